"""The failure matrix against real HTTP: after each failure the rows come out, each once.

What was generated twice is counted in the stand-in's own log of requests, not by the pipeline.
"""

import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tasks.batch.answering import answer
from tasks.batch.records import Row
from tasks.errors import StageFailed
from tests.batch.dispatching import KEY, chunks_of, finished, in_background, job, rows_of
from tests.batch.stand_in import Does, StandIn, answer_to
from tests.runs import wait_until

ROWS = 300


def some(share: float, does: Does) -> Callable[[str, str, int], Does | None]:
    """This share of the rows meets `does`, the first time."""

    def behaviour(worker: str, prompt: str, before: int) -> Does | None:
        return does if before == 0 and int(prompt.split()[1]) % 100 < share * 100 else None

    return behaviour


MATRIX = {
    "500": some(0.2, Does(status=500, body=b"boom")),
    "429": some(0.2, Does(status=429, body=b"slow down", at_the_door=True)),
    "503 with Retry-After": some(0.2, Does(status=503, headers={"Retry-After": "0.2"}, at_the_door=True)),
    "closes in mid answer": some(0.04, Does(closes=True)),
    "invalid UTF-8": some(0.2, Does(body=b'{"choices": [{"message": {"content": "\xff\xfe"}}]}')),
    "invalid JSON": some(0.2, Does(body=b'{"choices": [')),
    "another model": some(0.04, Does(body=b'{"model": "other", "choices": [{"message": {"content": "x"}}]}')),
    "hangs": some(0.02, Does(after_s=4.0)),
    "slow": some(0.1, Does(after_s=0.3)),
}


@pytest.mark.parametrize("failure", MATRIX)
def test_every_row_is_answered_once_whatever_the_workers_do(tmp_path, failure):
    with StandIn(KEY, behaviour=MATRIX[failure], latency_s=0.005) as pool:
        # Only who hangs is to be given up: a busy machine is slow too.
        asked = job(pool, tmp_path, request_timeout_s=1.5 if failure == "hangs" else 20.0)
        tally = answer(asked, chunks_of(rows_of(ROWS)), "p0")
        # Generated whole and not taken: what the engine spent in vain.
        twice = sum(count - 1 for count in pool.answered.values())
    assert (tally.answered, tally.failed, tally.given_up) == (ROWS, 0, 0)
    results = finished(tmp_path)
    assert sorted(result.id for result in results) == sorted(row.id for row in rows_of(ROWS))
    assert all(result.answer == answer_to(f"question {result.id[4:]}") for result in results)
    bad_answers = 0.2 * ROWS if failure in ("invalid UTF-8", "invalid JSON", "another model") else 0
    assert twice <= bad_answers + 0.02 * ROWS


def test_an_answer_that_belongs_to_another_request_is_not_taken(tmp_path):
    """Both requests are out; the first one gets the answer of the second."""

    def swaps(worker: str, prompt: str, before: int) -> Does | None:
        return Does(answers_another=True, after_s=0.3) if prompt == "question 0" and not before else None

    with StandIn(KEY, behaviour=swaps, latency_s=0.6, workers=1) as pool:
        tally = answer(job(pool, tmp_path), chunks_of(rows_of(2)), "p0")
        assert pool.asked["question 0"] == 2
    assert tally.answered == 2
    assert {result.id: result.answer for result in finished(tmp_path)}["row-0"] == answer_to("question 0")


def test_a_worker_that_is_killed_costs_no_more_than_its_rows_in_flight(tmp_path):
    with StandIn(KEY, latency_s=0.02, max_num_seqs=8) as pool:
        with in_background(lambda: answer(job(pool, tmp_path), chunks_of(rows_of(600)), "p0")):
            wait_until(lambda: sum(pool.answered.values()) > 100)
            pool.stop_worker("worker-0")
            pool.hidden = {"worker-0"}
            wait_until(lambda: sum(pool.answered.values()) > 300)
            pool.start_worker("worker-0")
            pool.hidden = set()
        assert sum(count - 1 for count in pool.asked.values()) <= 16
    assert len({result.id for result in finished(tmp_path)}) == len(finished(tmp_path)) == 600


def test_a_full_disk_costs_what_was_not_flushed_and_the_rest_goes_on_where_there_is_room(tmp_path):
    folder = tmp_path / "small"
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(folder)], check=False)
    if mounted.returncode != 0:
        pytest.skip("a small file system cannot be mounted here")
    try:
        with StandIn(KEY, latency_s=0.005) as pool:
            with pytest.raises(StageFailed, match="No space left on device"):
                answer(job(pool, folder), chunks_of(rows_of(2000)), "p0")
            kept = {result.id for result in finished(folder)}
            wait_until(lambda: pool.in_flight == 0)
            asked = sum(pool.asked.values())
            subprocess.run(["mount", "-o", "remount,size=8m", str(folder)], check=True)
            answer(job(pool, folder), chunks_of(rows_of(2000)), "p0")
            results = finished(folder)
            twice = sum(count - 1 for count in pool.asked.values())
        assert 0 < len(kept) < asked
        assert len(results) == len({result.id for result in results}) == 2000
        assert twice <= asked - len(kept)
    finally:
        subprocess.run(["umount", str(folder)], check=True)


@pytest.mark.parametrize("partitions", [1, 2, 7])
def test_the_answers_do_not_depend_on_the_partitions(tmp_path, partitions):
    rows = rows_of(140)
    with StandIn(KEY, latency_s=0.002) as pool:
        threads = [
            threading.Thread(
                target=answer, args=(job(pool, tmp_path, shares=partitions), iter([part]), f"p{n}")
            )
            for n in range(partitions)
            for part in [[row for row in rows if int(row.id[4:]) % partitions == n]]
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert set(pool.asked.values()) == {1}
    assert {one.id: one.answer for one in finished(tmp_path)} == {
        f"row-{n}": answer_to(f"question {n}") for n in range(140)
    }


# Steering.


def test_an_engine_that_runs_fewer_than_it_says_is_not_flooded(tmp_path):
    """KV cache for 4, though max_num_seqs is 32: the queue tells, and the window follows."""
    with StandIn(KEY, workers=1, max_num_seqs=4, latency_s=0.05) as pool:
        pool.claimed_num_seqs = 32
        answer(job(pool, tmp_path, registry_poll_s=0.1), chunks_of(rows_of(400)), "p0")
        assert pool.waiting_late < 16  # it began with 48 in flight


def test_an_engine_that_runs_more_than_the_window_gets_more(tmp_path):
    with StandIn(KEY, workers=1, max_num_seqs=8, latency_s=0.05) as pool:
        answer(job(pool, tmp_path, registry_poll_s=0.05, shares=8), chunks_of(rows_of(300)), "p0")
        assert pool.most_in_flight >= 8  # its share was 1 or 2; the other dispatchers have nothing to do


def test_a_worker_that_failed_gets_one_row_before_it_gets_many(tmp_path):
    refuses = time.monotonic() + 1.0

    def behaviour(worker: str, prompt: str, before: int) -> Does | None:
        is_broken = worker == "worker-0" and time.monotonic() < refuses
        return Does(status=401, body=b"no", at_the_door=True) if is_broken else None

    with StandIn(KEY, behaviour=behaviour, latency_s=0.02, max_num_seqs=16) as pool:
        tally = answer(job(pool, tmp_path), chunks_of(rows_of(2000)), "p0")
        refused = sum(count - 1 for count in pool.asked.values())
    assert tally.answered == 2000
    assert refused <= 24 + 8  # those in flight, and one for each trial


def test_the_time_of_a_row_follows_what_rows_take(tmp_path):
    """A worker that hangs holds a row for some seconds, and not for the 60 that are allowed at most."""
    rows = [replace(row, max_tokens=8) for row in reversed(rows_of(400))]
    with StandIn(KEY, behaviour=some(0.01, Does(after_s=12.0)), latency_s=0.01) as pool:
        began = time.monotonic()
        answer(job(pool, tmp_path, request_timeout_s=60.0), chunks_of(rows), "p0")
        assert time.monotonic() - began < 10
    assert len(finished(tmp_path)) == 400


# Sessions.


def session_rows(sessions: int, turns: int) -> list[Row]:
    return [
        Row(f"s{s}-t{t}", f'[{{"role":"user","content":"session {s} turn {t}"}}]', 4, session=f"s{s}")
        for s in range(sessions)
        for t in range(turns)
    ]


def history_is_right(pool: StandIn, sessions: int, turns: int) -> None:
    """Every request held all turns before it and the answers that were given to them."""
    expected = {}
    for s in range(sessions):
        chat: list[Any] = []
        for t in range(turns):
            chat.append({"role": "user", "content": f"session {s} turn {t}"})
            expected[f"session {s} turn {t}"] = list(chat)
            chat.append({"role": "assistant", "content": answer_to(f"session {s} turn {t}")})
    for body in pool.bodies:
        assert body["messages"] == expected[body["messages"][-1]["content"]]


def test_the_turns_of_a_session_are_asked_in_order_with_their_answers_on_one_worker(tmp_path):
    with StandIn(KEY, latency_s=0.01) as pool:
        tally = answer(job(pool, tmp_path), chunks_of(session_rows(10, 4), size=7), "p0")
        history_is_right(pool, 10, 4)
        assert set(pool.asked.values()) == {1}
        workers: dict[str, set[str]] = {}
        for result in finished(tmp_path):
            workers.setdefault(result.id.split("-")[0], set()).add(str(result.worker))
        assert all(len(names) == 1 for names in workers.values())
    assert tally.answered == 40


def test_a_session_goes_on_with_its_history_when_its_worker_goes_away(tmp_path):
    with StandIn(KEY, latency_s=0.05) as pool:
        with in_background(lambda: answer(job(pool, tmp_path), chunks_of(session_rows(12, 6)), "p0")):
            wait_until(lambda: sum(pool.answered.values()) > 20)
            pool.stop_worker("worker-0")
            pool.hidden = {"worker-0"}
        history_is_right(pool, 12, 6)
    results = finished(tmp_path)
    assert len(results) == len({one.id for one in results}) == 72


def test_a_session_goes_on_with_its_history_in_another_process(tmp_path):
    """Its first turns were answered by an attempt that was killed."""
    with StandIn(KEY) as pool:
        rows = session_rows(5, 4)
        answer(job(pool, tmp_path), iter([[row for row in rows if row.id[-1] in "01"]]), "p0")
        tally = answer(job(pool, tmp_path), iter([rows]), "p0")
        history_is_right(pool, 5, 4)
        assert set(pool.asked.values()) == {1}
    assert tally.answered == 10


def test_turns_after_one_that_has_no_answer_are_failed_and_not_asked(tmp_path):
    def refuse(worker: str, prompt: str, before: int) -> Does | None:
        return Does(status=400, body=b"no") if prompt == "session 0 turn 1" else None

    with StandIn(KEY, behaviour=refuse) as pool:
        tally = answer(job(pool, tmp_path), chunks_of(session_rows(2, 4)), "p0")
        assert "session 0 turn 2" not in pool.asked
    assert (tally.answered, tally.failed) == (5, 3)
    errors = {one.id: one.error_class for one in finished(tmp_path) if one.status == "failed"}
    assert errors == {"s0-t1": "BadRequest", "s0-t2": "EarlierTurnFailed", "s0-t3": "EarlierTurnFailed"}


# What a row says for itself.


def test_a_row_has_its_own_sampling_and_schema(tmp_path):
    schema = '{"type":"object","required":["n"]}'
    rows = [
        Row("a", '[{"role":"user","content":"question 1"}]', 4, 8),
        Row("b", '[{"role":"user","content":"question 2"}]', 4, 3, sampling='{"max_tokens":3,"seed":7}'),
        Row("c", '[{"role":"user","content":"question 3"}]', 4, 8, schema=schema),
    ]
    texts = {"question 3": Does(text='{"n": 1}')}
    with StandIn(KEY, behaviour=lambda w, prompt, b: texts.get(prompt)) as pool:
        assert answer(job(pool, tmp_path), iter([rows]), "p0").answered == 3
        bodies = {body["messages"][0]["content"]: body for body in pool.bodies}
    assert (bodies["question 1"]["max_tokens"], bodies["question 2"]["max_tokens"]) == (8, 3)
    assert bodies["question 2"]["seed"] == 7
    assert bodies["question 2"]["temperature"] == 0.0
    assert "response_format" not in bodies["question 1"]
    assert bodies["question 3"]["response_format"]["json_schema"]["schema"]["required"] == ["n"]


def test_an_answer_that_the_schema_refuses_is_asked_for_again_and_not_for_ever(tmp_path):
    schema = {"type": "object", "required": ["city"]}

    def behaviour(worker: str, prompt: str, before: int) -> Does | None:
        is_good = prompt == "question 0" and before == 1
        return Does(text='{"city": "Ulm"}' if is_good else "no JSON")

    with StandIn(KEY, behaviour=behaviour) as pool:
        answer(job(pool, tmp_path, schema=schema), chunks_of(rows_of(2)), "p0")
        assert pool.asked == {"question 0": 2, "question 1": 3}
    results = {one.id: one for one in finished(tmp_path)}
    assert (results["row-0"].status, results["row-0"].attempts) == ("answered", 2)
    assert (results["row-1"].error_class, results["row-1"].answer) == ("InvalidAnswer", None)


def test_prompts_that_are_too_long_are_cut_by_the_engine_where_the_spec_says_so(tmp_path):
    with StandIn(KEY) as pool:
        answer(job(pool, tmp_path, max_model_len=100), iter([rows_of(1)]), "p0")
        assert pool.bodies[0]["truncate_prompt_tokens"] == 100 - rows_of(1)[0].max_tokens or 1


# Order.


def skewed(order: Callable[[list[Row]], list[Row]]) -> Iterator[list[Row]]:
    """Most answers are short; one in twenty is ten times longer."""
    rows = [
        Row(f"row-{n}", f'[{{"role":"user","content":"question {n}"}}]', 4, 200 if n >= 190 else 20)
        for n in range(200)
    ]
    yield order(rows)


def tail_s(folder: Path, order: Callable[[list[Row]], list[Row]]) -> float:
    """How long the engines are no longer full at the end."""

    def takes(worker: str, prompt: str, before: int) -> Does | None:
        return Does(after_s=0.6 if int(prompt.split()[1]) >= 190 else 0.06)

    with StandIn(KEY, behaviour=takes, workers=1, max_num_seqs=16) as pool:
        answer(job(pool, folder), skewed(order), "p0")
        times = sorted(pool.finished_at.values())
    return times[-1] - times[-17]


def test_longest_first_leaves_a_shorter_tail(tmp_path):
    as_they_stand = tail_s(tmp_path / "a", lambda rows: rows)
    longest_first = tail_s(tmp_path / "b", lambda rows: sorted(rows, key=lambda row: -row.max_tokens))
    assert longest_first < as_they_stand / 2
