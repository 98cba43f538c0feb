"""Rows of streams that only a query can give: Spark's own sources, and stateful operators."""

from __future__ import annotations

import os
import re
import signal
import threading
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.errors import PythonException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - Spark's own habit

import penstock
from penstock.errors import InvalidInputError, OutputModeRefusedError
from penstock.peek import query
from penstock.peek.penstock_reads import RowScope, may_keep_state, row_scope
from tests.support.processes import ChildProcess
from tests.support.spark_queues import fill, make_queue, one_store, stream
from tests.support.waiting import wait_until

EVENTS = pa.schema([("at", pa.timestamp("us", tz="UTC")), ("key", pa.string())])


def rate(spark: SparkSession) -> DataFrame:
    return spark.readStream.format("rate").option("rowsPerSecond", 100).load()


@pytest.fixture
def events(store: penstock.Store) -> penstock.Queue:
    """Two minutes of each hour of a day, in two appends."""
    queue = store.create_queue("events", EVENTS)
    for hours in (range(12), range(12, 24)):
        times = [datetime(2026, 1, 1, hour, minute, tzinfo=UTC) for hour in hours for minute in (0, 30)]
        queue.append(pa.table([times, ["a"] * len(times)], schema=EVENTS))
    return queue


def hourly(spark: SparkSession, url: str, **options: Any) -> DataFrame:
    frame = stream(spark, url, "events", **options).withWatermark("at", "1 minute")
    return frame.groupBy(F.window("at", "1 hour").alias("hour")).count().select("hour.start", "count")


def test_a_source_of_sparks_own(spark: SparkSession, tmp_path: Path) -> None:
    rows = penstock.take(rate(spark).where("value % 2 = 1"), 3)
    assert [row.value % 2 for row in rows] == [1, 1, 1]
    (tmp_path / "in").mkdir()
    for number in range(3):
        (tmp_path / "in" / f"{number}.json").write_text(f'{{"a": {number}}}\n{{"a": {number}}}\n')
    files = spark.readStream.schema("a int").option("maxFilesPerTrigger", 1).json(str(tmp_path / "in"))
    assert len(penstock.take(files.unionAll(files), 9)) == 9
    rows = penstock.take(files.select("a", F.col("a").alias("a")), 6)
    assert (sorted(row[1] for row in rows), rows.to_arrow().schema.names) == ([0, 0, 1, 1, 2, 2], ["a", "a"])


def test_rows_without_columns_come_from_any_query(spark: SparkSession) -> None:
    """Of one that keeps state, too."""
    assert list(penstock.take(rate(spark).select(), 3)) == [(), (), ()]
    counted = rate(spark).dropDuplicates(["value"]).select()
    assert list(penstock.take(counted, 3)) == [(), (), ()]


def test_the_query_stops_at_the_timeout(spark: SparkSession) -> None:
    rows = penstock.take(rate(spark).where("value < 0"), 1, timeout=1)
    assert (len(rows), rows.complete, rows.to_arrow().schema.names) == (0, False, ["timestamp", "value"])


def test_groups_are_taken_when_the_watermark_passes_them(
    spark: SparkSession, store: penstock.Store, store_url: str, events: penstock.Queue
) -> None:
    store.create_consumer("board").register("events", start={0: 2})
    before = store.consumer("board").registration("events")
    rows = penstock.take(hourly(spark, store_url, consumer="board", maxRowsPerTrigger="6"), 4)
    assert [row["count"] for row in rows] == [2, 2, 2, 2]
    assert sorted(row.start.hour for row in rows)[0] == 1
    assert store.consumer("board").registration("events") == before


@one_store
@pytest.mark.usefixtures("events")
def test_all_groups_but_the_last_are_taken_without_more_data(spark: SparkSession, store_url: str) -> None:
    rows = penstock.take(hourly(spark, store_url), 23)
    assert sorted(row.start.hour for row in rows) == list(range(23))


@one_store
@pytest.mark.usefixtures("events")
def test_operators_not_supported_in_append_mode_are_refused_by_name(
    spark: SparkSession, store_url: str
) -> None:
    with pytest.raises(OutputModeRefusedError, match="watermark") as caught:
        penstock.take(stream(spark, store_url, "events").groupBy("key").count(), 1)
    assert "PENSTOCK_AGGREGATION_WITHOUT_WATERMARK" in caught.value.parameters["problems"]
    assert "check=False" not in str(caught.value)
    with pytest.raises(OutputModeRefusedError, match="append"):
        penstock.take_sample(stream(spark, store_url, "events").groupBy("key").count(), 1)


def test_limits_and_joins_run_as_a_query(spark: SparkSession) -> None:
    assert len(penstock.take(rate(spark).limit(2), 2)) == 2
    names = spark.createDataFrame([(1, "one"), (2, "two")], "value long, name string")
    assert {row.name for row in penstock.take(rate(spark).join(names, "value"), 2)} == {"one", "two"}


def test_the_error_of_a_failing_query_is_raised(spark: SparkSession) -> None:
    @F.udf("long")
    def broken(_: int) -> int:
        raise ValueError("there is no such day")

    with pytest.raises(PythonException, match="there is no such day"):
        penstock.take(rate(spark).select(broken("value")), 1)


def interrupt_when_a_query_runs(spark: SparkSession) -> threading.Thread:
    def interrupt() -> None:
        wait_until(lambda: any(found.isActive for found in spark.streams.active))
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    return thread


def test_an_interrupt_stops_the_query(spark: SparkSession) -> None:
    thread = interrupt_when_a_query_runs(spark)
    with pytest.raises(KeyboardInterrupt):
        penstock.take(rate(spark).where("value < 0"), 1, timeout=None)
    thread.join()
    thread = interrupt_when_a_query_runs(spark)
    with pytest.raises(KeyboardInterrupt):
        penstock.take_sample(rate(spark), 1, seconds=60)
    thread.join()


def test_an_interrupt_while_the_query_starts_stops_it_too(
    spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun = threading.Event()

    def starting(_: SparkSession) -> Any:
        return slowed

    def slowed(start: Any) -> Any:
        def slowly() -> Any:
            begun.set()
            interrupted.wait(30)
            return start()

        return slowly

    interrupted = threading.Event()

    def interrupt() -> None:
        begun.wait(30)
        os.kill(os.getpid(), signal.SIGINT)
        interrupted.set()

    monkeypatch.setattr(query, "inheritable_thread_target", starting)
    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        penstock.take(rate(spark), 1)
    thread.join()


def test_the_checkpoint_is_where_the_caller_says(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    seen = set()

    def look(batches: Any) -> Any:
        yield from batches

    place = tmp_path / "checkpoints"
    place.mkdir()
    for folder in (Path("checkpoints"), place.as_uri(), f"file:{place}"):
        stops = threading.Event()

        def watch(stops: threading.Event = stops) -> None:
            while not stops.wait(0.01):
                seen.update(re.sub(r"_\w+.*", "", found.name) for found in place.iterdir())

        watching = threading.Thread(target=watch)
        watching.start()
        penstock.take(rate(spark).mapInArrow(look, "timestamp timestamp, value long"), 1, folder=folder)
        stops.set()
        watching.join()
        assert seen == {"penstock"}
        assert list(place.iterdir()) == []
        seen.clear()


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"n": 0}, "n is a whole number from 1"),
        ({"n": True}, "n is a whole number from 1"),
        ({"n": 2**31}, "n is a whole number from 1 to 2,147,483,647"),
        ({"timeout": 0}, "timeout is a finite number of seconds above 0, or None"),
        ({"timeout": float("inf")}, "timeout is a finite number"),
        ({"timeout": "5"}, "timeout is a finite number"),
        ({"folder": 7}, "folder is a directory"),
        ({"df": "orders"}, r"df is a streaming DataFrame; of a penstock.stream\(…\), pass its .to_df\(\)"),
    ],
)
def test_arguments_of_the_wrong_type_are_refused(
    spark: SparkSession, wrong: dict[str, Any], said: str
) -> None:
    with pytest.raises(InvalidInputError, match=said):
        penstock.take(**{"df": rate(spark), "n": 1} | wrong)


@pytest.mark.soak
def test_spark_connect_is_refused_by_name(run_child: Callable[..., ChildProcess]) -> None:
    child = run_child(Path(__file__).parent / "programs/over_connect.py")
    assert child.wait(120) == 0, child.output[-4000:]
    assert child.output.count("REFUSED TAKE_NEEDS_CLASSIC") == 2


def test_a_batch_dataframe_is_refused(spark: SparkSession) -> None:
    with pytest.raises(
        InvalidInputError,
        match=r"NOT_STREAMING\].*df.limit\(n\) returns its first rows, df.sample\(fraction\) a sample",
    ):
        penstock.take(spark.range(3), 1)


@one_store
def test_a_plan_is_classified_by_what_its_rows_depend_on(
    spark: SparkSession, store: penstock.Store, store_url: str
) -> None:
    make_queue(store)
    orders = stream(spark, store_url)
    by_row = orders.where("id > 1").select("id").alias("a")
    assert (row_scope(by_row), may_keep_state(by_row)) == (RowScope.ROW, False)
    assert (row_scope(orders.repartition(3)), may_keep_state(orders.repartition(3))) == (
        RowScope.MICRO_BATCH,
        False,
    )
    assert (row_scope(orders.union(orders)), may_keep_state(orders.union(orders))) == (RowScope.STREAM, False)
    for frame in (orders.limit(3), orders.dropDuplicates(["id"]), orders.groupBy("id").count()):
        assert (row_scope(frame), may_keep_state(frame)) == (RowScope.STREAM, True)


@one_store
def test_taking_from_a_union_moves_no_consumer(
    spark: SparkSession, store: penstock.Store, store_url: str
) -> None:
    fill(make_queue(store), range(5))
    consumers = [store.create_consumer(name) for name in ("a", "b")]
    for consumer in consumers:
        consumer.register("orders")
    before = [consumer.registration("orders") for consumer in consumers]
    both = stream(spark, store_url, consumer="a").union(stream(spark, store_url, consumer="b"))
    assert sorted(row.id for row in penstock.take(both, 10)) == sorted([*range(5), *range(5)])
    assert [consumer.registration("orders") for consumer in consumers] == before


def test_a_micro_batch_that_the_end_of_the_time_interrupts_is_no_error(
    spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, stopping, stop = threading.Event(), threading.Event(), query._stop

    def stops(queries: list[Any]) -> None:
        stopping.set()
        stop(queries)

    def interrupted(batch: DataFrame, number: int) -> None:
        begun.set()
        assert stopping.wait(30)
        raise RuntimeError("interrupted")

    monkeypatch.setattr(query, "_stop", stops)
    query.run_query(rate(spark), interrupted, query.Deadline(5), folder=None, available_now=False)
    assert begun.is_set()
