"""Iceberg tables that exist before a query writes to them: partitions, other columns, and what is refused."""

from __future__ import annotations

import json
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from itertools import product
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyiceberg.partitioning import PartitionField, PartitionSpec
from pyiceberg.schema import Schema
from pyiceberg.table import Table
from pyiceberg.table.sorting import SortField, SortOrder
from pyiceberg.transforms import (
    BucketTransform,
    DayTransform,
    HourTransform,
    IdentityTransform,
    MonthTransform,
    Transform,
    YearTransform,
)
from pyiceberg.types import (
    DateType,
    DecimalType,
    IntegerType,
    LongType,
    NestedField,
    StringType,
    StructType,
    TimestampType,
    TimestamptzType,
    UUIDType,
)
from pyiceberg.utils.datetime import datetime_to_micros
from pyspark.sql import types as spark

from penstock.errors import CommitRefusedError, SchemaMismatchError, TableRefusedError
from penstock.tables.iceberg.partitioning import transform
from tests.tables.iceberg.driver import ROWS, Driver

EVENTS = (
    spark.StructType()
    .add("k", spark.LongType())
    .add("at", spark.TimestampType())
    .add("day", spark.DateType())
    .add("kind", spark.StringType())
)
MOMENT = datetime(2026, 1, 1, 22, tzinfo=UTC)


def table(
    folder: Path,
    *fields: NestedField,
    spec: PartitionSpec | None = None,
    name: str = "t",
    **more: Any,
) -> Table:
    """Create a table before its query does."""
    catalog = Driver(folder, name="another").catalog
    options = {"partition_spec": spec} if spec is not None else {}
    return catalog.create_table(
        ("shop", name), Schema(*fields), properties={"format-version": "2"}, **options, **more
    )


def events(folder: Path, *parts: PartitionField) -> Table:
    return table(
        folder,
        NestedField(1, "k", LongType()),
        NestedField(2, "at", TimestamptzType()),
        NestedField(3, "day", DateType()),
        NestedField(4, "kind", StringType()),
        spec=PartitionSpec(*parts),
    )


def event(k: int, hours: int = 0, kind: str | None = "a") -> tuple[Any, ...]:
    at = MOMENT + timedelta(hours=hours)
    return k, at, at.date(), kind


@pytest.mark.parametrize(
    "parts",
    [
        [(4, IdentityTransform())],
        [(2, DayTransform()), (4, IdentityTransform())],
        [(3, IdentityTransform()), (2, YearTransform())],
    ],
    ids=["identity", "day and identity", "date and year"],
)
def test_rows_are_written_by_partition_and_updated_across_partitions(
    tmp_path: Path, parts: list[tuple[int, Any]]
) -> None:
    fields = [PartitionField(source, 1000 + n, each, f"p{n}") for n, (source, each) in enumerate(parts)]
    events(tmp_path, *fields)
    driver = Driver(tmp_path, "update", "k", schema=EVENTS)
    rows = [event(1), event(2, 5), event(3, 9000, "b/ ü=%25"), event(4, 1, None), event(5, 1, "")]
    driver.write(0, rows[:3], rows[3:])
    assert driver.rows() == sorted(rows, key=repr)
    moved = [event(2, 20, "c"), event(4, 1, "was null"), event(6)]
    driver.write(1, moved)
    expected = sorted([rows[0], rows[2], rows[4], *moved], key=repr)
    assert driver.rows() == expected
    found = driver.table.scan(row_filter="kind = 'c'").to_arrow()
    assert found["k"].to_pylist() == [2]
    for task in driver.table.scan().plan_files():
        stored = pq.read_table(Path(task.file.file_path.removeprefix("file://")), partitioning=None)
        if parts[0][0] == 4:
            assert set(stored["kind"].to_pylist()) == {task.file.partition[0]}
    driver.write(2, [event(9)])
    Driver(tmp_path, "complete", app_id="other", schema=EVENTS).write(0, [event(1), event(1, 5000, "z")])
    assert len(driver.rows()) == 2
    assert driver.orphans == []


@pytest.mark.parametrize("part", [YearTransform(), MonthTransform(), DayTransform(), HourTransform()])
def test_the_first_and_the_last_time_are_keys_by_which_a_table_is_partitioned(
    tmp_path: Path, part: Transform[Any, Any]
) -> None:
    events(tmp_path, PartitionField(2, 1000, part, "p"))
    driver = Driver(tmp_path, "update", "k", "at", schema=EVENTS)
    first, last = datetime(1, 1, 1, tzinfo=UTC), datetime(9999, 12, 31, 23, 59, 59, 999_999, tzinfo=UTC)
    times = [first, MOMENT, last]
    for batch_id, (kind, at) in enumerate(product(("old", "new"), times)):
        driver.write(batch_id, [(1, at, None, kind)])
    assert [row[3] for row in driver.rows()] == ["new"] * 3


def test_rows_of_an_older_partitioning_are_rewritten_by_the_new_one(tmp_path: Path) -> None:
    made = events(tmp_path)
    driver = Driver(tmp_path, "update", "k", schema=EVENTS)
    driver.write(0, [event(1), event(2, kind="b"), event(3, kind="c")])
    with made.refresh().update_spec() as update:
        update.add_field("kind", IdentityTransform(), "kind")
    driver.write(1, [event(3, kind="a")])
    assert driver.rows() == sorted([event(1), event(2, kind="b"), event(3, kind="a")], key=repr)
    assert sorted(task.file.partition[0] for task in driver.table.scan().plan_files()) == ["a", "a", "b"]


def test_more_partitions_than_files_that_are_open_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.tables.iceberg.data_files._MAX_OPEN_FILES", 2)
    events(tmp_path, PartitionField(4, 1000, IdentityTransform(), "kind"))
    driver = Driver(tmp_path, schema=EVENTS)
    rows = [event(number, kind="abcdef"[number % 6]) for number in range(60)]
    driver.write(0, rows)
    assert driver.rows() == sorted(rows, key=repr)


def test_large_files_are_divided(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.tables.iceberg.data_files._ROW_GROUP_ROWS", 1)
    driver = Driver(tmp_path)
    driver.table.transaction().set_properties(
        {"write.target-file-size-bytes": "1", "write.parquet.compression-codec": "uncompressed"}
    ).commit_transaction()
    driver.write(0, [(1, "a")], [(2, "b")])
    assert len(list(driver.table.scan().plan_files())) == 2
    assert driver.rows() == [(1, "a"), (2, "b")]


def test_buckets_need_a_library_of_their_own(tmp_path: Path) -> None:
    events(tmp_path, PartitionField(1, 1000, BucketTransform(4), "bucket"))
    try:
        import pyiceberg_core  # noqa: F401
    except ModuleNotFoundError:
        with pytest.raises(TableRefusedError, match="install pyiceberg-core") as caught:
            Driver(tmp_path, schema=EVENTS)
        assert caught.value.condition == "TABLE_REFUSED.PARTITIONING"
    else:
        driver = Driver(tmp_path, schema=EVENTS)
        driver.write(0, [event(1), event(2)])
        assert len(driver.rows()) == 2


def test_a_value_of_a_partition_that_has_too_many_digits_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As -99.99 has, truncated to tens; this transform needs another library."""
    spec = PartitionSpec(PartitionField(2, 1000, IdentityTransform(), "p"))
    table(tmp_path, NestedField(1, "k", LongType()), NestedField(2, "d", DecimalType(4, 2)), spec=spec)
    truncated = pa.chunked_array([pa.array([Decimal("-100.00")], pa.decimal128(5, 2))])
    monkeypatch.setattr(
        "penstock.tables.iceberg.partitioning.transform", lambda *_: lambda column: truncated[: len(column)]
    )
    schema = spark.StructType().add("k", spark.LongType()).add("d", spark.DecimalType(4, 2))
    driver = Driver(tmp_path, schema=schema)
    with pytest.raises(TableRefusedError, match="precision") as caught:
        driver.write(0, [(1, Decimal("-99.99"))])
    assert caught.value.condition == "TABLE_REFUSED.ICEBERG"
    assert not [name for name in driver.orphans if name.endswith(".parquet")]


def test_partitions_by_a_field_inside_a_column_are_refused(tmp_path: Path) -> None:
    inner = StructType(NestedField(2, "k", LongType()))
    table(
        tmp_path,
        NestedField(1, "s", inner),
        spec=PartitionSpec(PartitionField(2, 1000, IdentityTransform(), "k")),
    )
    schema = spark.StructType().add("s", spark.StructType().add("k", spark.LongType()))
    with pytest.raises(TableRefusedError, match="a field inside a column"):
        Driver(tmp_path, schema=schema)


@pytest.mark.parametrize("version", [1, 3])
def test_formats_other_than_2_are_refused(tmp_path: Path, version: int) -> None:
    made = table(tmp_path, NestedField(1, "k", LongType()), NestedField(2, "v", StringType()))
    path = Path(made.metadata_location.removeprefix("file://"))
    metadata = json.loads(path.read_text())
    if version == 3:
        metadata |= {"format-version": 3, "next-row-id": 0}
    else:
        metadata |= {
            "format-version": 1,
            "schema": metadata["schemas"][0],
            "partition-spec": metadata["partition-specs"][0]["fields"],
        }
    path.write_text(json.dumps(metadata))
    with pytest.raises(TableRefusedError, match=f"has format {version}") as caught:
        Driver(tmp_path)
    assert caught.value.condition == "TABLE_REFUSED.FORMAT_VERSION"


def test_differences_are_listed_when_the_query_starts(tmp_path: Path) -> None:
    table(
        tmp_path,
        NestedField(1, "K", IntegerType()),
        NestedField(2, "needed", StringType(), required=True),
        NestedField(3, "id", UUIDType()),
    )
    with pytest.raises(SchemaMismatchError) as caught:
        Driver(tmp_path)
    assert caught.value.condition == "SCHEMA_MISMATCH.TABLE_DIFFERS"
    assert caught.value.parameters["differences"] == [
        "column 'K' is int in the table and long in the rows",
        "it has no column 'v'",
        "its column 'needed' does not allow nulls, and the rows do not have it",
    ]


def test_nulls_in_a_required_column_are_refused_and_leave_nothing(tmp_path: Path) -> None:
    table(tmp_path, NestedField(1, "k", LongType(), required=True), NestedField(2, "V", StringType()))
    driver = Driver(tmp_path)
    driver.write(0, [(1, "a")])
    with pytest.raises(SchemaMismatchError, match="no value in 'k'") as caught:
        driver.write(1, [(2, "b")], [(None, "a")])
    assert caught.value.condition == "SCHEMA_MISMATCH.NULL_VALUE"
    assert driver.rows() == [(1, "a")]


def test_a_required_field_inside_a_column_takes_no_null(tmp_path: Path) -> None:
    inner = StructType(NestedField(2, "x", LongType(), required=True))
    table(tmp_path, NestedField(1, "s", inner))
    schema = spark.StructType().add("s", spark.StructType().add("x", spark.LongType()))
    driver = Driver(tmp_path, schema=schema)
    driver.write(0, [({"x": 1},), (None,)])
    with pytest.raises(TableRefusedError):
        driver.write(1, [({"x": None},)])
    assert driver.rows() == [(None,), ({"x": 1},)]


def test_other_columns_are_null_in_new_rows_and_lost_in_replaced_ones(tmp_path: Path) -> None:
    made = table(
        tmp_path,
        NestedField(1, "note", StringType()),
        NestedField(2, "V", StringType()),
        NestedField(3, "k", LongType()),
    )
    made.append(pa.table({"note": ["x", "y"], "V": ["a", "b"], "k": [1, 2]}))
    driver = Driver(tmp_path, "update", "k")
    driver.write(0, [(2, "c"), (3, "d")])
    assert driver.rows() == [("x", "a", 1), (None, "c", 2), (None, "d", 3)]


def test_files_of_older_columns_are_rewritten_with_the_new_ones(tmp_path: Path) -> None:
    made = table(tmp_path, NestedField(1, "n", IntegerType()), NestedField(2, "v", StringType()))
    made.append(pa.table({"n": pa.array([1, 2], pa.int32()), "v": ["a", "b"]}))
    with made.update_schema() as update:
        update.update_column("n", LongType())
        update.add_column("w", StringType())
    with made.update_schema() as update:
        update.rename_column("n", "k")
    driver = Driver(tmp_path, "update", "k")
    driver.write(0, [(2, "c")])
    assert driver.rows() == [(1, "a", None), (2, "c", None)]
    assert len(list(driver.table.scan().plan_files())) == 2


def test_a_sort_order_is_not_claimed_for_rows_in_no_order(tmp_path: Path) -> None:
    table(
        tmp_path,
        NestedField(1, "k", LongType()),
        NestedField(2, "v", StringType()),
        sort_order=SortOrder(SortField(1, IdentityTransform())),
    )
    driver = Driver(tmp_path)
    driver.write(0, [(2, "b"), (1, "a")])
    (task,) = driver.table.scan().plan_files()
    assert task.file.sort_order_id is None
    assert driver.rows() == [(1, "a"), (2, "b")]


def test_complete_replaces_the_columns_with_the_rows(tmp_path: Path) -> None:
    made = table(
        tmp_path,
        NestedField(1, "k", StringType()),
        NestedField(2, "gone", LongType(), required=True),
        NestedField(3, "V", StringType()),
    )
    made.append(
        pa.table(
            {"k": ["1"], "gone": [2], "V": ["x"]},
            schema=pa.schema([("k", pa.string()), pa.field("gone", pa.int64(), False), ("V", pa.string())]),
        )
    )
    driver = Driver(tmp_path, "complete")
    before = driver.table.schema()
    assert before.column_names == ["k", "gone", "V"]
    driver.write(0, [(1, "a")])
    assert driver.rows() == [("a", 1)]
    assert driver.table.schema().column_names == ["V", "k"]
    assert driver.table.schema().find_field("k").field_id == 4
    first = driver.table.metadata.snapshots[0]
    assert driver.table.scan(snapshot_id=first.snapshot_id).to_arrow().to_pylist() == [
        {"k": "1", "gone": 2, "V": "x"}
    ]
    driver.write(1, [(2, "b")])
    assert driver.rows() == [("b", 2)]
    assert len(driver.table.schemas()) == 2


def test_complete_does_not_drop_a_column_that_partitions_need(tmp_path: Path) -> None:
    events(tmp_path, PartitionField(4, 1000, IdentityTransform(), "kind"))
    with pytest.raises(TableRefusedError, match="partition field"):
        Driver(tmp_path, "complete", schema=ROWS)


@pytest.mark.parametrize("change", ["column", "type", "partitioning"])
def test_columns_that_change_while_a_micro_batch_is_written(tmp_path: Path, change: str) -> None:
    driver = Driver(tmp_path)
    driver.write(0, [(1, "a")])

    def changed(commit: Any) -> Any:
        made = Driver(tmp_path, name="another").catalog.load_table(("shop", "t"))
        made.append(pa.table({"k": [9], "v": ["another engine"]}))
        if change == "partitioning":
            with made.update_spec() as spec:
                spec.add_identity("v")
        else:
            with made.update_schema(allow_incompatible_changes=True) as update:
                if change == "type":
                    update.delete_column("v")
                    update.add_column("v", LongType())
                else:
                    update.add_column("w", StringType())
        return commit()

    driver.catalog.faults = [changed]
    if change == "column":
        driver.write(1, [(2, "b")])
        assert driver.rows() == [(1, "a", None), (2, "b", None), (9, "another engine", None)]
        return
    with pytest.raises((CommitRefusedError, SchemaMismatchError)):
        driver.write(1, [(2, "b")])
    assert len(driver.table.metadata.snapshots) == 2


@pytest.mark.parametrize("compression", ["zstd", "gzip", "snappy"])
def test_settings_of_the_table_are_followed(tmp_path: Path, compression: str) -> None:
    made = table(tmp_path, NestedField(1, "k", LongType()), NestedField(2, "v", StringType()))
    made.transaction().set_properties(
        {
            "write.parquet.compression-codec": compression,
            "write.object-storage.enabled": "true",
            "write.data.path": f"file://{tmp_path}/elsewhere",
        }
    ).commit_transaction()
    driver = Driver(tmp_path)
    driver.write(0, [(1, "a")])
    (task,) = driver.table.scan().plan_files()
    assert task.file.file_path.startswith(f"file://{tmp_path}/elsewhere/")
    stored = pq.read_metadata(task.file.file_path.removeprefix("file://"))
    assert stored.row_group(0).column(0).compression == compression.upper()


def test_manifests_are_merged(tmp_path: Path) -> None:
    driver = Driver(tmp_path)
    driver.table.transaction().set_properties(
        {"commit.manifest.min-count-to-merge": "3"}
    ).commit_transaction()
    for batch_id in range(7):
        driver.write(batch_id, [(batch_id, "a")])
    snapshot = driver.table.current_snapshot()
    assert snapshot is not None
    assert len(snapshot.manifests(driver.table.io)) < 4
    assert len(driver.rows()) == 7


def test_dates_before_1970_are_in_their_partition(tmp_path: Path) -> None:
    events(tmp_path, PartitionField(3, 1000, YearTransform(), "year"))
    driver = Driver(tmp_path, schema=EVENTS)
    driver.write(0, [(1, None, date(1969, 12, 31), "a"), (2, None, None, "b")])
    found = driver.table.scan(row_filter="day < '1970-01-01'").to_arrow()
    assert found["k"].to_pylist() == [1]


@given(st.lists(st.datetimes(datetime(1700, 1, 1), datetime(2200, 1, 1)), min_size=1))  # noqa: DTZ001
def test_transforms_of_times_are_those_of_the_table_format(times: list[datetime]) -> None:
    moments = pa.array(times, pa.timestamp("us"))
    for each in (YearTransform(), MonthTransform(), DayTransform(), HourTransform()):
        expected = [each.transform(TimestampType())(datetime_to_micros(moment)) for moment in times]
        assert transform(each, TimestampType())(moments).to_pylist() == expected
    for each in (YearTransform(), MonthTransform(), DayTransform()):
        days = [moment.date() for moment in times]
        expected = [each.transform(DateType())(day) for day in days]
        assert transform(each, DateType())(pa.array(days, pa.date32())).to_pylist() == expected
