"""Checks of the spec itself and of the files that it names; they need no ledger, no hub and no GPU."""

import os
from collections.abc import Callable
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

from tasks.errors import InputError
from tasks.preflight.check import Check, look
from tasks.settings import Settings
from tasks.spec import Batch, RunSpec, times


def spec_checks(spec: RunSpec, settings: Settings) -> list[Check]:
    """All of them. A path with an open `{{ date }}` is left out; it is checked once the run has started."""
    texts = {"convert.calibration": spec.convert.calibration, "convert.gate.texts": spec.convert.gate.texts}
    checks = [look("serving.extra_args", "flags of the installed vLLM", lambda: _flags(spec, settings))]
    if not spec.batch.is_none:
        checks += _batch_checks(spec)
    for field, path in texts.items():
        if path is not None:
            checks += _of_path(field, path, "a file of texts", partial(_texts, field, path))
    return checks


def deadline_ahead(spec: RunSpec) -> str:
    """Of a run that has not started.

    Raises:
        InputError: the deadline names a moment of the past.
    """
    deadline = spec.limits.deadline
    if times.is_moment(deadline) and datetime.fromisoformat(deadline) <= datetime.now(UTC):
        field = "until" if spec.batch.is_none else "limits.deadline"
        raise InputError(
            f"{field}: {deadline} is over, so the run would take no devices: name a moment to come, a time of day "
            f"(`18:00`, the next one) or a time from the run's start (`8h`)"
        )
    return deadline


def _batch_checks(spec: RunSpec) -> list[Check]:
    batch = spec.batch
    return [
        look("batch.sampling.max_tokens", "less than serving.max_model_len", lambda: _answers_fit(spec)),
        *_of_path(
            "batch.input", batch.input, "files with the columns that the spec names", lambda: _input(batch)
        ),
        *_of_path(
            "batch.output", batch.output, "a folder that can be written", lambda: _writable(batch.output)
        ),
    ]


def _of_path(field: str, path: str, needed: str, at: Callable[[], str]) -> list[Check]:
    return [] if "{{" in path else [look(field, needed, at)]


def _answers_fit(spec: RunSpec) -> str:
    longest, most = spec.serving.max_model_len, spec.batch.sampling.max_tokens
    if most >= longest:
        raise InputError(
            f"batch.sampling.max_tokens: answers of {most} tokens leave no room for a prompt in "
            f"serving.max_model_len = {longest}; lower the one or raise the other"
        )
    return f"{most} of {longest}, which leaves {longest - most} tokens for a prompt"


def _flags(spec: RunSpec, settings: Settings) -> str:
    from tasks.serving import flags

    flags.check(spec.serving.extra_args, settings.serving_flags)
    return f"{len(spec.serving.extra_args)} flag(s)"


def _input(batch: Batch) -> str:
    from tasks.batch import input as batch_input

    description = batch_input.check(batch)
    return f"{len(description.files)} file(s) with columns {', '.join(description.columns)}"


def _writable(output: str) -> str:
    path = Path(output).absolute()
    there = next(place for place in (path, *path.parents) if place.exists())
    if not there.is_dir():
        raise InputError(f"batch.output: {there} is a file; name a folder")
    if not os.access(there, os.W_OK | os.X_OK):
        raise InputError(f"batch.output: user {os.geteuid()} cannot write to {there}; choose another folder")
    return str(there) if there == path else f"{there}, in which it will be made"


def _texts(field: str, name: str) -> str:
    path = Path(name)
    if not path.is_file():
        raise InputError(f"{field}: there is no file {path}; leave it out to use the built-in texts")
    return f"{path}, {path.stat().st_size} bytes"
