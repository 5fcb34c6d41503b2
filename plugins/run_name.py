"""What a run of Airflow is called in the ledger. Apart from the rest, because pages and links need it too."""

import re

from tasks.errors import InputError

_OF_ANOTHER_DAG = re.compile(r"qwen_(pool|release|nightly_[^.]*)\.")


def run_name(dag_id: str, run_id: str) -> str:
    """Airflow's run id is unique within a DAG only: two nightly DAGs of one cron expression share theirs.

    Raises:
        InputError: a run of qwen_batch would have a name of another DAG's runs, and end what that one has.
    """
    if dag_id != "qwen_batch":
        return f"{dag_id}.{run_id}"
    if _OF_ANOTHER_DAG.match(run_id):
        raise InputError(
            f"dag_run_id: {run_id!r} begins as the ledger calls the runs of another DAG, and could be one of them: "
            f"start the run with an id that begins otherwise, or leave it to Airflow"
        )
    return run_id
