"""How long parsing dags/ takes beyond importing Airflow: the scheduler pays it again and again.

    .venv/bin/python -m benchmarks.dag_parse [ROUNDS]

Each round starts two fresh processes in turn, one that only imports Airflow and one that parses dags/ as the DAG
processor does, and prints the medians and the difference: CPU seconds, which a busy machine stretches less, and
wall seconds. Aim: under 1 s beyond the import.
"""

import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

REPOSITORY = Path(__file__).resolve().parent.parent

IMPORT = "from airflow.sdk import dag; import airflow.dag_processing.dagbag"

PARSE = f"""
import sys
sys.path[:0] = [{str(REPOSITORY / "plugins")!r}, {str(REPOSITORY / "dags")!r}]
{IMPORT}
from airflow.dag_processing.dagbag import BundleDagBag
bag = BundleDagBag(dag_folder={str(REPOSITORY / "dags")!r}, bundle_path={str(REPOSITORY / "dags")!r}, bundle_name="b")
assert not bag.import_errors, bag.import_errors
assert "qwen_batch" in bag.dags, list(bag.dags)
"""


class Cost(NamedTuple):
    """What a process took, in seconds."""

    cpu_s: float
    wall_s: float


def cost_of(code: str, home: str) -> Cost:
    """The cost of a fresh process that runs `code`."""
    environment = {
        **os.environ,
        "AIRFLOW_HOME": home,
        "AIRFLOW__CORE__LOAD_EXAMPLES": "False",
        "AIRFLOW__CORE__PLUGINS_FOLDER": str(REPOSITORY / "plugins"),
    }
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    subprocess.run([sys.executable, "-c", code], env=environment, check=True, capture_output=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return Cost(cpu_s, time.perf_counter() - began)


def measure(rounds: int) -> dict[str, float]:
    """Medians over `rounds` pairs, in seconds."""
    with tempfile.TemporaryDirectory() as home:
        cost_of(PARSE, home)  # bytecode and page cache, and Airflow writes its configuration
        pairs = [(cost_of(IMPORT, home), cost_of(PARSE, home)) for _ in range(rounds)]
    figures: dict[str, float] = {"rounds": rounds}
    for name in Cost._fields:
        alone = [getattr(first, name) for first, _ in pairs]
        both = [getattr(second, name) for _, second in pairs]
        beyond = [second - first for first, second in zip(alone, both, strict=True)]
        figures[f"import_airflow_{name}"] = round(statistics.median(alone), 2)
        figures[f"beyond_import_{name}"] = round(statistics.median(beyond), 2)
        figures[f"beyond_import_{name}_most"] = round(max(beyond), 2)
    return figures


if __name__ == "__main__":
    print(json.dumps(measure(int(sys.argv[1]) if len(sys.argv) > 1 else 5)))
