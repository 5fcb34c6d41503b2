"""Four ways to send the same prompts to the real vLLM on a CPU, in one run: what does each keep of the engine?

    .venv/bin/python -m benchmarks.real_engine RELEASE PROMPTS.parquet [--rows 120] [--rounds 2]

- spark: the stage `run` (its driver, its Python worker, segments, the ledger in a real PostgreSQL);
- dispatcher: the same dispatcher in one process without Spark, segments too;
- bare loop: aiohttp and nothing else, no retry, nothing durable;
- run-batch: `vllm run-batch`, which holds its engine in its own process.

The first three take turns at one worker that the stage `start` started. The engine is pinned to the first core and
the client to the others, where there are more; without prefix caching, and at temperature 0, each way asks the same.
Rates are read off the engine's own counters: over all, and between 10% and 90% of the rows. RELEASE and PROMPTS are
what `make demo` leaves in var/demo.
"""

import argparse
import json
import signal
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.real_engine.bench import Bench
from benchmarks.real_engine.ways import WAYS, client


def main() -> None:
    """Print a JSON object a turn, then the medians."""
    parser = argparse.ArgumentParser()
    parser.add_argument("release", type=Path)
    parser.add_argument("prompts", type=Path)
    parser.add_argument("--rows", type=int, default=120)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--way", choices=WAYS)
    parser.add_argument("--home", type=Path)
    parser.add_argument("--target", type=json.loads)
    options = parser.parse_args()
    if options.way:
        print(json.dumps(client(options.way, options.prompts, options.home, options.target)))
        return
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # as at any other end, nothing is left running
    found: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="real-engine-") as home:
        for turn in Bench(Path(home), options.release, options.prompts, options.rows).turns(options.rounds):
            print(json.dumps(turn), flush=True)
            found.append(turn)
    for way in (*WAYS, "run-batch"):
        of_way = [turn for turn in found if turn["way"] == way]
        keys = [key for key, value in of_way[0].items() if isinstance(value, int | float) and key != "round"]
        medians = {key: round(median(turn[key] for turn in of_way), 3) for key in keys}
        print(json.dumps({"median_of": len(of_way), "way": way, **medians}), flush=True)


if __name__ == "__main__":
    main()
