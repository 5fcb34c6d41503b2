"""One cell of the matrix: a run in which one thing goes wrong in one stage, and what is left of it.

Afterwards, with the reaper and without a person: no worker, no lease, the run's state tells the truth. Then the
same batch is run again, and each row is answered exactly once.
"""

import random
import time
from dataclasses import asdict, dataclass
from typing import Any

from demo.airflow_api import AirflowApi
from tasks.errors import StageError
from tests.chaos.events import Act, Event, Missed
from tests.chaos.world import Batch, World

_TRIES = 4
_REACH_S = 600.0
_SETTLE_S = 600.0
_LOOK_EVERY_S = 2.0
_REAP_EVERY_S = 15.0
"""A node's timer comes every minute; a reap costs a second of a core."""


@dataclass(frozen=True)
class Result:
    """What was seen; `wrong` is empty when the promise was kept."""

    stage: str
    event: str
    state: str
    """Airflow's, of the run in which it went wrong."""
    again: str
    """Airflow's, of the rerun."""
    generated_twice: int
    wrong: tuple[str, ...]
    seconds: float

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


class _FailedByItself(Exception):
    """Before anything was done to it."""


def run_cell(world: World, stage: str, event: Event, seed: int) -> Result:
    """Bring one cell about and look. A stage can be over before the event comes: then it is tried again."""
    chance = random.Random(f"{seed} {stage} {event.name}")
    why = ""
    for number in range(_TRIES):
        try:
            # A stage that was over before its middle was shorter than it was taken for.
            within_s = (3.0 if stage == "run" else 0.5) / 3**number
            return _try_cell(world, stage, event, chance.uniform(0.0, within_s))
        except Missed as missed:
            why = str(missed)
        except _FailedByItself as failed:
            why = str(failed)
            break
    return Result(stage, event.name, "?", "?", 0, (why,), 0.0)


def _try_cell(world: World, stage: str, event: Event, after_s: float) -> Result:
    began = time.monotonic()
    name = f"{stage}-{event.name}".replace(" ", "-")
    batch = world.new_batch(name)
    world.forget_weights()
    world.reap()  # what a matrix that was stopped in mid cell has left
    try:
        with world.api() as api:
            run_id = f"{name}-{int(time.time())}"
            act = Act(world, api, event.dag_id, run_id, stage)
            api.trigger(event.dag_id, world.spec(batch), run_id=run_id)
            try:
                reach(act, event, after_s)
                event.happens(act)
            except Missed:
                settled(world, event.dag_id, run_id)
                raise
        state = settled(world, event.dag_id, run_id)
        wrong = _after(world, batch, event, state)
        if event.undo is not None:
            event.undo(act)
        with world.api() as api:
            api.trigger("qwen_batch", world.spec(batch), run_id=f"{run_id}-again")
        again = settled(world, "qwen_batch", f"{run_id}-again")
        wrong += _after_rerun(world, batch, again)
    finally:
        world.small_disk.free()
    return Result(
        stage,
        event.name,
        state,
        again,
        world.generated_twice(batch),
        tuple(wrong),
        round(time.monotonic() - began, 1),
    )


def reach(act: Act, event: Event, after_s: float) -> None:
    """Return `after_s` after the stage began to act, or after the run.

    Raises:
        Missed: the stage was too short.
        _FailedByItself: the run does not come there, though nothing was done to it.
    """
    if event.after_success:
        state = settled(act.world, act.dag_id, act.run_id)
        if state != "success":
            raise _FailedByItself(f"the run that was to succeed first ended as {state}")
        return
    began = looked = time.monotonic()
    while act.world.acting(act.name, act.stage) is None:
        # Asking Airflow takes longer than the shortest stages do.
        if (now := time.monotonic()) > looked + _LOOK_EVERY_S:
            looked = now
            run = act.api.dag_run(act.dag_id, act.run_id)
            if now > began + _REACH_S or (run.finished and run.state != "success"):
                raise _FailedByItself(f"the run is {run.state}, and stage {act.stage} was not seen at work")
            if run.finished:
                raise Missed(f"stage {act.stage} was over before it was seen at work")
        time.sleep(0.02)
    # A moment that chance has chosen: nothing is waited for.
    time.sleep(after_s)
    if act.world.acting(act.name, act.stage) is None:
        raise Missed(f"stage {act.stage} was over {after_s:.2f} s after it was seen at work")


def settled(world: World, dag_id: str, run_id: str) -> str:
    """Airflow's state of the run once it has ended and nothing is left, or time is up."""
    began = reaped = time.monotonic()
    while (now := time.monotonic()) < began + _SETTLE_S:
        time.sleep(_LOOK_EVERY_S)
        world.revive()
        if now > reaped + _REAP_EVERY_S:
            world.reap()
            reaped = now
        try:
            with world.api() as api:
                run = api.dag_run(dag_id, run_id)
                if run.finished and _nothing_runs(api, dag_id, run_id) and not world.left():
                    return run.state
        except StageError:
            continue  # the API server is coming back
    with world.api() as api:
        return api.dag_run(dag_id, run_id).state


def _nothing_runs(api: AirflowApi, dag_id: str, run_id: str) -> bool:
    # A run can be over while a task that it no longer waits for is still being ended.
    return not any(task.state in ("running", "queued") for task in api.task_instances(dag_id, run_id))


def _after(world: World, batch: Batch, event: Event, state: str) -> list[str]:
    wrong = [f"left afterwards: {what}" for what in world.left()]
    counted = world.counted(batch)
    if state == "success" and (counted is None or not counted.holds):
        wrong.append("the run says success, and its answers are not all published")
    if state not in ("success", "failed"):
        wrong.append(f"the run is {state} after {_SETTLE_S:.0f} s")
    if event.must_fail and state != "failed":
        wrong.append(f"the run says {state}, though it was ended as failed")
    return wrong


def _after_rerun(world: World, batch: Batch, state: str) -> list[str]:
    if state != "success":
        return [f"the rerun ended as {state}"]
    wrong = [f"left after the rerun: {what}" for what in world.left()]
    counted = world.counted(batch)
    if counted is None or not counted.holds or counted.answered != world.batch_rows:
        wrong.append(f"the count does not come out after the rerun: {counted}")
    return wrong
