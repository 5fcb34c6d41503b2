"""Weights in, a verified release out.

Downloads a repository, converts it, measures it against the base, and publishes it in the node's store: the first
half of qwen_batch alone. Its release is found again by whichever run asks for the same, or named by it
(`model: {repo: "release:ID"}`). Updates the asset `qwen_release`, whose events hold the release's id and metrics.
"""

from airflow.sdk import dag
from pipeline_tasks import form, freeze, judge, stage, with_links
from release_tasks import announce
from run_notifications import notifications

from tasks.spec.release import ReleaseSpec, parse_release


@dag(
    schedule=None,
    is_paused_upon_creation=False,  # nothing starts by itself, and a run of a paused DAG stays queued
    catchup=False,
    max_active_runs=16,
    params=form(ReleaseSpec),
    tags=["qwen"],
    doc_md=__doc__,
    **notifications(),
)
def qwen_release() -> None:
    """See the text above."""
    converted = stage("convert")
    announced = announce(converted)
    judged = with_links(judge())

    freeze(parse_release, by_hand=ReleaseSpec) >> stage("download") >> converted
    # A teardown of no setup runs whatever failed, and where nothing has run, too.
    announced >> judged.as_teardown(on_failure_fail_dagrun=True)


qwen_release()
