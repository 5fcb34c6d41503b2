"""The texts on which awq measures activations, and those on which a release is measured.

Keeps: the same file gives the same texts in the same order, so their hash can be part of a release's name; the
texts that ship with Python are split, so that none is in both. They are read here, once, and handed to the
child processes; those never look for data themselves.
"""

import hashlib
import json
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

from tasks.errors import InputError

SAMPLE_TOKENS = 128
"""Tokens of a sequence. awq needs the mean size of each channel's activations, not long context, and many
short sequences are more alike the prompts of a batch than few long ones. Its authors found 16 sequences
enough where GPTQ needs 192 (arXiv 2306.00978)."""

HELD_OUT_SAMPLE_TOKENS = 256
"""Of a sequence that a release is measured on."""

_HELD_OUT_ONE_IN = 6
"""Of Python's texts, by the hash of their names."""

_LONGEST_TEXT_CHARS = 4_000
"""Of one text: so that a long one does not crowd out the others."""

_CHARS_PER_TOKEN = 8
"""More than English or Chinese text has, so that enough text is kept for the tokens asked for."""

_COLUMN = "text"


def texts(calibration: str | None, tokens: int) -> list[str]:
    """The calibration texts that `convert.calibration` names, at most as many as hold `tokens` tokens.

    Raises:
        InputError: the file cannot be read, is of no known kind, or holds no text.
    """
    return _texts("convert.calibration", calibration, tokens, held_out=False)


def held_out(source: str | None, tokens: int) -> list[str]:
    """The texts that `convert.gate.texts` names, likewise.

    Raises:
        InputError: as for `texts`.
    """
    return _texts("convert.gate.texts", source, tokens, held_out=True)


def _texts(field: str, source: str | None, tokens: int, *, held_out: bool) -> list[str]:
    found = _shipped_with_python(held_out) if source is None else _from_file(field, Path(source))
    kept: list[str] = []
    wanted_chars = tokens * _CHARS_PER_TOKEN
    for text in found:
        if wanted_chars <= 0:
            break
        if text.strip():
            kept.append(text[:_LONGEST_TEXT_CHARS])
            wanted_chars -= len(kept[-1])
    if not kept:
        raise InputError(f"{field}: {source} holds no text")
    return kept


def digest(calibration_texts: list[str]) -> str:
    """Names the texts in a release's fingerprint."""
    return hashlib.sha256(json.dumps(calibration_texts).encode()).hexdigest()


def _shipped_with_python(held_out: bool) -> Iterator[str]:
    """The language reference by topic, as `help()` shows it: half a megabyte of English prose and code."""
    topics: dict[str, str] = import_module("pydoc_data.topics").topics
    for name in sorted(topics):
        if held_out == (hashlib.sha256(name.encode()).digest()[0] % _HELD_OUT_ONE_IN == 0):
            yield topics[name]


def _from_file(field: str, path: Path) -> Iterator[str]:
    try:
        match path.suffix:
            case ".jsonl":
                yield from _from_jsonl(field, path)
            case ".parquet":
                yield from _from_parquet(field, path)
            case ".txt":
                yield from path.read_text(encoding="utf-8").split("\n\n")
            case other:
                raise InputError(
                    f"{field}: {path} is a {other or 'nameless'} file; give .jsonl, .parquet or .txt"
                )
    except OSError as error:
        raise InputError(f"{field}: {path} cannot be read: {error.strerror or error}") from None
    except UnicodeDecodeError:
        raise InputError(f"{field}: {path} is not UTF-8 text") from None


def _from_jsonl(field: str, path: Path) -> Iterator[str]:
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            try:
                text = json.loads(line)[_COLUMN]
            except (ValueError, KeyError, TypeError):
                text = None
            if not isinstance(text, str):
                raise InputError(f'{field}: line {number} of {path} is no object with a string "{_COLUMN}"')
            yield text


def _from_parquet(field: str, path: Path) -> Iterator[str]:
    from pyarrow import ArrowInvalid, parquet

    try:
        file = parquet.ParquetFile(path)
    except ArrowInvalid as error:
        raise InputError(f"{field}: {path} is not parquet: {error}") from None
    with file:
        if _COLUMN not in file.schema_arrow.names:
            names = ", ".join(file.schema_arrow.names)
            raise InputError(f"{field}: {path} has no column {_COLUMN}; it has {names}")
        for batch in file.iter_batches(columns=[_COLUMN]):
            yield from (str(text) for text in batch.column(0).to_pylist() if text is not None)
