"""Measure one candidate. Run in the converting environment: `python measure_one.py BASE MADE REPORT`."""

import json
import sys
from pathlib import Path

from convert_all import measure


def main(base: Path, made: Path, report: Path) -> None:
    report.write_text(json.dumps(measure(base, {made.name: made})))


if __name__ == "__main__":
    main(*(Path(argument) for argument in sys.argv[1:]))
