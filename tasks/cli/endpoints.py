"""`qwen-pipeline endpoints`: where a run's workers can be asked, and the key in a file of the asker's own."""

import os
from pathlib import Path
from typing import Any

from tasks import pool_key
from tasks.errors import InputError, Unavailable
from tasks.ledger import Ledger
from tasks.serving import pools, probes, standing
from tasks.settings import Settings

_ASKS = 3


def endpoints(ledger: Ledger, run_id: str, settings: Settings) -> dict[str, Any]:
    """The pool that the run has open: its model's name, and the OpenAI endpoint of each worker with its state.

    Raises:
        InputError: the run has no pool now.
        Unavailable: its keeper does not answer from here.
    """
    pool = pools.open_pool(ledger, run_id)
    if pool is None:
        raise InputError(f"run {run_id} has no pool of workers now")
    try:
        now = standing.ask(pool, pool_key.derive(settings.secret(), pool.pool_id), tries=_ASKS)
    except probes.NoAnswer as error:
        raise Unavailable(
            f"the keeper of pool {pool.pool_id} on node {pool.node} does not answer: {error}"
        ) from None
    workers = [{"url": f"{one['url']}/v1", "state": one["state"]} for one in now.workers if one["url"]]
    return {"run": run_id, "pool": pool.pool_id, "model": pool.wanted.release_id, "endpoints": workers}


def endpoints_verb(settings: Settings, run_id: str, key_file: Path | None) -> tuple[dict[str, Any], str]:
    """The same as a document and as text; writes the pool's key to a new 0600 file when one is named.

    Raises:
        InputError: the file exists, or cannot be written.
    """
    with Ledger(settings.database_url(), settings.sql) as ledger:
        found = endpoints(ledger, run_id, settings)
    lines = [f"model  {found['model']}"]
    lines += [f"url    {one['url']}  ({one['state']})" for one in found["endpoints"]]
    if key_file is not None:
        _write_private(key_file, pool_key.derive(settings.secret(), found["pool"]))
        lines.append(f"key    in {key_file}, for this pool alone")
    return found, "\n".join(lines)


def _write_private(path: Path, content: str) -> None:
    try:
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="ascii") as file:
            file.write(content)
    except OSError as error:
        raise InputError(f"--key-file {path} cannot be made: {error.strerror}; name a new file") from None
