"""A queue and the table that it is exported to, read as one: each row once at any time."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest
from deltalake import write_deltalake
from pyiceberg.types import StringType
from pyspark.sql import DataFrame, SparkSession

import penstock
from penstock.errors import TableRefusedError
from tests.export.lakes import DeltaLake, IcebergLake, Lake

SCHEMA = pa.schema([pa.field("n", pa.int64(), nullable=False), ("ä `b`.c", pa.list_(pa.string()))])


@pytest.fixture
def queue(store: penstock.Store) -> penstock.Queue:
    return store.create_queue("orders", SCHEMA, partitions=2)


@pytest.fixture
def delta(store_url: str, queue: penstock.Queue, tmp_path: Path) -> penstock.QueueExport:
    return penstock.QueueExport("orders", store_url, f"delta://{tmp_path}/lake")


@pytest.fixture
def export(store_url: str, queue: penstock.Queue, lake: Lake) -> penstock.QueueExport:
    return penstock.QueueExport("orders", store_url, lake.url, table=lake.named("orders"))


def _append(queue: penstock.Queue, n: int) -> None:
    queue.append([{"n": n, "ä `b`.c": [str(n), None]}], n % queue.partitions)


def _numbers(frame: DataFrame) -> list[int]:
    return sorted(row["n"] for row in frame.collect())


def _both(export: penstock.QueueExport, lake: Lake) -> list[int]:
    version, newer = export.newer_rows()
    found: list[int] = newer.read_all()["n"].to_pylist()
    if version is not None:
        found += lake.rows("orders", version)["n"].to_pylist()
    return sorted(found)


@pytest.mark.few(2)
def test_each_row_is_there_once_before_and_after_an_export(
    spark: SparkSession, queue: penstock.Queue, export: penstock.QueueExport, lake: Lake
) -> None:
    for n in range(6):
        _append(queue, n)
        assert _numbers(export.frame(spark)) == _both(export, lake) == list(range(n + 1))
        if n in (2, 4):
            export.run()
            assert _numbers(export.frame(spark)) == _both(export, lake) == list(range(n + 1))


def test_columns_that_came_later_are_null_in_older_files(
    spark: SparkSession, queue: penstock.Queue, export: penstock.QueueExport
) -> None:
    _append(queue, 0)
    export.run()
    queue.add_columns(pa.schema([("more", pa.string())]))
    queue.append([{"n": 1, "more": "x"}])
    export.run()
    queue.append([{"n": 2, "more": "y"}])
    rows = export.frame(spark).orderBy("n").collect()
    assert [(row["n"], row["ä `b`.c"], row["more"]) for row in rows] == [
        (0, ["0", None], None),
        (1, None, "x"),
        (2, None, "y"),
    ]


def test_the_columns_of_others_are_kept(
    spark: SparkSession, queue: penstock.Queue, delta: penstock.QueueExport, tmp_path: Path
) -> None:
    rows = pa.table({"n": pa.array([9], pa.int64()), "ä `b`.c": pa.array([None], pa.list_(pa.string()))})
    write_deltalake(f"{tmp_path}/lake/orders", rows.append_column("by", pa.array(["them"])))
    _append(queue, 0)
    delta.run()
    _append(queue, 1)
    found = {row["n"]: row["by"] for row in delta.frame(spark).collect()}
    assert found == {9: "them", 0: None, 1: None}


def test_a_partitioned_table_is_left_to_engines_that_know_such(
    spark: SparkSession, queue: penstock.Queue, delta: penstock.QueueExport, tmp_path: Path
) -> None:
    rows = pa.table({"n": pa.array([9], pa.int64()), "ä `b`.c": pa.array([None], pa.list_(pa.string()))})
    write_deltalake(f"{tmp_path}/lake/orders", rows, partition_by=["n"])
    _append(queue, 0)
    delta.run()
    with pytest.raises(TableRefusedError, match="partition columns"):
        delta.frame(spark)
    assert _both(delta, DeltaLake(tmp_path)) == [0, 9]


def test_rows_and_files_that_others_have_changed_are_read_as_they_are_now(
    spark: SparkSession, queue: penstock.Queue, store_url: str, tmp_path: Path
) -> None:
    lake = IcebergLake(tmp_path)
    export = penstock.QueueExport("orders", store_url, lake.url, table="shop.orders")
    for n in range(3):
        _append(queue, n)
        export.run()
    table = lake.catalog.load_table("shop.orders")
    table.delete("n = 1")
    with table.update_schema() as update:
        update.add_column("by", StringType())
    with table.update_spec() as update:
        update.add_identity("n")
    _append(queue, 3)
    export.run()
    _append(queue, 4)
    found = {row["n"]: (row["ä `b`.c"], row["by"]) for row in export.frame(spark).collect()}
    assert found == {n: ([str(n), None], None) for n in (0, 2, 3, 4)}


def test_columns_of_other_types_are_refused_by_name(
    spark: SparkSession, queue: penstock.Queue, store_url: str, tmp_path: Path
) -> None:
    lake = IcebergLake(tmp_path)
    export = penstock.QueueExport("orders", store_url, lake.url, table="shop.orders")
    _append(queue, 0)
    export.run()
    table = lake.catalog.load_table("shop.orders")
    with table.update_schema(allow_incompatible_changes=True) as update:
        update.delete_column("n")
    with table.update_schema() as update:
        update.add_column("n", StringType())
    table.append(pa.table({"ä `b`.c": pa.array([["x"]], pa.list_(pa.string())), "n": ["text"]}))
    with pytest.raises(Exception, match="READ_WITH_ICEBERG"):
        export.frame(spark).collect()


@pytest.mark.parametrize("lake", ["iceberg"], indirect=True)
def test_another_queue_gives_the_table_wider_types(
    spark: SparkSession, store: penstock.Store, store_url: str, lake: Lake
) -> None:
    schema = pa.schema([("n", pa.int32()), ("x", pa.float32()), ("d", pa.decimal128(6, 2))])
    queues = [store.create_queue(name, schema) for name in ("wide", "narrow")]
    exports = [
        penstock.QueueExport(queue.name, store_url, lake.url, table=lake.named("both"), consumer=queue.name)
        for queue in queues
    ]
    for number, (queue, export) in enumerate(zip(queues, exports, strict=True)):
        queue.append([{"n": number, "x": 0.5, "d": 1}])
        export.run()
    queues[0].widen_columns([("n", pa.int64()), ("x", pa.float64()), ("d", pa.decimal128(12, 2))])
    queues[0].append([{"n": 1 << 40, "x": 0.1, "d": 10**9}])
    exports[0].run()
    queues[1].append([{"n": 2, "x": 0.25, "d": 2}])
    expected = [(0, 0.5, 1), (1, 0.5, 1), (2, 0.25, 2), (1 << 40, 0.1, 10**9)]
    for _ in range(2):
        assert sorted(map(tuple, exports[1].frame(spark).collect())) == expected
        exports[1].run()
    assert sorted(map(tuple, exports[0].frame(spark).collect())) == expected
