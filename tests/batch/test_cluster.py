"""A standalone cluster: a real master and two workers on this host, and an executor that is killed."""

import os
import signal
import socket
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from tasks import settings
from tasks.batch.submission import spark_home
from tasks.settings import REPOSITORY
from tests.batch.stand_in import StandIn, answer_to
from tests.batch.test_spark import the_stage_run
from tests.batch.world import World, prompt_of, write_input
from tests.runs import wait_until

pytestmark = [
    pytest.mark.skipif(
        not (REPOSITORY / ".envs/spark/bin/python").exists(), reason="the Spark environment is not set up"
    ),
    pytest.mark.everything,
]


@pytest.fixture
def master(world: World, tmp_path: Path) -> Iterator[str]:
    """The address of a cluster with two workers of one core."""
    home = spark_home(world.settings)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
    address = f"spark://127.0.0.1:{port}"
    deploy = "org.apache.spark.deploy"
    with ExitStack() as stack:
        log = tmp_path / "cluster.log"
        stack.enter_context(
            daemon(
                home, log, f"{deploy}.master.Master", "-h", "127.0.0.1", "-p", str(port), "--webui-port", "0"
            )
        )
        for number in range(2):
            work = tmp_path / f"worker-{number}"
            options = ("-h", "127.0.0.1", "-c", "1", "-m", "700m", "-d", str(work), "--webui-port", "0")
            stack.enter_context(daemon(home, log, f"{deploy}.worker.Worker", *options, address))
        wait_until(lambda: log.read_text().count("Successfully registered with master") == 2, deadline_s=120)
        yield address


@contextmanager
def daemon(home: Path, log: Path, name: str, *options: str) -> Iterator[None]:
    """One of the cluster's processes, and what it starts."""
    environment = {
        **os.environ,
        "SPARK_HOME": str(home),
        "SPARK_LOCAL_IP": "127.0.0.1",
        "SPARK_DAEMON_MEMORY": "256m",
    }
    with log.open("ab") as output:
        process = subprocess.Popen(
            [home / "bin/spark-class", name, *options],
            env=environment,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    try:
        yield
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def executors() -> list[int]:
    """Pids of this user's executors that belong to the cluster of this test's processes."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                command = (entry / "cmdline").read_bytes()
            except OSError:
                continue
            if b"CoarseGrainedExecutorBackend" in command and str(os.getpid()).encode() in marks(entry):
                found.append(int(entry.name))
    return found


def marks(entry: Path) -> bytes:
    try:
        return (entry / "environ").read_bytes().split(b"CLUSTER_OF_TEST=")[-1].split(b"\0")[0]
    except OSError:
        return b""


def test_a_killed_executor_costs_no_row_and_none_twice_beyond_the_bound(
    world: World, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
):
    monkeypatch.setenv("CLUSTER_OF_TEST", str(os.getpid()))
    address = request.getfixturevalue("master")
    conf = '{"spark.executor.memory": "512m", "spark.executor.cores": "1"}'
    for name, value in (("SPARK_MASTER", address), ("SPARK_CORES", "2"), ("SPARK_CONF", conf)):
        monkeypatch.setenv(f"QWEN_PIPELINE_{name}", value)
        world.environment[f"QWEN_PIPELINE_{name}"] = value
    settings.current.cache_clear()
    ids = [f"r{n:04d}" for n in range(1200)]
    spec = world.spec(write_input(world.root / "in" / "prompts.parquet", ids))
    with StandIn(world.key, latency_s=0.2, max_num_seqs=8) as pool:
        world.run("one", spec, pool.registry)
        world.execute("prepare", "one")
        with the_stage_run(world) as stage:
            wait_until(lambda: sum(pool.answered.values()) > 200 or stage.poll() is not None, deadline_s=300)
            assert stage.poll() is None, (world.home / "logs/one/spark-run.log").read_text()[-3000:]
            assert len(executors()) == 2
            os.kill(executors()[0], signal.SIGKILL)
            assert stage.wait(300) == 0
        done = {name: world.execute(name, "one") for name in ("reconcile", "publish")}
        asked_twice = sum(count - 1 for count in pool.asked.values())
        assert asked_twice <= pool.most_in_flight + 80 * world.settings.segment_flush_s
    assert done["reconcile"].facts == {"rows": 1200, "answered": 1200, "failed": 0, "not_started": 0}
    assert [row["id"] for row in world.published()] == ids
    assert all(row["answer"] == answer_to(prompt_of(row["id"])) for row in world.published())
