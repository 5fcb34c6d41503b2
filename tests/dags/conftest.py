"""What Airflow reads in dags/, in one process for all tests: importing Airflow takes seconds."""

import json
import os
import subprocess
import sys
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


def _read(folder: Path) -> dict[str, Any]:
    (folder / "nightly").mkdir()
    (folder / "nightly" / "prod.yaml").write_text(NIGHTLY.format(cron="30 0 * * *"))
    (folder / "nightly" / "never.yaml").write_text(NIGHTLY.format(cron="99 0 * * *"))
    (folder / "nightly" / "leap.yaml").write_text(NIGHTLY.format(cron="0 0 31 2 *"))
    (folder / "nightly" / "early.yaml").write_text(
        NIGHTLY.format(cron="30 0 * * *").replace("}", ", start: 0001-01-01}", 1)
    )
    told = {
        "notifier": "airflow.providers.smtp.notifications.smtp:SmtpNotifier",
        "arguments": {"to": "nobody"},
    }
    environment = {
        **os.environ,
        "AIRFLOW_HOME": str(folder),
        "AIRFLOW__CORE__LOAD_EXAMPLES": "False",
        "AIRFLOW__CORE__PLUGINS_FOLDER": str(REPOSITORY / "plugins"),
        "AIRFLOW__LOGGING__LOGGING_LEVEL": "ERROR",
        "QWEN_PIPELINE_NIGHTLY": str(folder / "nightly"),
        "QWEN_PIPELINE_NODES": '["dgx-07", "dgx-08"]',
        "QWEN_PIPELINE_NODE_QUEUES": "true",
        "QWEN_PIPELINE_NOTIFY": json.dumps([{**told, "on": ["failure"]}]),
    }
    said = subprocess.run(
        [
            sys.executable,
            Path(__file__).with_name("describe.py"),
            REPOSITORY / "plugins",
            REPOSITORY / "dags",
        ],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert said.returncode == 0, said.stderr
    found: dict[str, Any] = json.loads(said.stdout.splitlines()[-1])
    return found
