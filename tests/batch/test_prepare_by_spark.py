"""The stage `prepare` by Spark: it writes what this process would, and a kill leaves nothing behind."""

import json
import os
from pathlib import Path

import pytest

from tasks import settings
from tasks.batch import parts
from tasks.errors import InputError
from tasks.node import processes
from tasks.settings import REPOSITORY
from tests.batch.stages.working import IDS
from tests.batch.world import World, write_input
from tests.runs import python, wait_until

pytestmark = pytest.mark.skipif(
    not (REPOSITORY / ".envs/spark/bin/python").exists(), reason="the Spark environment is not set up"
)

PART_ROWS = 8

PREPARE = f"""
import sys
from tasks.batch import parts
from tasks.stages import execute
parts.PART_ROWS = {PART_ROWS}
execute("prepare", sys.argv[1])
"""

SLOW = "{% for n in range(20000) %}{% endfor %}{% for m in messages %}{{ m.content }}{% endfor %}"


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several parts out of a small input."""
    monkeypatch.setattr(parts, "PART_ROWS", PART_ROWS)


def by_spark(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QWEN_PIPELINE_SPARK_PREPARE_ROWS", "1")
    settings.current.cache_clear()


def test_killed_and_begun_again_it_writes_what_one_process_writes(
    world: World, monkeypatch: pytest.MonkeyPatch
):
    (world.model / "tokenizer_config.json").write_text(json.dumps({"chat_template": SLOW}))
    spec = world.spec(write_input(world.root / "in" / "prompts.parquet", IDS))
    world.run("one", spec)
    folder = Path(world.execute("prepare", "one").facts["folder"])
    manifest = folder / "prepared" / "manifest.json"
    by_one_process = manifest.read_bytes()
    assert len(json.loads(by_one_process)["files"]) == 8
    manifest.unlink()
    by_spark(monkeypatch)
    world.run("two", spec)
    with python(PREPARE, "two", env={**os.environ}) as stage:
        wait_until(
            lambda: list(folder.glob(".draft-*/part-*.parquet")) or stage.poll() is not None, deadline_s=300
        )
        assert stage.poll() is None, stage.communicate()[0]
        stage.kill()
        stage.wait(60)
        # Nobody ends them: the kernel and Spark do.
        wait_until(lambda: not processes.find())
    assert not manifest.exists()
    done = world.execute("prepare", "two")
    assert done.changed
    assert manifest.read_bytes() == by_one_process
    assert (world.home / "logs" / "two" / "spark-prepare.log").stat().st_size
    assert [path.name for path in folder.iterdir()] == ["prepared"]
    assert not processes.find()
    assert not list((world.home / "spark").glob("*/*"))


def test_what_is_wrong_with_a_row_is_told_as_one_process_tells_it(
    world: World, monkeypatch: pytest.MonkeyPatch
):
    by_spark(monkeypatch)
    path = world.root / "in" / "prompts.jsonl"
    path.parent.mkdir()
    lines = [json.dumps({"row_id": one, "prompt": "text"}) for one in IDS]
    lines[20] = "nonsense"
    path.write_text("\n".join(lines))
    world.run("one", world.spec(path))
    with pytest.raises(InputError, match=r"batch\.input: line 21 of .*prompts\.jsonl is not JSON"):
        world.execute("prepare", "one")
