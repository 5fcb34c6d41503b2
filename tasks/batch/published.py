"""What readers of the answers see: one manifest, and the files it names.

    OUTPUT/manifest.json            replaced in one step; names the version and its files with their hashes
    OUTPUT/v-HASH/part-*.parquet    the answers, in the input's order
    OUTPUT/v-HASH/failed.jsonl      failed rows as input rows, to be fed in again

A version's name is the hash of its files' content, so the same answers make the same version.
"""

from pathlib import Path
from typing import Any

import pyarrow as pa

from tasks.batch import files

SCHEMA = pa.schema(
    [
        pa.field("id", pa.string(), nullable=False),
        pa.field("answer", pa.string()),
        pa.field("status", pa.string(), nullable=False),
        pa.field("error_class", pa.string()),
        pa.field("error_message", pa.string()),
        pa.field("finish_reason", pa.string()),
        pa.field("prompt_tokens", pa.int64(), nullable=False),
        pa.field("completion_tokens", pa.int64(), nullable=False),
        pa.field("latency_s", pa.float64()),
        pa.field("worker", pa.string()),
        pa.field("attempts", pa.int32(), nullable=False),
        pa.field("release_id", pa.string(), nullable=False),
    ]
)

KNOWN_COLUMNS = [
    *("id", "status", "error_class", "error_message"),
    *("prompt_tokens", "completion_tokens", "latency_s"),
]
"""Enough to say what is known about a row."""


def manifest_path(output: Path) -> Path:
    """The file that readers begin with."""
    return output / "manifest.json"


def manifest_of(output: Path, batch_id: str) -> dict[str, Any] | None:
    """The manifest in `output`, when it is this batch's."""
    manifest = files.read_json(manifest_path(output))
    if isinstance(manifest, dict) and manifest.get("format") == 1 and manifest.get("batch_id") == batch_id:
        return manifest
    return None


def damaged(output: Path, manifest: dict[str, Any]) -> list[str]:
    """Names of published files that are missing or hold something else than was published."""
    return files.damaged(output / manifest["version"], manifest["files"])


def intact_files(output: Path, batch_id: str) -> list[Path]:
    """The batch's published parquet files whose content is as it was published."""
    manifest = manifest_of(output, batch_id)
    if manifest is None:
        return []
    bad = damaged(output, manifest)
    return [
        output / manifest["version"] / item["name"]
        for item in manifest["files"]
        if item["name"].endswith(".parquet") and item["name"] not in bad
    ]
