"""The kill harness: an action killed at every point, run again, and looked at.

    report = kill_everywhere(stage("download", run_id), world, check=..., picture=...)

For n = 1, 2, 3 ... the world is put back, the action runs and is killed (SIGKILL) at its nth point
(`tests.kill.points`), until it ends by itself. After each kill:

1. `meanwhile(world)`: what must hold at any moment, for those who read while nobody mends;
2. the action runs again, and must succeed;
3. `check(world)` holds, and `picture(world)` is what it is after a run that was never killed;
4. once more it runs, and finds nothing to do.

What fails is a violation; `Violated` is raised at the end with the table and the exact points. A slow action
is killed at a sample of its points (`at_most`): one of each place first, the rest drawn by `seed`. With
KILL_EVERY_POINT=1 in the environment of the tests nothing is sampled.
"""

import os
import random
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from tests.kill.launcher import Action, Ended, Point, stage
from tests.kill.world import World

__all__ = ["Action", "Point", "Report", "Violated", "World", "kill_everywhere", "kill_in_a_row", "stage"]

ENOUGH_VIOLATIONS = 3
"""After so many the harness stops: each may cost a timeout, and the first tells most."""

MOST_POINTS = 2000
"""An action that has not ended by then does not end."""

REPORTS: list["Report"] = []
"""All of this test session, for the table at its end."""


@dataclass(frozen=True)
class Violation:
    """Something that does not hold after a kill."""

    point: Point | None
    """Where the action was killed; None: it was not."""
    what: str


@dataclass
class Report:
    """What was killed where, and what did not hold."""

    action: str
    points: tuple[Point, ...] = ()
    """Those of a run that is not killed."""
    kills: list[Point] = field(default_factory=list)
    violations: list[Violation] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def kinds(self) -> Counter[str]:
        """Kills by kind."""
        return Counter(point.kind for point in self.kills)

    def line(self) -> str:
        """One row of the table."""
        kinds = ", ".join(f"{count} {kind}" for kind, count in self.kinds.most_common())
        return f"{self.action:<24}{len(self.points):>7}{len(self.kills):>7}{self.seconds:>9.1f}  {kinds}"

    def table(self) -> str:
        """Counts, then where it was killed, then what did not hold."""
        lines = [HEADER, self.line(), *(f"  {point.n:>4} {point.name}" for point in self.kills)]
        for violation in self.violations:
            where = f"killed {violation.point.name}" if violation.point else "not killed"
            lines.append(f"VIOLATED, {where}: {violation.what}")
        return "\n".join(lines)


HEADER = f"{'action':<24}{'points':>7}{'kills':>7}{'seconds':>9}  kills by kind"


class Violated(AssertionError):
    """Something did not hold after a kill."""

    def __init__(self, report: Report) -> None:
        super().__init__(report.table())
        self.report = report


def kill_everywhere(
    action: Action,
    world: World,
    *,
    check: Callable[[World], None],
    picture: Callable[[World], Any] | None = None,
    meanwhile: Callable[[World], None] | None = None,
    before: Action | None = None,
    settles: bool = True,
    where: Callable[[Point], bool] | None = None,
    at_most: int | None = None,
    seed: int = 0,
    in_child: str | None = None,
    also: Sequence[str] = (),
    timeout_s: float = 120.0,
) -> Report:
    """Kill `action` at every point, each time on the world as it is now; afterwards the world has it done.

    Args:
        check: raises AssertionError when the world is not as it must be after a success.
        picture: what must be the same whether or not there was a kill; anything that can be compared.
        meanwhile: like `check`, for the moment after the kill.
        before: runs on each world that was put back, for what cannot be put back (processes).
        settles: whether the action, run on its own result, must say that it changed nothing
            (`stages.Result.changed`).
        where: which points to kill at; by default at all.
        at_most: kill at so many points at most.
        in_child: kill not the action itself but the Python child that runs this module with -m.
        also: further functions to kill before and after, as `module:function`.

    Raises:
        Violated: with the report.
    """
    trial = _Trial(action, world, check, picture, meanwhile, settles, in_child, also, timeout_s)
    world.save()
    trial.make_ready(before)
    with _reporting(action.name) as report:
        reference = trial.run(None)
        report.points = reference.points
        trial.judge(report, None, reference)
        if picture is not None and not report.violations:
            trial.expected = picture(world)
        if report.violations:
            return report
        if os.environ.get("KILL_EVERY_POINT") == "1":
            at_most = None
        if where is None and at_most is None:
            numbers: Iterable[int] = range(1, MOST_POINTS)
        else:
            wanted = [point for point in reference.points if where is None or where(point)]
            numbers = _sample(wanted, at_most, seed)
        for n in numbers:
            world.restore()
            trial.make_ready(before)
            ended = trial.run(n)
            if ended.killed_at is not None:
                report.kills.append(ended.killed_at)
                trial.after_kill(report, ended.killed_at)
            else:
                trial.judge(report, None, ended)
            is_over = ended.killed_at is None and n > len(reference.points)
            if is_over or len(report.violations) >= ENOUGH_VIOLATIONS:
                break
        if not report.kills:
            report.violations.append(Violation(None, "it was killed nowhere, so nothing was shown"))
    return report


def kill_in_a_row(
    action: Action,
    world: World,
    *,
    check: Callable[[World], None],
    settles: bool = True,
    also: Sequence[str] = (),
    timeout_s: float = 120.0,
) -> Report:
    """Kill at the first point, go on from there and be killed at the second, and so on until the action ends.

    What each death leaves adds up, as in a task that is killed again and again.

    Raises:
        Violated: with the report.
    """
    trial = _Trial(action, world, check, None, None, settles, None, also, timeout_s)
    with _reporting(f"{action.name} (in a row)") as report:
        for n in range(1, MOST_POINTS):
            ended = trial.run(n)
            report.points = ended.points
            if ended.killed_at is None:
                trial.judge(report, None, ended)
                break
            report.kills.append(ended.killed_at)
    return report


class _reporting:
    """Times the block, keeps the report for the session's table, and raises when something did not hold."""

    def __init__(self, name: str) -> None:
        self._report = Report(name)
        self._began = time.monotonic()

    def __enter__(self) -> Report:
        return self._report

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self._report.seconds = time.monotonic() - self._began
        if error is None:
            if self._report.violations:
                raise Violated(self._report)
            REPORTS.append(self._report)


@dataclass
class _Trial:
    action: Action
    world: World
    check: Callable[[World], None]
    picture: Callable[[World], Any] | None
    meanwhile: Callable[[World], None] | None
    settles: bool
    in_child: str | None
    also: Sequence[str]
    timeout_s: float
    expected: Any = None

    def make_ready(self, before: Action | None) -> None:
        if before is not None:
            ended = self.world.run(before, timeout_s=self.timeout_s)
            assert ended.succeeded, f"{before.name} failed, without a kill: {ended.error}"

    def run(self, kill_at: int | None) -> Ended:
        return self.world.run(
            self.action,
            kill_at=kill_at,
            in_child=self.in_child,
            also=self.also,
            timeout_s=self.timeout_s,
        )

    def after_kill(self, report: Report, point: Point) -> None:
        if self.meanwhile is not None:
            self._hold(report, point, lambda: self.meanwhile(self.world), "right after the kill")  # type: ignore[misc]
        self.judge(report, point, self.run(None))

    def judge(self, report: Report, point: Point | None, ended: Ended) -> None:
        """Whether the run that ended did well, and left the world as it must be."""
        if not ended.succeeded:
            again = "run again, " if point else ""
            report.violations.append(Violation(point, f"{again}it failed: {ended.error}"))
            return
        before = len(report.violations)
        when = "after it was run again" if point else "after it ended"
        self._hold(report, point, lambda: self.check(self.world), when)
        if self.picture is not None and self.expected is not None and len(report.violations) == before:
            self._hold(report, point, self._looks_the_same, "compared with a run that was not killed")
        if self.settles and len(report.violations) == before:
            once_more = self.run(None)
            changed = once_more.succeeded and once_more.result["changed"]
            if changed or not once_more.succeeded:
                found = once_more.error or f"it found something to do: {once_more.result['message']}"
                report.violations.append(Violation(point, f"run on its own result: {found}"))

    def _looks_the_same(self) -> None:
        assert self.picture is not None
        seen = self.picture(self.world)
        if seen != self.expected:
            raise AssertionError(_difference(self.expected, seen))

    @staticmethod
    def _hold(report: Report, point: Point | None, look: Callable[[], None], when: str) -> None:
        try:
            look()
        except AssertionError as error:
            report.violations.append(Violation(point, f"{when}: {error}"))


def _sample(points: Sequence[Point], at_most: int | None, seed: int) -> list[int]:
    """The numbers of some of the points, in order: one of each place first, then any."""
    draw = random.Random(seed)
    shuffled = draw.sample(list(points), len(points))
    first_of_place = {point.name: point for point in reversed(shuffled)}
    firsts = draw.sample(list(first_of_place.values()), len(first_of_place))
    rest = [point for point in shuffled if first_of_place[point.name] is not point]
    return sorted(point.n for point in [*firsts, *rest][:at_most])


def _difference(expected: Any, seen: Any) -> str:
    if not isinstance(expected, dict) or not isinstance(seen, dict):
        return f"expected {expected!r}, found {seen!r}"
    names = sorted(key for key in expected.keys() | seen.keys() if expected.get(key) != seen.get(key))
    shown = [f"{name}: {expected.get(name)!r} became {seen.get(name)!r}" for name in names[:5]]
    return f"{len(names)} thing(s) differ: {'; '.join(shown)}"
