"""A user's program as a type checker sees it: never run."""

import logging
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any, assert_type

import pyarrow as pa
from pyspark.sql import DataFrame, Row, SparkSession
from pyspark.sql.types import StructType

import penstock
from penstock.logs import JsonFormatter
from penstock.testing import MemoryStream, run

assert_type(penstock.__version__, str)


def queues() -> None:
    with penstock.connect("sqlite:///shop.db", create=True) as store:
        assert_type(store, penstock.Store)
        schema = pa.schema([("id", pa.int64())])
        orders = store.create_queue(
            "orders",
            schema,
            partitions=4,
            key=["id"],
            retention=penstock.Retention(rows=1_000, age=timedelta(days=1)),
        )
        assert_type(orders, penstock.Queue)
        store.create_queue("others", StructType())
        appended = orders.append([{"id": 1}], partition=None)
        assert_type(appended, penstock.AppendResult)
        assert_type(appended.ranges, dict[int, tuple[int, int]])
        assert_type(appended.rows, int)
        orders.append(orders.read(0, 0, None, max_rows=10, max_bytes=1 << 20))
        assert_type(orders.trim(0, before=5), int)
        assert_type(orders.info(), penstock.QueueInfo)
        assert_type(orders.partitions, int)
        assert_type(store.queues(), list[str])


def consumers(store: penstock.Store) -> None:
    billing = store.create_consumer("billing")
    assert_type(billing, penstock.Consumer)
    billing.register("orders", vital=True, start=datetime.now(UTC))
    billing.register("orders", start={0: 5})
    assert_type(store.queue("orders").register("billing", start="latest"), penstock.Consumer)
    pull = billing.pull("orders", 0, max_rows=100)
    assert_type(pull, penstock.Pull)
    assert_type(pull.end, int)
    billing.advance("orders", 0, old=pull.start, new=pull.end)
    assert_type(billing.offsets("orders"), dict[int, int])
    assert_type(billing.lag("orders"), penstock.Lag)
    assert_type(billing.lag("orders").seconds, float)
    assert_type(billing.seek("orders", to="earliest", dry_run=True), dict[int, int])
    producer = store.producer("orders", session="web-1")
    assert_type(producer, penstock.Producer)
    assert_type(producer.append([{"id": 1}], sequence=41).skipped, bool)
    assert_type(producer.skipped, int)


def pipelines(spark: SparkSession, url: str) -> None:
    penstock.register(spark)
    penstock.log_progress(spark)
    stream = penstock.stream(spark, penstock.QueueSource("orders", consumer="billing", url=url))
    assert_type(stream, penstock.Stream)
    pipeline = (
        stream.transform(lambda df: df.where("amount > 10"))
        .limit(1_000)
        .write(penstock.QueueSink("big", url=url), guarantee="exactly_once", output_mode="append")
    )
    assert_type(pipeline, penstock.Pipeline)
    query = pipeline.start(name="big", checkpoint="/tmp/big", trigger=penstock.Trigger.continuous("100 ms"))
    assert_type(query, penstock.Query)
    assert_type(query.isActive, bool)
    assert_type(query.name, str | None)
    assert_type(query.exception(), Exception | None)
    assert_type(query.awaitTermination(1.5), bool | None)
    assert_type(query.stop(), bool)
    if isinstance(query, penstock.ContinuousQuery):
        assert_type(query.awaitEpoch(5, timeout=1.0), bool)
    penstock.stream(spark, spark.readStream.format("rate").load()).write(penstock.ConsoleSink()).start(
        checkpoint="/tmp/c"
    )
    penstock.stream(spark, penstock.RateSource(10)).write(penstock.FunctionSink(_look)).start(
        checkpoint="/tmp/f"
    )
    penstock.stream(spark, penstock.DeltaFeed("/data/orders")).write(
        penstock.TableSink("totals", keys=["id"], url=url)
    )


def _look(batch: pa.RecordBatch) -> None:
    print(batch.num_rows)


def _write(batch: DataFrame, number: int) -> None:
    with penstock.exactly_once(None, "totals", "app", number) as new:
        assert_type(new.new, bool)


def sessions() -> SparkSession:
    return penstock.session(
        "shop", master="local[2]", url="sqlite:///shop.db", conf={"spark.ui.enabled": "false"}
    )


def changes(spark: SparkSession) -> Iterator[DataFrame]:
    contract = penstock.ChangeContract(
        row_id=["id"], row_version="rv", carryover_rows=True, whole_commits=True
    )
    feed = penstock.QueueFeed.create("flights", pa.schema([]), contract, store="sqlite:///shop.db")
    assert_type(feed, penstock.QueueFeed)
    for each in (
        feed,
        penstock.PostgresFeed("postgresql://h/d", "p"),
        penstock.IcebergFeed("db.t"),
        "delta:/data/orders",
    ):
        yield assert_type(
            penstock.changes.read(spark, each, starting_version=1, compute_updates=True), DataFrame
        )
    yield assert_type(penstock.changes.read_stream(spark, feed, deduplication_mode="netChanges"), DataFrame)
    yield penstock.changes.post_process(spark.table("t"), contract, compute_updates=True)


def looks(spark: SparkSession, df: DataFrame) -> None:
    report = penstock.modes.check(df, sink="kafka", trigger=penstock.Trigger.available_now())
    assert_type(report, penstock.modes.Report)
    assert_type(report["append"].allowed, bool)
    assert_type(report["append"].problems[0].fix, str | None)
    taken = penstock.take(df, 10, timeout=None)
    assert_type(taken, penstock.TakeResult)
    assert_type(taken[0], Row)
    assert_type(taken[1:], list[Row])
    assert_type(taken.complete, bool)
    assert_type(penstock.take_sample(df, 10), penstock.TakeResult)
    assert_type(penstock.limits.limit_progress("/tmp/c"), penstock.limits.LimitProgress)
    state = penstock.state.show(spark, "/tmp/c")
    assert_type(state, penstock.state.CheckpointState)
    assert_type(state.last_committed, int | None)
    assert_type(penstock.state.read(spark, "/tmp/c"), DataFrame)


def tests_of_ones_own(spark: SparkSession, frame: DataFrame) -> None:
    with MemoryStream(spark, "id long") as stream, run(frame) as query:
        stream.add_data([{"id": 1}])
        query.process_all_available()
        assert_type(query.emitted(), list[list[dict[str, Any]]])


def errors() -> None:
    try:
        penstock.connect("sqlite:///shop.db", create=False)
    except penstock.errors.StoreNotFoundError as error:
        assert_type(error.condition, str)
        assert_type(error.parameters, dict[str, Any])
    except penstock.PenstockError:
        pass


def logs() -> logging.Formatter:
    return JsonFormatter()
