"""NVML, opened for a block and closed after it: the real driver, or the simulated one where the settings say so.

Whoever changes something opens it anew before looking again: a library that was initialised before still
enumerates destroyed MIG devices (libcudacxx #224).
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pynvml

from tasks.errors import InputError
from tasks.gpu.simulated.library import Library
from tasks.gpu.simulated.state import StateFile
from tasks.node import processes
from tasks.settings import Settings

log = logging.getLogger(__name__)

SIMULATED = "SIMULATED GPUs"
"""Begins every message about a simulated node."""

_libraries: dict[tuple[str, Path], Library] = {}
"""One for each node: pynvml has one library for the whole process, and its initialisations are counted."""


@contextmanager
def opened(settings: Settings) -> Iterator[bool]:
    """NVML, initialised for the block; False where there is no driver to talk to.

    Raises:
        InputError: the settings ask for a simulated driver that there is not, or only half ask for one.
    """
    _choose(settings)
    try:
        pynvml.nvmlInit()
    except (pynvml.NVMLError_LibraryNotFound, pynvml.NVMLError_DriverNotLoaded):
        yield False
        return
    try:
        yield True
    finally:
        pynvml.nvmlShutdown()


def is_simulated(settings: Settings) -> bool:
    """Whether this deployment's GPUs are simulated."""
    return settings.nvml != "driver"


def simulation(settings: Settings) -> Library | None:
    """The simulated driver of the settings; None for the real one.

    Raises:
        InputError: the settings ask for one that there is not, or only half ask for one.
    """
    if not is_simulated(settings):
        if settings.nvml_state is not None:
            raise InputError(
                f"QWEN_PIPELINE_NVML_STATE={settings.nvml_state} is a simulated node, and QWEN_PIPELINE_NVML is "
                f"`driver`, the real one: set both for a simulated node, or neither"
            )
        return None
    kind, _, node = settings.nvml.partition(":")
    if kind != "sim":
        raise InputError(f"QWEN_PIPELINE_NVML={settings.nvml}: it is `driver`, or `sim:PRODUCT[*COUNT]`")
    if settings.nvml_state is None:
        raise InputError(
            f"QWEN_PIPELINE_NVML={settings.nvml} is a simulated node, which is kept in a file: name one with "
            f"QWEN_PIPELINE_NVML_STATE, or leave QWEN_PIPELINE_NVML at `driver`"
        )
    key = (node, settings.nvml_state)
    if key not in _libraries or not settings.nvml_state.exists():
        log.warning("%s (%s): nothing here runs on a real GPU", SIMULATED, settings.nvml)
        _libraries[key] = Library(StateFile(settings.nvml_state, node))
    return _libraries[key]


def boot_id(settings: Settings) -> str:
    """Of the node that has the GPUs: after another boot nothing that was laid out is there."""
    library = simulation(settings)
    if library is None:
        return processes.boot_id()
    return f"{SIMULATED}, boot {library.file.read()['boot']}"


def text(value: str | bytes) -> str:
    """nvidia-ml-py gives str since version 11.5, bytes before, and bytes in structures."""
    return value.decode() if isinstance(value, bytes) else value


def describe(error: Any) -> str:
    """An error of NVML with its number, by which it is found in NVIDIA's documentation."""
    return f"{error} (NVML error {error.value})"


def _choose(settings: Settings) -> None:
    library = simulation(settings)
    there = pynvml.nvmlLib
    if library is not None and there is not library:
        _use(library)
    elif library is None and isinstance(there, Library):
        _use(None)


def _use(library: Library | None) -> None:
    pynvml.nvmlLib = library
    pynvml._nvmlGetFunctionPointer_cache.clear()
