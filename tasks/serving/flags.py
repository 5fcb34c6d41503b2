"""`serving.extra_args`: checked against the flags that the installed vLLM knows.

Importing vllm takes 13 s, so its flags are read once (`make setup`, or `make flags` for an environment of one's own)
and kept in a file (`settings.serving_flags`).
"""

import json
import logging
from collections.abc import Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from tasks.errors import InputError

log = logging.getLogger(__name__)

_OURS = {
    "model": "model.repo and model.revision say which weights",
    "trust-remote-code": "code of a repository is never run",
    "model-tag": "model.repo and model.revision say which weights",
    "host": "the setting serve_host says where workers listen",
    "port": "ports come from the setting port_range",
    "uds": "clients come over TCP",
    "grpc": "clients speak HTTP",
    "api-key": "every pool gets a key of its own",
    "served-model-name": "a pool serves its release's id",
    "tensor-parallel-size": "the layout says how many GPUs a worker gets",
    "max-model-len": "it is the field serving.max_model_len",
    "max-num-seqs": "it is the field serving.max_num_seqs",
    "max-num-batched-tokens": "it is the field serving.max_num_batched_tokens",
    "dtype": "it is the field serving.dtype",
    "kv-cache-dtype": "it is the field serving.kv_cache_dtype",
    "kv-cache-memory-bytes": "it is the field serving.kv_cache_memory_mb",
    "gpu-memory-utilization": "it is the field serving.gpu_memory_utilization",
    "enable-chunked-prefill": "it is the field serving.chunked_prefill",
    "kv-offloading-size": "it is the field serving.kv_offload_gb",
    "enable-prefix-caching": "it is the field serving.prefix_caching",
    "max-num-queued-reqs": "it follows serving.max_num_seqs, so that overload is answered with 503",
    "enforce-eager": "it is the field serving.enforce_eager",
    "config": "the spec is the only source of flags",
}
"""Flags that the pipeline sets itself."""


def check(extra_args: Mapping[str, Any], path: Path) -> None:
    """Refuse flags that the installed vLLM does not know, or that the pipeline sets itself.

    Raises:
        InputError: names every such field, and the nearest flag that exists.
    """
    if not extra_args:
        return
    flags = known(path)
    if flags is None:
        log.warning(
            "%s is missing or unreadable, so serving.extra_args is not checked: run `make flags OF=PYTHON` with "
            "the interpreter of the serving environment",
            path,
        )
    problems = []
    for given in extra_args:
        name = _normal(given)
        ours = _OURS.get(name) or _OURS.get(name.removeprefix("no-"))
        if ours:
            problems.append(f"serving.extra_args.{given}: the pipeline sets this one ({ours})")
        elif flags is not None and name not in flags and name.removeprefix("no-") not in flags:
            nearest = get_close_matches(name, sorted(flags), n=1)
            hint = f"; did you mean {nearest[0]}?" if nearest else " (`vllm serve --help=all` lists them)"
            problems.append(f"serving.extra_args.{given}: vLLM {version(path)} has no flag --{name}{hint}")
    if problems:
        raise InputError("\n".join(problems))


def words(name: str, value: str | int | float | bool) -> list[str]:
    """One flag as vLLM's parser wants it: a switch has no value, and its opposite is spelt `--no-`."""
    flag = _normal(name)
    if value is True:
        return [f"--{flag}"]
    if value is False:
        return [f"--no-{flag}"]
    return [f"--{flag}", str(value)]


def version(known: Path) -> str:
    """Of the installed vLLM; `unknown` before set-up has read it."""
    try:
        return str(json.loads(known.read_text())["version"])
    except (OSError, ValueError, KeyError, TypeError):
        return "unknown"


def known(path: Path) -> frozenset[str] | None:
    """The flags of the installed vLLM, without dashes in front; None before set-up has read them."""
    try:
        return frozenset(_normal(flag) for flag in json.loads(path.read_text())["flags"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _normal(flag: str) -> str:
    return flag.lstrip("-").replace("_", "-")
