"""Does every prompt have exactly one answer or one failure? By id, from the files alone.

    python -m demo.check PROMPTS.parquet ANSWERS_FOLDER

Reads parquet and the published manifest; takes the pipeline's word for nothing. Exit status 1 when ids differ.
"""

import argparse
import json
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import pyarrow.parquet as pq


@dataclass(frozen=True)
class Count:
    """Rows by what became of them."""

    rows_in: int
    answered: int
    failed: int
    missing: tuple[str, ...]
    unasked: tuple[str, ...]
    twice: tuple[str, ...]

    @property
    def holds(self) -> bool:
        """Whether input = answered + failed, each id exactly once."""
        return (
            not (self.missing or self.unasked or self.twice) and self.rows_in == self.answered + self.failed
        )


def count(prompts: Path, answers: Path, id_column: str = "row_id") -> Count:
    """Compare the ids of the input with those of the published answers."""
    asked = Counter(map(str, pq.read_table(prompts, columns=[id_column])[id_column].to_pylist()))
    got: Counter[str] = Counter()
    answered = 0
    for path in answer_files(answers):
        table = pq.read_table(path, columns=["id", "status"])
        got.update(map(str, table["id"].to_pylist()))
        answered += sum(status != "failed" for status in table["status"].to_pylist())
    return Count(
        rows_in=asked.total(),
        answered=answered,
        failed=got.total() - answered,
        missing=tuple(sorted(asked.keys() - got.keys())),
        unasked=tuple(sorted(got.keys() - asked.keys())),
        twice=tuple(sorted(name for name, times in (asked | got).items() if times > 1)),
    )


def answer_files(answers: Path) -> list[Path]:
    """The parquet files of the version that the manifest names: what a reader of the answers reads."""
    manifest = json.loads((answers / "manifest.json").read_text())
    names = [entry["name"] for entry in manifest["files"] if entry["name"].endswith(".parquet")]
    return [answers / manifest["version"] / name for name in names]


def main() -> int:
    """Print the count; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m demo.check", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("prompts", type=Path, help="the parquet file that was asked")
    parser.add_argument("answers", type=Path, help="the folder with manifest.json")
    given = parser.parse_args()
    found = count(given.prompts, given.answers)
    print(f"input {found.rows_in} = answered {found.answered} + failed {found.failed}: {found.holds}")
    for name in ("missing", "unasked", "twice"):
        ids: tuple[str, ...] = getattr(found, name)
        if ids:
            print(f"  {name}: {len(ids)}, as {', '.join(ids[:5])}")
    return 0 if found.holds else 1


if __name__ == "__main__":
    sys.exit(main())
