"""Batch writes: all rows become visible in one step, or none do."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as fn

from penstock import Store
from tests.support.spark_queues import batch, column, fill, ids_in, make_queue


def write(frame: DataFrame, url: str, queue: str = "orders", mode: str = "append", **options: object) -> None:
    frame.write.format("penstock").options(url=url, **options).mode(mode).save(queue)


def numbers(spark: SparkSession, start: int, end: int, tasks: int = 2) -> DataFrame:
    return spark.range(start, end, 1, tasks).selectExpr("id", "concat('n', id) as name")


def test_the_rows_of_all_tasks_are_one_append(spark: SparkSession, store: Store, store_url: str) -> None:
    queue = make_queue(store, partitions=2)
    write(numbers(spark, 0, 10, tasks=4), store_url)
    write(numbers(spark, 10, 20, tasks=4), store_url)
    assert sorted(ids_in(queue)) == list(range(20))
    queue.compact()
    times = (
        batch(spark, store_url, includeMetadataColumns=True).groupBy("_timestamp").agg(fn.collect_set("id"))
    )
    assert sorted(sorted(row[1]) for row in times.collect()) == [list(range(10)), list(range(10, 20))]


def test_columns_are_matched_by_name(spark: SparkSession, store: Store, store_url: str) -> None:
    queue = make_queue(store)
    write(spark.sql("select 'x' as NAME, 1 as Id"), store_url)
    write(spark.sql("select 2L as id"), store_url)
    assert queue.read(0, 0).to_pylist() == [{"id": 1, "name": "x"}, {"id": 2, "name": None}]


def test_writing_no_rows_appends_nothing(spark: SparkSession, store: Store, store_url: str) -> None:
    queue = make_queue(store)
    write(numbers(spark, 0, 0), store_url)
    write(numbers(spark, 0, 10).where("id < 0"), store_url)
    assert queue.info().rows == 0
    assert store.info().staged_segments == 0


def test_a_failing_task_leaves_nothing_behind(spark: SparkSession, store: Store, store_url: str) -> None:
    queue = make_queue(store)
    # One task: of several, another one may still be writing when the first one's failure is cleaned up.
    broken = numbers(spark, 0, 10, tasks=1).mapInArrow(_fail_late, "id long, name string")
    with pytest.raises(Exception, match="deliberately"):
        write(broken, store_url, maxRowsPerWrite=1)
    assert queue.info().rows == 0
    assert store.info().staged_segments == 0, "an aborted write clears up"


def _fail_late(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    for found in batches:
        yield found
        if 9 in found.column("id").to_pylist():
            raise ValueError("deliberately")


@pytest.mark.parametrize(
    ("mode", "words"),
    [("overwrite", "append-only"), ("error", "Append"), ("ignore", "Append")],
)
def test_other_modes_are_refused(
    spark: SparkSession, store: Store, store_url: str, mode: str, words: str
) -> None:
    queue = make_queue(store)
    fill(queue, [1])
    with pytest.raises(Exception, match=words):
        write(numbers(spark, 0, 3), store_url, mode=mode)
    assert ids_in(queue) == [1]


def test_writes_are_split_into_segments_of_bounded_size(
    spark: SparkSession, store: Store, store_url: str
) -> None:
    queue = make_queue(store)
    write(numbers(spark, 0, 100, tasks=1), store_url, maxRowsPerWrite=3)
    info = queue.info().partitions[0]
    assert ids_in(queue) == list(range(100)), "the order of a task's rows stays"
    assert info.segments >= 33


def test_many_small_segments_are_merged_in_the_background(
    spark: SparkSession, store: Store, store_url: str
) -> None:
    from tests.support.waiting import wait_until

    queue = make_queue(store)
    write(numbers(spark, 0, 70, tasks=1), store_url, maxRowsPerWrite=1)
    wait_until(lambda: queue.info().partitions[0].segments < 70, message="merged")
    assert ids_in(queue) == list(range(70))


def test_equal_keys_share_a_partition(spark: SparkSession, store: Store, store_url: str) -> None:
    queue = make_queue(store, partitions=3, key=["name"])
    frame = spark.range(0, 60, 1, 4).selectExpr("id", "concat('k', id % 7) as name")
    write(frame, store_url)
    queue.append([{"id": 100 + i, "name": f"k{i}"} for i in range(7)])
    homes = (
        batch(spark, store_url, includeMetadataColumns=True)
        .groupBy("name")
        .agg(fn.count_distinct("_partition").alias("homes"), fn.count("*").alias("rows"))
    )
    assert {row.homes for row in homes.collect()} == {1}
    assert len({row._partition for row in batch(spark, store_url, includeMetadataColumns=True).collect()}) > 1


def test_keys_keep_their_partition_when_the_queue_grows(
    spark: SparkSession, store: Store, store_url: str
) -> None:
    queue = make_queue(store, partitions=2, key=["name"])
    frame = spark.range(0, 60, 1, 2).selectExpr("id", "concat('k', id % 9) as name")
    write(frame, store_url)
    queue.add_partitions(3)
    write(frame.selectExpr("id + 100 as id", "name"), store_url)
    homes = (
        batch(spark, store_url, includeMetadataColumns=True)
        .groupBy("name")
        .agg(fn.count_distinct("_partition"))
    )
    assert {row[1] for row in homes.collect()} == {1}


@pytest.mark.parametrize(
    ("query", "words"),
    [
        (
            "select 1L as idd",
            "MISMATCH.UNKNOWN_COLUMN] queue 'orders' has no column 'idd'. Did you mean 'id'",
        ),
        (
            "select '1' as id",
            "column 'id' of queue 'orders' is int64, but the DataFrame has string: cast it first",
        ),
        ("select 1.5D as id", "cast it first"),
        ("select 1L as id, struct(1) as name", "cast it first"),
    ],
)
def test_a_schema_that_does_not_match_is_refused(
    spark: SparkSession, tmp_path: Path, query: str, words: str
) -> None:
    import penstock

    url = f"sqlite:///{tmp_path}/penstock.db"
    with penstock.connect(url) as store:
        queue = make_queue(store)
        with pytest.raises(Exception, match=r"SCHEMA_MISMATCH\.(COLUMN_TYPE|UNKNOWN_COLUMN)\]") as caught:
            write(spark.sql(query), url)
        assert words in str(caught.value)
        assert queue.info().rows == 0


def test_nulls_in_a_required_column_are_refused(spark: SparkSession, store: Store, store_url: str) -> None:
    schema = pa.schema([pa.field("id", pa.int64(), nullable=False), pa.field("name", pa.string())])
    queue = store.create_queue("strict", schema)
    with pytest.raises(
        Exception, match=r"MISSING_COLUMN\].*may not be null, and the DataFrame has no such column"
    ):
        write(spark.sql("select 'a' as name"), store_url, "strict")
    with pytest.raises(Exception, match=r"SCHEMA_MISMATCH.NULL_VALUE") as caught:
        write(spark.sql("select if(id = 3, null, id) as id from range(5)"), store_url, "strict")
    assert "'id'" in str(caught.value)
    assert queue.info().rows == 0
    write(spark.sql("select if(id = 9, null, id) as id from range(5)"), store_url, "strict")
    assert sorted(ids_in(queue)) == [0, 1, 2, 3, 4]
    assert batch(spark, store_url, "strict").schema["id"].nullable is False


def test_nested_columns_are_matched_by_name(spark: SparkSession, store: Store, store_url: str) -> None:
    queue = store.create_queue(
        "nested", pa.schema([("s", pa.struct([("a", pa.int64()), ("b", pa.string()), ("c", pa.int32())]))])
    )
    write(spark.sql("select named_struct('b', 'x', 'a', 1) as s"), store_url, "nested")
    assert queue.read(0, 0).to_pylist() == [{"s": {"a": 1, "b": "x", "c": None}}]
    with pytest.raises(Exception, match="cast it first"):
        write(spark.sql("select named_struct('b', 'x', 'z', 1) as s"), store_url, "nested")


ALL_TYPES = """
select
    cast(n as boolean) as a_boolean, cast(n as tinyint) as a_tiny, cast(n as smallint) as a_small,
    cast(n as int) as an_int,
    cast(n as bigint) as a_big, cast(n as float) / 3 as a_float, cast(n as double) / 3 as a_double,
    double('NaN') as a_nan, cast(n as decimal(38, 10)) / 7 as a_wide, cast(n as decimal(5, 2)) as a_decimal,
    concat('é☂', n) as a_string, cast(concat('b', n) as binary) as a_binary,
    date'1582-10-15' + n as a_date, timestamp'1582-10-15 00:00:00.000001Z' as a_timestamp,
    timestamp_ntz'2024-03-10 02:30:00.123456' as an_ntz, make_dt_interval(n, 1, 2, 3.000004) as an_interval,
    array(n, null, 3) as an_array, map('k', n, 'l', null) as a_map,
    named_struct('x', n, 'y', array(named_struct('z', 'deep'))) as a_struct,
    array(map(n, named_struct('d', cast(n as decimal(10, 3))))) as nested,
    parse_json(concat('{"v": [', n, ', null, "x"]}')) as a_variant,
    cast(null as string) as a_null
from (select cast(id as int) as n from range(3))
"""


def test_every_type_is_read_back_unchanged(spark: SparkSession, store: Store, store_url: str) -> None:
    frame = spark.sql(ALL_TYPES)
    nothing = frame.select(
        *[fn.when(fn.lit(False), fn.col(name)).alias(name) for name in frame.columns]
    ).limit(1)
    rows = frame.unionByName(nothing)
    store.create_queue("types", rows.schema)
    write(rows, store_url, "types")
    found = batch(spark, store_url, "types")
    assert found.schema.simpleString() == rows.schema.simpleString()
    assert _texts(found) == _texts(rows)
    assert len(_texts(found)) == 4


def _texts(frame: DataFrame) -> list[str]:
    return sorted(str(row) for row in frame.withColumn("a_variant", fn.to_json("a_variant")).collect())


def test_rows_can_be_copied_from_queue_to_queue(spark: SparkSession, store: Store, store_url: str) -> None:
    source = make_queue(store, partitions=2)
    fill(source, range(10), each=3)
    make_queue(store, "copy")
    write(batch(spark, store_url), store_url, "copy")
    assert sorted(column(batch(spark, store_url, "copy"))) == list(range(10))
