"""Says, as JSON, what Airflow's scheduler decides about runs of dags/ whose tasks end as told. Run in a process of its
own: PLUGINS DAGS.

No task is executed, and the database is a file of SQLite: it is Airflow's own decisions that are looked at.
"""

import json
import os
import sys
from datetime import UTC, datetime
from importlib import import_module
from pathlib import Path

sys.path[:0] = sys.argv[1:3]

# Named here alone: the tests' own processes import no Airflow.
dagbag = import_module("airflow.dag_processing.dagbag")
DBDagBag = import_module("airflow.models.dagbag").DBDagBag
DagRun = import_module("airflow.models.dagrun").DagRun
create_session = import_module("airflow.utils.session").create_session
mark_failed = import_module("airflow.api.common.mark_tasks").set_dag_run_state_to_failed
types = import_module("airflow.utils.types")
FOLDER = Path(os.environ["QWEN_PIPELINE_NIGHTLY"])
NOW = datetime(2026, 3, 9, tzinfo=UTC)


def read_the_dags():
    bag = dagbag.BundleDagBag(dag_folder=sys.argv[2], bundle_path=sys.argv[2], bundle_name="dags-folder")
    dagbag.sync_bag_to_db(bag, "dags-folder", None)


def latest(dag_id, session):
    return DBDagBag().get_latest_version_of_dag(dag_id, session=session)


def played(name, dag_id, *, fails=(), marked_failed=False, midway=None):
    """How a run ends, and which of its tasks ran: each well but for those in `fails`; `midway` follows on `run`."""
    with create_session() as session:
        dag = latest(dag_id, session)
        run = dag.create_dagrun(
            run_id=name,
            run_after=NOW,
            run_type=types.DagRunType.MANUAL,
            triggered_by=types.DagRunTriggeredByType.TEST,
            state="running",
            session=session,
        )
        if marked_failed:
            mark_failed(dag=dag, run_id=name, commit=True, session=session)
    ran = []
    for _ in range(30):
        with create_session() as session:
            run = session.query(DagRun).filter_by(dag_id=dag_id, run_id=name).one()
            run.dag = dag
            ready, _ = run.update_state(session=session, execute_callbacks=False)
            if run.state in ("success", "failed"):
                break
            states = {one.task_id: one.state for one in run.get_task_instances(session=session)}
            bad = set(states.values()) & {"failed", "upstream_failed", "skipped"}
            for one in ready:
                ran.append(one.task_id)
                ends_badly = one.task_id in fails or (one.task_id == "judge" and bad)
                one.set_state("failed" if ends_badly else "success", session=session)
        if midway is not None and "run" in ran:
            midway()
            midway = None
            with create_session() as session:
                dag = latest(dag_id, session)
    return {"ran": ran, "ends": run.state}


def spoil():
    (FOLDER / "prod.yaml").write_text("schedule: {cron: ")
    read_the_dags()
    with create_session() as session:
        assert "refused" in latest("qwen_nightly_prod", session).tags


import_module("airflow.utils.db").initdb()
import_module("airflow.dag_processing.bundles.manager").DagBundlesManager().sync_bundles_to_db()
read_the_dags()
found = {}
for dag_id in ("qwen_batch", "qwen_pool", "qwen_release"):
    found[dag_id] = {
        "goes well": played("well", dag_id),
        "marked failed before it began": played("marked", dag_id, marked_failed=True),
        "does not start": played("first", dag_id, fails=["freeze"]),
        "convert fails": played("convert", dag_id, fails=["convert"]),
    }
found["qwen_nightly_prod"] = {"its file is spoilt": played("spoilt", "qwen_nightly_prod", midway=spoil)}
print(json.dumps(found))
