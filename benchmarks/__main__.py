"""`make bench`: every benchmark, one JSON object a line."""

import json

from benchmarks import dag_parse


def main() -> None:
    """Run them one after the other."""
    print(json.dumps({"benchmark": "dag_parse", **dag_parse.measure(rounds=5)}))


if __name__ == "__main__":
    main()
