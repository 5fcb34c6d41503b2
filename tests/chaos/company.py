"""The deployment of a company: a node with two GPUs (simulated), tenants with quotas, runs that start by themselves.

Real Airflow with all DAGs and PostgreSQL; engines and Spark are stand-ins, because it is turns, times and pages that
are looked at here. See tests/chaos/world.py for the rest.
"""

import json
import os
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import psycopg
import pyarrow.parquet as pq
import yaml

from tasks.settings import REPOSITORY
from tests.batch.world import write_input
from tests.chaos.world import DAG, REPO, World

NODE = "dgx-01"
GPUS = 2
NIGHTLY = {"red": "red", "blue-one": "blue", "blue-two": "blue"}
"""File to tenant; each starts every minute and wants one of the two GPUs."""

SPARK_HISTORY = "http://spark.example.org:18080"
ROWS_OF_A_NIGHT = 12
_MINUTES = 30
_QUOTAS = {"blue": {"devices": 1}, "poor": {"tokens_per_day": 300}}


@dataclass(frozen=True)
class Turn:
    """A lease that a run had."""

    run_id: str
    tenant: str
    devices: tuple[str, ...]
    asked_at: datetime
    """When its provision first began."""
    taken_at: datetime
    released_at: datetime | None

    def overlaps(self, other: "Turn") -> bool:
        """Whether both were held at one moment."""
        end, others_end = (one.released_at or datetime.max.replace(tzinfo=UTC) for one in (self, other))
        return self.taken_at < others_end and other.taken_at < end


class Company(World):
    """See the module."""

    dags = (DAG, "qwen_release", "qwen_pool")
    gpus = f"a100-80*{GPUS}"

    def cut_node(self) -> None:
        """Runs take whole GPUs here."""

    @property
    def told(self) -> Path:
        """What the notifier was told."""
        return self.home / "told.txt"

    def environment(self) -> dict[str, str]:
        """Two GPUs, a queue for the node, quotas, and a notifier for deadlines."""
        telling = {
            "on": ["deadline"],
            "notifier": "told:Told",
            "arguments": {"file": str(self.told), "text": "{{ warning }}"},
        }
        return {
            **super().environment(),
            "QWEN_PIPELINE_NODE": NODE,
            "QWEN_PIPELINE_NODES": json.dumps([NODE]),
            "QWEN_PIPELINE_NODE_QUEUES": "true",
            "QWEN_PIPELINE_NIGHTLY": str(self.home / "nightly"),
            "QWEN_PIPELINE_QUOTAS": json.dumps(_QUOTAS),
            "QWEN_PIPELINE_NOTIFY": json.dumps([telling]),
            "QWEN_PIPELINE_SPARK_HISTORY": SPARK_HISTORY,
            "QWEN_PIPELINE_PYTHON_SPARK": str(self._standin_spark),
            "PYTHONPATH": f"{REPOSITORY / 'config'}:{Path(__file__).parent / 'told'}",
        }

    @property
    def _standin_spark(self) -> Path:
        """The interpreter of an environment in which spark-submit is a stand-in."""
        return self.home / "spark" / "bin" / "python"

    def make_dags(self) -> None:
        """All of the project's, and the files of the nightly ones."""
        submit = (
            self.home / "spark" / "lib" / "python3" / "site-packages" / "pyspark" / "bin" / "spark-submit"
        )
        for place in (submit, self._standin_spark):
            place.parent.mkdir(parents=True, exist_ok=True)
        script = Path(__file__).with_name("standin_spark.py")
        submit.write_text(f'#!/bin/sh\nPYTHONPATH="{REPOSITORY}" exec "{sys.executable}" "{script}" "$@"\n')
        submit.chmod(0o755)
        if not self._standin_spark.exists():
            self._standin_spark.symlink_to(sys.executable)
        shutil.copytree(REPOSITORY / "dags", self.home / "dags", dirs_exist_ok=True)
        folder = self.home / "nightly"
        folder.mkdir(exist_ok=True)
        for name, tenant in NIGHTLY.items():
            document = {
                "schedule": {"cron": "* * * * *"},
                "spec": {
                    **self.spec_for(tenant, gpus=1),
                    "batch": {
                        "input": f"{self._nights}/{name}/{{{{ ts_nodash }}}}.parquet",
                        "output": f"{self._nights}/{name}/{{{{ ts_nodash }}}}/",
                        "prompt": "prompt",
                        "sampling": {"max_tokens": 16},
                    },
                },
            }
            (folder / f"{name}.yaml").write_text(yaml.safe_dump(document))

    def spec_for(self, tenant: str, gpus: int | str, **changes: Any) -> dict[str, Any]:
        """A spec without rows, on that many of the node's GPUs."""
        return {
            "tenant": tenant,
            "model": {"repo": REPO},
            "convert": {"scheme": "none"},
            "node": NODE,
            "layout": {"tensor_parallel": 1, "gpus": gpus},
            "serving": {"max_model_len": 512, "max_num_seqs": 4, "kv_cache_memory_mb": 64},
            **changes,
        }

    def ask(self, tenant: str, gpus: int | str, name: str, rows: int, **changes: Any) -> dict[str, Any]:
        """A spec with rows that nobody else has."""
        batch = self.new_batch(name, rows)
        rows_of = {"input": str(batch.prompts), "output": str(batch.answers), "prompt": "prompt"}
        return {
            **self.spec_for(tenant, gpus, **changes),
            "batch": {**rows_of, "sampling": {"max_tokens": 16}},
        }

    def write_nights(self) -> None:
        """The prompts of every minute that the test can last."""
        now = datetime.now(UTC).replace(second=0, microsecond=0)
        for name in NIGHTLY:
            for minute in range(-1, _MINUTES):
                stamp = f"{now + timedelta(minutes=minute):%Y%m%dT%H%M%S}"
                ids = [f"{name}-{stamp}-{number}" for number in range(ROWS_OF_A_NIGHT)]
                write_input(self._nights / name / f"{stamp}.parquet", ids)

    def published_nights(self, name: str) -> list[str]:
        """The moments for which a nightly run has published."""
        return sorted(found.parent.name for found in (self._nights / name).glob("*/manifest.json"))

    def published_ids(self, name: str, stamp: str) -> list[str]:
        """The ids of the rows that a nightly run has published."""
        output = self._nights / name / stamp
        version = json.loads((output / "manifest.json").read_text())["version"]
        found = [pq.read_table(path, columns=["id"]) for path in (output / version).glob("*.parquet")]
        return [row["id"] for table in found for row in table.to_pylist()]

    def spec_of(self, dag_id: str, run_id: str) -> dict[str, Any]:
        """The conf with which a run was started."""
        with psycopg.connect(self.cluster.url("airflow")) as connection:
            query = "select conf from dag_run where dag_id = %s and run_id = %s"
            ((conf,),) = connection.execute(query, (dag_id, run_id)).fetchall()
        found: dict[str, Any] = conf
        return found

    def cli(self, *arguments: str) -> str:
        """What a verb of the command line says on standard output."""
        command = [str(Path(sys.executable).parent / "qwen-pipeline"), *arguments]
        environment = {**os.environ, **self.environment()}
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout

    def turns(self) -> list[Turn]:
        """Every lease there was, in the order in which they were taken."""
        rows = self.rows(
            "select lease.run_id, run.tenant, "
            "array(select device from ledger.lease_device where lease_id = lease.lease_id), "
            "(select min(claimed_at) from ledger.claim where run_id = lease.run_id and stage = 'provision'), "
            "taken_at, released_at from ledger.lease join ledger.run using (run_id) order by taken_at"
        )
        return [Turn(run_id, tenant, tuple(devices), *times) for run_id, tenant, devices, *times in rows]

    def queues(self, dag_id: str, run_id: str) -> dict[str, str]:
        """Task to the queue that Airflow sent it to."""
        with psycopg.connect(self.cluster.url("airflow")) as connection:
            query = "select task_id, queue from task_instance where dag_id = %s and run_id = %s"
            return dict(connection.execute(query, (dag_id, run_id)).fetchall())

    def wait_for(self, dag_id: str, run_id: str, within_s: float = 600.0) -> str:
        """Airflow's state of the run, once it has ended.

        Raises:
            AssertionError: it has not ended in time.
        """
        deadline = time.monotonic() + within_s
        with self.api() as api:
            while not (run := api.dag_run(dag_id, run_id)).finished:
                assert time.monotonic() < deadline, f"{run_id} is {run.state} after {within_s:.0f} s"
                time.sleep(1.0)
        return run.state

    @property
    def _nights(self) -> Path:
        return self.disk / "nights"
