"""What Airflow reads in dags/, in one process for all tests: importing Airflow takes seconds."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from fcntl import LOCK_EX, flock
from pathlib import Path
from typing import Any

import pytest

from tasks.node.atomic import replace_text
from tasks.settings import REPOSITORY

NIGHTLY = """
schedule: {{cron: "{cron}", timezone: Europe/Berlin}}
spec:
  tenant: prod
  node: dgx-07
  model: {{repo: owner/name}}
  layout: {{cpu: 1}}
  batch: {{input: "/prompts/{{{{ ds }}}}/", output: /answers, prompt: prompt}}
  limits: {{deadline: "07:00"}}
"""


@pytest.fixture(scope="session")
def read_by_airflow(tmp_path_factory: pytest.TempPathFactory, worker_id: str) -> dict[str, Any]:
    """See tests/dags/describe.py; read once, though the files of this folder are shared out among processes."""
    if worker_id == "master":
        return _read(tmp_path_factory.mktemp("airflow"))
    folder = tmp_path_factory.getbasetemp().parent / "read-by-airflow"
    said = folder / "said.json"
    with folder.with_suffix(".lock").open("w") as lock:
        flock(lock, LOCK_EX)
        if not said.exists():
            folder.mkdir()
            replace_text(said, json.dumps(_read(folder)))
    found: dict[str, Any] = json.loads(said.read_text())
    return found


@pytest.fixture(scope="session")
def _acting(tmp_path_factory: pytest.TempPathFactory) -> Iterator[subprocess.Popen[str]]:
    folder = tmp_path_factory.mktemp("acting")
    # Its log is not read: a pipe would fill up.
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(
            command("act.py"),
            env=environment_of(folder),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
        )
        try:
            yield process
        finally:
            process.kill()
            process.communicate()


@pytest.fixture
def act(_acting: subprocess.Popen[str], database_url: str) -> Callable[..., dict[str, Any]]:
    """Does a task of a DAG, and says what it returned or raised. See tests/dags/act.py."""
    assert _acting.stdin is not None
    assert _acting.stdout is not None
    given, said = _acting.stdin, _acting.stdout

    def act(dag: str, task: str, run: str = "run-1", **more: Any) -> dict[str, Any]:
        print(
            json.dumps({"ledger": database_url, "dag": dag, "task": task, "run": run, **more}),
            file=given,
            flush=True,
        )
        marked = (line.partition("came of it: ")[2] for line in said)
        found: dict[str, Any] = json.loads(next(filter(None, marked)))
        return found

    return act


def _read(folder: Path) -> dict[str, Any]:
    said = subprocess.run(
        command("describe.py"), env=environment_of(folder), capture_output=True, text=True, check=False
    )
    assert said.returncode == 0, said.stderr
    found: dict[str, Any] = json.loads(said.stdout.splitlines()[-1])
    return found


def command(script: str) -> list[str | Path]:
    """One of the scripts of this folder, in a process of its own."""
    return [sys.executable, Path(__file__).with_name(script), REPOSITORY / "plugins", REPOSITORY / "dags"]


def environment_of(folder: Path) -> dict[str, str]:
    """Of a deployment of two nodes, with good and bad files of nightly runs."""
    (folder / "nightly").mkdir()
    good = NIGHTLY.format(cron="30 0 * * *")
    for name, text in {
        "prod": good,
        "never": NIGHTLY.format(cron="99 0 * * *"),
        "leap": NIGHTLY.format(cron="0 0 31 2 *"),
        "made_up": good.replace("}", ", catchup: true, start: 2026-02-01}", 1),
        "early": good.replace("}", ", start: 0001-01-01}", 1),
        "elsewhere": good.replace("dgx-07", "dgx-99"),
    }.items():
        (folder / "nightly" / f"{name}.yaml").write_text(text)
    told = {
        "notifier": "airflow.providers.smtp.notifications.smtp:SmtpNotifier",
        "arguments": {"to": "nobody"},
    }
    return {
        **os.environ,
        "AIRFLOW_HOME": str(folder),
        "AIRFLOW__CORE__LOAD_EXAMPLES": "False",
        "AIRFLOW__CORE__DEFAULT_TIMEZONE": "Europe/Helsinki",
        "AIRFLOW__CORE__MIN_SERIALIZED_DAG_UPDATE_INTERVAL": "0",
        "AIRFLOW__CORE__PLUGINS_FOLDER": str(REPOSITORY / "plugins"),
        "AIRFLOW__LOGGING__LOGGING_LEVEL": "ERROR",
        "QWEN_PIPELINE_HOME": str(folder / "home"),
        "QWEN_PIPELINE_NIGHTLY": str(folder / "nightly"),
        "QWEN_PIPELINE_NODES": '["dgx-07", "dgx-08"]',
        "QWEN_PIPELINE_NODE_QUEUES": "true",
        "QWEN_PIPELINE_NOTIFY": json.dumps([{**told, "on": ["failure"]}]),
    }
