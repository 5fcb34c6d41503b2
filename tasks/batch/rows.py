"""What is known about every row of a batch: answered, failed, or still to do.

The one place that decides it, for prepare, run, reconcile and publish alike. A row is finished when a
registered segment or the published table holds it; of several records the first committed one counts. A row
that can never be asked (no prompt, too long) needs no record: it is failed by what is prepared, and under a
longer context it is to do again.

All of it is columns: about 60 bytes of memory for each finished row and its id, and no Python for each row but
the checksum of its record.
"""

import json
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from tasks.batch import in_ledger, published, segments
from tasks.batch.in_ledger import Range
from tasks.batch.prepared import PreparedBatch
from tasks.ledger import Claim, Ledger
from tasks.spec import RunSpec

_READ = pa.schema(
    [
        pa.field("id", pa.string()),
        pa.field("status", pa.string()),
        pa.field("error_class", pa.string()),
        pa.field("error_message", pa.string()),
        pa.field("prompt_tokens", pa.int64()),
        pa.field("completion_tokens", pa.int64()),
    ]
)

_TOKENS = pa.schema([_READ.field("prompt_tokens"), _READ.field("completion_tokens")])

_KNOWN = pa.schema(
    [
        pa.field("id", pa.string()),
        pa.field("is_answered", pa.bool_()),
        pa.field("error_class", pa.string()),
        pa.field("error_message", pa.string()),
        pa.field("path", pa.int32()),
        pa.field("offset", pa.int64()),
        pa.field("length", pa.int32()),
    ]
)


@dataclass(frozen=True)
class Answers:
    """All finished rows of a batch."""

    known: pa.Table
    """A row for each finished id: `id`, `is_answered`, `error_class`, `error_message`, and where its record is:
    `path` (an index into `paths`), `offset` and `length` in bytes; in a published file, `offset` is the row's
    number and `length` is -1."""
    paths: tuple[Path, ...] = ()
    records: int = 0
    """Records read; more than rows known when some were generated twice."""
    prompt_tokens: int = 0
    completion_tokens: int = 0
    spent: Counter[str] = field(default_factory=Counter)
    """Prompt and completion tokens by run, rows that were generated twice included."""

    @property
    def has_answers(self) -> bool:
        """Whether any row is answered."""
        return bool(pc.any(self.known.column("is_answered")).as_py())

    def places_of(self, ids: pa.ChunkedArray) -> pa.ChunkedArray:
        """For each id the number of its row in `known`; null where the row is not finished."""
        return pc.index_in(ids, value_set=self.known.column("id").combine_chunks())


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


NOTHING = Answers(_KNOWN.empty_table())
"""Of a batch that nobody has begun."""


def answers_of(ledger: Ledger, batch_id: str, output: Path) -> Answers:
    """Read what is finished: registered segments in the order of commits, then what `output` publishes."""
    return read_answers(in_ledger.registered(ledger, batch_id), published.intact_files(output, batch_id))


def read_answers(ranges: Iterable[Range], published_files: Iterable[Path]) -> Answers:
    """What these ranges hold, in the order of commits, then what these published files hold."""
    read = _Reading()
    for one in ranges:
        for table in segments.tables(one.path, one.start, one.stop, _READ):
            read.add(table, one.path)
            read.records += table.num_rows
            read.spent[one.run_id] += _sum(table, "prompt_tokens") + _sum(table, "completion_tokens")
    for path in published_files:
        table = pq.read_table(path, columns=published.KNOWN_COLUMNS)
        table = table.append_column("offset", pa.arange(0, table.num_rows))
        table = table.append_column("length", pa.repeat(pa.scalar(-1, pa.int32()), table.num_rows))
        # What had no record, and so no latency, is judged anew: the context may be longer now.
        read.add(table.filter(pc.is_valid(table.column("latency_s"))), path)
    return read.answers()


def never_sent(table: pa.Table, spec: RunSpec) -> pa.ChunkedArray:
    """Which of these prepared rows (`error_class`, `prompt_tokens`, `max_tokens`) are not to be asked."""
    is_bad = pc.is_valid(table.column("error_class"))
    if spec.batch.too_long == "truncate":
        return is_bad
    needed = pc.add(table.column("prompt_tokens").cast(pa.int64()), table.column("max_tokens"))
    return pc.or_(is_bad, pc.greater(needed, spec.serving.max_model_len))


def why_never_sent(row: dict[str, Any], spec: RunSpec) -> tuple[str, str]:
    """Error class and message of a row of which `never_sent` is true."""
    error_class, prompt_tokens, max_tokens = row["error_class"], row["prompt_tokens"], row["max_tokens"]
    if error_class is not None:
        return str(error_class), row["error_message"] or ""
    return "PromptTooLong", (
        f"{prompt_tokens} prompt tokens and an answer of {max_tokens} do not fit into serving.max_model_len = "
        f"{spec.serving.max_model_len}"
    )


def survey(batch: PreparedBatch, answers: Answers, spec: RunSpec) -> Survey:
    """Count every row of the input by its id."""
    rows = prepared_rows(batch, ["id", "prompt_tokens", "max_tokens", "error_class", "error_message"])
    places = answers.places_of(rows.column("id"))
    is_finished = pc.is_valid(places)
    finished = answers.known.take(places.drop_null())
    is_answered = finished.column("is_answered")
    others = rows.filter(pc.invert(is_finished))
    refused = others.filter(never_sent(others, spec))
    found = Survey(
        rows=rows.num_rows,
        answered=_true(is_answered),
        failed=finished.num_rows - _true(is_answered) + refused.num_rows,
        to_do=others.num_rows - refused.num_rows,
        strangers=answers.known.num_rows - finished.num_rows,
    )
    failures = finished.filter(pc.invert(is_answered))
    for name, count, first in _first_of_each(failures.column("error_class")):
        _count_errors(found, name, count, failures, first, failures.column("error_message")[first].as_py())
    reasons = pc.fill_null(refused.column("error_class"), "PromptTooLong")
    for name, count, first in _first_of_each(reasons):
        (row,) = refused.slice(first, 1).to_pylist()
        _count_errors(found, name, count, refused, first, why_never_sent(row, spec)[1])
    return found


def prepared_rows(batch: PreparedBatch, columns: list[str]) -> pa.Table:
    """Some columns of the prepared rows, in the input's order."""
    return pa.concat_tables([pq.read_table(path, columns=columns) for path in batch.parts])


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


class _Reading:
    """Collects records; the first one of each id counts."""

    def __init__(self) -> None:
        self._tables: list[pa.Table] = []
        self._tokens: list[pa.Table] = []
        self._paths: dict[Path, int] = {}
        self.records = 0
        self.spent: Counter[str] = Counter()

    def add(self, table: pa.Table, path: Path) -> None:
        """Take records of one file: the columns of `_READ`, `offset` and `length`."""
        number = self._paths.setdefault(path, len(self._paths))
        columns = {
            "is_answered": pc.not_equal(table.column("status"), "failed"),
            "path": pa.repeat(pa.scalar(number, pa.int32()), table.num_rows),
        }
        known = [columns[name] if name in columns else table.column(name) for name in _KNOWN.names]
        self._tables.append(pa.table(known, schema=_KNOWN))
        tokens = [table.column(name).cast(pa.int64()) for name in _TOKENS.names]
        self._tokens.append(pa.table(tokens, schema=_TOKENS))

    def answers(self) -> Answers:
        """What was collected."""
        if not self._tables:
            return NOTHING
        known = pa.concat_tables(self._tables).combine_chunks()
        tokens = pa.concat_tables(self._tokens)
        ids = known.column("id").combine_chunks()
        first = pc.index_in(ids, value_set=ids)
        is_first = pc.equal(first, pa.arange(0, len(ids)).cast(pa.int32()))
        if not pc.all(is_first).as_py():
            known, tokens = known.filter(is_first), tokens.filter(is_first)
        return Answers(
            known,
            tuple(self._paths),
            self.records,
            _sum(tokens, "prompt_tokens"),
            _sum(tokens, "completion_tokens"),
            self.spent,
        )


def _tails(paths: Iterable[Path], registered_up_to: dict[Path, int]) -> Iterator[Range]:
    for path in paths:
        start = registered_up_to.get(path, 0)
        if path.stat().st_size <= start:
            continue
        rows, tokens, stop = 0, 0, start
        for found in segments.records(path, start):
            rows, stop = rows + 1, found.end
            document = json.loads(found.document)
            tokens += document["prompt_tokens"] + document["completion_tokens"]
        if rows:
            yield Range(path, start, stop, rows, tokens=tokens)


def _first_of_each(values: pa.ChunkedArray) -> Iterator[tuple[str, int, int]]:
    """Each distinct value, how often it is there, and where first."""
    for one in pc.value_counts(values.combine_chunks()).to_pylist():
        yield one["values"], one["counts"], pc.index(values, one["values"]).as_py()


def _count_errors(
    found: Survey, name: str, count: int, table: pa.Table, first: int, message: str | None
) -> None:
    found.errors[name] += count
    found.examples.setdefault(name, f"row {table.column('id')[first].as_py()}: {message or ''}")


def _sum(table: pa.Table, column: str) -> int:
    return int(pc.sum(table.column(column)).as_py() or 0)


def _true(values: pa.ChunkedArray) -> int:
    return int(pc.sum(values).as_py() or 0)
