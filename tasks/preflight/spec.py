"""Checks of the spec itself and of the files that it names; they need no ledger, no hub and no GPU."""

import os
from pathlib import Path

from tasks.errors import InputError
from tasks.preflight.check import Check, look
from tasks.settings import Settings
from tasks.spec import Batch, Convert, RunSpec


def spec_checks(spec: RunSpec, settings: Settings) -> list[Check]:
    """All of them. A path with an unresolved `{{ date }}` is left out; it is checked when the run has started."""
    batch, convert = spec.batch, spec.convert
    checks = [
        look(
            "batch.sampling.max_tokens",
            "below serving.max_model_len, so that a prompt fits too",
            lambda: _answer_fits(spec),
        )
    ]
    if _resolved(batch.input):
        checks.append(
            look("batch.input", "files with the columns that the spec names", lambda: _input(batch))
        )
    if _resolved(batch.output):
        checks.append(look("batch.output", "a folder that can be written", lambda: _writable(batch.output)))
    if convert.calibration is not None and _resolved(convert.calibration):
        checks.append(look("convert.calibration", "a file with texts", lambda: _calibration(convert)))
    return checks


def _resolved(text: str) -> bool:
    return "{{" not in text


def _answer_fits(spec: RunSpec) -> str:
    longest, most = spec.serving.max_model_len, spec.batch.sampling.max_tokens
    if most >= longest:
        raise InputError(
            f"batch.sampling.max_tokens: answers of {most} tokens leave no room for a prompt in "
            f"serving.max_model_len = {longest}; lower the one or raise the other"
        )
    return f"{most} of {longest}, which leaves {longest - most} tokens for a prompt"


def _input(batch: Batch) -> str:
    from tasks.batch.input import check

    return str(check(batch))


def _writable(output: str) -> str:
    path = Path(output)
    there = next(folder for folder in (path, *path.absolute().parents) if folder.exists())
    if not there.is_dir():
        raise InputError(f"batch.output: {there} is a file; name a folder")
    if not os.access(there, os.W_OK | os.X_OK):
        raise InputError(
            f"batch.output: {there} cannot be written by user {os.geteuid()}; choose another folder"
        )
    return str(there) if there == path else f"{there}, in which it will be made"


def _calibration(convert: Convert) -> str:
    path = Path(str(convert.calibration))
    if not path.is_file():
        raise InputError(
            f"convert.calibration: there is no file {path}; leave it out to use the built-in texts"
        )
    return f"{path}, {path.stat().st_size} bytes"
