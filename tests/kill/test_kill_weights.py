"""The start of a run, download and convert (scheme none), killed everywhere, against a local hub."""

import json
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest

from demo.hub import Hub
from tests.batch.world import tokenizer_folder
from tests.kill.harness import World, kill_everywhere, kill_in_a_row, stage
from tests.kill.invariants import after_a_stage, manifest_agrees
from tests.kill.stage_actions import freezing
from tests.runs import a_spec

RUN = "run-1"
SPEC = a_spec(model={"repo": "owner/tiny"}, convert={"scheme": "none"})


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[Hub]:
    """A hub with one repository."""
    folder = tokenizer_folder(tmp_path / "hub" / "owner" / "tiny")
    config = {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}
    (folder / "config.json").write_text(json.dumps(config))
    write_safetensors(folder / "model.safetensors")
    with Hub(tmp_path / "hub") as serving:
        yield serving


@pytest.fixture
def connected(world: World, hub: Hub) -> World:
    """A world that asks the local hub, one file at a time, so that points come in one order."""
    world.environment |= {"HF_ENDPOINT": hub.url, "QWEN_PIPELINE_HUB_CONNECTIONS": "1"}
    return world


@pytest.fixture
def started(connected: World) -> World:
    """A run that has started."""
    assert connected.run(FREEZE).succeeded, connected.log()
    return connected


FREEZE = freezing(RUN, SPEC.model_dump(mode="json"))
DOWNLOAD = stage("download", RUN)
CONVERT = stage("convert", RUN)


def write_safetensors(path: Path) -> None:
    """One matrix of two-byte floats."""
    data = bytes(2 * 64 * 64)
    header = {"model.weight": {"dtype": "BF16", "shape": [64, 64], "data_offsets": [0, len(data)]}}
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


def store(world: World) -> dict[str, str]:
    """All of the store, with what each branch stood for, but for the notes about when a file was hashed."""
    files = world.files("home", "store")
    return {name: content for name, content in files.items() if not name.startswith("proven/")}


def nothing_half_made_is_visible(world: World) -> None:
    """A download or a release that can be seen is whole."""
    for top, name in (("downloads/*", ".manifest.json"), ("releases", "manifest.json")):
        for folder in world.settings.store.glob(f"{top}/*"):
            if folder.name != "revisions":
                assert (folder / name).exists(), f"{folder} is visible without a manifest"
                manifest_agrees(folder / name)


def test_the_start_of_a_run_survives_a_kill_at_every_point(connected: World) -> None:
    kill_everywhere(
        FREEZE,
        connected,
        check=after_a_stage,
        picture=lambda world: world.rows("select run_id, spec, pins from run"),
    )


def test_download_and_then_convert_survive_a_kill_at_their_points(started: World) -> None:
    for action in (DOWNLOAD, CONVERT):
        kill_everywhere(
            action,
            started,
            check=after_a_stage,
            meanwhile=nothing_half_made_is_visible,
            picture=store,
            at_most=10,
        )
    releases = started.rows("select release_id, files from release")
    assert len(releases) == 1


def test_download_mends_a_changed_file_wherever_it_is_killed(started: World) -> None:
    assert started.run(DOWNLOAD).succeeded, started.log()
    (config,) = started.settings.store.glob("downloads/*/*/config.json")
    config.write_text("changed behind the pipeline's back")
    report = kill_everywhere(DOWNLOAD, started, check=after_a_stage, picture=store, at_most=8)
    assert any(point.kind == "renameat2" for point in report.points)
    nothing_half_made_is_visible(started)


def test_download_survives_being_killed_again_and_again(started: World) -> None:
    kill_in_a_row(DOWNLOAD, started, check=after_a_stage)
    nothing_half_made_is_visible(started)
