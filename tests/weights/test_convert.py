"""The release as a folder: published whole, mended, made once. Scheme `none`, so that no model is loaded."""

import json
import re
from datetime import UTC, datetime
from pathlib import Path

import pytest

from tasks import stages
from tasks.errors import InputError, StageFailed, Unavailable
from tasks.node import lock
from tasks.weights import pin as pinning
from tasks.weights import store
from tasks.weights.pin import pin, release_id
from tests.runs import a_spec, outputs
from tests.weights.world import FETCHED, REPO, World, write_checkpoint, write_safetensors

WEIGHTS = "model-00001-of-00002.safetensors"


def release_of(world: World, run_id: str = "run-1") -> Path:
    return Path(world.facts("convert", run_id)["path"])


def record_of(world: World) -> dict[str, object]:
    with world.ledger.transaction() as connection:
        rows = connection.execute("select * from release").fetchall()
    assert len(rows) == 1
    return rows[0]


def test_a_release_is_the_download_with_a_manifest_and_a_record(world: World) -> None:
    run = world.start()

    result = world.execute("download", "convert")

    folder = release_of(world)
    manifest = store.read_manifest(folder / store.MANIFEST)
    assert manifest is not None
    assert set(manifest.files) == FETCHED
    assert all(
        (folder / name).read_bytes() == (world.repositories / REPO / name).read_bytes() for name in FETCHED
    )
    assert manifest.about["fingerprint"] == run.pins["fingerprint"]
    assert result.facts == {"release_id": folder.name, "path": str(folder), "bytes": manifest.bytes}
    assert folder.name == run.pins["release_id"]
    assert record_of(world)["path"] == str(folder)
    assert record_of(world)["files"] == len(FETCHED)
    assert world.staging() == []
    assert store.releases(world.settings) == {folder.name: manifest}


def test_a_manifest_json_of_the_repository_gives_way_to_that_of_the_release(world: World) -> None:
    (world.repositories / REPO / "manifest.json").write_text('{"theirs": true}')
    world.start()
    world.execute("download", "convert")
    manifest = store.read_manifest(release_of(world) / store.MANIFEST)
    assert manifest is not None
    assert set(manifest.files) == FETCHED
    assert not world.execute("download").changed
    assert not world.execute("convert").changed


def test_unconverted_weights_take_no_second_place_on_the_disk(world: World) -> None:
    world.start()
    world.execute("download", "convert")

    download = Path(world.facts("download")["path"])
    assert (release_of(world) / WEIGHTS).stat().st_ino == (download / WEIGHTS).stat().st_ino
    assert (release_of(world) / "tokenizer.json").stat().st_ino != (download / "tokenizer.json").stat().st_ino


def test_a_second_run_finds_the_release_and_changes_nothing(world: World) -> None:
    world.start("run-1")
    world.execute("download", "convert", run_id="run-1")
    looks = {path: path.stat() for path in release_of(world).iterdir()}
    world.start("run-2")

    result = world.execute("download", "convert", run_id="run-2")

    assert not result.changed
    assert {path: path.stat() for path in release_of(world, "run-2").iterdir()} == looks
    assert record_of(world)["made_by_run"] == "run-1"


@pytest.mark.parametrize("name", [WEIGHTS, "tokenizer.json", "config.json"])
def test_a_file_deleted_behind_its_back_is_mended_alone(world: World, name: str) -> None:
    world.start()
    world.execute("download", "convert")
    folder = release_of(world)
    manifest = (folder / store.MANIFEST).read_bytes()
    others = {path.name: path.stat().st_ino for path in folder.iterdir() if path.name in FETCHED - {name}}
    (folder / name).unlink()
    world.hub.seen.clear()

    result = world.execute("download", "convert")

    assert result.changed
    assert (folder / name).read_bytes() == (world.repositories / REPO / name).read_bytes()
    assert {other: (folder / other).stat().st_ino for other in others} == others
    assert (folder / store.MANIFEST).read_bytes() == manifest
    assert world.fetched() == []
    assert world.staging() == []


def test_a_byte_changed_in_shared_weights_is_mended_in_download_and_release(world: World) -> None:
    world.start()
    world.execute("download", "convert")
    path = release_of(world) / WEIGHTS
    right = path.read_bytes()
    with path.open("r+b") as file:
        file.seek(-1, 2)
        file.write(bytes([right[-1] ^ 1]))
    world.hub.seen.clear()

    world.execute("download", "convert")

    assert path.read_bytes() == right
    assert (Path(world.facts("download")["path"]) / WEIGHTS).read_bytes() == right
    assert world.fetched() == [WEIGHTS]


def test_a_lost_manifest_makes_the_same_release_again(world: World) -> None:
    world.start()
    world.execute("download", "convert")
    path = release_of(world) / store.MANIFEST
    before = path.read_bytes()
    path.unlink()

    assert world.execute("convert").changed
    assert path.read_bytes() == before


def test_a_release_that_the_ledger_does_not_know_is_recorded_and_not_made_again(world: World) -> None:
    world.start()
    world.execute("download", "convert")
    inode = release_of(world).stat().st_ino
    with world.ledger.transaction() as connection:
        connection.execute("select set_config('ledger.acting', 'test', true)")
        connection.execute("delete from release")

    assert world.execute("convert").changed
    assert release_of(world).stat().st_ino == inode
    assert record_of(world)["release_id"] == release_of(world).name


def test_what_a_killed_attempt_left_is_removed(world: World) -> None:
    run = world.start()
    world.execute("download", "convert")
    leftover = world.home / "store/staging" / f"{run.pins['release_id']}.killed" / "release"
    leftover.mkdir(parents=True)
    (leftover / "half").write_text("half")

    assert world.execute("convert").changed
    assert world.staging() == []


def test_what_killed_attempts_at_other_releases_left_is_removed_but_not_what_lives(world: World) -> None:
    world.start()
    world.execute("download")
    dead, living = (world.home / "store/staging" / f"other-{name}-awq-1.x" for name in ("dead", "living"))
    for folder in (dead, living):
        (folder / "release").mkdir(parents=True)

    with lock.held(world.settings.locks / f"release-{living.stem}.lock", "making of it", 0):
        world.execute("convert")

    assert world.staging() == [living.name]


def test_two_runs_at_once_both_end_with_the_one_release(world: World) -> None:
    world.start("run-1")
    world.start("run-2")
    world.execute("download")

    with world.executing("convert", "run-1") as one, world.executing("convert", "run-2") as other:
        said = outputs([one, other], timeout_s=300)

    assert "changed\n" in said
    inode = release_of(world, "run-1").stat().st_ino
    assert release_of(world, "run-2").stat().st_ino == inode
    assert not world.execute("convert", run_id="run-2").changed
    assert world.staging() == []


def test_a_run_waits_for_another_that_makes_the_release(world: World) -> None:
    run = world.start()
    world.execute("download")
    impatient = world.settings_with(weights_wait_s=0.1)
    path = world.settings.locks / f"release-{run.pins['release_id']}.lock"

    with (
        lock.held(path, "making of it for run other", 0),
        pytest.raises(stages.StageError, match="run other"),
    ):
        world.execute("convert", settings=impatient)

    assert world.execute("convert").changed


def test_a_download_that_is_not_whole_is_not_converted(world: World) -> None:
    world.start()
    world.execute("download")
    (Path(world.facts("download")["path"]) / WEIGHTS).unlink()

    with pytest.raises(StageFailed, match=f"not whole.*{WEIGHTS}"):
        world.execute("convert")

    assert world.staging() == []
    assert not (world.home / "store/releases").exists()


def test_an_index_that_lies_is_not_published(world: World) -> None:
    path = world.repositories / REPO / "model.safetensors.index.json"
    path.write_text(path.read_text().replace("model.norm.weight", "model.lost.weight"))
    world.start()
    world.execute("download")

    with pytest.raises(StageFailed, match=r"model\.(lost|norm)\.weight"):
        world.execute("convert")

    assert not (world.home / "store/releases").exists()


def test_an_unknown_architecture_names_itself_and_the_known_ones(world: World) -> None:
    write_checkpoint(world.repositories / "owner/other", architectures=["MambaForCausalLM"])
    world.start(repo="owner/other", scheme="fp8")
    world.execute("download")

    with pytest.raises(InputError, match=r"model\.repo: .*MambaForCausalLM.*Qwen2ForCausalLM"):
        world.execute("convert")


def test_a_checkpoint_that_is_quantized_already_is_refused(world: World) -> None:
    write_checkpoint(world.repositories / "owner/other", quantization_config={"quant_method": "awq"})
    world.start(repo="owner/other", scheme="fp8")
    world.execute("download")

    with pytest.raises(InputError, match="quantized already"):
        world.execute("convert")


def test_a_group_size_that_does_not_divide_is_refused_before_converting(world: World) -> None:
    world.start(scheme="awq", group_size=128)
    world.execute("download")

    with pytest.raises(
        InputError, match=r"convert\.group_size: 128 .* 64 inputs of model\.layers\.0\..*64 and 32 work"
    ):
        world.execute("convert")

    assert not (world.settings.logs / "run-1").exists()


def test_blocks_that_vllm_would_not_load_are_refused_before_converting(world: World) -> None:
    matrix = "model.layers.0.self_attn.k_proj.weight"
    path = world.repositories / REPO / "model.safetensors.index.json"
    write_safetensors(world.repositories / REPO / WEIGHTS, {matrix: ("BF16", (192, 64))})
    index = json.loads(path.read_text())
    index["weight_map"] = {matrix: WEIGHTS} | {
        name: file for name, file in index["weight_map"].items() if file != WEIGHTS
    }
    path.write_text(json.dumps(index))
    world.start(scheme="fp8_block")
    world.execute("download")

    with pytest.raises(InputError, match=r"convert\.scheme: fp8_block .* 192 rows of .*k_proj .* take fp8"):
        world.execute("convert")


def test_a_converter_that_fails_is_quoted(world: World, tmp_path: Path) -> None:
    environment = failing_environment(tmp_path, world.settings.python_convert)
    world.start(scheme="fp8")
    world.execute("download")

    with pytest.raises(StageFailed, match=r"ended with status 7; .*convert\.log ends with: out of paper"):
        world.execute("convert", settings=world.settings_with(python_convert=environment))

    assert world.staging() == []


def test_a_converter_that_is_killed_may_be_tried_again(world: World, tmp_path: Path) -> None:
    environment = failing_environment(tmp_path, world.settings.python_convert)
    environment.write_text("#!/bin/sh\necho layer 7\nkill -KILL $$\n")
    world.start(scheme="fp8")
    world.execute("download")

    with pytest.raises(Unavailable, match=r"was killed, as the kernel does .* ends with: layer 7"):
        world.execute("convert", settings=world.settings_with(python_convert=environment))

    assert world.staging() == []


def test_the_release_is_named_by_all_that_its_bytes_depend_on(world: World, tmp_path: Path) -> None:
    texts = tmp_path / "texts.jsonl"
    texts.write_text(json.dumps({"text": "one text"}))
    convert = {"scheme": "awq", "group_size": 64}
    changes = [
        {},
        {"group_size": 32},
        {"scheme": "fp8"},
        {"calibration": str(texts)},
        {"calibration_tokens": 512},
    ]
    names = [name_of(world, {**convert, **change}) for change in changes]
    assert len(set(names)) == len(names)
    assert name_of(world, convert) == names[0]
    assert names[0].startswith("tiny-qwen2-awq-g64-")

    texts.write_text(json.dumps({"text": "another text"}))
    assert name_of(world, {**convert, "calibration": str(texts)}) != names[3]

    fingerprint = pin(a_spec(model={"repo": REPO}, convert=convert), world.settings)["fingerprint"]
    fingerprint["versions"]["torch"] = "0"
    assert release_id(fingerprint) not in names


def test_calibration_texts_that_changed_since_the_run_started_are_refused(
    world: World, tmp_path: Path
) -> None:
    texts = tmp_path / "texts.txt"
    texts.write_text("one text")
    world.start(scheme="awq", group_size=64, calibration=str(texts))
    world.execute("download")
    texts.write_text("another text")

    with pytest.raises(InputError, match=r"convert\.calibration: .* changed since"):
        world.execute("convert")


def test_libraries_that_changed_since_the_run_started_convert_nothing_under_its_name(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.start(scheme="fp8")
    world.execute("download")
    then = pinning.converter_versions(world.settings.python_convert)
    monkeypatch.setattr(pinning, "converter_versions", lambda python: {**then, "torch": "99.0"})
    torch = re.escape(then["torch"])
    with pytest.raises(InputError, match=rf"this run started \(torch {torch} then, 99\.0 now\).*another run"):
        world.execute("convert")
    monkeypatch.undo()
    monkeypatch.setattr(pinning, "RECIPE_VERSION", 99)
    with pytest.raises(InputError, match=r"changed since this run started \(recipe \d+ then, 99 now\)"):
        world.execute("convert")


def test_a_missing_converting_environment_is_named(world: World, tmp_path: Path) -> None:
    spec = a_spec(model={"repo": REPO}, convert={"scheme": "fp8"})

    with pytest.raises(StageFailed, match="make setup"):
        pin(spec, world.settings_with(python_convert=tmp_path / "absent/bin/python"))


def test_a_run_keeps_the_commit_it_started_with(world: World) -> None:
    first = world.start()
    write_safetensors(world.repositories / REPO / "model-00003.safetensors", {"x": ("BF16", (2, 2))})

    again = stages.freeze(world.ledger, "run-1", first.spec, datetime.now(UTC), world.settings)

    assert again.pins == first.pins
    assert world.start("run-2").pins["commit"] != first.pins["commit"]


def name_of(world: World, convert: dict[str, object]) -> str:
    return str(pin(a_spec(model={"repo": REPO}, convert=convert), world.settings)["release_id"])


def failing_environment(folder: Path, real: Path) -> Path:
    """An interpreter that says something and fails, with the libraries of the real one beside it."""
    python = folder / "environment/bin/python"
    python.parent.mkdir(parents=True)
    (folder / "environment/lib").symlink_to(real.parent.parent / "lib")
    python.write_text("#!/bin/sh\necho out of paper\nexit 7\n")
    python.chmod(0o755)
    return python
