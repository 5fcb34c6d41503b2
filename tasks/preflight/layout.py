"""Checks of what the layout asks of this node, and of what the converted model asks of the layout."""

from pathlib import Path

from tasks.contract import Context
from tasks.errors import InputError
from tasks.gpu import inventory
from tasks.gpu.provision import refuse_other_node
from tasks.gpu.slots import devices_for, slots_of
from tasks.preflight.check import Check, look
from tasks.spec import CpuLayout

_GIB = 1 << 30

_WORKER_BASE_BYTES = int(1.5 * _GIB)
"""A vLLM worker on CPU with a model of a few MB: 1.5 GB resident were seen."""


def layout_checks(context: Context) -> list[Check]:
    """Whether this node has what the layout asks for."""
    layout = context.run.spec.layout
    checks = [
        look("node", f"this host is {context.run.spec.node}", lambda: _right_node(context)),
        look("layout", str(layout.model_dump(mode="json")), lambda: _devices(context)),
    ]
    if isinstance(layout, CpuLayout):
        checks.append(look("layout.cpu", "memory for every worker", lambda: _memory(context, layout)))
    return checks


def workers(context: Context) -> int:
    """How many workers the layout makes here.

    Raises:
        StageError: the layout does not fit this node.
    """
    layout = context.run.spec.layout
    devices = devices_for(layout, inventory.read(context.settings), inventory.available_cores())
    return len(slots_of(layout, devices))


def _right_node(context: Context) -> str:
    refuse_other_node(context.run.spec, context.settings)
    return context.settings.node


def _devices(context: Context) -> str:
    there, cores = inventory.read(context.settings), inventory.available_cores()
    devices_for(context.run.spec.layout, there, cores)
    return f"{there.describe()}; {len(cores)} CPU core(s)"


def _memory(context: Context, layout: CpuLayout) -> str:
    cache_mb = context.run.spec.serving.kv_cache_memory_mb
    if cache_mb is None:
        raise InputError(
            "serving.kv_cache_memory_mb: on CPU it must be set, because vLLM would take a share of the whole "
            "memory for each worker; 512 is a good start"
        )
    each = _WORKER_BASE_BYTES + cache_mb * (1 << 20)
    there, whose = _memory_bytes()
    if layout.cpu * each > there:
        raise InputError(
            f"layout.cpu: {layout.cpu} worker(s) need about {each / _GIB:.1f} GiB each besides the weights, "
            f"and {whose} has {there / _GIB:.1f} GiB; ask for fewer, or lower serving.kv_cache_memory_mb"
        )
    return (
        f"{there / _GIB:.1f} GiB on {whose}; {layout.cpu} x {each / _GIB:.1f} GiB and the weights are wanted"
    )


def _memory_bytes() -> tuple[int, str]:
    """All memory, not what is free now: the pool of an earlier try of this run may be using it."""
    fields = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    total = int(fields["MemTotal"].split()[0]) * 1024
    limit = _cgroup_limit()
    return (limit, "this container") if limit is not None and limit < total else (total, "this host")


def _cgroup_limit() -> int | None:
    for name in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            return int(Path(name).read_text())
        except (OSError, ValueError):  # ValueError: "max", no limit
            continue
    return None
