"""prepare, reconcile and publish, killed everywhere; the rows are answered by hand, without Spark."""

import json
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from tasks.batch import in_ledger
from tasks.batch.in_ledger import Range
from tasks.batch.records import Result
from tasks.batch.segments import SegmentWriter, attempt_prefix
from tasks.ledger.claims import facts_of, take
from tests.batch.world import tokenizer_folder, write_input
from tests.kill.harness import World, kill_everywhere, kill_in_a_row, stage
from tests.kill.invariants import after_a_stage, all_of, manifest_agrees
from tests.runs import a_spec

RUN = "run-1"
RELEASE = "release-1"
ROWS = 7


@pytest.fixture
def downloaded(world: World) -> World:
    """A run with an input and a tokenizer."""
    write_input(world.root / "input" / "prompts.parquet", range(ROWS))
    batch = {
        "input": str(world.root / "input"),
        "output": str(world.root / "answers"),
        "id": "row_id",
        "prompt": "prompt",
    }
    world.register(RUN, a_spec(batch=batch, limits={"max_row_error_rate": 0.5}), {"release_id": RELEASE})
    model = tokenizer_folder(world.root / "model")
    world.finish(RUN, "download", {"path": str(model), "commit": "c", "bytes": 1, "files": 1})
    return world


def answer(world: World, count: int, registered: bool) -> None:
    """What a run of the stage `run` leaves: `count` finished rows, the last of them failed."""
    with world.ledger() as ledger:
        batch_id = (facts_of(ledger, RUN, "prepare") or {})["batch_id"]
        claim, _ = take(ledger, RUN, "run", frozenset({"run"}))
        folder = world.root / "answers" / "_batch" / batch_id / "segments"
        assert in_ledger.become_writer(claim, batch_id) is None
        with SegmentWriter(folder, attempt_prefix(RUN, claim.epoch)) as writer:
            for number in range(count):
                writer.append(result(number, failed=number == count - 1))
        if registered:
            size = writer.path.stat().st_size
            in_ledger.register(claim, batch_id, [Range(writer.path, 0, size, count)])
        claim.finish("done" if registered else "failed", "answered by hand", {})


def result(number: int, failed: bool) -> Result:
    return Result(
        id=str(number),
        status="failed" if failed else "answered",
        answer=None if failed else f"answer {number}",
        error_class="BadRequest" if failed else None,
        error_message="refused" if failed else None,
        finish_reason=None if failed else "stop",
        prompt_tokens=5,
        completion_tokens=0 if failed else 3,
        latency_s=0.1,
        worker="worker-0",
        attempts=1,
        release_id=RELEASE,
    )


def everything(world: World) -> dict[str, Any]:
    """Every file of the output, drafts too, and what the ledger says of the batch."""
    return {
        **world.files("answers"),
        "segments": world.rows("select path, start_byte, stop_byte, rows from segment order by position"),
        "publications": world.rows("select output, version, answered, failed, not_started from publication"),
        "batches": world.rows("select batch_id, identity, rows from batch"),
    }


def published_is_whole(world: World) -> None:
    """A reader who follows the manifest, at any moment, finds every file of it, and each id once."""
    manifest = world.root / "answers" / "manifest.json"
    if not manifest.exists():
        return
    document = json.loads(manifest.read_text())
    folder = manifest.parent / document["version"]
    entries = [{"path": f"{folder.name}/{item['name']}", **item} for item in document["files"]]
    manifest_agrees(manifest, entries)
    ids = [row for path in sorted(folder.glob("*.parquet")) for row in ids_of(path)]
    assert sorted(ids) == sorted(str(number) for number in range(ROWS)), f"published ids: {ids}"


def ids_of(path: Path) -> list[str]:
    return [str(one) for one in pq.read_table(path, columns=["id"]).column("id").to_pylist()]


def test_prepare_survives_a_kill_at_its_points(downloaded: World) -> None:
    report = kill_everywhere(
        stage("prepare", RUN), downloaded, check=after_a_stage, picture=everything, at_most=12
    )
    assert report.kinds["replace"] >= 2  # before and after
    assert everything(downloaded)["batches"][0]["rows"] == ROWS


def test_prepare_mends_a_damaged_part_wherever_it_is_killed(downloaded: World) -> None:
    assert downloaded.run(stage("prepare", RUN)).succeeded
    (part,) = (downloaded.root / "answers").glob("_batch/*/prepared/part-00000.parquet")
    part.write_bytes(b"damaged behind the pipeline's back")
    kill_everywhere(stage("prepare", RUN), downloaded, check=after_a_stage, picture=everything, at_most=6)


def test_prepare_adopts_what_a_killed_run_left_once_wherever_it_is_killed(downloaded: World) -> None:
    assert downloaded.run(stage("prepare", RUN)).succeeded
    answer(downloaded, ROWS, registered=False)
    kill_everywhere(stage("prepare", RUN), downloaded, check=after_a_stage, picture=everything, at_most=6)
    assert [segment["rows"] for segment in everything(downloaded)["segments"]] == [ROWS]


def test_reconcile_and_publish_survive_a_kill_at_their_points(downloaded: World) -> None:
    assert downloaded.run(stage("prepare", RUN)).succeeded
    answer(downloaded, ROWS, registered=True)
    kill_everywhere(stage("reconcile", RUN), downloaded, check=after_a_stage, picture=everything)
    kill_everywhere(
        stage("publish", RUN),
        downloaded,
        check=all_of(after_a_stage, published_is_whole),
        meanwhile=published_is_whole,
        at_most=10,
        picture=everything,
    )
    assert (downloaded.root / "answers" / "manifest.json").exists()


def test_publish_mends_a_damaged_file_wherever_it_is_killed(downloaded: World) -> None:
    assert downloaded.run(stage("prepare", RUN)).succeeded
    answer(downloaded, ROWS, registered=True)
    assert downloaded.run(stage("publish", RUN)).succeeded
    (part,) = (downloaded.root / "answers").glob("v-*/part-00000.parquet")
    part.write_bytes(b"damaged behind the pipeline's back")
    kill_everywhere(
        stage("publish", RUN),
        downloaded,
        check=all_of(after_a_stage, published_is_whole),
        picture=everything,
        at_most=6,
    )


def test_publish_survives_being_killed_again_and_again(downloaded: World) -> None:
    assert downloaded.run(stage("prepare", RUN)).succeeded
    answer(downloaded, ROWS, registered=True)
    kill_in_a_row(stage("publish", RUN), downloaded, check=after_a_stage)
    published_is_whole(downloaded)
