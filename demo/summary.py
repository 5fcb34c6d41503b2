"""What the demo ends with: counts from the answer files, three answers, and var/demo/summary.json."""

import json
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
from rich.console import Console

from demo.check import Count, answer_files, count
from demo.children import write_private
from demo.world import REPOSITORY, World
from tasks.cli.report import report

_SHOWN_ANSWERS = 3
_SHOWN_CHARACTERS = 220


def summarise(world: World, run_id: str) -> dict[str, Any]:
    """The summary as a document; paths are relative to the repository where they lie in it."""
    prompts = world.prompts / "prompts.parquet"
    counted = count(prompts, world.answers)
    if not counted.holds:
        raise AssertionError(f"input and answers differ: {counted}")
    reported, _ = report(world.settings(), run_id)
    return {
        "input": _relative(prompts),
        "output": _relative(world.answers),
        **_counts(counted),
        **_tokens(world.answers),
        "rows_per_s": reported["rows_per_s"],
        "seconds": reported["seconds"],
        "run_id": run_id,
    }


def write(world: World, summary: dict[str, Any]) -> None:
    """Leave the summary as summary.json."""
    write_private(world.home / "summary.json", json.dumps(summary, indent=2) + "\n")


def show(world: World, summary: dict[str, Any], console: Console) -> None:
    """The summary for a person, with three answers to read."""
    rate = summary["rows_per_s"]
    console.print()
    console.print(
        f"rows       {summary['rows_in']} in = {summary['answered']} answered + {summary['failed']} failed"
    )
    console.print(
        f"tokens     {summary['prompt_tokens']:,} in prompts, {summary['completion_tokens']:,} in answers"
    )
    console.print(f"speed      {rate:.2f} rows/s" if rate else "speed      no row was generated in this run")
    console.print(f"answers    {summary['output']}/manifest.json names the files", highlight=False)
    for prompt, answer in _samples(world):
        console.print()
        console.print(f"[bold]Q[/] {_short(prompt)}", highlight=False)
        console.print(f"[bold]A[/] {_short(answer)}", highlight=False)


def _counts(counted: Count) -> dict[str, int]:
    return {"rows_in": counted.rows_in, "answered": counted.answered, "failed": counted.failed}


def _tokens(answers: Path) -> dict[str, int]:
    totals = {"prompt_tokens": 0, "completion_tokens": 0}
    for path in answer_files(answers):
        table = pq.read_table(path, columns=list(totals))
        for name in totals:
            totals[name] += sum(value or 0 for value in table[name].to_pylist())
    return totals


def _samples(world: World) -> list[tuple[str, str]]:
    rows = pq.read_table(world.prompts / "prompts.parquet", columns=["row_id", "prompt"]).to_pylist()
    asked = {row["row_id"]: row["prompt"] for row in rows}
    found = []
    for path in answer_files(world.answers):
        table = pq.read_table(path, columns=["id", "answer"]).to_pylist()
        found += [(asked[row["id"]], row["answer"]) for row in table if row["answer"]]
    step = max(1, len(found) // _SHOWN_ANSWERS)
    return found[::step][:_SHOWN_ANSWERS]


def _relative(path: Path) -> str:
    return str(path.relative_to(REPOSITORY)) if path.is_relative_to(REPOSITORY) else str(path)


def _short(text: str) -> str:
    line = " ".join(text.split()).replace("[", r"\[")
    return line if len(line) <= _SHOWN_CHARACTERS else line[: _SHOWN_CHARACTERS - 1] + "…"
