"""`make bench`: every benchmark, one JSON object a line."""

import json

from benchmarks import bookkeeping, dag_parse, dispatcher, mig_layout, weights


def main() -> None:
    """Run them one after the other."""
    print(json.dumps({"benchmark": "dag_parse", **dag_parse.measure(rounds=5)}))
    print(json.dumps({"benchmark": "weights_files", **weights.measure_files(rounds=3)}))
    print(json.dumps({"benchmark": "mig_layout", **mig_layout.measure(rounds=5)}))
    for count in (10_000, 100_000):
        print(json.dumps({"benchmark": "bookkeeping", **bookkeeping.measure(count)}), flush=True)
    for line in dispatcher.measure([10_000, 100_000]):
        print(json.dumps({"benchmark": "dispatcher", **line}), flush=True)


if __name__ == "__main__":
    main()
