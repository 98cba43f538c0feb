"""What Spark does with a registered Python data source."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession

import penstock

SCHEMA = pa.schema([("id", pa.int64())])


def variables(spark: SparkSession, name: str) -> set[str]:
    """The names in the environment that all queries of a source share."""
    manager = spark._jsparkSession.sessionState().dataSourceManager()
    return set(manager.lookupDataSource(name).dataSourceCls().envVars())


def run(frame: DataFrame, checkpoint: Path) -> None:
    writer = frame.writeStream.format("noop").option("checkpointLocation", str(checkpoint))
    writer.trigger(availableNow=True).start().awaitTermination()


def test_starting_a_query_adds_nothing_to_state_shared_by_queries(
    spark: SparkSession, tmp_path: Path
) -> None:
    # Two that added to it at once would break it: it is a plain HashMap.
    url = f"sqlite:///{tmp_path}/penstock.db"
    with penstock.connect(url, create=True) as store:
        store.create_queue("rows", SCHEMA).append([{"id": 1}])
        feed = penstock.QueueFeed.create("feed", SCHEMA, penstock.ChangeContract("id"), store=url)
        feed.append_commit(1, datetime(2026, 1, 1, tzinfo=UTC), [{"id": 1, "_change_type": "insert"}])
    penstock.register(spark)
    frames = {
        "penstock": spark.readStream.format("penstock").option("url", url).load("rows"),
        "penstock_changes": penstock.changes.read_stream(spark, feed),
    }
    for name, frame in frames.items():
        before = variables(spark, name)
        run(frame, tmp_path / name)
        assert variables(spark, name) == before


def test_a_thread_that_did_not_create_the_session_can_write(spark: SparkSession, tmp_path: Path) -> None:
    """Spark sees no active session in it, and looks for a writer's data source only there."""
    url = f"sqlite:///{tmp_path}/penstock.db"

    def write() -> None:
        assert not spark._jvm.org.apache.spark.sql.SparkSession.getActiveSession().isDefined()
        reads = penstock.QueueSource("rows", url=url)
        pipeline = penstock.stream(spark, reads).write(penstock.QueueSink("copy", url=url))
        query = pipeline.start(checkpoint=tmp_path / "checkpoint", trigger=penstock.Trigger.available_now())
        query.awaitTermination()

    def save() -> None:
        penstock.register(spark)
        rows = spark.range(2, 4)
        rows.write.format("penstock").mode("append").options(url=url).save("copy")

    with penstock.connect(url, create=True) as store:
        store.create_queue("rows", SCHEMA).append([{"id": 1}])
        copy = store.create_queue("copy", SCHEMA)
        for work in (write, save):
            with ThreadPoolExecutor(1) as thread:
                thread.submit(work).result()
        assert sorted(copy.read(0, 0)["id"].to_pylist()) == [1, 2, 3]


def test_a_source_is_registered_again_only_if_its_defaults_changed(spark: SparkSession) -> None:
    """Spark warns on every registration."""

    def known() -> object:
        manager = spark._jsparkSession.sessionState().dataSourceManager()
        return manager.lookupDataSource("penstock").dataSourceCls().command()

    penstock.register(spark)
    before = known()
    penstock.register(spark)
    assert known() == before
    spark.conf.set("spark.penstock.maxRowsPerTrigger", "7")
    try:
        penstock.register(spark)
        assert known() != before
    finally:
        spark.conf.unset("spark.penstock.maxRowsPerTrigger")
        penstock.register(spark)
