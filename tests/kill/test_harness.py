"""The harness finds every point of a stage, says nothing about a right one, and catches each planted bug."""

from collections import Counter

import pytest

from tasks.spec import RunSpec
from tests.kill import harness, toy_stage
from tests.kill.harness import Action, Violated, World, kill_everywhere, kill_in_a_row, stage
from tests.kill.invariants import after_a_stage, all_of, one_file_each

RUN = "toy-run"
TOY = stage("toy", RUN, module="tests.kill.toy_stage")
KEPT = "worth keeping"
CHECK = all_of(after_a_stage, one_file_each("home/toy", "answer", "kept"))


@pytest.fixture
def toy(world: World) -> World:
    """A world with the run, and the file that must survive."""
    batch = {"input": "prompts.jsonl", "output": "answers", "prompt": "prompt"}
    spec = {"model": {"repo": "a/b"}, "layout": {"cpu": 1}, "batch": batch}
    world.register(RUN, RunSpec.model_validate(spec))
    (world.home / "toy").mkdir()
    (world.home / "toy" / "kept").write_text(KEPT)
    return world


def picture(world: World) -> dict[str, str]:
    return world.files("home", "toy")


def nothing(world: World) -> None:
    """No invariant."""


def test_a_right_stage_survives_a_kill_at_every_point(toy: World) -> None:
    report = kill_everywhere(TOY, toy, check=CHECK, picture=picture)
    assert [point.n for point in report.kills] == list(range(1, len(report.points) + 1))
    assert Counter(point.name.partition(" at ")[0] for point in report.points) == {
        "before commit": 3,  # the claim is taken, progress, the claim is finished
        "after commit": 3,
        "after mkdir": 3,  # locks, draft, logs
        "after create": 2,  # lock file, log; the child's file is made by the child
        "before spawn": 1,
        "after spawn": 1,
        "before signal": 1,
        "after signal": 1,
        "before fsync": 1,
        "before replace": 1,
        "after replace": 1,
        "before rmdir": 1,
        "after rmdir": 1,
    }
    assert (toy.home / "toy" / "kept").read_text() == KEPT


def test_a_right_stage_survives_being_killed_again_and_again(toy: World) -> None:
    report = kill_in_a_row(TOY, toy, check=CHECK)
    assert len(report.kills) >= 5
    assert picture(toy).keys() == {"answer", "kept"}


@pytest.mark.parametrize(
    ("bug", "caught_at", "word"),
    [
        (toy_stage.MOVES_AWAY_FIRST, "after unlink", "kept"),
        (toy_stage.RECORDS_FIRST, "after commit", "answer"),
        (toy_stage.LEAVES_DRAFTS, "after mkdir", "draft-"),
        (toy_stage.LEAVES_A_CHILD, "after spawn", "a-stranger"),
        (toy_stage.FAILS_ON_A_DRAFT, "after mkdir", "somebody writes to"),
    ],
)
def test_a_planted_bug_is_caught_at_its_point(
    toy: World, bug: str, caught_at: str, word: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(harness, "ENOUGH_VIOLATIONS", 1)
    toy.environment[toy_stage.TOY_BUG] = bug
    with pytest.raises(Violated) as caught:
        kill_everywhere(TOY, toy, check=CHECK, picture=picture, settles=False)
    first = caught.value.report.violations[0]
    assert first.point is not None
    assert first.point.name.startswith(caught_at)
    assert "apply" in first.point.name
    assert word in first.what
    assert first.point.name in str(caught.value)


def test_a_stage_that_never_settles_is_caught_without_a_kill(toy: World) -> None:
    (toy.home / "toy" / "answer").write_text("41\n")
    with pytest.raises(Violated) as caught:
        kill_everywhere(stage("toy", RUN, module="tests.kill.restless_stage"), toy, check=CHECK)
    assert [violation.point for violation in caught.value.report.violations] == [None]
    assert "something to do" in caught.value.report.violations[0].what


def test_a_sample_takes_every_place_before_it_takes_one_twice(toy: World) -> None:
    links = Action("links", "tests.kill.acts:link_often", (str(toy.root / "links"), 30))
    report = kill_everywhere(links, toy, check=nothing, settles=False, at_most=4)
    assert len(report.points) > 60
    assert len({point.name for point in report.kills}) == 4  # two mkdir, before and after the links
    toy.restore()
    again = kill_everywhere(links, toy, check=nothing, settles=False, at_most=4)
    assert [point.n for point in again.kills] == [point.n for point in report.kills]


def test_a_python_child_is_followed_and_killed_instead(toy: World) -> None:
    report = kill_everywhere(
        Action("parent", "tests.kill.acts:parent", (str(toy.root / "child"),)),
        toy,
        check=one_file_each("child", "whole"),
        settles=False,
        in_child="tests.kill.acts",
    )
    assert [point.name.partition(" at ")[0] for point in report.kills] == [
        "after mkdir",
        "after create",
        "before fsync",
        "before rename",
        "after rename",
    ]


def test_driver_calls_are_points_and_reading_ones_only_before(toy: World) -> None:
    report = kill_everywhere(
        Action("driver", "tests.kill.acts:call_driver"), toy, check=nothing, settles=False
    )
    assert [point.name.partition(" at ")[0] for point in report.points] == [
        "before driver call nvmlDeviceGetCount",
        "before driver call nvmlDeviceSetMigMode",
        "after driver call nvmlDeviceSetMigMode",
    ]


def test_a_transaction_that_only_read_is_no_point(toy: World) -> None:
    report = kill_everywhere(
        Action("reads", "tests.kill.acts:read_then_write", (toy.database_url,)),
        toy,
        check=nothing,
        settles=False,
    )
    assert [point.name.partition(" at ")[0] for point in report.points] == [
        "before commit",  # in a transaction block
        "after commit",
        "before commit",  # commit() of a connection without autocommit
        "after commit",
        "before commit",  # one statement in autocommit
        "after commit",
    ]


def test_a_further_function_can_be_named(toy: World) -> None:
    report = kill_everywhere(
        Action("further", "tests.kill.acts:touch", (str(toy.root / "touched"),)),
        toy,
        check=nothing,
        settles=False,
        also=["tests.kill.acts:mark"],
    )
    assert [point.name.partition(" at ")[0] for point in report.points] == ["before mark", "after mark"]


def test_a_world_comes_back_as_it_was_saved(toy: World) -> None:
    toy.save()
    before = toy.files()
    toy.finish(RUN, "download", {"path": "somewhere"})
    (toy.home / "toy" / "kept").write_text("changed")
    (toy.home / "toy" / "more").write_text("new")
    toy.restore()
    assert toy.files() == before
    assert toy.rows("select * from claim") == []
    assert [row["run_id"] for row in toy.rows("select run_id from run")] == [RUN]
