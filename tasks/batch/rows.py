"""What is known about every row of a batch: answered, failed, or still to do.

The one place that decides it, for prepare, run, reconcile and publish alike. A row is finished when a
registered segment or the published table holds it; of several records the first committed one counts. A row
that can never be asked (no prompt, too long) needs no record: it is failed by what is prepared, and under a
longer context it is to do again.

Holds about 300 bytes of memory for each finished row.
"""

import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from tasks.batch import in_ledger, published, segments
from tasks.batch.in_ledger import Range
from tasks.batch.prepared import PreparedBatch
from tasks.ledger import Claim, Ledger
from tasks.spec import RunSpec


@dataclass(frozen=True, slots=True)
class Known:
    """A finished row and where its record lies."""

    answered: bool
    error_class: str | None
    error_message: str | None
    path: Path
    offset: int
    length: int
    """Of the record in the segment `path`; -1 where `path` is a published file."""


@dataclass
class Answers:
    """All finished rows of a batch, by id."""

    known: dict[str, Known] = field(default_factory=dict)
    records: int = 0
    """Records read; more than rows known when some were generated twice."""
    prompt_tokens: int = 0
    completion_tokens: int = 0
    spent: Counter[str] = field(default_factory=Counter)
    """Prompt and completion tokens by run, rows that were generated twice included."""


@dataclass
class Survey:
    """The rows of a batch, counted by id."""

    rows: int = 0
    answered: int = 0
    failed: int = 0
    to_do: int = 0
    strangers: int = 0
    """Finished ids that are not in the input."""
    errors: Counter[str] = field(default_factory=Counter)
    """Failed rows by error class."""
    examples: dict[str, str] = field(default_factory=dict)
    """For each error class, the id and message of its first row."""


def answers_of(ledger: Ledger, batch_id: str, output: Path) -> Answers:
    """Read what is finished: registered segments in the order of commits, then what `output` publishes."""
    answers = Answers()
    for one in in_ledger.registered(ledger, batch_id):
        for found in segments.records(one.path, one.start, one.stop):
            document = json.loads(found.document)
            answers.records += 1
            answers.spent[one.run_id] += document["prompt_tokens"] + document["completion_tokens"]
            if document["id"] not in answers.known:
                place = (one.path, found.offset, found.length)
                _add(answers, document, *place)
    for path in published.intact_files(output, batch_id):
        table = pq.read_table(path, columns=published.KNOWN_COLUMNS)
        for document in table.to_pylist():
            # Rows that were never sent are judged anew: the context may be longer now.
            if document["attempts"] > 0 and document["id"] not in answers.known:
                _add(answers, document, path, 0, -1)
    return answers


def refusal_rule(spec: RunSpec) -> Callable[[str | None, str | None, int], tuple[str, str] | None]:
    """Says of a prepared row (error class, error message, prompt tokens) why it is never sent, if so."""
    longest = spec.serving.max_model_len - spec.batch.sampling.max_tokens

    def refusal(error_class: str | None, message: str | None, prompt_tokens: int) -> tuple[str, str] | None:
        if error_class is not None:
            return error_class, message or ""
        if prompt_tokens > longest:
            return "PromptTooLong", (
                f"{prompt_tokens} prompt tokens and an answer of {spec.batch.sampling.max_tokens} do not fit "
                f"into serving.max_model_len = {spec.serving.max_model_len}"
            )
        return None

    return refusal


def survey(batch: PreparedBatch, answers: Answers, spec: RunSpec) -> Survey:
    """Count every row of the input by its id."""
    found = Survey()
    refusal = refusal_rule(spec)
    met = 0
    for row in prepared_rows(batch, ["id", "prompt_tokens", "error_class", "error_message"]):
        found.rows += 1
        known = answers.known.get(row["id"])
        if known is not None:
            met += 1
            if known.answered:
                found.answered += 1
            else:
                _count_failure(found, row["id"], known.error_class or "", known.error_message or "")
            continue
        refused = refusal(row["error_class"], row["error_message"], row["prompt_tokens"])
        if refused is not None:
            _count_failure(found, row["id"], *refused)
        else:
            found.to_do += 1
    found.strangers = len(answers.known) - met
    return found


def prepared_rows(batch: PreparedBatch, columns: list[str]) -> Iterator[dict[str, Any]]:
    """The prepared rows in the input's order, one part in memory at a time."""
    for path in batch.parts:
        yield from pq.read_table(path, columns=columns).to_pylist()


def unregistered(ledger: Ledger, batch: PreparedBatch) -> list[Range]:
    """Whole records that a killed attempt wrote and nobody registered."""
    registered_up_to: dict[Path, int] = {}
    for one in in_ledger.registered(ledger, batch.batch_id):
        registered_up_to[one.path] = max(one.stop, registered_up_to.get(one.path, 0))
    folders = {batch.segments, *(path.parent for path in registered_up_to)}
    present = sorted(path for folder in folders for path in folder.glob(f"*{segments.SUFFIX}"))
    return list(_tails(present, registered_up_to))


def adopt(claim: Claim, batch: PreparedBatch) -> int:
    """Register, under `claim`, what earlier attempts left unregistered; returns how many rows that are.

    The claim must be the batch's writer: then no earlier attempt can still register the same bytes.
    """
    left = unregistered(claim.ledger, batch)
    if left:
        in_ledger.register(claim, batch.batch_id, left)
    return sum(one.rows for one in left)


def _tails(paths: Iterable[Path], registered_up_to: dict[Path, int]) -> Iterator[Range]:
    for path in paths:
        start = registered_up_to.get(path, 0)
        if path.stat().st_size <= start:
            continue
        rows, stop = 0, start
        for found in segments.records(path, start):
            rows, stop = rows + 1, found.end
        if rows:
            yield Range(path, start, stop, rows)


def _add(answers: Answers, document: dict[str, Any], path: Path, offset: int, length: int) -> None:
    answers.known[document["id"]] = Known(
        document["status"] == "answered",
        document["error_class"],
        document["error_message"],
        path,
        offset,
        length,
    )
    answers.prompt_tokens += document["prompt_tokens"]
    answers.completion_tokens += document["completion_tokens"]


def _count_failure(found: Survey, row_id: str, error_class: str, message: str) -> None:
    found.failed += 1
    found.errors[error_class] += 1
    found.examples.setdefault(error_class, f"row {row_id}: {message}")
