"""Batch reads: where they start and end, what they return, what they refuse."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession
from pyspark.sql import functions as fn

from penstock import Store
from penstock.spark.ranges import MAX_TASKS
from tests.support.spark_queues import batch, column, fill, make_queue, table
from tests.support.waiting import wait_until


def test_a_batch_read_returns_all_rows_of_all_partitions(
    spark: SparkSession, store: Store, store_url: str
) -> None:
    queue = make_queue(store, partitions=3)
    for partition in range(3):
        fill(queue, range(partition * 10, partition * 10 + 10), partition=partition, each=4)
    frame = batch(spark, store_url)
    assert frame.schema.simpleString() == "struct<id:bigint,name:string>"
    assert sorted(tuple(row) for row in frame.collect()) == [(i, f"n{i}") for i in range(30)]


def test_an_empty_queue_returns_no_rows(spark: SparkSession, store: Store, store_url: str) -> None:
    make_queue(store, partitions=2)
    frame = batch(spark, store_url, includeMetadataColumns=True)
    assert frame.collect() == []
    assert frame.count() == 0


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"startingOffsets": "earliest", "endingOffsets": "latest"}, [0, 1, 2, 3, 10, 11, 12, 13]),
        ({"startingOffsets": "latest"}, []),
        ({"endingOffsets": "earliest"}, []),
        ({"startingOffsets": '{"0": 2}'}, [2, 3, 10, 11, 12, 13]),
        ({"startingOffsets": '{"0": 2, "1": 4}'}, [2, 3]),
        ({"endingOffsets": '{"1": 1}'}, [0, 1, 2, 3, 10]),
        ({"startingOffsets": '{"1": 3}', "endingOffsets": '{"0": 1, "1": 3}'}, [0]),
    ],
)
def test_a_read_starts_and_ends_at_the_given_positions(
    spark: SparkSession, tmp_path: Path, options: dict[str, str], expected: list[int]
) -> None:
    url = f"sqlite:///{tmp_path}/penstock.db"
    with _two_partitions(url):
        assert sorted(column(batch(spark, url, **options))) == expected


def _two_partitions(url: str) -> Store:
    import penstock

    store = penstock.connect(url)
    queue = make_queue(store, partitions=2)
    fill(queue, range(4), partition=0, each=3)
    fill(queue, range(10, 14), partition=1, each=3)
    return store


def test_a_read_can_start_at_a_time_inside_a_merged_segment(
    spark: SparkSession, store: Store, store_url: str
) -> None:
    queue = make_queue(store)
    fill(queue, [1, 2])
    first = _last_time(store)
    wait_until(lambda: datetime.now(UTC) > first)
    fill(queue, [3, 4])
    second = _last_time(store)
    queue.compact()
    assert column(batch(spark, store_url, startingTimestamp=second.isoformat())) == [3, 4]
    assert column(batch(spark, store_url, startingTimestamp=first.isoformat())) == [1, 2, 3, 4]
    later = int(datetime(2100, 1, 1, tzinfo=UTC).timestamp() * 1000)
    assert column(batch(spark, store_url, startingTimestamp=later)) == []


def _last_time(store: Store) -> datetime:
    found = store.queue("orders").info().partitions[0].last_append
    assert found is not None
    return found


def test_a_read_can_start_at_a_consumers_offsets(spark: SparkSession, store: Store, store_url: str) -> None:
    queue = make_queue(store, partitions=2)
    fill(queue, range(5))
    store.create_consumer("billing").register("orders")
    store.consumer("billing").advance("orders", 0, old=0, new=3)
    fill(queue, [9], partition=1)
    assert column(batch(spark, store_url, consumer="billing")) == [3, 4, 9]
    assert column(batch(spark, store_url, consumer="billing", startingOffsets="consumer")) == [3, 4, 9]
    assert store.consumer("billing").offsets("orders") == {0: 3, 1: 0}, "a batch read moves nothing"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"startingOffsets": '{"0": 99}'}, ["POSITION.PAST_END]", "rows up to 4", "99"]),
        ({"startingOffsets": '{"7": 0}'}, ["POSITION.UNKNOWN_PARTITION]", "partitions 0 to 1", "7"]),
        ({"endingOffsets": '{"0": 99}'}, ["POSITION.PAST_END]", "rows up to 4", "99"]),
        (
            {"startingOffsets": '{"0": 3}', "endingOffsets": '{"0": 1}'},
            ["POSITION.BACKWARDS]", "before row", "exchange"],
        ),
        ({"consumer": "biling"}, ["no consumer 'biling'", "Did you mean 'billing'"]),
        ({"queue": "orders", "consumer": "idle"}, ["not registered"]),
    ],
)
def test_invalid_positions_are_refused(
    spark: SparkSession, tmp_path: Path, options: dict[str, str], words: list[str]
) -> None:
    url = f"sqlite:///{tmp_path}/penstock.db"
    with _two_partitions(url) as store:
        store.create_consumer("billing")
        store.create_consumer("idle")
        with pytest.raises(Exception, match=r"penstock\.errors") as caught:
            batch(spark, url, **options).collect()
    for word in words:
        assert word in str(caught.value)


def test_trimmed_rows_fail_the_read_or_are_skipped(spark: SparkSession, store: Store, store_url: str) -> None:
    queue = make_queue(store)
    fill(queue, range(10), each=2)
    store.create_consumer("slow").register("orders")
    queue.trim(0, before=5)
    assert column(batch(spark, store_url)) == list(range(5, 10)), "earliest is what is there"
    for options in ({"startingOffsets": '{"0": 3}'}, {"consumer": "slow"}):
        with pytest.raises(Exception, match="DATA_LOST") as caught:
            batch(spark, store_url, **options).collect()
        assert "rows [" in str(caught.value)
        assert ", 5) of queue 'orders', partition 0" in str(caught.value)
        assert "failOnDataLoss=false" in str(caught.value)
        assert column(batch(spark, store_url, failOnDataLoss=False, **options)) == list(range(5, 10))


def test_a_read_is_planned_once(spark: SparkSession, store: Store, store_url: str) -> None:
    """A DataFrame stands for the same rows in each action; rows trimmed meanwhile are reported as lost, not
    skipped.
    """
    queue = make_queue(store, partitions=2, key=["id"])
    queue.append(table(range(50)))
    strict, lenient = batch(spark, store_url), batch(spark, store_url, failOnDataLoss=False)
    assert strict.count() == lenient.count() == 50
    queue.append(table(range(50)))
    assert strict.count() == 50
    assert batch(spark, store_url).count() == 100
    queue.trim(0, before=1)
    assert lenient.count() == 49
    with pytest.raises(Exception, match="DATA_LOST"):
        strict.count()


def test_metadata_columns_are_returned_on_request(spark: SparkSession, store: Store, store_url: str) -> None:
    queue = make_queue(store, partitions=2)
    fill(queue, [1, 2], partition=1)
    first = datetime.now(UTC)
    wait_until(lambda: datetime.now(UTC) > first)
    fill(queue, [3], partition=1)
    before = _service(spark, store_url)
    queue.compact()
    assert _service(spark, store_url) == before, "a merged segment tells the times of its appends"
    places = [(number, "orders", queue.record.generation, 1, index) for index, number in enumerate((1, 2, 3))]
    assert [row[:5] for row in before] == places
    times = [row[5] for row in before]
    assert times[0] == times[1] < times[2]
    only = batch(spark, store_url, includeMetadataColumns=True).select("_row_index").collect()
    assert sorted(row[0] for row in only) == [0, 1, 2]


def _service(spark: SparkSession, url: str) -> list[tuple[Any, ...]]:
    frame = batch(spark, url, includeMetadataColumns=True).drop("name")
    return sorted(tuple(row) for row in frame.collect())


def test_a_queue_may_have_columns_named_like_metadata_columns(
    spark: SparkSession, store: Store, store_url: str
) -> None:
    import pyarrow as pa

    store.create_queue("own", pa.schema([("_Row_Index", pa.int64())])).append([{"_Row_Index": 7}])
    assert column(batch(spark, store_url, "own"), "_Row_Index") == [7]
    with pytest.raises(Exception, match="leave the option out"):
        batch(spark, store_url, "own", includeMetadataColumns=True)


def test_a_schema_given_by_the_user_is_a_projection(
    spark: SparkSession, store: Store, store_url: str
) -> None:
    fill(make_queue(store), [1, 2])

    def read(schema: str, **options: object) -> list[tuple[Any, ...]]:
        reader = spark.read.format("penstock").options(url=store_url, **options).schema(schema)
        return [tuple(row) for row in reader.load("orders").collect()]

    assert read("name string") == [("n1",), ("n2",)]
    assert read("name string, id bigint") == [("n1", 1), ("n2", 2)]
    assert read("_row_index bigint", includeMetadataColumns=True) == [(0,), (1,)]
    assert read("_partition int, name string", includeMetadataColumns=True) == [(0, "n1"), (0, "n2")]
    for schema, words in (
        ("nme string", r"SCHEMA_MISMATCH.UNKNOWN_COLUMN\].*Did you mean 'name'"),
        ("id int", r"SCHEMA_MISMATCH.COLUMN_TYPE\].*read it as that, then cast it"),
        ("name string not null", r"SCHEMA_MISMATCH.NOT_NULL\].*leave out NOT NULL"),
        ("_row_index bigint", r"SCHEMA_MISMATCH.UNKNOWN_COLUMN\].*does not exist"),
    ):
        with pytest.raises(Exception, match=words):
            read(schema)


def test_large_partitions_are_split_into_tasks(spark: SparkSession, store: Store, store_url: str) -> None:
    queue = make_queue(store, partitions=2)
    fill(queue, range(10), each=3)
    fill(queue, range(10, 12), partition=1)
    frame = batch(spark, store_url, rowsPerTask=4)
    tasks = (
        frame.withColumn("task", fn.spark_partition_id()).groupBy("task").agg(fn.collect_list("id")).collect()
    )
    assert sorted(sorted(row[1]) for row in tasks) == [[0, 1, 2], [3, 4, 5], [6, 7, 8, 9], [10, 11]]


def test_partitions_with_few_rows_share_tasks(spark: SparkSession, store: Store, store_url: str) -> None:
    queue = make_queue(store, partitions=7)
    for partition in range(7):
        fill(queue, range(10 * partition, 10 * partition + 2), each=1, partition=partition)
    frame = batch(spark, store_url, maxTasks=3, includeMetadataColumns=True)
    tasks = frame.groupBy(fn.spark_partition_id()).agg(fn.collect_list("id")).collect()
    assert sorted(row[1] for row in tasks) == [[0, 1, 10, 11, 20, 21], [30, 31, 40, 41], [50, 51, 60, 61]]
    assert frame.where("id = 10 * _partition + _row_index").count() == 14
    assert frame.where("_partition = 4 and _row_index > 0").select("id").collect() == [(41,)]
    queue.trim(1, 2)
    queue.trim(2, 1)
    left = batch(spark, store_url, maxTasks=1, startingOffsets='{"1": 0, "2": 0}', failOnDataLoss="false")
    assert left.count() == 11


def test_a_read_of_very_many_tasks_is_refused(spark: SparkSession, store: Store, store_url: str) -> None:
    fill(make_queue(store), range(MAX_TASKS + 1))
    with pytest.raises(Exception, match=r"INVALID_OPTION.TOO_MANY_TASKS\].*raise rowsPerTask"):
        batch(spark, store_url, rowsPerTask=1).count()
    assert batch(spark, store_url, rowsPerTask=MAX_TASKS).count() == MAX_TASKS + 1


def test_many_small_appends_are_read_in_few_batches(
    spark: SparkSession, store: Store, store_url: str
) -> None:
    queue = make_queue(store)
    fill(queue, range(100), each=1)
    counted = batch(spark, store_url).mapInArrow(_count_batches, "batches int").collect()
    assert [row[0] for row in counted] == [1]


def _count_batches(batches: Any) -> Any:
    import pyarrow as pa

    yield pa.RecordBatch.from_pydict({"batches": pa.array([sum(1 for _ in batches)], pa.int32())})
