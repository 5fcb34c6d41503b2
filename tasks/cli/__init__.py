"""The command line: `qwen-pipeline VERB --spec FILE [--run NAME] [--json]`, for people on a node and for tests.

The verbs are the same functions that the DAG's tasks call.
"""

from tasks.cli.main import main

__all__ = ["main"]
