"""Rows that trouble has met, asked alone: who is to blame, against real HTTP."""

from tasks.batch.answering import answer
from tests.batch.dispatching import KEY, chunks_of, finished, job, rows_of
from tests.batch.stand_in import Does, StandIn


def test_only_what_fails_alone_at_a_working_engine_is_failed(tmp_path):
    def poison(worker: str, prompt: str, before: int) -> Does | None:
        return Does(status=500, body=b"cannot") if prompt == "question 3" else None

    with StandIn(KEY, behaviour=poison) as pool:
        tally = answer(job(pool, tmp_path), chunks_of(rows_of(30)), "p0")
        assert (tally.answered, tally.failed, tally.given_up) == (29, 1, 0)
        assert pool.asked["question 3"] == 7
    failed = [result for result in finished(tmp_path) if result.status == "failed"]
    assert [(one.id, one.error_class) for one in failed] == [("row-3", "EngineError")]


def test_a_row_that_kills_engines_alone_is_quarantined_with_an_error_of_its_own(tmp_path):
    def poison(worker: str, prompt: str, before: int) -> Does | None:
        return Does(closes=True) if prompt == "question 3" else None

    with StandIn(KEY, behaviour=poison) as pool:
        tally = answer(job(pool, tmp_path), chunks_of(rows_of(30)), "p0")
        assert pool.asked["question 3"] == 4  # twice among others, twice alone
        assert pool.retries == 2  # a slot that was given up because of it is tried again
    assert (tally.answered, tally.failed, tally.given_up) == (29, 1, 0)
    (failed,) = [result for result in finished(tmp_path) if result.status == "failed"]
    assert (failed.id, failed.error_class, failed.answer) == ("row-3", "KillsEngine", None)


def test_rows_that_were_in_engines_that_died_are_answered_alone_and_none_is_blamed(tmp_path):
    """Deaths by another cause: all rows in flight met two of them."""

    def dies(worker: str, prompt: str, before: int) -> Does | None:
        return Does(closes=True) if before < 2 and prompt.split()[1] in ("3", "4", "5") else None

    with StandIn(KEY, behaviour=dies) as pool:
        tally = answer(job(pool, tmp_path), chunks_of(rows_of(30)), "p0")
        assert pool.asked["question 4"] == 3
    assert (tally.answered, tally.failed, tally.given_up) == (30, 0, 0)


def test_no_row_is_blamed_where_the_engines_answer_nobody_any_more(tmp_path):
    def broken(worker: str, prompt: str, before: int) -> Does | None:
        is_suspect = prompt == "question 3"
        return Does(closes=True) if is_suspect or pool.asked["question 3"] > 2 else None

    with StandIn(KEY, behaviour=broken) as pool:
        tally = answer(job(pool, tmp_path), chunks_of(rows_of(30)), "p0")
    assert (tally.failed, tally.given_up) == (0, 1)
    assert "row-3" not in {result.id for result in finished(tmp_path)}


def test_an_engine_that_dies_of_something_else_is_no_more_than_one_strike_of_the_row_in_it(tmp_path):
    """Its server still answers for a moment, and says 500 to everybody."""
    requests_until_it_is_back = 0

    def dies_once(worker: str, prompt: str, before: int) -> Does | None:
        nonlocal requests_until_it_is_back
        if prompt == "question 3" and before < 2:
            return Does(closes=True)
        if prompt == "question 3" and before == 2:
            requests_until_it_is_back = 3
        requests_until_it_is_back -= 1
        return Does(status=500, body=b"the engine is dead") if requests_until_it_is_back >= 0 else None

    with StandIn(KEY, behaviour=dies_once, workers=1) as pool:
        tally = answer(job(pool, tmp_path), chunks_of(rows_of(30)), "p0")
        assert pool.asked["question 3"] == 4  # twice in company, once when it died, once more
    assert (tally.answered, tally.failed, tally.given_up) == (30, 0, 0)


def test_with_other_dispatchers_at_work_suspects_are_left_for_later_and_then_asked_alone(tmp_path):
    def poison(worker: str, prompt: str, before: int) -> Does | None:
        return Does(closes=True) if prompt == "question 3" else None

    with StandIn(KEY, behaviour=poison) as pool:
        tally = answer(job(pool, tmp_path, shares=2), chunks_of(rows_of(30)), "p0")
        assert (tally.answered, tally.failed, tally.set_aside) == (29, 0, 1)
        tally = answer(job(pool, tmp_path), chunks_of(rows_of(30)), "p0", alone=True)
        assert (tally.answered, tally.failed, tally.set_aside) == (0, 1, 0)
        assert pool.most_at_once_of("question 3", "Say yes.") == 1
