"""The first rows of queues and change feeds, which are read without a query if the result is the same."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.errors import PythonException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - Spark's own habit

import penstock
from penstock.errors import ConsumerNotFoundError, DataLostError
from penstock.peek import penstock_reads, take
from penstock.peek.query import Deadline, RowCollector
from tests.support.spark_queues import fill, make_queue, one_store, stream
from tests.support.waiting import wait_until

SECOND = timedelta(seconds=1)
START = datetime(2026, 1, 1, tzinfo=UTC)


@pytest.fixture
def no_query(monkeypatch: pytest.MonkeyPatch) -> None:
    """Starting one is an error."""

    def refuse(*_: object) -> None:
        raise AssertionError("a query is started")

    monkeypatch.setattr(take, "run_query", refuse)


def ids(rows: penstock.TakeResult) -> list[int]:
    return [row.id for row in rows]


@pytest.mark.usefixtures("no_query")
def test_the_first_rows_are_taken_partition_by_partition(
    spark: SparkSession, store: penstock.Store, store_url: str
) -> None:
    orders = make_queue(store, partitions=2)
    fill(orders, range(5))
    fill(orders, range(100, 2000), partition=1)
    rows = penstock.take(stream(spark, store_url), 7)
    assert ids(rows) == [0, 1, 2, 3, 4, 100, 101]
    assert (rows.complete, rows.asked, rows.seen) == (True, 7, None)
    assert rows[0].name == "n0"


@one_store
@pytest.mark.usefixtures("no_query")
def test_filters_and_functions_see_only_as_many_rows_as_needed(
    spark: SparkSession, store: penstock.Store, store_url: str
) -> None:
    fill(make_queue(store), range(50_000), each=5_000)
    frame = stream(spark, store_url, includeMetadataColumns="true").withWatermark("_timestamp", "1 hour")
    frame = frame.where("id % 100 = 7").select("id", "name", (F.col("id") * 2).alias("twice"))
    rows = penstock.take(frame, 25)
    assert [(row.id, row.twice) for row in rows] == [(100 * n + 7, 200 * n + 14) for n in range(25)]
    assert rows.to_arrow().schema.names == ["id", "name", "twice"]


@one_store
@pytest.mark.usefixtures("no_query")
def test_python_functions_and_exploded_rows_are_taken_too(
    spark: SparkSession, store: penstock.Store, store_url: str
) -> None:
    fill(make_queue(store), range(30))

    def doubled(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            yield pa.record_batch(
                [pa.array([2 * number for number in batch["id"].to_pylist()])], names=["id"]
            )

    frame = stream(spark, store_url).mapInArrow(doubled, "id long")
    assert sorted(ids(penstock.take(frame, 30))) == [2 * number for number in range(30)]
    exploded = stream(spark, store_url).select(F.explode(F.sequence(F.lit(0), F.col("id"))).alias("id"))
    assert ids(penstock.take(exploded, 4)) == [0, 0, 1, 0]


EVERY_KIND = pa.schema(
    [
        pa.field("whole", pa.int32(), nullable=False),
        ("real", pa.float32()),
        ("exact", pa.decimal128(12, 3)),
        ("truth", pa.bool_()),
        ("bytes", pa.binary()),
        ("day", pa.date32()),
        ("instant", pa.timestamp("us", tz="UTC")),
        ("wall", pa.timestamp("us")),
        ("several", pa.list_(pa.timestamp("us", tz="UTC"))),
        ("nested", pa.struct([("a", pa.int64()), ("b", pa.map_(pa.string(), pa.int32()))])),
    ]
)


@one_store
def test_values_of_every_type_equal_those_of_a_query(
    spark: SparkSession, store: penstock.Store, store_url: str
) -> None:
    instant = datetime(2026, 3, 29, 1, 30, 0, 123456, tzinfo=UTC)
    full = [
        1,
        0.5,
        Decimal("-1.250"),
        True,
        b"\x00\xff",
        date(1969, 7, 20),
        instant,
        instant.replace(tzinfo=None),
    ]
    full += [[instant, None], {"a": 1, "b": [("x", 1), ("y", None)]}]
    empty: list[Any] = [2, *[None] * 9]
    columns = [pa.array(values, field.type) for *values, field in zip(full, empty, EVERY_KIND, strict=True)]
    store.create_queue("kinds", EVERY_KIND).append(pa.table(columns, schema=EVERY_KIND))
    frame = stream(spark, store_url, "kinds", includeMetadataColumns="true").drop("_timestamp", "_queue")
    query = frame.writeStream.format("memory").queryName("kinds").trigger(availableNow=True).start()
    query.awaitTermination()
    wanted = spark.table("kinds")
    rows = penstock.take(frame, 2)
    assert rows.to_arrow().equals(wanted.toArrow())
    assert rows.schema == frame.schema
    assert list(rows) == wanted.collect()
    assert rows.to_df().collect() == wanted.collect()
    assert rows.to_pandas().equals(wanted.toPandas())


@one_store
def test_spark_reads_on_if_the_first_rows_do_not_suffice(
    spark: SparkSession, store: penstock.Store, store_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(penstock_reads, "_MOST", 3_000)
    orders = make_queue(store, partitions=2)
    fill(orders, range(4_000), each=1_000)
    fill(orders, range(10_000, 16_000), partition=1, each=1_000)
    frame = stream(spark, store_url).where("id % 1000 = 999")
    rows = penstock.take(frame, 10, timeout=60)
    assert sorted(ids(rows)) == [*range(999, 4_000, 1_000), *range(10_999, 16_000, 1_000)]
    assert rows.complete


@one_store
@pytest.mark.usefixtures("no_query")
def test_sparks_executors_start_after_the_rows_already_examined(
    spark: SparkSession, store: penstock.Store, store_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    orders = make_queue(store)
    fill(orders, range(100))
    found, clock = take.RowCollector(200), take.Deadline(60)
    frame = stream(spark, store_url)
    own = take.single_penstock_read(frame)
    assert own is not None
    monkeypatch.setattr(penstock_reads, "_MOST", 150)
    adding = threading.Thread(
        target=lambda: (wait_until(lambda: found.rows), fill(orders, range(100, 400)))  # type: ignore[func-returns-value]
    )
    adding.start()
    assert penstock_reads.LocalRead(frame, own, found, clock).collect() is None
    adding.join()
    assert [number for table in found.tables for number in table["id"].to_pylist()] == list(range(200))


@one_store
@pytest.mark.usefixtures("no_query")
def test_sparks_executors_search_a_backlog_for_rare_rows(
    spark: SparkSession, store: penstock.Store, store_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A few rows show how many more to read; the result is taken from all available rows, each of them
    once.
    """
    for name, value in {"_MOST": 200, "_ESTIMATE_ROWS": 100, "_FIRST_ROWS": 50}.items():
        monkeypatch.setattr(penstock_reads, name, value)
    orders = make_queue(store, partitions=2)
    for partition in range(2):
        fill(orders, range(partition * 5_000, partition * 5_000 + 4_000), partition=partition, each=1_000)
    rows = ids(penstock.take(stream(spark, store_url).where("id % 50 = 7"), 150))
    there = [number for number in [*range(4_000), *range(5_000, 9_000)] if number % 50 == 7]
    assert len(rows) == len(set(rows)) == 150
    assert set(rows) <= set(there)
    everything = ids(penstock.take(stream(spark, store_url).where("id % 50 = 7"), 161, timeout=3))
    assert sorted(everything) == there


@one_store
@pytest.mark.usefixtures("no_query")
def test_rows_already_found_are_returned_if_the_timeout_ends_the_second_read(
    spark: SparkSession, store: penstock.Store, store_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(penstock_reads, "_MOST", 1_500)

    def read_by_spark(read: penstock_reads.LocalRead, start: Any) -> Any:
        monkeypatch.setattr(read._deadline, "_seconds", 0.0)
        return start

    monkeypatch.setattr(penstock_reads.LocalRead, "_read_by_spark", read_by_spark)
    fill(make_queue(store), range(3_000), each=1_500)
    rows = penstock.take(stream(spark, store_url).where("id % 100 = 7"), 1_000)
    assert (ids(rows), rows.complete) == ([100 * n + 7 for n in range(10)], False)


def test_the_timeout_may_have_any_length() -> None:
    clock = Deadline(10**400)
    assert (clock.is_over, clock.at_most(0.5)) == (False, 0.5)
    assert clock.at_most(1e300) < threading.TIMEOUT_MAX


def test_the_larger_of_two_collections_of_the_same_rows_is_returned() -> None:
    found = RowCollector(10)
    found.add(pa.table({"id": [1]}))
    found.add(pa.table({"id": [2, 3]}))
    found.keep_first(1)
    found.add(pa.table({"id": [2]}))
    assert (found.missing, sum(table.num_rows for table in found.collected)) == (8, 3)
    found.add(pa.table({"id": [3, 4]}))
    assert pa.concat_tables(found.collected)["id"].to_pylist() == [1, 2, 3, 4]


@one_store
@pytest.mark.usefixtures("no_query")
def test_rows_that_arrive_meanwhile_are_waited_for(
    spark: SparkSession, store: penstock.Store, store_url: str
) -> None:
    orders = make_queue(store)
    fill(orders, range(3))
    adding = threading.Timer(0.3, fill, [orders, range(3, 10)])
    adding.start()
    rows = penstock.take(stream(spark, store_url), 5)
    adding.join()
    assert (ids(rows), rows.complete) == ([0, 1, 2, 3, 4], True)


@pytest.mark.usefixtures("no_query")
def test_at_the_timeout_the_rows_so_far_are_returned_and_marked_incomplete(
    spark: SparkSession, store: penstock.Store, store_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    fill(make_queue(store), range(3))
    rows = penstock.take(stream(spark, store_url), 5, timeout=3)
    assert (ids(rows), rows.complete) == ([0, 1, 2], False)
    assert "3 rows of 5: there were no more within 3" in rows.note
    assert rows.note in caplog.text
    nothing = penstock.take(stream(spark, store_url, startingOffsets="latest"), 5, timeout=0.1)
    assert (len(nothing), nothing.to_arrow().schema.names) == (0, ["id", "name"])


@one_store
def test_a_function_that_takes_too_long_is_interrupted(
    spark: SparkSession, store: penstock.Store, store_url: str
) -> None:
    fill(make_queue(store), range(3))

    def endless(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        import time

        while True:
            time.sleep(0.1)
            yield from ()

    rows = penstock.take(stream(spark, store_url).mapInArrow(endless, "id long"), 1, timeout=3)
    assert (len(rows), rows.complete) == (0, False)
    assert rows.seconds < 30


@one_store
def test_the_error_of_a_failing_function_is_raised(
    spark: SparkSession, store: penstock.Store, store_url: str
) -> None:
    fill(make_queue(store), range(3))

    @F.udf("long")
    def broken(_: int) -> int:
        raise ValueError("there is no such day")

    with pytest.raises(PythonException, match="there is no such day"):
        penstock.take(stream(spark, store_url).select(broken("id")), 1)


def standing(store: penstock.Store, consumer: str) -> dict[int, int]:
    return store.consumer(consumer).offsets("orders")


def test_taking_starts_at_the_consumers_position_and_does_not_move_it(
    spark: SparkSession, store: penstock.Store, store_url: str
) -> None:
    orders = make_queue(store, partitions=2)
    fill(orders, range(10))
    fill(orders, range(20, 30), partition=1)
    billing = store.create_consumer("billing")
    billing.register("orders", start={0: 4, 1: 9})
    before = billing.registration("orders")
    rows = penstock.take(stream(spark, store_url, consumer="billing"), 7)
    assert ids(rows) == [*range(4, 10), 29]
    assert billing.registration("orders") == before
    assert standing(store, "billing") == {0: 4, 1: 9}
    with pytest.raises(ConsumerNotFoundError):
        penstock.take(stream(spark, store_url, consumer="nobody"), 1)


@one_store
def test_taking_rows_does_not_disturb_a_running_query_of_the_consumer(
    spark: SparkSession, store: penstock.Store, store_url: str, tmp_path: Path
) -> None:
    orders = make_queue(store)
    make_queue(store, "big")
    fill(orders, range(10))
    store.create_consumer("billing").register("orders")
    pipeline = penstock.stream(
        spark, penstock.QueueSource("orders", consumer="billing", url=store_url)
    ).write(penstock.QueueSink("big", url=store_url))
    running = pipeline.start(checkpoint=tmp_path / "checkpoint")
    try:
        running.processAllAvailable()
        fill(orders, range(10, 20))
        frame = stream(spark, store_url, consumer="billing")
        counted = frame.groupBy("name").count()
        with pytest.raises(penstock.errors.OutputModeRefusedError):
            penstock.take(counted, 1)
        penstock.take(frame, 1, timeout=0.2)
        penstock.take(frame.dropDuplicates(["id"]), 1, timeout=1)
        fill(orders, range(20, 25))
        running.processAllAvailable()
        assert running.isActive
    finally:
        running.stop()
    assert standing(store, "billing") == {0: 25}
    assert store.queue("big").info().rows == 25


@one_store
def test_trimmed_rows_are_reported(spark: SparkSession, store: penstock.Store, store_url: str) -> None:
    orders = make_queue(store)
    fill(orders, range(10), each=2)
    store.create_consumer("billing").register("orders")
    orders.trim(0, 6)
    frame = stream(spark, store_url, consumer="billing")
    with pytest.raises(DataLostError, match=r"\[0, 6\)"):
        penstock.take(frame, 1)
    assert ids(penstock.take(stream(spark, store_url), 1)) == [6]


CONTRACT = penstock.ChangeContract(
    "id", row_version="version", carryover_rows=True, updates_as_delete_and_insert=True
)
DATA = pa.schema([("id", pa.int64()), ("version", pa.int64()), ("data", pa.string())])


@pytest.fixture
def feed(store: penstock.Store, store_url: str) -> penstock.QueueFeed:
    """Twenty commits that rewrite ten rows each, of which one has changed."""
    made = penstock.QueueFeed.create("feed", DATA, CONTRACT, store=store_url, partitions=2)
    versions = dict.fromkeys(range(10), 0)
    inserted = [{"id": id, "version": 0, "data": "0", "_change_type": "insert"} for id in versions]
    made.append_commit(0, START, inserted)
    for commit in range(1, 20):
        change = {"_change_type": "delete"}
        rows = [{"id": id, "version": old, "data": str(old), **change} for id, old in versions.items()]
        versions[commit % 10] = commit
        change = {"_change_type": "insert"}
        rows += [{"id": id, "version": new, "data": str(new), **change} for id, new in versions.items()]
        made.append_commit(commit, START + commit * SECOND, rows)
    return made


def content(frame: DataFrame | penstock.TakeResult) -> list[tuple[Any, ...]]:
    rows = frame.collect() if isinstance(frame, DataFrame) else frame
    return sorted(tuple(row) for row in rows)


@pytest.mark.few(2)
@pytest.mark.parametrize("rows", [5, 20_000])
@pytest.mark.parametrize("mode", ["none", "dropCarryovers"])
@one_store
@pytest.mark.usefixtures("no_query")
def test_a_change_feed_gives_the_same_rows_as_a_batch_read(
    spark: SparkSession,
    feed: penstock.QueueFeed,
    mode: str,
    rows: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(penstock_reads, "_RANGE_ROWS", rows)
    options: dict[str, Any] = {"deduplication_mode": mode, "compute_updates": mode != "none"}
    wanted = content(penstock.changes.read(spark, feed, **options))
    found = penstock.take(penstock.changes.read_stream(spark, feed, **options), len(wanted), timeout=60)
    assert content(found) == wanted
    first = penstock.take(penstock.changes.read_stream(spark, feed, starting_version=3, **options), 2)
    assert {row["_commit_version"] for row in first} == {3}


@one_store
def test_spark_reads_the_rest_of_a_change_feed_in_whole_commits(
    spark: SparkSession, feed: penstock.QueueFeed, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(penstock_reads, "_RANGE_ROWS", 1)
    monkeypatch.setattr(penstock_reads, "_MOST", 50)
    wanted = content(penstock.changes.read(spark, feed, compute_updates=True))
    found = penstock.take(penstock.changes.read_stream(spark, feed, compute_updates=True), len(wanted))
    assert content(found) == wanted


@pytest.mark.parametrize("bounds", [{"ending_version": 4}, {"ending_timestamp": START + 4 * SECOND}])
@one_store
def test_a_change_feed_with_an_end_version_stops_there(
    spark: SparkSession, feed: penstock.QueueFeed, bounds: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    start: dict[str, Any] = {next(iter(bounds)).replace("ending", "starting"): 0}
    if "ending_timestamp" in bounds:
        start = {"starting_timestamp": START}
    wanted = content(penstock.changes.read(spark, feed, **start, **bounds))
    frame = penstock.changes.read_stream(spark, feed, **start, **bounds)
    for timeout in (3, 10, 30):
        found = penstock.take(frame, 1_000, timeout=timeout)
        if len(found):
            break
    assert (content(found), found.complete) == (wanted, False)
    monkeypatch.setattr(penstock_reads, "_MOST", 30)
    assert content(penstock.take(frame, len(wanted))) == wanted


@one_store
def test_rows_of_a_column_that_is_never_null_are_taken_from_both_reads(
    spark: SparkSession, store: penstock.Store, store_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(penstock_reads, "_MOST", 3_000)
    numbers = pa.schema([pa.field("id", pa.int64(), nullable=False)])
    queue = store.create_queue("numbers", numbers, partitions=2)
    for start in range(0, 4_000, 1_000):
        queue.append(pa.table([range(start, start + 1_000)], schema=numbers), partition=0)
        queue.append(pa.table([range(start, start + 1_000)], schema=numbers), partition=1)
    rows = penstock.take(stream(spark, store_url, "numbers").where("id % 500 = 499"), 16)
    assert sorted(ids(rows)) == sorted([*range(499, 4_000, 500)] * 2)


@one_store
@pytest.mark.usefixtures("no_query")
def test_rows_without_columns_are_counted(spark: SparkSession, store: penstock.Store, store_url: str) -> None:
    fill(make_queue(store), range(10))
    rows = penstock.take(stream(spark, store_url).select(), 3)
    assert list(rows) == spark.range(10).select().take(3) == [(), (), ()]
    assert (rows.complete, rows.schema.fields, rows.to_arrow().shape) == (True, [], (3, 0))
    assert rows.to_df().count() == 3
    assert repr(rows).endswith("(3 rows)")
