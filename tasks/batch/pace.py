"""How long a row may take: learnt from those that were answered.

A worker that hangs holds its rows until their time is over, so the time should be short; one that is only slow
must not be taken for one that hangs. As for TCP's retransmissions: the mean and its deviation, both smoothed.
"""

_SMOOTHING = 0.05
_DEVIATIONS = 6.0
_FACTOR = 2.0
_BEFORE_ANY_ANSWER = 20
"""Answers before what was learnt counts."""


class Pace:
    """Seconds for each token of an answer, queueing included."""

    def __init__(self, least_s: float, most_s: float) -> None:
        """
        Args:
            least_s: what every row is given, however short its answer.
            most_s: what no row is given more of; and each one as long as nothing was learnt.
        """
        self._least_s = least_s
        self._most_s = most_s
        self._answers = 0
        self._mean_s = 0.0
        self._deviation_s = 0.0

    def learn(self, latency_s: float, completion_tokens: int) -> None:
        """A row was answered."""
        each_s = latency_s / max(1, completion_tokens)
        self._answers += 1
        weight = max(_SMOOTHING, 1.0 / self._answers)
        self._deviation_s += weight * (abs(each_s - self._mean_s) - self._deviation_s)
        self._mean_s += weight * (each_s - self._mean_s)

    def timeout_s(self, max_tokens: int) -> float:
        """For a row whose answer has at most so many tokens; in whole seconds above one, so that few differ."""
        if self._answers < _BEFORE_ANY_ANSWER:
            return self._most_s
        each_s = self._mean_s + _DEVIATIONS * self._deviation_s
        expected_s = max(self._least_s, _FACTOR * each_s * max_tokens)
        return min(self._most_s, float(round(expected_s)) if expected_s > 1 else expected_s)
