"""What it gains that the rows with the longest answers are asked first, where lengths are skewed.

    .venv/bin/python -m benchmarks.order [ROWS]

Most rows may have 16 to 64 tokens, one in fifty 1,024. The stand-in engine has 64 places and takes 10 ms a token, so
that no client is the limit. The same rows are asked in the order that Spark gives them (`tasks.batch.to_do`: longest
first), as they come, and, as the worst case, with the longest last. The tail is the time after the last moment at
which every place was taken; the figures are the engine's own. At best, all places are used all of the time.
"""

import json
import random
import sys
import tempfile
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from benchmarks.dispatcher import engine, job
from tasks.batch.answering import answer
from tasks.batch.records import Row

_TOKEN_S = 0.01
_LONG = 1024
_ONE_LONG_IN = 50

ORDERS: dict[str, Callable[[list[Row]], list[Row]]] = {
    "longest first": lambda rows: sorted(rows, key=lambda row: -row.max_tokens),
    "as they come": list,
    "longest last": lambda rows: sorted(rows, key=lambda row: row.max_tokens),
}


def rows(count: int) -> list[Row]:
    """Always the same ones."""
    draw = random.Random(2026)
    found = []
    for number in range(count):
        tokens = _LONG if number % _ONE_LONG_IN == _ONE_LONG_IN - 1 else draw.randint(16, 64)
        chat = json.dumps([{"role": "user", "content": f"question {number}"}])
        found.append(Row(f"row-{number}", chat, 60, tokens, sampling=json.dumps({"max_tokens": tokens})))
    draw.shuffle(found)
    return found


def measure(count: int) -> Iterator[dict[str, Any]]:
    """A line for each order."""
    with engine(0.0, _TOKEN_S) as url:
        for name, ordered in ORDERS.items():
            urllib.request.urlopen(f"{url}/reset").read()
            with tempfile.TemporaryDirectory() as folder:
                tally = answer(job(url, Path(folder)), iter([ordered(rows(count))]), "p0")
            assert tally.answered == count, tally
            report = json.loads(urllib.request.urlopen(f"{url}/report").read())
            kept = ("rows_per_s", "tail_s", "places_used", "asked_twice")
            yield {"order": name, "rows": count, **{key: report[key] for key in kept}}


if __name__ == "__main__":
    for line in measure(int(sys.argv[1]) if len(sys.argv) > 1 else 4000):
        print(json.dumps(line), flush=True)
