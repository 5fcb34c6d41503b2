"""A run through the pipeline's own first stages on this machine: frozen, looked at, its weights made.

Nothing is written into the ledger by hand here: `model.repo` is the folder of the made-up checkpoint.
"""

import json
import resource
from datetime import UTC, datetime
from typing import Any

from benchmarks.gpu.deployment import Deployment
from benchmarks.gpu.kit import Stopwatch, gpu_index
from benchmarks.gpu.sampling import Peak
from tasks import stages
from tasks.errors import StageError
from tasks.ledger import load
from tasks.spec import parse

_ROWS = 1536


def freeze(at: Deployment, run_id: str, scheme: str) -> dict[str, Any]:
    """Start the run: the folder is hashed, versions and release are pinned."""
    prompts = at.home / "prompts.jsonl"
    lines = [json.dumps({"row_id": f"r{number}", "prompt": "Name a colour."}) for number in range(_ROWS)]
    prompts.write_text("\n".join(lines) + "\n")
    spec = parse(
        {
            "model": {"repo": str(at.kit.model("none"))},
            # Random weights answer at random: what they lose by rounding says nothing.
            "convert": {"scheme": scheme, "gate": {"max_kl": 20.0, "max_perplexity_ratio": 20.0}},
            "node": at.node,
            "layout": {"tensor_parallel": 1, "gpus": [gpu_index()]},
            "batch": {"input": str(prompts), "output": str(at.home / "answers"), "prompt": "prompt"},
        }
    )
    watch = Stopwatch()
    with at.ledger() as ledger:
        run = stages.freeze(ledger, run_id, spec, datetime.now(UTC), at.settings)
    return {"seconds": watch.total_s(), "release_id": run.pins["release_id"], "commit": run.pins["commit"]}


def weights(at: Deployment, run_id: str) -> dict[str, Any]:
    """Stages download and convert of a frozen run, each with its time and the memory of its children."""
    found: dict[str, Any] = {"run": run_id}
    with at.ledger() as ledger:
        found["scheme"] = load(ledger, run_id).spec.convert.scheme
    for name in ("download", "convert"):
        with Peak() as peak:
            try:
                result = at.execute(name, run_id)
                found[name] = {
                    "seconds": result.seconds,
                    "changed": result.changed,
                    "message": result.message,
                    "facts": result.facts,
                }
            except StageError as refusal:
                found[name] = {"error": type(refusal).__name__, "message": str(refusal)}
        # Linux counts in KiB.
        largest = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024
        found[name] |= {"largest_child_bytes": largest, **peak.found()}
        if "error" in found[name]:
            break
    return found
