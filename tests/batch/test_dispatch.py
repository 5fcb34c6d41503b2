"""The dispatcher against real HTTP: every row is answered once, whatever the workers do."""

import asyncio
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from tasks.batch.answering import answer
from tasks.batch.records import Row
from tasks.errors import StageFailed, Unavailable
from tests.batch.dispatching import KEY, chunks_of, finished, in_background, job, rows_of
from tests.batch.stand_in import Does, StandIn, answer_to
from tests.runs import wait_until


def test_every_row_is_answered_once_and_by_both_workers(tmp_path):
    with StandIn(KEY) as pool:
        tally = answer(job(pool, tmp_path), chunks_of(rows_of(200)), "p0")
        assert (tally.answered, tally.failed, tally.given_up) == (200, 0, 0)
        assert set(pool.asked.values()) == {1}
        assert set(pool.by_worker) == {"worker-0", "worker-1"}
        results = {result.id: result for result in finished(tmp_path)}
    assert len(results) == 200
    first = results["row-7"]
    assert first.answer == answer_to("question 7")
    assert (first.status, first.finish_reason, first.attempts) == ("answered", "stop", 1)
    assert first.prompt_tokens == 4


def test_the_engines_are_kept_full_across_chunks(tmp_path):
    with StandIn(KEY, workers=2, max_num_seqs=8, latency_s=0.05) as pool:
        answer(job(pool, tmp_path), chunks_of(rows_of(200), size=4), "p0")
        assert 24 <= pool.most_in_flight <= 32  # 1.5 to 2 times 2 x 8, though a chunk has 4 rows


def test_shares_of_a_pool_divide_what_is_in_flight(tmp_path):
    with StandIn(KEY, workers=2, max_num_seqs=8, latency_s=0.05) as pool:
        answer(job(pool, tmp_path, shares=4, registry_poll_s=5.0), chunks_of(rows_of(60)), "p0")
        assert pool.most_in_flight == 6


@pytest.mark.parametrize(
    "trouble",
    [
        Does(status=500, body=b'{"error": {"message": "boom"}}'),
        Does(status=503, body=b"", headers={"Retry-After": "0.1"}),
        Does(status=429, body=b"slow down"),
        Does(closes=True),
        Does(body=b"\xff\xfe not json"),
        Does(body=b'{"choices": []}'),
        Does(body=b'{"model": "another", "choices": [{"message": {"content": "x"}}]}'),
    ],
    ids=["500", "503", "429", "closes", "not-utf8", "no-choice", "another-model"],
)
def test_trouble_with_a_worker_is_no_failure_of_the_row(tmp_path, trouble):
    def first_time(worker: str, prompt: str, before: int) -> Does | None:
        return trouble if before == 0 and int(prompt.split()[1]) % 5 == 0 else None

    with StandIn(KEY, behaviour=first_time) as pool:
        tally = answer(job(pool, tmp_path), chunks_of(rows_of(40)), "p0")
    assert (tally.answered, tally.failed, tally.given_up) == (40, 0, 0)
    assert {result.id: result.attempts for result in finished(tmp_path)}["row-5"] == 2
    assert len({result.id for result in finished(tmp_path)}) == 40


def test_retry_after_is_obeyed(tmp_path):
    def full(worker: str, prompt: str, before: int) -> Does | None:
        return Does(status=503, headers={"Retry-After": "1"}) if before == 0 else None

    with StandIn(KEY, workers=1, behaviour=full) as pool:
        began = time.monotonic()
        answer(job(pool, tmp_path), chunks_of(rows_of(1)), "p0")
        assert time.monotonic() - began >= 1.0
        assert pool.asked["question 0"] == 2


def test_a_row_that_the_engine_refuses_is_failed_with_its_reason_and_not_asked_again(tmp_path):
    refusals = {
        3: Does(status=400, body=b'{"error": {"message": "role must be one of ..."}}'),
        4: Does(status=400, body=b'{"error": {"message": "maximum context length is 10 tokens"}}'),
    }
    with StandIn(KEY, behaviour=lambda worker, prompt, before: refusals.get(int(prompt.split()[1]))) as pool:
        tally = answer(job(pool, tmp_path), chunks_of(rows_of(10)), "p0")
        assert set(pool.asked.values()) == {1}
    assert (tally.answered, tally.failed) == (8, 2)
    failed = {result.id: result for result in finished(tmp_path) if result.status == "failed"}
    assert failed["row-3"].error_class == "BadRequest"
    assert failed["row-3"].error_message == "role must be one of ..."
    assert failed["row-3"].answer is None
    assert failed["row-4"].error_class == "PromptTooLong"


def test_engines_that_refuse_every_row_of_a_new_batch_fail_none(tmp_path):
    with StandIn(KEY, behaviour=lambda *_: Does(status=400, body=b"no chat template")) as pool:
        with pytest.raises(StageFailed, match=r"first \d\d rows were refused .* no chat template"):
            answer(job(pool, tmp_path, proven=False), chunks_of(rows_of(100)), "p0")
        assert finished(tmp_path) == []
        tally = answer(job(pool, tmp_path, proven=False), chunks_of(rows_of(5)), "p0")
    assert tally.failed == 5


def test_refusals_of_a_new_batch_count_from_its_first_answer_on(tmp_path):
    def refuse(worker: str, prompt: str, before: int) -> Does | None:
        return Does(status=400) if int(prompt.split()[1]) % 2 else None

    with StandIn(KEY, behaviour=refuse) as pool:
        tally = answer(job(pool, tmp_path, proven=False), chunks_of(rows_of(100)), "p0")
    assert (tally.answered, tally.failed) == (50, 50)
    assert len(finished(tmp_path)) == 100


def test_engines_that_refuse_every_row_of_a_batch_smaller_than_their_windows_fail_none(tmp_path):
    refused = pytest.raises(StageFailed, match="first 100 rows were refused")
    with StandIn(KEY, max_num_seqs=64, behaviour=lambda *_: Does(status=400)) as pool, refused:
        answer(job(pool, tmp_path, proven=False), chunks_of(rows_of(100)), "p0")
    assert finished(tmp_path) == []


def test_refusals_that_come_before_slow_answers_are_the_rows_own(tmp_path):
    def refuse(worker: str, prompt: str, before: int) -> Does | None:
        return Does(status=400, at_the_door=True) if int(prompt.split()[1]) % 4 == 0 else None

    with StandIn(KEY, max_num_seqs=64, latency_s=1.0, behaviour=refuse) as pool:
        tally = answer(job(pool, tmp_path, proven=False), chunks_of(rows_of(192)), "p0")
    assert (tally.answered, tally.failed) == (144, 48)
    assert len(finished(tmp_path)) == 192


def test_turns_that_were_never_asked_are_no_refusals(tmp_path):
    turns = [replace(row, session="s") for row in rows_of(30)]
    with StandIn(KEY, behaviour=lambda *_: Does(status=400)) as pool:
        tally = answer(job(pool, tmp_path, proven=False), iter([turns]), "p0")
    assert tally.failed == 30
    assert [one.error_class for one in finished(tmp_path)] == ["BadRequest"] + 29 * ["EarlierTurnFailed"]


def test_engines_that_bring_nothing_but_trouble_fail_no_row(tmp_path):
    with StandIn(KEY, max_num_seqs=2, behaviour=lambda *_: Does(status=500, body=b"broken")) as pool:
        hopeless = job(pool, tmp_path, patience_s=0.5, request_timeout_s=0.25)
        with pytest.raises(Unavailable, match="broken"):
            answer(hopeless, chunks_of(rows_of(500)), "p0")
    assert finished(tmp_path) == []


def test_a_worker_that_hangs_is_left_after_the_deadline(tmp_path):
    def hangs(worker: str, prompt: str, before: int) -> Does | None:
        return Does(after_s=3) if worker == "worker-0" else None

    with StandIn(KEY, behaviour=hangs, max_num_seqs=2) as pool:
        tally = answer(job(pool, tmp_path, request_timeout_s=0.5), chunks_of(rows_of(20)), "p0")
    assert tally.answered == 20


def test_rows_wait_while_all_workers_are_gone(tmp_path):
    with StandIn(KEY, latency_s=0.02, max_num_seqs=2) as pool:
        tallies: list[Any] = []
        work = lambda: tallies.append(answer(job(pool, tmp_path), chunks_of(rows_of(200)), "p0"))  # noqa: E731
        with in_background(work):
            wait_until(lambda: sum(pool.answered.values()) > 20)
            for name in ("worker-0", "worker-1"):
                pool.stop_worker(name)
            pool.hidden = {"worker-0", "worker-1"}
            asked = sum(pool.asked.values())
            time.sleep(1.0)  # the time without workers is what is tested
            assert sum(pool.asked.values()) == asked
            pool.start_worker("worker-1")
            pool.hidden = {"worker-0"}
        assert tallies[0].answered == 200
        again = sum(count - 1 for count in pool.asked.values())
        assert again <= 6  # no more than were in flight


def test_no_worker_for_too_long_says_why(tmp_path):
    with StandIn(KEY) as pool:
        pool.hidden = {"worker-0", "worker-1"}
        with pytest.raises(Unavailable, match="names no worker that is ready"):
            answer(job(pool, tmp_path, patience_s=0.5), chunks_of(rows_of(5)), "p0")


def test_a_pool_that_drains_gets_no_more_rows(tmp_path):
    with StandIn(KEY) as pool:
        pool.draining = True
        with pytest.raises(Unavailable, match="draining"):
            answer(job(pool, tmp_path, patience_s=0.5), chunks_of(rows_of(5)), "p0")
        assert not pool.asked


def test_the_client_of_another_pool_is_turned_away(tmp_path):
    with StandIn(KEY) as pool:
        with pytest.raises(StageFailed, match="another pool"):
            answer(job(pool, tmp_path, key="another key"), chunks_of(rows_of(5)), "p0")
        assert not pool.asked


def test_finished_rows_are_on_disk_within_the_flush_time_while_others_are_in_flight(tmp_path):
    with (
        StandIn(
            KEY, behaviour=lambda w, prompt, b: Does(after_s=5) if prompt == "question 1" else None
        ) as pool,
        in_background(lambda: answer(job(pool, tmp_path), chunks_of(rows_of(2)), "p0")),
    ):
        wait_until(lambda: pool.answered["question 0"])
        wait_until(lambda: [one.id for one in finished(tmp_path)] == ["row-0"], deadline_s=2.0)


def test_the_order_to_stop_lets_rows_in_flight_finish_and_starts_no_more(tmp_path):
    with StandIn(KEY, latency_s=0.1, max_num_seqs=4) as pool:
        with in_background(lambda: answer(job(pool, tmp_path), chunks_of(rows_of(5000)), "p0")):
            wait_until(lambda: sum(pool.answered.values()) > 10)
            (tmp_path / "stop").touch()
        assert sum(pool.answered.values()) < 1000
        assert len(finished(tmp_path)) == sum(pool.asked.values()) == sum(pool.answered.values())


def test_the_deadline_is_such_an_order(tmp_path):
    with StandIn(KEY) as pool:
        tally = answer(job(pool, tmp_path, stop_at=time.time() - 1), chunks_of(rows_of(50)), "p0")
        assert tally.answered == 0
        assert not pool.asked


def test_a_task_that_runs_again_leaves_out_what_its_first_attempt_finished(tmp_path):
    with StandIn(KEY) as pool:
        answer(job(pool, tmp_path), chunks_of(rows_of(20)), "p0")
        tally = answer(job(pool, tmp_path), chunks_of(rows_of(30)), "p0")
        assert tally.answered == 10
        assert set(pool.asked.values()) == {1}


def test_rows_come_from_a_source_that_blocks_without_holding_up_those_in_flight(tmp_path):
    def slow_source() -> Iterator[list[Row]]:
        rows = rows_of(4)
        yield rows[:2]
        wait_until(lambda: len(pool.answered) == 2)
        yield rows[2:]

    with StandIn(KEY) as pool:
        assert answer(job(pool, tmp_path), slow_source(), "p0").answered == 4


def test_an_error_of_the_source_ends_the_dispatcher(tmp_path):
    def broken_source() -> Iterator[list[Row]]:
        yield rows_of(2)
        raise ValueError("the rows cannot be read")

    with StandIn(KEY) as pool, pytest.raises(ValueError, match="cannot be read"):
        answer(job(pool, tmp_path), broken_source(), "p0")


def test_a_full_disk_ends_the_dispatcher_with_the_reason(tmp_path, monkeypatch):
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("tasks.batch.segments.os.fdatasync", full)
    with StandIn(KEY, latency_s=0.02) as pool, pytest.raises(StageFailed, match="No space left"):
        answer(job(pool, tmp_path), chunks_of(rows_of(2000)), "p0")


def test_an_answer_must_satisfy_the_schema(tmp_path):
    schema = {"type": "object", "required": ["city"], "properties": {"city": {"type": "string"}}}
    texts = {
        "question 0": Does(text='{"city": "Ulm"}'),
        "question 1": Does(text='{"town": "Ulm"}'),
        "question 2": Does(text="Ulm"),
        "question 3": Does(text='{"city": "Ulm"}', finish_reason="length"),
    }
    with StandIn(KEY, behaviour=lambda worker, prompt, before: texts[prompt]) as pool:
        answer(job(pool, tmp_path, schema=schema), chunks_of(rows_of(4)), "p0")
        assert pool.bodies[0]["response_format"]["json_schema"]["schema"] == schema
    errors = {result.id: result.error_class for result in finished(tmp_path)}
    assert errors == {
        "row-0": None,
        "row-1": "InvalidAnswer",
        "row-2": "InvalidAnswer",
        "row-3": "AnswerCutOff",
    }


def test_an_empty_answer_is_a_status_and_a_lone_surrogate_can_be_stored(tmp_path):
    texts = {"question 0": Does(text=""), "question 1": Does(text="a\ud800b", finish_reason="length")}
    with StandIn(KEY, behaviour=lambda worker, prompt, before: texts[prompt]) as pool:
        answer(job(pool, tmp_path), chunks_of(rows_of(2)), "p0")
    results = {result.id: result for result in finished(tmp_path)}
    assert (results["row-0"].status, results["row-0"].answer) == ("empty", "")
    assert (results["row-1"].answer, results["row-1"].status) == ("a?b", "length")


def test_the_key_is_not_shown(tmp_path):
    with StandIn(KEY) as pool:
        assert KEY not in repr(job(pool, tmp_path))


def test_nothing_is_left_running_in_the_loop(tmp_path):
    with StandIn(KEY) as pool:
        answer(job(pool, tmp_path), chunks_of(rows_of(3)), "p0")
    with pytest.raises(RuntimeError, match="no running event loop"):
        asyncio.get_running_loop()
