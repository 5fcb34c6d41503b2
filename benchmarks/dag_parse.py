"""How long parsing dags/ takes beyond importing Airflow: the scheduler pays it again and again.

    .venv/bin/python benchmarks/dag_parse.py [ROUNDS]

Each round starts two fresh processes in turn, one that only imports Airflow and one that parses dags/ as the DAG
processor does, and prints the medians and the difference. Aim: under 1 s.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent

IMPORT = "from airflow.sdk import dag; import airflow.dag_processing.dagbag"

PARSE = f"""
import sys, time
sys.path[:0] = [{str(REPOSITORY / "plugins")!r}, {str(REPOSITORY / "dags")!r}]
{IMPORT}
began = time.perf_counter()
from airflow.dag_processing.dagbag import BundleDagBag
bag = BundleDagBag(dag_folder={str(REPOSITORY / "dags")!r}, bundle_path={str(REPOSITORY / "dags")!r}, bundle_name="b")
assert not bag.import_errors, bag.import_errors
assert "qwen_batch" in bag.dags, list(bag.dags)
print("parse_s", time.perf_counter() - began)
"""


def timed(code: str, home: str) -> float:
    """Wall seconds of a fresh process that runs `code`."""
    environment = {
        **os.environ,
        "AIRFLOW_HOME": home,
        "AIRFLOW__CORE__LOAD_EXAMPLES": "False",
        "AIRFLOW__CORE__PLUGINS_FOLDER": str(REPOSITORY / "plugins"),
    }
    began = time.perf_counter()
    subprocess.run([sys.executable, "-c", code], env=environment, check=True, capture_output=True)
    return time.perf_counter() - began


def main() -> None:
    """Print one JSON object with the medians, in seconds."""
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 5
    with tempfile.TemporaryDirectory() as home:
        timed(PARSE, home)  # bytecode and page cache, and Airflow writes its configuration
        pairs = [(timed(IMPORT, home), timed(PARSE, home)) for _ in range(rounds)]
    beyond = [parse - alone for alone, parse in pairs]
    print(
        json.dumps(
            {
                "rounds": rounds,
                "import_airflow_s": round(statistics.median(alone for alone, _ in pairs), 2),
                "import_and_parse_s": round(statistics.median(parse for _, parse in pairs), 2),
                "beyond_importing_s": round(statistics.median(beyond), 2),
                "most_s": round(max(beyond), 2),
            }
        )
    )


if __name__ == "__main__":
    main()
