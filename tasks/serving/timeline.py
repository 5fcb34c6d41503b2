"""When a server's start passed what, read from its log: vLLM's lines carry the time, to the second."""

import re
from collections.abc import Iterable
from datetime import datetime

_STAMP = re.compile(r"\b(?:INFO|WARNING|ERROR) (\d\d-\d\d \d\d:\d\d:\d\d) \[")

_EVENTS = (
    ("imported", re.compile(r"non-default args:")),
    ("engine process", re.compile(r"Initializing a V1 LLM engine")),
    ("begins to load", re.compile(r"Starting to load model")),
    ("weights loaded", re.compile(r"Loading weights took|Model loading took")),
    ("compiled", re.compile(r"torch\.compile (?:takes|took|and initial profiling)|Compiling a graph")),
    ("engine ready", re.compile(r"init engine \(")),
    ("listens", re.compile(r"Starting vLLM server on|Application startup complete")),
)
"""In the order of a start; the last line that matches counts, because ranks say the same one after another."""


def of_log(lines: Iterable[str], began: float) -> dict[str, float]:
    """Event to seconds after `began` (Unix time); what the log does not tell is left out."""
    found: dict[str, float] = {}
    for line in lines:
        for name, pattern in _EVENTS:
            if pattern.search(line) and (stamp := _STAMP.search(line)):
                found[name] = max(0.0, round(_unix(stamp[1], began) - began, 1))
    return found


def _unix(stamp: str, near: float) -> float:
    """vLLM's stamp has no year: it is that of `near`, or the next one around New Year."""
    year = datetime.fromtimestamp(near).year
    then = datetime.strptime(f"{year}-{stamp}", "%Y-%m-%d %H:%M:%S").timestamp()
    if then < near - 86400 * 180:
        return datetime.strptime(f"{year + 1}-{stamp}", "%Y-%m-%d %H:%M:%S").timestamp()
    return then
