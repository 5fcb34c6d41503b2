"""Checks of what the layout asks of this node, and of what the converted model asks of the layout."""

from collections.abc import Mapping
from pathlib import Path

from tasks import tuning
from tasks.contract import Context, refuse_other_node
from tasks.errors import InputError, StageError, StageFailed
from tasks.gpu import demand, inventory, privileged, rights, sizing
from tasks.gpu.inventory import Gpu, Inventory
from tasks.gpu.layouts import Step
from tasks.gpu.provision import ask
from tasks.gpu.sizing import Estimate
from tasks.gpu.slots import cpu_devices, refuse_parallel_workers
from tasks.ledger import leases, quotas
from tasks.preflight.check import Check, Poor, look
from tasks.preflight.model import OnDisk, release_on_disk
from tasks.serving import flags
from tasks.settings import Quota
from tasks.spec import CpuLayout, MigLayout, TensorParallelLayout
from tasks.tuning import Line

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
    quota = context.settings.quota_of(context.run.spec.tenant)
    if quota is not None and quota.devices is not None:
        needed = f"{quota.devices} device(s) at most, the quota of tenant {context.run.spec.tenant}"
        checks.append(look("layout.gpus", needed, lambda: _within(quota, context)))
    if isinstance(layout, CpuLayout):
        checks.append(look("layout.cpu", "memory for every worker", lambda: _memory(context, layout)))
    else:
        checks.append(look("layout.memory", "a device holds a worker", lambda: _device_memory(context)))
        checks.append(look("layout.rights", "to cut GPUs, where they must be", lambda: _rights(context)))
    if isinstance(layout, TensorParallelLayout):
        checks.append(look("serving.max_num_seqs", "as measured, if it was", lambda: _sequences(context)))
    return checks


def workers(context: Context) -> int:
    """How many workers the layout makes here.

    Raises:
        StageError: the layout does not fit this node.
    """
    layout = context.run.spec.layout
    if isinstance(layout, CpuLayout):
        cpu_devices(layout, inventory.available_cores())
        return layout.cpu
    asked = ask(layout, inventory.read(context.settings), needs_of(context))
    if isinstance(layout, TensorParallelLayout):
        return asked.how_many // layout.tensor_parallel
    each = [sum(counts.values()) for counts in asked.counts.values()]
    return sum(sorted(each, reverse=True)[: asked.how_many])


def needs_of(context: Context) -> Estimate | None:
    """The memory of one worker on a GPU: of the release, or, before it is made, guessed from the download."""
    found = release_on_disk(context)
    if found is None:
        return None
    serving = tuning.settled(context.run.spec.serving, _measured(context, found))
    return sizing.of_folder(found.folder, found.weights_bytes, serving)


def _measured(context: Context, found: OnDisk) -> Line | None:
    """What was measured of this model on these GPUs, by workers of one whole GPU each."""
    spec = context.run.spec
    if not isinstance(spec.layout, TensorParallelLayout) or spec.layout.tensor_parallel > 1:
        return None
    config = tuning.config_of(found.folder)
    scheme = None if "quantization_config" in config else spec.convert.scheme
    names = {gpu.name for gpu in inventory.read(context.settings).gpus}
    return tuning.find(names.pop(), config, scheme) if len(names) == 1 else None


def _sequences(context: Context) -> str | Poor:
    """How many each worker decodes at once, and what is known of that."""
    serving, found = context.run.spec.serving, release_on_disk(context)
    line = _measured(context, found) if found else None
    sequences = tuning.settled(serving, line).sequences
    if found is None:
        return f"{sequences}, unless more was measured for the model: that is known once it is downloaded"
    if line is None or not tuning.is_as_measured(serving):
        return f"{sequences}: nothing was measured for this GPU, model, scheme and memory"
    known = line.describe(flags.version(context.settings.serving_flags))
    if sequences != line.max_num_seqs:
        return Poor(f"{sequences}, as the spec says", f"leave it out, for {line.max_num_seqs}. {known}")
    return (
        Poor(f"{sequences}. {known}", f"convert.scheme: {line.better}")
        if line.better
        else f"{sequences}. {known}"
    )


def _right_node(context: Context) -> str:
    refuse_other_node(context.run.spec, context.settings)
    return context.settings.node


def _devices(context: Context) -> str:
    layout, there, cores = (
        context.run.spec.layout,
        inventory.read(context.settings),
        inventory.available_cores(),
    )
    refuse_parallel_workers(context.run.spec)
    notes: tuple[str, ...] = ()
    if isinstance(layout, CpuLayout):
        cpu_devices(layout, cores)
    else:
        needs = needs_of(context)
        if needs is None and getattr(layout, "mig", None) == "auto" and there.gpus:
            return f"{there.describe()}; what `auto` comes to is known once the model is downloaded"
        asked = ask(layout, there, needs)
        notes = asked.notes
        if not _is_leased(context, there):
            demand.pick(asked, there)
    return "; ".join([there.describe(), f"{len(cores)} CPU core(s)", *notes])


def _within(quota: Quota, context: Context) -> str:
    """Asked here: else a layout that the quota never allows is refused when the weights are made."""
    layout, settings = context.run.spec.layout, context.settings
    if leases.lease_of(context.claim.ledger, context.run.run_id, settings.node) is not None:
        return "this run has its devices already"
    if isinstance(layout, CpuLayout):
        wanted = len(cpu_devices(layout, inventory.available_cores()))
    else:
        if isinstance(layout, MigLayout):
            # How its GPUs are to be cut may not be known yet, and how many it takes does not depend on it.
            layout = layout.model_copy(update={"mig": {}})
        wanted = ask(layout, inventory.read(settings), None).how_many
    quotas.refuse_more_than_all(context.run.spec.tenant, quota, wanted)
    return f"{wanted} device(s)"


def _is_leased(context: Context, there: Inventory) -> bool:
    """Whether a run works on these GPUs, perhaps this one: then what is in use there now says nothing."""
    held = leases.live_leases(context.claim.ledger, context.settings.node)
    return any(there.gpu(device) is not None for lease in held for device in lease.devices)


def _rights(context: Context) -> str | Poor:
    """Asked here: else a node without them says so in `provision`, hours later, when the weights are made."""
    settings = context.settings
    if settings.mig_command:
        report = privileged.carry_out([], settings)  # which changes nothing
        if report.kind not in ("done", "busy"):
            raise StageFailed(report.error)
        return "the privileged helper answers"
    steps = _changes(context)
    if steps is None:
        lacking = rights.missing(settings, [Step("create", "any")])
        return Poor(lacking, "or have the GPUs cut as wanted before") if lacking else "there"
    if lacking := rights.missing(settings, steps):
        raise StageFailed(lacking)
    return "there" if steps else "none is wanted: nothing is to be changed"


def _changes(context: Context) -> list[Step] | None:
    """Of the GPUs as they are cut now; None where that cannot be said yet."""
    layout, there = context.run.spec.layout, inventory.read(context.settings)
    assert not isinstance(layout, CpuLayout)
    if _is_leased(context, there):
        return None
    needs = needs_of(context)
    if needs is None and getattr(layout, "mig", None) == "auto":
        return None
    try:
        chosen = demand.pick(ask(layout, there, needs), there)
    except StageError:
        return None  # which is the finding of the check `layout`
    return [step for taken in chosen for step in taken.difference.steps()]


def _device_memory(context: Context) -> str:
    """By the estimate from which an `auto` layout is made."""
    layout, needs = context.run.spec.layout, needs_of(context)
    there = inventory.read(context.settings)
    if needs is None or isinstance(layout, CpuLayout) or not there.gpus:
        return "not known before the model is downloaded" if needs is None else "no GPU"
    asked = ask(layout, there, needs)
    smallest = min(_device_bytes(gpu, asked.counts.get(gpu.uuid), asked.group) for gpu in asked.candidates)
    if not needs.can_start(smallest):
        field = "layout.tensor_parallel" if isinstance(layout, TensorParallelLayout) else "layout.mig"
        raise InputError(
            f"{field}: a device of {smallest / _GIB:.1f} GiB does not hold a worker: {needs.describe()}; use larger "
            f"devices, lower serving.max_model_len or max_num_seqs, or convert to a smaller scheme"
        )
    room = "" if needs.fits(smallest) else "; sequences will wait for KV cache"
    return f"{smallest / _GIB:.1f} GiB a device; {needs.describe()}{room}"


def _device_bytes(gpu: Gpu, counts: Mapping[str, int] | None, group: int) -> int:
    if counts is None:
        return gpu.memory_bytes * group
    known = {profile.name: profile.memory_mb for profile in gpu.cut.profiles}
    return min((known[name.removeprefix("MIG ")] << 20 for name in counts if name in known), default=0)


def _memory(context: Context, layout: CpuLayout) -> str:
    cache_mb = context.run.spec.serving.kv_cache_memory_mb
    if cache_mb is None:
        raise InputError(
            "serving.kv_cache_memory_mb: on CPU it must be set, because there is no device of the worker's own "
            "that it could be a share of; 512 is a good start"
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
