"""What is published: each row once, whole files, mended where they were harmed."""

import errno
import json
from pathlib import Path

import pytest

from tasks.batch import in_ledger, prepared, rows, segments
from tasks.errors import StageFailed
from tasks.ledger.claims import take
from tests.batch.stages.working import IDS, a_result, work
from tests.batch.stand_in import Does, StandIn, answer_to
from tests.batch.world import prompt_of, write_input


def test_every_row_in_is_a_row_out_in_the_inputs_order(world, run_stage):
    def refuse(worker: str, prompt: str, before: int) -> Does | None:
        return Does(status=400, body=b"no such role") if " r007 " in prompt else None

    spec = world.spec(write_input(world.root / "in" / "prompts.parquet", IDS))
    with StandIn(world.key, behaviour=refuse) as pool:
        world.run("one", spec, pool.registry)
        done = work(world, run_stage, "one")
    out = world.published()
    assert [row["id"] for row in out] == IDS
    answers = {row["id"]: row for row in out}
    assert answers["r008"]["answer"] == answer_to(prompt_of("r008"))
    assert (answers["r008"]["status"], answers["r008"]["release_id"]) == ("answered", "release-1")
    assert answers["r007"]["answer"] is None
    assert (answers["r007"]["status"], answers["r007"]["error_class"]) == ("failed", "BadRequest")
    assert done["prepare"].facts["to_do"] == 60
    assert done["run"].facts["answered"] == 59
    assert done["reconcile"].facts == {"rows": 60, "answered": 59, "failed": 1, "not_started": 0}
    assert done["publish"].facts["failed"] == 1


def test_answers_are_published_in_other_formats_too_where_the_spec_asks(world, run_stage):
    spec = world.spec(
        write_input(world.root / "in" / "prompts.parquet", IDS[:4]), batch={"also": ["jsonl", "openai_batch"]}
    )
    with StandIn(world.key, behaviour=lambda w, p, b: Does(status=400) if " r002 " in p else None) as pool:
        world.run("one", spec, pool.registry)
        work(world, run_stage, "one")
    folder = world.output / world.manifest()["version"]
    as_lines = [json.loads(line) for line in (folder / "answers.jsonl").read_text().splitlines()]
    assert as_lines == world.published()
    responses = [json.loads(line) for line in (folder / "openai-batch.jsonl").read_text().splitlines()]
    assert [one["custom_id"] for one in responses] == IDS[:4]
    assert [one["error"] is None for one in responses] == [True, True, False, True]


def test_failed_rows_can_be_fed_in_again(world, run_stage):
    spec = world.spec(write_input(world.root / "in" / "prompts.parquet", IDS[:4]))
    with StandIn(world.key, behaviour=lambda w, p, b: Does(status=400) if " r002 " in p else None) as pool:
        world.run("one", spec, pool.registry)
        work(world, run_stage, "one")
    again = world.output / world.manifest()["version"] / "failed.jsonl"
    assert [json.loads(line)["row_id"] for line in again.read_text().splitlines()] == ["r002"]
    second = world.spec(again, batch={"output": str(world.root / "again")})
    with StandIn(world.key) as pool:
        world.run("two", second, pool.registry)
        assert work(world, run_stage, "two")["publish"].facts["answered"] == 1
        assert pool.asked == {prompt_of("r002"): 1}


def test_the_second_time_there_is_nothing_to_do_and_no_file_changes(world, run_stage, submissions):
    spec = world.spec(write_input(world.root / "in" / "prompts.parquet", IDS))
    with StandIn(world.key) as pool:
        world.run("one", spec, pool.registry)
        work(world, run_stage, "one")
        before = snapshot(world.output)
        # Another run of the same batch: the rows are its answers too, and it needs no pool.
        world.run("two", spec)
        for run_id in ("one", "two"):
            done = work(world, run_stage, run_id)
            changed = {stage for stage, result in done.items() if result.changed}
            assert changed == set()
            assert done["prepare"].facts["to_do"] == 0
            assert "nothing to do" in done["run"].message
        assert snapshot(world.output) == before
        assert len(submissions) == 1
        assert sum(pool.asked.values()) == 60


def snapshot(folder: Path) -> dict[str, tuple[int, int]]:
    return {
        str(path): (path.stat().st_ino, path.stat().st_mtime_ns)
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


@pytest.mark.parametrize("harm", ["deleted", "changed"])
@pytest.mark.parametrize("which", ["part-00000.parquet", "failed.jsonl"])
def test_a_published_file_that_was_harmed_is_written_again_without_a_model(world, run_stage, harm, which):
    spec = world.spec(write_input(world.root / "in" / "prompts.parquet", IDS))
    with StandIn(world.key) as pool:
        world.run("one", spec, pool.registry)
        work(world, run_stage, "one")
        asked = sum(pool.asked.values())
    before, rows_before = snapshot(world.output), world.published()
    path = world.output / world.manifest()["version"] / which
    if harm == "deleted":
        path.unlink()
    else:
        path.write_bytes(path.read_bytes() + b" ")
    done = work(world, run_stage, "one")
    assert done["publish"].changed
    assert not done["run"].changed
    assert world.published() == rows_before
    after = snapshot(world.output)
    touched = {name for name in after if after[name] != before.get(name)}
    assert touched == {str(path)}
    assert asked == 60


def test_a_version_that_cannot_be_moved_in_says_that_the_disk_is_full(world, run_stage, monkeypatch):
    rename = Path.rename

    def full(path: Path, place: Path) -> Path:
        if place.name.startswith("v-"):
            raise OSError(errno.ENOSPC, "No space left on device", str(place))
        return rename(path, place)

    with StandIn(world.key) as pool:
        world.run("one", world.spec(write_input(world.root / "in" / "p.parquet", IDS[:3])), pool.registry)
        world.execute("prepare", "one")
        run_stage("one")
        monkeypatch.setattr(Path, "rename", full)
        with pytest.raises(StageFailed, match=r"the disk is full, at .*v-"):
            world.execute("publish", "one")


def test_too_many_failed_rows_publish_nothing_and_say_why(world, run_stage):
    spec = world.spec(
        write_input(world.root / "in" / "p.parquet", IDS[:10]), limits={"max_row_error_rate": 0.2}
    )
    with StandIn(
        world.key, behaviour=lambda w, p, b: Does(status=400, body=b"why") if int(p[11:13]) < 3 else None
    ) as pool:
        world.run("one", spec, pool.registry)
        world.execute("prepare", "one")
        run_stage("one")
    for stage in ("reconcile", "publish"):
        with pytest.raises(StageFailed, match=r"3 of 10 rows failed, .* 3 x BadRequest \(row r000: why\)"):
            world.execute(stage, "one")
    assert not (world.output / "manifest.json").exists()


def test_rows_not_started_are_published_only_where_the_spec_allows_and_as_a_version(world, run_stage):
    spec = world.spec(write_input(world.root / "in" / "p.parquet", IDS), limits={"max_tokens": 200})
    with StandIn(world.key, workers=1, max_num_seqs=1, latency_s=0.3) as pool:
        world.run("one", spec, pool.registry)
        world.execute("prepare", "one")
        done = run_stage("one")
        assert 0 < done.facts["answered"] < 60
        assert "token limit" in done.message
        with pytest.raises(StageFailed, match=r"rows are not started, and limits\.partial is false"):
            world.execute("reconcile", "one")
        assert not run_stage("one").changed
        partial = world.spec(world.root / "in" / "p.parquet", limits={"max_tokens": 200, "partial": True})
        world.run("partial", partial, pool.registry)
        work(world, run_stage, "partial")
        first = world.manifest()
        assert first["partial"]
        assert first["rows"] == 60 > first["answered"] == len(world.published())
        world.run("rest", world.spec(world.root / "in" / "p.parquet"), pool.registry)
        work(world, run_stage, "rest")
        last = world.manifest()
        assert not last["partial"]
        assert last["version"] != first["version"]
        assert {path.name for path in world.output.glob("v-*")} == {first["version"], last["version"]}
        assert set(pool.asked.values()) == {1}


def test_an_id_that_is_not_in_the_input_stops_publishing(world):
    world.run("one", world.spec(write_input(world.root / "in" / "p.parquet", IDS[:1])))
    folder = Path(world.execute("prepare", "one").facts["folder"])
    with world.ledger() as ledger:
        claim, _ = take(ledger, "one", "run", frozenset({"run"}))
        assert in_ledger.become_writer(claim, folder.name) is None
        with segments.SegmentWriter(folder / "segments", "x") as writer:
            for row_id in (IDS[0], "stranger"):
                writer.append(a_result(row_id, "a"))
        rows.adopt(claim, prepared.load(folder))
        claim.finish("done", "", {})
    with pytest.raises(StageFailed, match="1 finished ids that are not in the input"):
        world.execute("reconcile", "one")
