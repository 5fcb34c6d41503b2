"""What a run of Airflow is called in the ledger. Apart from the rest, because pages and links need it too."""


def run_name(dag_id: str, run_id: str) -> str:
    """Airflow's run id is unique within a DAG only: two nightly DAGs of one cron expression share theirs."""
    return run_id if dag_id == "qwen_batch" else f"{dag_id}.{run_id}"
