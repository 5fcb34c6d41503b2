"""When a worker counts as alive. No process, no clock: what was seen is told, and when."""

import pytest

from tasks.serving.health import Pulse
from tasks.serving.probes import Load, Look

ALLOWED_S = 60.0


@pytest.fixture
def pulse() -> Pulse:
    """Of a worker that became ready at second 0."""
    return Pulse(ALLOWED_S, 0.0)


def look(tokens: int) -> Look:
    return Look(Load(1, 0), tokens)


def test_a_worker_whose_tokens_move_is_never_asked(pulse: Pulse) -> None:
    for second in range(300):
        pulse.looked(look(second), second)
        assert not pulse.wants_canary(second)
        assert pulse.verdict(second).state == "ready"


def test_an_idle_worker_is_asked_and_lives_by_its_answer(pulse: Pulse) -> None:
    pulse.looked(look(7), 0)
    pulse.looked(look(7), 11)
    assert pulse.wants_canary(11)
    pulse.canary_answered(12)
    assert not pulse.wants_canary(13)
    pulse.looked(look(7), 61)
    assert pulse.verdict(61).state == "suspect", "the next canary is overdue"


def test_an_api_server_that_answers_does_not_prove_its_engine(pulse: Pulse) -> None:
    states = []
    for second in range(70):
        pulse.looked(look(7), second)
        states.append(pulse.verdict(second).state)
    assert states[10] == "ready"
    assert states[30] == "suspect"
    assert states[61] == "dead"
    pulse.canary_failed("a request of 1 token(s) was not answered within 60 s")
    evidence = pulse.verdict(70).evidence
    assert "no token was made for" in evidence
    assert "was not answered within 60 s" in evidence
    assert "API server answers" in evidence


def test_a_worker_that_moves_again_is_ready_again(pulse: Pulse) -> None:
    pulse.looked(look(7), 0)
    pulse.looked(look(7), 30)
    assert pulse.verdict(30).state == "suspect"
    pulse.looked(look(8), 31)
    assert pulse.verdict(31).state == "ready"


def test_a_silent_api_server_is_suspect_soon_and_dead_in_the_end(pulse: Pulse) -> None:
    pulse.looked(None, 6)
    assert pulse.verdict(6).state == "suspect"
    assert pulse.verdict(61).state == "dead"
    assert "API server has not answered" in pulse.verdict(61).evidence


def test_a_stopped_engine_is_suspect_at_once_and_an_ended_one_dead(pulse: Pulse) -> None:
    pulse.engines([], ["pid 7"])
    assert pulse.verdict(1).state == "suspect"
    assert "pid 7" in pulse.verdict(1).evidence
    pulse.engines([], [])
    assert pulse.verdict(2).state == "ready"
    pulse.engines(["pid 7"], [])
    assert pulse.verdict(3).state == "dead"


def test_a_worker_that_lost_its_memory_is_suspect(pulse: Pulse) -> None:
    pulse.memory("its GPU memory fell from 70.0 to 1.0 GiB")
    assert pulse.verdict(1).state == "suspect"
    pulse.memory("")
    assert pulse.verdict(2).state == "ready"
