"""One deployment for all cells: real Airflow, PostgreSQL and Spark, the real hub client; engines are stand-ins, the GPU
is simulated.

Everything is below `home`. What the pipeline writes is on a small file system of its own (a tmpfs, when the
program is root), so that a cell can fill it. The reaper is run every few seconds, as a node's timer would.
"""

import json
import os
import shutil
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from secrets import token_hex
from typing import Any

import psycopg

from demo.airflow_api import AirflowApi
from demo.airflow_services import Airflow
from demo.check import Count, count
from demo.children import Children, write_private
from demo.postgres import Cluster
from tasks.gpu.simulated import control
from tasks.ledger.migrations import migrate
from tasks.node import processes
from tasks.node.processes import Process
from tasks.settings import REPOSITORY, Settings
from tests.batch.world import prompt_of, tokenizer_folder, write_input
from tests.chaos.local_hub import LocalHub
from tests.chaos.small_disk import SmallDisk
from tests.gpu.node import Node
from tests.runs import port_range
from tests.weights.world import write_checkpoint

DAG = "qwen_batch"
TIMED_DAG = "qwen_timed"
REPO = "local/chaos"
ROWS = 24

_PIPELINE_PARTS = ("/keeper", "/worker", "/start", "/stop", "/run", "/convert", "/download", "/provision")

_TIMED = """
from datetime import timedelta
from airflow.sdk import dag
from batch_run import batch_run
from pipeline_tasks import freeze, run_spec_params
from run_notifications import notifications

@dag(dag_id="qwen_timed", schedule=None, params=run_spec_params(), dagrun_timeout=timedelta(hours=1), **notifications())
def qwen_timed():
    batch_run(freeze())

qwen_timed()
"""


@dataclass(frozen=True)
class Batch:
    """The prompts of one cell."""

    name: str
    prompts: Path
    answers: Path


class World:
    """See the module."""

    dags: tuple[str, ...] = (DAG, TIMED_DAG)
    """Those that are switched on."""

    batch_rows = ROWS
    """Of a cell."""

    gpus = "h100-80*1"
    """The simulated node's."""

    def __init__(self, home: Path) -> None:
        self.home = home.absolute()
        self.small_disk = SmallDisk(self.home / "disk")
        self.disk = self.small_disk.path
        self.deployment = f"chaos-{token_hex(4)}"
        mark = self.home / "deployment"
        if mark.exists():
            self.deployment = mark.read_text()
        else:
            self.home.mkdir(parents=True, exist_ok=True)
            mark.write_text(self.deployment)

    @cached_property
    def children(self) -> Children:
        """PostgreSQL, Airflow's services, the hub."""
        return Children(self.home / "children", self.deployment)

    @cached_property
    def cluster(self) -> Cluster:
        """The database server."""
        return Cluster(self.home / "postgres", self.children)

    @cached_property
    def airflow(self) -> Airflow:
        """Airflow's services, with heartbeats that are missed soon."""
        return Airflow(
            self.home / "airflow",
            self.children,
            database_url=self.cluster.url("airflow"),
            dags=self.home / "dags",
            plugins=REPOSITORY / "plugins",
            environment={
                **self.environment(),
                "AIRFLOW__SCHEDULER__TASK_INSTANCE_HEARTBEAT_TIMEOUT": "30",
                "AIRFLOW__SCHEDULER__TASK_INSTANCE_HEARTBEAT_TIMEOUT_DETECTION_INTERVAL": "5",
            },
        )

    @property
    def requests(self) -> Path:
        """A line for every prompt that an engine answered whole."""
        return self.home / "requests.jsonl"

    def environment(self) -> dict[str, str]:
        """The deployment's settings."""
        worker = {"STANDIN_LATENCY_S": "0.5", "STANDIN_REQUESTS": str(self.requests)}
        standin = Path(__file__).parents[1] / "serving" / "standin_vllm.py"
        return {
            "QWEN_PIPELINE_HOME": str(self.disk / "pipeline"),
            "QWEN_PIPELINE_DEPLOYMENT": self.deployment,
            "QWEN_PIPELINE_PORT_RANGE": json.dumps(port_range()),
            "QWEN_PIPELINE_LEDGER_URL_FILE": str(self.home / "ledger-url"),
            "QWEN_PIPELINE_SECRET_FILE": str(self.home / "secret"),
            "QWEN_PIPELINE_WORKER_COMMAND": json.dumps([sys.executable, str(standin)]),
            "QWEN_PIPELINE_WORKER_ENVIRONMENT": json.dumps(worker),
            "QWEN_PIPELINE_NVML": self.node.settings.nvml,
            "QWEN_PIPELINE_NVML_STATE": str(self.node.settings.nvml_state),
            "QWEN_PIPELINE_LEASE_S": "40",
            "QWEN_PIPELINE_LEASE_PLACE_S": "30",
            "QWEN_PIPELINE_LEASE_RENEW_S": "5",
            "QWEN_PIPELINE_RETRY_DELAY_S": "1",
            "QWEN_PIPELINE_WAIT_STEP_S": "5",
            "HF_ENDPOINT": self.hub.url,
            "AIRFLOW_CONN_SPARK_DEFAULT": '{"conn_type": "spark", "host": "local[1]"}',
        }

    @cached_property
    def node(self) -> Node:
        """The one with the GPUs."""
        return Node(Settings(home=self.home, nvml=f"sim:{self.gpus}", nvml_state=self.home / "node.json"))

    def cut_node(self) -> None:
        """As the GPUs are before the first run: MIG is on, and somebody else has an instance."""
        control.set_mode(self.node.file, True)
        self.node.put(0, ("1g.10gb", 0))

    @cached_property
    def hub(self) -> LocalHub:
        """Has the model."""
        return LocalHub(self.home, self.children)

    def start(self) -> None:
        """Bring everything up, or back up; what runs is kept."""
        self.small_disk.mount()
        self.cluster.start()
        write_private(self.home / "ledger-url", self.cluster.url("ledger"))
        if not (self.home / "secret").exists():
            write_private(self.home / "secret", token_hex(32))
        migrate(self.cluster.url("ledger"), REPOSITORY / "sql" / "migrations")
        self.hub.start(REPO, self.write_model)
        if not self._layout_before.exists():
            self.cut_node()
            self._layout_before.write_text(json.dumps(self.node.picture()))
        self.make_dags()
        self.airflow.start()
        with self.airflow.api() as api:
            for dag in self.dags:
                api.wait_for_dag(dag, parsed_after=self.airflow.started_at)
                api.unpause(dag)

    def end(self) -> None:
        """End everything and give the small disk back."""
        self.children.end_all(grace_s=5.0)
        self.small_disk.unmount()

    def api(self) -> AirflowApi:
        """A REST client; use it in a `with`."""
        return self.airflow.api()

    def new_batch(self, name: str, rows: int | None = None) -> Batch:
        """Prompts that no other cell has."""
        folder = self.disk / "batches" / name
        shutil.rmtree(folder, ignore_errors=True)
        ids = [f"{name}-{number}-{token_hex(3)}" for number in range(rows or self.batch_rows)]
        return Batch(name, write_input(folder / "in" / "prompts.parquet", ids), folder / "out")

    def forget_weights(self) -> None:
        """So that a cell downloads and converts too."""
        shutil.rmtree(self.disk / "pipeline" / "store", ignore_errors=True)

    def write_model(self, folder: Path) -> None:
        """What the hub has: as much of a shape as it takes to know what memory a worker wants."""
        write_checkpoint(folder, num_attention_heads=4, hidden_size=64, num_hidden_layers=2, vocab_size=1000)
        tokenizer_folder(folder)

    def spec(self, batch: Batch) -> dict[str, Any]:
        """The run spec of a cell."""
        return {
            "tenant": "chaos",
            "model": {"repo": REPO},
            "convert": {"scheme": "none"},
            "layout": {"mig": {"3g.40gb": 1}},
            "serving": {"max_model_len": 512, "max_num_seqs": 4, "kv_cache_memory_mb": 64},
            "batch": {
                "input": str(batch.prompts),
                "output": str(batch.answers),
                "id": "row_id",
                "prompt": "prompt",
                "sampling": {"max_tokens": 16},
            },
            "limits": {"deadline": "1h"},
        }

    def reap(self) -> None:
        """What a node's timer does every few minutes."""
        command = Path(sys.executable).parent / "qwen-pipeline"
        subprocess.run(
            [command, "reap"], env={**os.environ, **self.environment()}, capture_output=True, check=False
        )

    def revive(self) -> None:
        """What a service manager does all the time."""
        for service in self.airflow.ended():
            self.airflow.start_again(service)

    def acting(self, run_id: str, stage: str) -> Process | None:
        """The process that acts for a stage of a run now."""
        found = self.rows(
            "select host, boot_id, pid, start_ticks from ledger.claim "
            "where run_id = %s and stage = %s and ended_at is null",
            run_id,
            stage,
        )
        if not found:
            return None
        host, boot_id, pid, start_ticks = found[0]
        return Process(pid, start_ticks, boot_id, host)

    def left(self) -> list[str]:
        """What of the pipeline still runs or is still held, for a person."""
        running = [
            f"pid {process.pid} ({part})"
            for process, part in self._parts()
            if any(mark in part for mark in _PIPELINE_PARTS)
        ]
        leases = self.rows("select run_id, state from ledger.lease where state <> 'released'")
        layout = json.dumps(self.node.picture())
        cut = [] if layout == self._layout_before.read_text() else [f"the GPUs are laid out as {layout}"]
        return [*running, *(f"lease of {run_id} ({state})" for run_id, state in leases), *cut]

    def rows(self, query: str, *arguments: Any) -> list[tuple[Any, ...]]:
        """What the ledger holds."""
        with psycopg.connect(self.cluster.url("ledger")) as connection:
            return list(connection.execute(query, arguments))  # type: ignore[call-overload]

    def counted(self, batch: Batch) -> Count | None:
        """What is published, counted by id; None when nothing is."""
        return count(batch.prompts, batch.answers) if (batch.answers / "manifest.json").exists() else None

    def generated_twice(self, batch: Batch) -> int:
        """Answers that an engine gave for a prompt that it had answered before."""
        if not self.requests.exists():
            return 0
        lines = Counter(json.loads(line) for line in self.requests.read_text().splitlines())
        mark = prompt_of(f"{batch.name}-").partition(" :")[0]
        return sum(times - 1 for prompt, times in lines.items() if prompt.startswith(mark))

    def kill_everything(self) -> None:
        """SIGKILL for every process of the deployment, databases and engines too, at once."""
        processes.end(self.children.living(), grace_s=0)

    @property
    def _layout_before(self) -> Path:
        return self.home / "layout-before.json"

    def _parts(self) -> list[tuple[Process, str]]:
        found = []
        for process in processes.find(deployment=self.deployment):
            try:
                marks = Path(f"/proc/{process.pid}/environ").read_bytes().decode(errors="replace").split("\0")
            except OSError:
                continue
            found.append((process, dict(mark.partition("=")[::2] for mark in marks).get(processes.PART, "")))
        return found

    def make_dags(self) -> None:
        """What Airflow reads."""
        dags = self.home / "dags"
        dags.mkdir(exist_ok=True)
        shutil.copy(REPOSITORY / "dags" / "qwen_batch.py", dags / "qwen_batch.py")
        (dags / "qwen_timed.py").write_text(_TIMED)
