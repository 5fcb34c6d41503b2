"""What a batch costs beside asking: to prepare it, to prove its ids, to count what is finished, to publish it.

    .venv/bin/python -m benchmarks.bookkeeping [ROWS ...]         # 10000 100000 by default

For each number of rows, in a fresh process: CPU microseconds a row, and by how much the process grew. Linear means
that the microseconds stay the same. Answers have 150 characters; counting is what each stage does once or twice.
"""

import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

from tasks.batch import ids, input, parts, prepared, prepared_part, rows, segments, versions
from tasks.batch.in_ledger import Range
from tasks.batch.records import Result
from tasks.spec import parse


def measure(count: int) -> dict[str, Any]:
    """All of it once, in this process."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        spec = parse(
            {
                "model": {"repo": "owner/name"},
                "layout": {"cpu": 1},
                "batch": {"input": f"{name}/in.parquet", "output": name, "prompt": "text"},
            }
        )
        tokenizer = Tokenizer(WordLevel({"[unk]": 0}, unk_token="[unk]"))
        tokenizer.pre_tokenizer = Whitespace()
        tokenizer.save(str(folder / "tokenizer.json"))
        figures: dict[str, Any] = {"rows": count}
        _write_input(folder / "in.parquet", count)
        (folder / "draft").mkdir()
        with _Timed(figures, "prepare", count):
            cut = parts.cut(input.check(spec.batch), parts.PART_ROWS)
            for part in cut:
                prepared_part.write(part, spec.batch, folder, folder / "draft")
            written = [prepared_part.path_of(part, folder / "draft") for part in cut]
        with _Timed(figures, "prove_ids", count):
            ids.prove(spec.batch, cut, written)
            batch = prepared.publish(folder, {"release_id": "release-1"}, written)
        with _Timed(figures, "write_segment", count), segments.SegmentWriter(folder, "a") as writer:
            for number in range(count):
                writer.append(_result(number))
                if number % 2000 == 0:
                    writer.flush()
        one = Range(writer.path, 0, writer.path.stat().st_size, count, "run-1")
        with _Timed(figures, "read_answers", count):
            answers = rows.read_answers([one], [])
        with _Timed(figures, "survey", count):
            assert rows.survey(batch, answers, spec).answered == count
        (folder / "version").mkdir()
        with _Timed(figures, "publish", count):
            versions.write(batch, answers, spec, folder / "version")
        figures["peak_mb"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
        return figures


class _Timed:
    def __init__(self, figures: dict[str, Any], name: str, count: int) -> None:
        self._figures, self._name, self._count = figures, name, count

    def __enter__(self) -> None:
        self._before = time.process_time()

    def __exit__(self, *_: object) -> None:
        used_s = time.process_time() - self._before
        self._figures[f"{self._name}_us"] = round(1e6 * used_s / self._count, 1)


def _write_input(path: Path, count: int) -> None:
    words = "some words that stand for a text " * 6
    schema = pa.schema([("row_id", pa.string()), ("text", pa.string())])
    with pq.ParquetWriter(path, schema) as writer:
        for start in range(0, count, parts.PART_ROWS):
            numbers = range(start, min(start + parts.PART_ROWS, count))
            columns = {"row_id": [f"row-{n}" for n in numbers], "text": [f"{n} {words}" for n in numbers]}
            writer.write_table(pa.table(columns, schema=schema))


def _result(number: int) -> Result:
    return Result(
        id=f"row-{number}",
        status="answered",
        answer="An answer of some length. " * 6,
        error_class=None,
        error_message=None,
        finish_reason="stop",
        prompt_tokens=50,
        completion_tokens=30,
        latency_s=0.1,
        worker="worker-0",
        attempts=1,
        release_id="release-1",
    )


def main() -> None:
    """Print a JSON object a line."""
    counts = [int(word) for word in sys.argv[1:]]
    if len(counts) == 1:
        print(json.dumps(measure(counts[0])), flush=True)
        return
    for count in counts or [10_000, 100_000]:
        subprocess.run([sys.executable, "-m", "benchmarks.bookkeeping", str(count)], check=True)


if __name__ == "__main__":
    main()
