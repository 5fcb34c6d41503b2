"""The ids of all rows: each present and in no other row, so that an answer can be told from others.

All ids are in memory here, 16 to 40 bytes each: the only thing of preparing that grows with the input.
"""

from collections import Counter
from collections.abc import Sequence
from itertools import islice
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from tasks.batch import parts
from tasks.batch.parts import Part
from tasks.errors import InputError
from tasks.spec import Batch

_EXAMPLES = 5


def prove(batch: Batch, cut: Sequence[Part], written: Sequence[Path]) -> None:
    """Refuse ids that are missing or stand in several rows; first give them others if the spec says so.

    Args:
        cut: the parts of the input; `written` are their files, in the same order.

    Raises:
        InputError: with examples; or there is no row at all.
    """
    ids = _ids_of(written)
    if not any(len(chunk) for chunk in ids):
        raise InputError(f"batch.input: {batch.input} holds no rows")
    if batch.bad_ids == "keep_apart" and (bad := _bad(ids)):
        _keep_apart(written, bad)
        ids = _ids_of(written)
    missing = [pc.equal(chunk, "") for chunk in ids]
    missing_rows = sum(pc.sum(chunk).as_py() or 0 for chunk in missing)
    column = "custom_id" if batch.format == "openai_batch" else batch.id
    if missing_rows:
        places = _places(batch, cut, missing)
        raise InputError(
            f"batch.id: {missing_rows} rows have no id in column {column!r}, or one that cannot be stored (a "
            f"lone surrogate, half of a character), for example {'; '.join(places)}; every row needs one, so "
            f"that its answer can be told from others (or set batch.bad_ids to keep_apart)"
        )
    twice = _in_several_rows(ids)
    if len(twice):
        examples = ", ".join(
            f"{one['values']!r} ({one['counts']} rows)" for one in twice.slice(0, _EXAMPLES).to_pylist()
        )
        raise InputError(
            f"batch.id: {len(twice)} ids in column {column!r} stand in more than one row, for example "
            f"{examples}; ids must be unique (texts and numbers that read alike count as the same; "
            f"batch.bad_ids: keep_apart gives such rows ids of their own)"
        )


def _ids_of(written: Sequence[Path]) -> list[pa.Array]:
    """A chunk for each part."""
    return [pq.read_table(path, columns=["id"]).column("id").combine_chunks() for path in written]


def _in_several_rows(ids: list[pa.Array]) -> pa.StructArray:
    """Ids that are there but not unique: `values` and `counts`."""
    every = pa.chunked_array(ids, pa.string())
    # Counting distinct ones takes a third of the memory, and nearly always that is all.
    if pc.count_distinct(every).as_py() == len(every):
        return pc.value_counts(pa.array([], pa.string()))
    counts = pc.value_counts(every)
    return counts.filter(
        pc.and_(pc.greater(counts.field("counts"), 1), pc.not_equal(counts.field("values"), ""))
    )


def _bad(ids: list[pa.Array]) -> set[str]:
    is_missing = any(pc.any(pc.equal(chunk, "")).as_py() for chunk in ids)
    return {*_in_several_rows(ids).field("values").to_pylist(), *([""] if is_missing else [])}


def _keep_apart(written: Sequence[Path], bad: set[str]) -> None:
    """Number the rows without an id and those after the first with the same id."""
    met: Counter[str] = Counter()
    before = 0
    for path in written:
        table = pq.read_table(path)
        ids = table.column("id").to_pylist()
        if not bad.isdisjoint(ids):
            apart = [
                _apart(text, number, met) if text in bad else text
                for number, text in enumerate(ids, start=before + 1)
            ]
            column = table.schema.get_field_index("id")
            table = table.set_column(column, table.schema.field("id"), pa.array(apart, pa.string()))
            pq.write_table(table, path, compression="zstd")
        before += len(ids)


def _apart(text: str, number: int, met: Counter[str]) -> str:
    if not text:
        return f"row-{number}"
    met[text] += 1
    return text if met[text] == 1 else f"{text}#{met[text]}"


def _places(batch: Batch, cut: Sequence[Part], missing: list[pa.Array]) -> list[str]:
    """Where some rows without an id stand in the input: its parts are read again for that."""
    places: list[str] = []
    for part, flags in zip(cut, missing, strict=True):
        numbers = pc.indices_nonzero(flags).to_pylist()[: _EXAMPLES - len(places)]
        places += [next(islice(parts.read(batch, part), number, None)).place for number in numbers]
    return places
