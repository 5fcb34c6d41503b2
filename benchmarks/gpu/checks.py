"""What the project says of this machine before a run: the inventory, and every check of `preflight`.

The inventory is set beside that of the simulated node of the same product, field by field, without what names
one card. Identities (UUID, PCI address) are left out.
"""

import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.gpu.deployment import Deployment
from tasks.contract import Context
from tasks.errors import StageError
from tasks.gpu import inventory
from tasks.gpu.inventory import Inventory
from tasks.ledger import load, take
from tasks.preflight.deployment import deployment_checks
from tasks.preflight.layout import layout_checks
from tasks.preflight.model import model_checks
from tasks.preflight.node import node_checks
from tasks.preflight.spec import spec_checks

SIMULATED = "h200-141"

_NAMES_ONE_CARD = ("uuid", "pci_bus_id")


def compare_inventory(at: Deployment) -> dict[str, Any]:
    """The real node's inventory, the simulated one's, and every field that differs."""
    count = len(inventory.read(at.settings).gpus)
    simulated = _simulated(at, count) if count else {}
    real = inventory.read(at.settings)  # the last, so that this process goes on with the real driver
    found = _plain(real)
    return {
        "describe": real.describe(),
        "real": found,
        "simulated": simulated,
        "differs": _differences(found, simulated) if simulated else {},
    }


def preflight(at: Deployment, run_id: str) -> dict[str, Any]:
    """The stage itself, and each check on its own: one that fails hides nothing of the others."""
    try:
        said: dict[str, Any] = {"passed": True, "message": at.execute("preflight", run_id).message}
    except StageError as refusal:
        said = {"passed": False, "error": type(refusal).__name__, "message": str(refusal)}
    with at.ledger() as ledger:
        run = load(ledger, run_id)
        claim, _ = take(ledger, run_id, "preflight", frozenset({"preflight"}))
        context = Context(run, claim, at.settings, submit=lambda _: None)
        checks = [
            *spec_checks(run.spec, at.settings),
            *layout_checks(context),
            *model_checks(context),
            *deployment_checks(context),
            *node_checks(context),
        ]
        claim.finish("done", "looked at by the benchmark", {})
    return {"stage": said, "checks": [check.document() for check in checks]}


def _simulated(at: Deployment, count: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        settings = at.settings.model_copy(
            update={"nvml": f"sim:{SIMULATED}*{count}", "nvml_state": Path(folder) / "node"}
        )
        return _plain(inventory.read(settings))


def _plain(there: Inventory) -> dict[str, Any]:
    gpus = [
        {name: value for name, value in asdict(gpu).items() if name not in _NAMES_ONE_CARD}
        for gpu in there.gpus
    ]
    return {
        "gpus": gpus,
        "driver_version": there.driver_version,
        "cuda_version": there.cuda_version,
        "pairs_linked_by_nvlink": len(there.linked),
    }


def _differences(real: Any, simulated: Any, place: str = "") -> dict[str, Any]:
    """Path of each field that differs, to both values."""
    if isinstance(real, dict) and isinstance(simulated, dict):
        names = real.keys() | simulated.keys()
        parts = [
            _differences(real.get(name), simulated.get(name), f"{place}.{name}".lstrip("."))
            for name in sorted(names)
        ]
    elif isinstance(real, (list, tuple)) and isinstance(simulated, (list, tuple)):
        if len(real) == len(simulated):
            parts = [
                _differences(one, other, f"{place}[{index}]")
                for index, (one, other) in enumerate(zip(real, simulated, strict=True))
            ]
        else:
            parts = [{place: {"real": real, "simulated": simulated}}]
    else:
        parts = [] if real == simulated else [{place: {"real": real, "simulated": simulated}}]
    return {name: value for part in parts for name, value in part.items()}
