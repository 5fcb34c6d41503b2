"""Keeps a pool of workers for people who want to query it.

The stages of qwen_batch without its rows: weights, devices, workers; then the pool is kept, without a worker slot,
until the time that the spec says or until somebody stops it. Then workers and devices are given back. Endpoints and
the way to the key are on the page *Workers and their logs*, to which the tasks link; see docs/pool.md.
"""

from airflow.sdk import dag
from pipeline_tasks import form, freeze, judge, stage, with_links
from pool_tasks import keep_pool
from run_notifications import notifications

from tasks.spec.pool import PoolSpec, parse_pool


@dag(
    schedule=None,
    is_paused_upon_creation=False,  # nothing starts by itself, and a run of a paused DAG stays queued
    catchup=False,
    max_active_runs=16,
    params=form(PoolSpec),
    tags=["qwen"],
    doc_md=__doc__,
    **notifications(),
)
def qwen_pool() -> None:
    """See the text above."""
    frozen = freeze(parse_pool, by_hand=PoolSpec).as_setup()
    provisioned = stage("provision").as_setup()
    started = stage("start").as_setup()
    kept = with_links(keep_pool())
    stopped = stage("stop").as_teardown(setups=[frozen, started])
    restored = stage("restore").as_teardown(setups=[frozen, provisioned])
    judged = with_links(judge())

    frozen >> stage("preflight") >> stage("download") >> stage("convert") >> provisioned >> started >> kept
    # A teardown of no setup runs where none has, too.
    kept >> stopped >> restored >> judged.as_teardown(on_failure_fail_dagrun=True)


qwen_pool()
