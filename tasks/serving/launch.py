"""How a worker is started: the spec and a slot, as a command line and an environment.

Pure functions. Every size is passed on, never left to vLLM's guess: it guesses from the whole machine, and a
slot is a part of one.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from tasks.node import processes
from tasks.serving import door, flags
from tasks.settings import Settings
from tasks.spec import Serving

_CPU_KV_CACHE_MB = 256
"""Where the spec gives no size: vLLM's own choice is half of all memory, for each worker."""

_QUIET_ENDPOINTS = "/health,/metrics"
"""The keeper asks these every second; their access log would bury what matters."""

_QUEUE_LIMIT = "max-num-queued-reqs"
_QUEUE_FACTOR = 2
_QUEUE_SPARE = 8
"""Requests in a worker, running and waiting, beyond which it answers 503: clients aim at 1.5 times
max_num_seqs, and the keeper's own requests must get in."""


@dataclass(frozen=True)
class Slot:
    """What one worker gets, as `provision` handed it on."""

    slot_id: str
    kind: Literal["cpu", "mig", "gpus"]
    cores: tuple[int, ...] = ()
    """Of a `cpu` slot."""
    uuids: tuple[str, ...] = ()
    """Of a `gpus` slot, one per tensor-parallel rank; of a `mig` slot, the one device."""

    @classmethod
    def from_facts(cls, facts: Mapping[str, Any]) -> "Slot":
        """The slot in `provision`'s facts, or in the ledger's record of a pool."""
        uuids = [facts["uuid"]] if "uuid" in facts else facts.get("uuids", ())
        return cls(facts["slot_id"], facts["kind"], tuple(facts.get("cores", ())), tuple(uuids))

    def as_facts(self) -> dict[str, Any]:
        """The same for the ledger, in one form for all kinds."""
        return {**asdict(self), "cores": list(self.cores), "uuids": list(self.uuids)}


def command(settings: Settings) -> list[str]:
    """What comes before the flags."""
    if settings.worker_command:
        return list(settings.worker_command)
    python = settings.python_serving
    # By its interpreter: a script's first line breaks when the path is long or the environment was moved.
    return [str(python), str(python.parent / "vllm"), "serve"]


def arguments(
    serving: Serving,
    slot: Slot,
    *,
    release_path: Path,
    release_id: str,
    host: str,
    port: int,
    known_flags: frozenset[str] | None = None,
) -> list[str]:
    """The flags of `vllm serve` for one worker. The key is not among them: see `environment`.

    Args:
        known_flags: what the installed vLLM knows; a limit that an older one does not have is left out.
    """
    words = [
        str(release_path),
        *("--host", host),
        *("--port", str(port)),
        *("--served-model-name", release_id),
        *("--max-model-len", str(serving.max_model_len)),
        *("--max-num-seqs", str(serving.sequences)),
        *("--max-num-batched-tokens", str(serving.max_num_batched_tokens)),
        *("--kv-cache-dtype", serving.kv_cache_dtype),
        "--enable-prefix-caching" if serving.prefix_caching else "--no-enable-prefix-caching",
        *("--middleware", f"{door.Door.__module__}.{door.Door.__name__}"),
        *("--disable-access-log-for-endpoints", _QUIET_ENDPOINTS),
        *(_on_cpu(serving) if slot.kind == "cpu" else _on_gpu(serving, slot)),
    ]
    if serving.chunked_prefill is not None:
        words += flags.words("enable-chunked-prefill", serving.chunked_prefill)
    if serving.kv_offload_gb is not None:
        words += ["--kv-offloading-size", str(serving.kv_offload_gb)]
    if _QUEUE_LIMIT in (known_flags or ()):
        words += [f"--{_QUEUE_LIMIT}", str(_QUEUE_FACTOR * serving.sequences + _QUEUE_SPARE)]
    for name, value in sorted(serving.extra_args.items()):
        words += flags.words(name, value)
    return words


def environment(
    part: str,
    slot: Slot,
    *,
    key: str,
    first_internal_port: int,
    cache: Path,
    temporary: Path,
    extra: Mapping[str, str],
) -> dict[str, str]:
    """The whole environment of a worker, from a list: nothing of Airflow's, none of our secrets but the key.

    Args:
        part: the mark by which a scan finds the worker and all it forks.
        first_internal_port: vLLM opens ports of its own from here upwards.
        cache: where compiled kernels are kept; it outlives workers.
        temporary: its folder for sockets and the like; it does not.
        extra: a deployment's own additions.
    """
    inherited = {
        name: value
        for name, value in processes.environment(part).items()
        if not name.startswith("QWEN_PIPELINE_") or name in (processes.DEPLOYMENT, processes.PART)
    }
    return {
        **inherited,
        door.KEY: key,
        "VLLM_PORT": str(first_internal_port),
        "VLLM_CACHE_ROOT": str(cache),
        "VLLM_CONFIG_ROOT": str(cache / "config"),
        "VLLM_NO_USAGE_STATS": "1",
        "TMPDIR": str(temporary),
        "VLLM_RPC_BASE_PATH": str(temporary),
        "TRITON_CACHE_DIR": str(cache / "triton"),
        "TORCHINDUCTOR_CACHE_DIR": str(cache / "inductor"),
        "HF_HUB_OFFLINE": "1",
        # vLLM names its processes, and setproctitle overwrites the environment in /proc unless told not to.
        "SPT_NOENV": "1",
        **_devices(slot),
        **extra,
    }


def _on_cpu(serving: Serving) -> list[str]:
    kv_cache_bytes = (serving.kv_cache_memory_mb or _CPU_KV_CACHE_MB) * 2**20
    return [
        *("--dtype", "bfloat16" if serving.dtype == "auto" else serving.dtype),
        *("--kv-cache-memory-bytes", str(kv_cache_bytes)),
        "--enforce-eager",
    ]


def _on_gpu(serving: Serving, slot: Slot) -> list[str]:
    words = ["--dtype", serving.dtype, "--gpu-memory-utilization", str(serving.gpu_memory_utilization)]
    if serving.kv_cache_memory_mb is not None:
        words += ["--kv-cache-memory-bytes", str(serving.kv_cache_memory_mb * 2**20)]
    if serving.enforce_eager:
        words.append("--enforce-eager")
    if len(slot.uuids) > 1:
        words += ["--tensor-parallel-size", str(len(slot.uuids))]
    return words


def _devices(slot: Slot) -> dict[str, str]:
    if slot.kind == "cpu":
        return {
            "VLLM_CPU_OMP_THREADS_BIND": ",".join(str(core) for core in slot.cores),
            # Else the first prompt whose tokens are rated waits 24 s for a C++ compiler, for one small function.
            "TORCHDYNAMO_DISABLE": "1",
        }
    return {"CUDA_VISIBLE_DEVICES": ",".join(slot.uuids), "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
