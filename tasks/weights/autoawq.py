"""The other converter for awq: AutoAWQ, in an optional environment of its own, for the architectures it knows."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tasks.contract import Context
from tasks.errors import InputError, StageFailed
from tasks.settings import Settings
from tasks.spec import Convert
from tasks.weights import child, recipes
from tasks.weights.converting import Job

LAYOUT = "autoawq"
"""Its format, for `verify`."""


def check(asked: Convert, config: Mapping[str, Any], settings: Settings) -> None:
    """Refuse what it cannot do; says nothing where it is not asked for.

    Raises:
        InputError: it does not know the architecture, or the layout; names the other converter.
        StageFailed: its environment was not made.
    """
    if asked.converter != "autoawq":
        return
    known = [name for name, recipe in recipes.RECIPES.items() if "autoawq" in recipe.converters]
    name = recipes.architecture(config)
    if name not in known:
        raise InputError(
            f"convert.converter: autoawq knows {', '.join(known)}, and this model is a {name}: take llm-compressor"
        )
    if asked.symmetric:
        raise InputError(
            "convert.symmetric: autoawq has no symmetric layout here: take llm-compressor for it"
        )
    if not os.access(settings.python_autoawq, os.X_OK):
        raise StageFailed(
            f"there is no interpreter at {settings.python_autoawq}: run `make setup WITH=autoawq`, or set "
            f"QWEN_PIPELINE_PYTHON_AUTOAWQ; convert.converter llm-compressor needs neither"
        )


def run(job: Job, work: Path, context: Context) -> None:
    """Add its candidate to the job's."""
    child.run(
        context.settings.python_autoawq,
        "tasks.weights.autoawq_converting",
        job.dumps(),
        work,
        context,
        says="the converter autoawq",
    )
