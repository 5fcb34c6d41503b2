"""The run spec: everything a run needs, in one versioned document.

`model` is the schema; `document` reads it from YAML or a mapping; `params` renders it for Airflow's form and
REST; `freeze` resolves what is open in it when a run first starts.
"""

from tasks.spec.document import parse, read
from tasks.spec.model import (
    Batch,
    Convert,
    CpuLayout,
    Layout,
    Limits,
    MigLayout,
    MigPartedLayout,
    Model,
    RunSpec,
    Sampling,
    Serving,
    TensorParallelLayout,
)

__all__ = [
    "Batch",
    "Convert",
    "CpuLayout",
    "Layout",
    "Limits",
    "MigLayout",
    "MigPartedLayout",
    "Model",
    "RunSpec",
    "Sampling",
    "Serving",
    "TensorParallelLayout",
    "parse",
    "read",
]
