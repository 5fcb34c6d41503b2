"""The rows still to do as a data frame: which, cut into partitions how, and in which order.

Which rows: the same rule as `rows.survey`. A session with a turn to do brings its finished turns along, for the
history of the others.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from tasks.batch.prepared import PreparedBatch
from tasks.batch.rows import Answers
from tasks.batch.spark_task import COLUMNS
from tasks.batch.store import Store
from tasks.spec import RunSpec

_READ = (
    "position long, id string, messages string, prompt_tokens int, max_tokens int, sampling string, "
    "schema string, session string, prefix long, error_class string"
)

_NO_ANSWER = "null"
"""In `finished`: the turn has none, and will have none."""

_WRITTEN_ROWS = 10_000


def rows_to_do(spark: Any, batch: PreparedBatch, answers: Answers, spec: RunSpec, folder: Path) -> Any:
    """Columns of `records.Row`, and `position`.

    Args:
        folder: for a file that Spark reads.
    """
    from pyspark.sql.functions import broadcast, coalesce, col, expr, lit, when

    fits = f"cast(prompt_tokens as long) + max_tokens <= {spec.serving.max_model_len}"
    is_asked = expr("error_class is null" + (f" and {fits}" if spec.batch.too_long == "fail" else ""))
    frame = spark.read.schema(_READ).parquet(*(str(path) for path in batch.parts))
    common = batch.manifest["common_prefixes"]
    if common:
        frame = frame.withColumn(
            "prefix", expr(f"if(prefix in ({', '.join(map(str, common))}), null, prefix)")
        )
    has_sessions = bool(batch.manifest["sessions"])
    if not has_sessions:
        frame = frame.where(is_asked)
    if not answers.known.num_rows and not has_sessions:
        return frame.withColumn("finished", lit(None).cast("string"))
    if answers.known.num_rows:
        done = folder / "done.parquet"
        _write_finished(answers, done, with_answers=has_sessions)
        finished = spark.read.schema("id string, finished string").parquet(str(done))
    else:
        finished = spark.createDataFrame([], "id string, finished string")
    if not has_sessions:
        return frame.join(finished.select("id"), "id", "left_anti").withColumn(
            "finished", lit(None).cast("string")
        )
    never = when(~is_asked, lit(_NO_ANSWER))
    frame = frame.join(finished, "id", "left").withColumn("finished", coalesce(col("finished"), never))
    is_to_do = col("finished").isNull()
    sessions = frame.where(is_to_do & col("session").isNotNull()).select("session").distinct()
    turns_before = frame.where(~is_to_do).join(broadcast(sessions), "session", "left_semi")
    return frame.where(is_to_do).unionByName(turns_before)


def in_company(frame: Any, shares: int) -> Any:
    """Cut into `shares` partitions; those who belong together in one, and sessions and long answers first.

    By a hash, so that a retried task gets the same rows again, which round-robin does not promise.
    """
    from pyspark.sql.functions import coalesce, col

    key = coalesce(col("session"), col("prefix").cast("string"), col("id"))
    return _ordered(frame.repartition(shares, key))


def alone(frame: Any) -> Any:
    """All in one partition."""
    return _ordered(frame.coalesce(1))


def _ordered(frame: Any) -> Any:
    """The longest answers first, so that none of them begins last; a session's turns and a prefix's rows side by side.

    Not by the length of the prompts: long ones together leave an engine prefill without decode, then the reverse.
    """
    from pyspark.sql.functions import col, when

    return frame.sortWithinPartitions(
        col("session").asc_nulls_last(),
        when(col("session").isNotNull(), col("position")).asc_nulls_last(),
        col("max_tokens").desc(),
        col("prefix").asc_nulls_last(),
        col("position"),
    ).select(*COLUMNS)


def _write_finished(answers: Answers, path: Path, *, with_answers: bool) -> None:
    schema = pa.schema([("id", pa.string()), ("finished", pa.string())])
    with pq.ParquetWriter(path, schema) as writer:
        if not with_answers:
            ids = answers.known.column("id")
            writer.write_table(pa.table([ids, pa.nulls(len(ids), pa.string())], schema=schema))
            return
        for table in _records(answers):
            texts = [json.dumps(answer) for answer in table.column("answer").to_pylist()]
            writer.write_table(pa.table([table.column("id"), pa.array(texts, pa.string())], schema=schema))


def _records(answers: Answers) -> Iterator[pa.Table]:
    with Store(answers) as store:
        for start in range(0, answers.known.num_rows, _WRITTEN_ROWS):
            stop = min(start + _WRITTEN_ROWS, answers.known.num_rows)
            yield store.records(pa.chunked_array([pa.arange(start, stop)]))
