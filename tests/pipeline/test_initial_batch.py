"""Runs without new data emit what an earlier run left in the state store."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path

import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - its usual name

import penstock
from penstock.pipeline import stream
from penstock.pipeline.initial_batch import InitialBatchReader, no_data_batches, with_initial_batch
from tests.support.change_frames import SCHEMA, Files, contract, tuples
from tests.support.spark_queues import one_store
from tests.support.waiting import wait_until

ROW = (1, "a", 1, "insert", 1, 1_700_000_000_000_000)


@one_store
@pytest.mark.parametrize(
    "trigger", [penstock.Trigger.available_now(), penstock.Trigger.processing_time("50 milliseconds")]
)
def test_the_last_commit_of_a_dead_run_is_emitted(
    spark: SparkSession,
    store: penstock.Store,
    store_url: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    trigger: penstock.Trigger,
) -> None:
    """As if between the micro-batch with the commit and the one without data."""
    files = Files(spark, tmp_path)
    files.add([ROW])
    changes = penstock.changes.post_process(files.read(), contract("CU", whole_commits=False))
    queue = store.create_queue("changes", SCHEMA)
    pipeline = penstock.stream(spark, changes).write(penstock.QueueSink("changes", url=store_url))
    no_data = "spark.sql.streaming.noDataMicroBatches.enabled"
    with monkeypatch.context() as patched:
        patched.setattr(stream, "no_data_batches", lambda spark: nullcontext())
        spark.conf.set(no_data, "false")
        try:
            pipeline.start(
                checkpoint=tmp_path / "ck", trigger=penstock.Trigger.available_now()
            ).awaitTermination()
        finally:
            spark.conf.unset(no_data)
    assert tuples(queue.read(0, 0)) == []
    query = pipeline.start(checkpoint=tmp_path / "ck", trigger=trigger)
    try:
        wait_until(lambda: tuples(queue.read(0, 0)) or not query.isActive)
    finally:
        query.stop()
    assert tuples(queue.read(0, 0)) == [ROW]


def test_queries_without_state_are_left_alone(spark: SparkSession, tmp_path: Path) -> None:
    frame = Files(spark, tmp_path).read()
    where = str(tmp_path / "ck")
    assert with_initial_batch(frame, where) is frame
    marked = frame.withWatermark("_commit_timestamp", "0 seconds")
    assert with_initial_batch(marked, where) is marked
    waits = marked.dropDuplicates(["_commit_timestamp"])
    assert with_initial_batch(waits, "nowhere://such/a/place") is waits
    counted = frame.groupBy("id").count()
    assert with_initial_batch(counted, where) is counted, "nothing waits for a watermark there"


def test_an_initial_batch_changes_neither_the_schema_nor_the_number_of_tasks(
    spark: SparkSession, tmp_path: Path
) -> None:
    files = Files(spark, tmp_path)
    files.add([ROW])
    kept = (
        files.read()
        .withWatermark("_commit_timestamp", "0 seconds")
        .dropDuplicates(["id", "_commit_timestamp"])
    )
    kept = kept.select(F.coalesce("id", F.lit(0)).alias("id"), "data")
    woken = with_initial_batch(kept, str(tmp_path / "ck"))
    assert woken is not kept
    assert not kept.schema["id"].nullable
    assert not woken.select("id").schema["id"].nullable
    plan = run(woken, tmp_path)
    assert "BatchScan" not in plan


def test_a_checkpoint_created_without_it_continues_without_it(spark: SparkSession, tmp_path: Path) -> None:
    files = Files(spark, tmp_path)
    files.add([ROW])
    kept = files.read().withWatermark("_commit_timestamp", "0 seconds").dropDuplicates(["_commit_timestamp"])
    run(kept, tmp_path)
    assert with_initial_batch(kept, str(tmp_path / "ck")) is kept


def test_a_checkpoint_whose_first_micro_batch_was_not_committed_keeps_its_sources(
    spark: SparkSession, tmp_path: Path
) -> None:
    """Spark compares them with those of the offset log."""
    files = Files(spark, tmp_path)
    files.add([ROW])
    plain = files.read()
    kept = plain.withWatermark("_commit_timestamp", "0 seconds").dropDuplicates(["_commit_timestamp"])
    run(kept, tmp_path)
    for commit in (tmp_path / "ck" / "commits").iterdir():
        commit.unlink()
    assert with_initial_batch(kept, str(tmp_path / "ck")) is kept


def test_each_run_has_one_offset() -> None:
    first, second = InitialBatchReader(), InitialBatchReader()
    start = first.initialOffset()
    one = first.latestOffset(start, first.getDefaultReadLimit())
    assert one != start
    assert first.latestOffset(one, first.getDefaultReadLimit()) == one
    two = second.latestOffset(one, second.getDefaultReadLimit())
    assert two != one
    assert second.latestOffset(two, second.getDefaultReadLimit()) == two


def run(df: DataFrame, folder: Path) -> str:
    """Return the physical plan of the last micro-batch of a run."""
    writer = df.writeStream.format("noop").option("checkpointLocation", str(folder / "ck"))
    query = writer.trigger(availableNow=True).start()
    query.awaitTermination()
    return str(query._jsq.explainInternal(False))


def test_queries_that_start_at_once_leave_the_sessions_setting_as_it_was(spark: SparkSession) -> None:
    setting = "spark.sql.streaming.noDataMicroBatches.enabled"
    session = spark.newSession()
    session.conf.set(setting, "false")
    first, second = no_data_batches(session), no_data_batches(session)
    with first:
        second.__enter__()
    assert session.conf.get(setting) == "true", "the second query is still starting"
    second.__exit__(None, None, None)
    assert session.conf.get(setting) == "false"
