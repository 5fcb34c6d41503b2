"""The demo, step by step: what must be there, the run, and what it ends with."""

import json
import signal
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from types import FrameType

from rich.console import Console

from demo import prompts, simulated
from demo.airflow_api import AirflowApi, DagRun
from demo.airflow_services import Airflow
from demo.children import last_lines
from demo.hub_process import start_hub
from demo.live_view import follow
from demo.world import REPOSITORY, World
from tasks.errors import StageFailed
from tasks.ledger import Ledger
from tasks.ledger.migrations import migrate
from tasks.node import processes
from tasks.reap import reap

DAG_ID = "qwen_batch"

_MODEL_BUILDERS = {"smollm2-135m": "demo.models.smollm2", "tiny-qwen3.5": "demo.models.tiny_qwen35"}
_TEARDOWN_DEADLINE_S = 60.0


def bring_up(world: World, console: Console) -> Airflow:
    """Database, prompts, model, hub and Airflow: there when this returns. What is there already is kept."""
    _step(console, "database", lambda: _start_database(world))
    if world.sim is not None:
        _step(console, "GPUs", lambda: simulated.make_ready(world))
    with ThreadPoolExecutor(max_workers=3) as pool:
        # Each builder waits in its own thread: its child is tied to that thread.
        jobs = [pool.submit(_step, console, "prompts", lambda: _write_prompts(world))]
        if world.is_local:
            jobs.append(pool.submit(_step, console, "model", lambda: _build_model(world)))
        airflow = world.airflow()
        jobs.append(pool.submit(_step, console, "Airflow", lambda: _start_airflow(airflow)))
        try:
            for job in jobs:
                job.result()
        except BaseException:
            # The builders wait for their children: without them they end, and so does this block.
            world.children.end_all()
            raise
    if world.is_local:
        _step(console, "hub", lambda: _start_hub(world))
    return airflow


def run(world: World, airflow: Airflow, console: Console) -> DagRun:
    """Trigger the DAG over REST and show it until it has ended."""
    with airflow.api() as api, Ledger(world.cluster.url("ledger"), REPOSITORY / "sql") as ledger:
        api.wait_for_dag(DAG_ID, parsed_after=airflow.started_at)
        api.unpause(DAG_ID)
        _end_interrupted_runs(world, api, ledger, console)
        started = api.trigger(DAG_ID, world.spec(), run_id=f"demo-{datetime.now(UTC):%Y%m%dT%H%M%S}")
        console.print(f"run {started.run_id} of {DAG_ID} was started over REST")
        try:
            return follow(api, ledger, DAG_ID, started.run_id, console)
        except KeyboardInterrupt:
            console.print(
                "interrupted: the run is marked failed and gives back what it holds (again: end at once)"
            )
            _fail_and_wait(api, started.run_id)
            raise


def take_down(world: World) -> list[str]:
    """End every process of the demo; returns what is left, which should be nothing."""
    world.children.end_all(grace_s=10.0)
    return [f"pid {process.pid}" for process in world.children.living()]


def interrupt_on_signals() -> None:
    """Make SIGTERM what Ctrl-C is, so that `timeout` and service managers end the demo as cleanly.

    SIGINT too: a shell starts what it puts into the background with SIGINT ignored.
    """

    def interrupt(_number: int, _frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, interrupt)


def _step(console: Console, name: str, act: Callable[[], str]) -> None:
    began = time.monotonic()
    found = act()
    console.print(f"{name:<10} {found} ({time.monotonic() - began:.1f} s)")


def _start_database(world: World) -> str:
    world.cluster.start()
    world.write_secrets()
    applied = migrate(world.cluster.url("ledger"), REPOSITORY / "sql" / "migrations")
    return f"PostgreSQL on port {world.cluster.port}, {len(applied)} migration(s) of the ledger applied"


def _write_prompts(world: World) -> str:
    return f"{prompts.write(world.prompts, world.rows)} real texts in {_shown(world.prompts)}"


def _start_airflow(airflow: Airflow) -> str:
    airflow.start()
    return f"four services, {airflow.url} (user admin, password {airflow.password})"


def _build_model(world: World) -> str:
    folder = world.hub_root / world.repo
    folder.parent.mkdir(parents=True, exist_ok=True)
    log = world.home / "logs" / f"model-{world.model}.log"
    child = processes.spawn(
        [world.settings().python_convert, "-m", _MODEL_BUILDERS[world.model], folder],
        processes.environment("demo/model"),
        log,
        cwd=REPOSITORY,
    )
    if child.wait() != 0:
        raise StageFailed(f"the model {world.model} could not be built; the end of {log}:\n{last_lines(log)}")
    return f"{world.repo} in {_shown(folder)}{how_good(folder)}"


def how_good(folder: Path) -> str:
    """What a model that was trained here has learned, for a line; nothing of another."""
    try:
        metrics = json.loads((folder / "metrics.json").read_text())
    except FileNotFoundError:
        return ""
    return (
        f", perplexity {metrics['held_out_perplexity']:.0f} on held-out text ({metrics['uniform_perplexity']:,} "
        f"if it knew nothing)"
    )


def _start_hub(world: World) -> str:
    assert world.hub_url is not None
    environment = processes.environment("demo/hub")
    log = world.home / "logs" / "hub.log"
    start_hub(world.children, world.hub_url, world.hub_root, world.home / "hub-ready", environment, log)
    return f"a local server that speaks the hub's protocol, {world.hub_url}"


def _end_interrupted_runs(world: World, api: AirflowApi, ledger: Ledger, console: Console) -> None:
    with ledger.transaction() as connection:
        open_runs = [
            row["run_id"]
            for row in ledger.queries.newest_runs(connection, limit=20)
            if row["verdict"] is None
        ]
    for run_id in open_runs:
        console.print(f"run {run_id} was interrupted: what it held is given back first")
        _fail_and_wait(api, run_id)
        reap(world.settings(), run_id=run_id, force=True)


def _fail_and_wait(api: AirflowApi, run_id: str) -> None:
    if not api.dag_run(DAG_ID, run_id).finished:
        api.fail(DAG_ID, run_id)
    deadline = time.monotonic() + _TEARDOWN_DEADLINE_S
    while not api.dag_run(DAG_ID, run_id).finished and time.monotonic() < deadline:
        time.sleep(0.5)


def _shown(path: Path) -> str:
    return str(path.relative_to(REPOSITORY)) if path.is_relative_to(REPOSITORY) else str(path)
