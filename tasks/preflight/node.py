"""Checks of the host that a run will lean on: limits, memory, clock, network, and the state of its GPUs.

What would stop the run fails; what only costs speed, or bites later, passes with what to do about it.
"""

import resource
import shutil
import socket
from collections.abc import Callable
from datetime import UTC, datetime
from importlib import metadata
from ipaddress import ip_address
from pathlib import Path
from typing import Any

from tasks.contract import Context
from tasks.errors import InputError, StageError, StageFailed
from tasks.preflight.check import Check, Poor, look
from tasks.preflight.layout import workers
from tasks.settings import Settings
from tasks.spec import CpuLayout, TensorParallelLayout

_GIB = 1 << 30

_FILES_PER_WORKER = 2048
"""Open files: connections of clients, shards, compiled kernels, pipes between the processes of one server."""

_CONNECTIONS_PER_SEQUENCE = 4
"""Entries in the connection table: two dispatchers' connections at 1.5 rows for each sequence, and closed ones."""

_CLOCK_OFF_S = 5.0
_SHM_PER_RANK = _GIB
"""NCCL's and vLLM's buffers of one rank; containers get 64 MiB in all unless told otherwise."""


def node_checks(context: Context) -> list[Check]:
    """All of them."""
    settings, layout = context.settings, context.run.spec.layout
    checks = [
        look("open files", f"{_FILES_PER_WORKER} for each worker", lambda: _open_files(context)),
        look("connections", "room in the connection table", lambda: _conntrack(context)),
        look("port range", "apart from the ports of clients", lambda: _port_range(settings)),
        look("network", "an address that Spark reaches", lambda: _address(settings)),
        look("clock", f"within {_CLOCK_OFF_S:.0f} s of the ledger's", lambda: _clock(context)),
    ]
    if isinstance(layout, CpuLayout):
        return checks
    checks += [
        look("memory", "16 GiB for what loads", _host_memory),
        look("power limit", "the card's default", lambda: _of_gpus(settings, _power_limit)),
        look("persistence mode", "on", lambda: _of_gpus(settings, _persistence)),
    ]
    if isinstance(layout, TensorParallelLayout) and layout.tensor_parallel > 1:
        ranks = layout.tensor_parallel
        checks += [
            look("NCCL", "in the serving environment", lambda: _nccl(settings)),
            look("/dev/shm", f"{ranks * _SHM_PER_RANK / _GIB:.0f} GiB", lambda: _shared_memory(ranks)),
        ]
    return checks


def _open_files(context: Context) -> str | Poor:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _FILES_PER_WORKER + 1024
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return str(soft)
    return Poor(
        f"{soft} (up to {hard})",
        f"raise it to {wanted} or more: LimitNOFILE= of the service that runs the stages, or `ulimit -n`",
    )


def _conntrack(context: Context) -> str | Poor:
    most, now = (_number(f"/proc/sys/net/netfilter/nf_conntrack_{name}") for name in ("max", "count"))
    if most is None or now is None:
        return "connections are not tracked"
    try:
        sequences = context.run.spec.serving.sequences * workers(context)
    except StageError:
        return "not known, because the layout does not fit"
    wanted = sequences * _CONNECTIONS_PER_SEQUENCE
    if most - now >= wanted:
        return f"{most - now} of {most} free"
    return Poor(
        f"{most - now} of {most} free, {wanted} may be wanted",
        "raise net.netfilter.nf_conntrack_max (sysctl): a full table drops new connections",
    )


def _port_range(settings: Settings) -> str | Poor:
    first, last = settings.port_range
    try:
        low, high = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    except (OSError, ValueError):
        return f"{first}-{last}"
    if last < low or first > high:
        return f"{first}-{last}; clients get {low}-{high}"
    return Poor(
        f"{first}-{last} and the ports of clients, {low}-{high}, overlap",
        "move QWEN_PIPELINE_PORT_RANGE, or add it to net.ipv4.ip_local_reserved_ports (sysctl)",
    )


def _address(settings: Settings) -> str:
    host = settings.serve_host
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        try:
            probe.bind((host, 0))
        except OSError as error:
            raise StageFailed(
                f"QWEN_PIPELINE_SERVE_HOST={host} is no address of this host ({error.strerror}): set it to the "
                f"address of the interface through which Spark comes (`ip -brief address`)"
            ) from None
    try:
        loopback = ip_address(host).is_loopback
    except ValueError:
        loopback = host == "localhost"
    if loopback and not settings.spark_master.startswith("local"):
        raise StageFailed(
            f"QWEN_PIPELINE_SERVE_HOST={host} is reached from this host only, and Spark runs at "
            f"{settings.spark_master}: set it to the node's own address"
        )
    return host


def _clock(context: Context) -> str | Poor:
    with context.claim.ledger.transaction() as connection:
        row: Any = connection.execute("select clock_timestamp() as now").fetchone()
    off_s = abs((datetime.now(UTC) - row["now"]).total_seconds())
    if off_s <= _CLOCK_OFF_S:
        return f"{off_s:.1f} s off"
    return Poor(
        f"{off_s:.0f} s off", "let chrony or systemd-timesyncd keep it: deadlines are compared with it"
    )


def _host_memory() -> str | Poor:
    fields = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    free = int(fields["MemAvailable"].split()[0]) * 1024
    if free >= 16 * _GIB:
        return f"{free / _GIB:.0f} GiB free"
    return Poor(
        f"{free / _GIB:.0f} GiB free",
        "end what uses it: weights are read through the host's memory, and a loader that swaps is very slow",
    )


def _of_gpus(settings: Settings, say: Callable[[Any, Any], Poor | None]) -> str | Poor:
    """What `say` finds wrong on each GPU."""
    if settings.nvml != "driver":
        return "not looked at: the GPUs are simulated"
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return "no driver"  # the layout's own check says what that means
    try:
        wrong = {}
        for index in range(pynvml.nvmlDeviceGetCount()):
            try:
                found = say(pynvml, pynvml.nvmlDeviceGetHandleByIndex(index))
            except pynvml.NVMLError:
                continue  # not every card knows every question
            if found is not None:
                wrong[index] = found
    finally:
        pynvml.nvmlShutdown()
    if not wrong:
        return "on every GPU"
    return Poor(
        "; ".join(f"GPU {index}: {poor.found}" for index, poor in wrong.items()),
        next(iter(wrong.values())).to_do,
    )


def _power_limit(pynvml: Any, gpu: Any) -> Poor | None:
    now, default = (
        read(gpu) // 1000
        for read in (
            pynvml.nvmlDeviceGetPowerManagementLimit,
            pynvml.nvmlDeviceGetPowerManagementDefaultLimit,
        )
    )
    if now >= default:
        return None
    return Poor(
        f"{now} W, and the default is {default} W", f"`nvidia-smi -pl {default}`, unless somebody meant it"
    )


def _persistence(pynvml: Any, gpu: Any) -> Poor | None:
    if pynvml.nvmlDeviceGetPersistenceMode(gpu):
        return None
    return Poor(
        "off",
        "start nvidia-persistenced, or `nvidia-smi -pm 1`: without it the driver unloads between workers",
    )


def _nccl(settings: Settings) -> str:
    packages = [str(path) for path in settings.python_serving.parent.parent.glob("lib/python*/site-packages")]
    found = [
        f"{one.metadata['Name']} {one.version}"
        for one in metadata.distributions(path=packages)
        if (one.metadata["Name"] or "").startswith("nvidia-nccl")
    ]
    if not found:
        raise InputError(
            "layout.tensor_parallel: the serving environment has no NCCL (a build of vLLM for CPU?), through "
            "which GPUs of one worker speak; install vLLM's CUDA build, or ask for tensor_parallel: 1"
        )
    return ", ".join(found)


def _shared_memory(ranks: int) -> str | Poor:
    free = shutil.disk_usage("/dev/shm").free
    if free >= ranks * _SHM_PER_RANK:
        return f"{free / _GIB:.1f} GiB free"
    return Poor(
        f"{free / _GIB:.2f} GiB free",
        "in a container: `--shm-size`, or `--ipc=host`; NCCL fails in its first message without",
    )


def _number(path: str) -> int | None:
    try:
        return int(Path(path).read_text())
    except (OSError, ValueError):
        return None
