"""`make demo SIM=dgx-a100`: the node's GPUs are simulated. Everything else is as real as without."""

from demo.world import World
from tasks.gpu import drawing, inventory, nvml
from tasks.gpu.simulated import control
from tasks.ledger import Ledger
from tasks.ledger.claims import facts_of
from tasks.settings import REPOSITORY


def make_ready(world: World) -> str:
    """A node as an administrator hands it over: MIG mode on, which on Ampere needs a reset once."""
    library = nvml.simulation(world.settings())
    assert library is not None, "the world has simulated GPUs"
    if not all(gpu.mig_mode for gpu in inventory.read(world.settings()).gpus):
        control.set_mode(library.file, True)
    return inventory.read(world.settings()).describe()


def at_the_end(world: World, run_id: str) -> str:
    """What the run's workers stood for, and how the GPUs are cut now."""
    settings = world.settings()
    with Ledger(settings.database_url(), REPOSITORY / "sql") as ledger:
        facts = facts_of(ledger, run_id, "provision") or {}
    devices = [slot["stands_for"] for slot in facts.get("slots", ()) if "stands_for" in slot]
    stood_for = ", ".join(f"{each['profile']} {each['uuid']}" for each in devices)
    there = inventory.read(settings)
    left = sum(len(gpu.instances) for gpu in there.gpus)
    return "\n".join(
        [
            f"GPUs       {nvml.SIMULATED}: no real GPU was used; each worker ran on CPU cores",
            f"           workers stood for {stood_for or 'no MIG device: no row was left to do'}",
            f"           after restore {left} GPU instance(s) are left, as before the run",
            drawing.table(there, []),
        ]
    )
