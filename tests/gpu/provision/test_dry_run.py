"""What a person sees of a layout before and after it is made."""

import json
import subprocess
import sys
from pathlib import Path

from tasks.contract import Context
from tasks.gpu import cutting, inventory
from tasks.ledger import leases, load, take
from tests.gpu.provision.held import MIG, held
from tests.runs import a_run, environment_of


def test_a_dry_run_prints_what_would_change_and_takes_nothing(ledger, node, settings, tmp_path):
    node.put(0, ("1g.10gb", 4))
    kept = node.uuids()["1g.10gb"]
    before = node.picture()
    spec = tmp_path / "run.json"
    document = a_run(ledger, layout={**MIG, "gpus": [0]}).spec.model_dump(mode="json")
    spec.write_text(json.dumps(document))
    environment = {
        **environment_of(settings),
        "QWEN_PIPELINE_NVML": settings.nvml,
        "QWEN_PIPELINE_NVML_STATE": str(settings.nvml_state),
    }
    said = subprocess.run(
        [
            sys.executable,
            "-m",
            "tasks.cli.main",
            "provision",
            "--spec",
            spec,
            "--run",
            "new",
            "--dry-run",
            "--json",
        ],
        env=environment,
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=True,
    )
    plan = json.loads(said.stdout)
    uuid = node.gpu().uuid
    assert plan["simulated"] is True
    assert plan["keep"] == [
        {
            "device": uuid,
            "index": 0,
            "profile": "1g.10gb",
            "placement": {"start": 4, "size": 1},
            "uuids": kept,
        }
    ]
    assert [(one["profile"], one["placement"]) for one in plan["create"]] == [
        ("3g.40gb", {"start": 0, "size": 4}),
        ("1g.10gb", {"start": 5, "size": 1}),
    ]
    assert (plan["destroy"], plan["mode"], node.picture(), held(ledger)) == ([], [], before, [])
    assert "SIMULATED GPUs" in said.stderr


def test_what_differs_is_said_in_words(ledger, node, execute, settings):
    a_run(ledger, layout={"mig": {"3g.40gb": 1}, "gpus": [0]})
    execute("provision")
    (lease,) = leases.live_leases(ledger)
    with node.file.changing() as state:
        state["gpus"][0]["instances"] = []
    claim, _ = take(ledger, "run-1", "provision", frozenset({"provision"}))
    context = Context(load(ledger, "run-1"), claim, settings, lambda _: None)
    assert cutting.missing(context, lease, inventory.read(settings)) == ["GPU 0: create 3g.40gb at 0-3"]
