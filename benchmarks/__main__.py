"""`make bench`: every benchmark, one JSON object a line."""

import json

from benchmarks import dag_parse, weights


def main() -> None:
    """Run them one after the other."""
    print(json.dumps({"benchmark": "dag_parse", **dag_parse.measure(rounds=5)}))
    print(json.dumps({"benchmark": "weights_files", **weights.measure_files(rounds=3)}))


if __name__ == "__main__":
    main()
