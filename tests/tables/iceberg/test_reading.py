"""Rewritten files have the values that the old ones had, in columns of any type, and after they changed."""

from __future__ import annotations

import uuid
from datetime import UTC, date, datetime, time
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from pyiceberg.io.pyarrow import schema_to_pyarrow
from pyiceberg.manifest import DataFile, DataFileContent, FileFormat
from pyiceberg.partitioning import PartitionField, PartitionSpec
from pyiceberg.schema import Schema
from pyiceberg.table import Table
from pyiceberg.transforms import IdentityTransform
from pyiceberg.typedef import Record
from pyiceberg.types import (
    BinaryType,
    BooleanType,
    DateType,
    DecimalType,
    DoubleType,
    FixedType,
    FloatType,
    IcebergType,
    IntegerType,
    ListType,
    LongType,
    MapType,
    NestedField,
    StringType,
    StructType,
    TimestampType,
    TimestamptzType,
    TimeType,
    UUIDType,
)

from penstock.errors import TableRefusedError
from penstock.tables.iceberg.data_files import FileTarget, cast_to_file_schema, write_data_files
from tests.tables.iceberg.driver import Driver

INNER = StructType(NestedField(20, "x", IntegerType()), NestedField(21, "y z.", StringType()))


def list_of(number: int, element: IcebergType) -> ListType:
    return ListType(number, element, element_required=False)


def map_of(number: int, value: IcebergType) -> MapType:
    return MapType(number, StringType(), number + 1, value, value_required=False)


SCHEMA = Schema(
    NestedField(1, "k", LongType()),
    NestedField(2, "v", StringType()),
    NestedField(3, "s", INNER),
    NestedField(4, "l", list_of(40, StructType(NestedField(41, "x", IntegerType())))),
    NestedField(5, "m", map_of(50, StructType(NestedField(52, "x", IntegerType())))),
    NestedField(6, "ml", map_of(60, list_of(62, StructType(NestedField(63, "a b", LongType()))))),
    NestedField(7, "ll", list_of(70, list_of(71, StructType(NestedField(72, "a.b", LongType()))))),
    NestedField(8, "n", list_of(80, IntegerType())),
)
NUMBERS = st.none() | st.integers(-5, 5)
STRUCTS = st.none() | st.fixed_dictionaries({"x": NUMBERS})
TEXT = st.text("ab", max_size=2)
ROWS = st.lists(
    st.fixed_dictionaries(
        {
            "k": st.integers(0, 100),
            "v": st.none() | TEXT,
            "s": st.none() | st.fixed_dictionaries({"x": NUMBERS, "y z.": st.none() | TEXT}),
            "l": st.none() | st.lists(STRUCTS, max_size=3),
            "m": st.none() | st.dictionaries(TEXT, STRUCTS, max_size=2).map(lambda d: list(d.items())),
            "ml": st.none()
            | st.dictionaries(
                TEXT, st.none() | st.lists(st.none() | st.fixed_dictionaries({"a b": NUMBERS}), max_size=2)
            ).map(lambda d: list(d.items())),
            "ll": st.none()
            | st.lists(st.none() | st.lists(st.fixed_dictionaries({"a.b": NUMBERS}), max_size=2), max_size=2),
            "n": st.none() | st.lists(NUMBERS, max_size=3),
        }
    ),
    min_size=1,
    max_size=12,
    unique_by=lambda row: row["k"],
)


def stored(table: Table) -> list[dict[str, Any]]:
    """The rows, as Parquet has them; pyiceberg's own reading changes some."""
    found = []
    for task in table.scan().plan_files():
        found += pq.read_table(task.file.file_path.removeprefix("file://")).to_pylist()
    return sorted(found, key=lambda row: row["k"])


def renamed(value: object) -> object:
    """A value with the names that fields have in files."""
    names = {"y z.": "y_x20z_x2E", "a b": "a_x20b", "a.b": "a_x2Eb"}
    if isinstance(value, dict):
        return {names.get(name, name): renamed(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(map(renamed, value))
    return value


def appended(table: Table, rows: list[dict[str, Any]]) -> None:
    """Append rows as the sink does; pyiceberg's own append changes some."""
    target = FileTarget.of("t", table.io, table.metadata, "token")
    arrow = schema_to_pyarrow(table.schema(), include_field_ids=False)
    files = write_data_files(
        target, [cast_to_file_schema(target, pa.Table.from_pylist(rows, schema=arrow).columns)]
    )
    with table.transaction() as transaction, transaction.update_snapshot().fast_append() as producer:
        for file in files:
            producer.append_data_file(file)


@settings(max_examples=12, phases=[Phase.generate], deadline=None, suppress_health_check=list(HealthCheck))
@given(rows=ROWS)
def test_nested_values_stay_as_they_are(
    tmp_path_factory: pytest.TempPathFactory, rows: list[dict[str, Any]]
) -> None:
    folder = tmp_path_factory.mktemp("nested")
    table = Driver(folder, name="another").catalog.create_table(
        ("shop", "t"), SCHEMA, properties={"format-version": "2"}
    )
    appended(table, rows)
    assert stored(table) == [renamed(row) for row in sorted(rows, key=lambda row: row["k"])]
    driver = Driver(folder, "update", "k")
    first = rows[0]["k"]
    driver.write(0, [(first, "new")])
    kept = [renamed(row) for row in sorted(rows[1:], key=lambda row: row["k"])]
    assert [row for row in stored(driver.table) if row["k"] != first] == kept


def test_nested_columns_that_were_renamed_moved_widened_added_and_dropped(tmp_path: Path) -> None:
    table = Driver(tmp_path, name="another").catalog.create_table(
        ("shop", "t"), SCHEMA, properties={"format-version": "2"}
    )
    old = {
        "v": "a",
        "s": {"x": 1, "y z.": "u"},
        "l": [{"x": 1}, None],
        "m": [("a", {"x": 2})],
        "ml": [("b", [{"a b": 3}])],
        "ll": [[{"a.b": 4}], None],
        "n": [5],
    }
    appended(table, [{"k": 1, **old}, {"k": 2, **old}, {"k": 3, **dict.fromkeys(old)}])
    with table.update_schema() as update:
        update.rename_column(("ml", "value", "element", "a b"), "renamed")
        update.rename_column(("ll", "element", "element", "a.b"), "renamed")
        update.update_column(("l", "element", "x"), LongType())
        update.add_column(("m", "value", "new"), StringType())
        update.delete_column(("s", "y z."))
        update.update_column(("n", "element"), LongType())
    with table.update_schema() as update:
        update.rename_column("n", "numbers")
        update.move_first("ll")
    driver = Driver(tmp_path, "update", "k")
    driver.write(0, [(1, "new")])
    found = stored(driver.table)
    assert found[1:] == [
        {
            "ll": [[{"renamed": 4}], None],
            "k": 2,
            "v": "a",
            "s": {"x": 1},
            "l": [{"x": 1}, None],
            "m": [("a", {"x": 2, "new": None})],
            "ml": [("b", [{"renamed": 3}])],
            "numbers": [5],
        },
        {"ll": None, "k": 3, **dict.fromkeys(["v", "s", "l", "m", "ml", "numbers"])},
    ]


def test_types_that_spark_does_not_have_stay_too(tmp_path: Path) -> None:
    kinds = [
        BooleanType(),
        IntegerType(),
        FloatType(),
        DoubleType(),
        DecimalType(9, 2),
        DecimalType(18, 2),
        DecimalType(38, 2),
        DateType(),
        TimeType(),
        TimestampType(),
        TimestamptzType(),
        BinaryType(),
        FixedType(3),
        UUIDType(),
    ]
    moment = datetime(2026, 1, 2, 3, 4, 5, 6, tzinfo=UTC)
    values: list[Any] = [
        True,
        -7,
        1.5,
        float("inf"),
        *[Decimal("-1.25")] * 3,
        date(1, 1, 1),
        time(1, 2, 3, 4),
        moment.replace(tzinfo=None),
        moment,
        b"\x00\xff",
        b"abc",
        uuid.UUID(int=7).bytes,
    ]
    fields = [NestedField(number, f"c{number}", kind) for number, kind in enumerate(kinds, 3)]
    schema = Schema(NestedField(1, "k", LongType()), NestedField(2, "v", StringType()), *fields)
    table = Driver(tmp_path, name="another").catalog.create_table(
        ("shop", "t"), schema, properties={"format-version": "2"}
    )
    names = [field.name for field in fields]
    arrow = pa.schema(
        [
            field if not isinstance(field.type, pa.BaseExtensionType) else pa.field(field.name, pa.binary(16))
            for field in schema_to_pyarrow(table.schema(), include_field_ids=False)
        ]
    )
    kept = dict(zip(names, values, strict=True))
    rows = [{"k": 1, **kept}, {"k": 2, **kept}, {"k": 3}]
    table.append(pa.Table.from_pylist(rows, schema=arrow))
    before = table.scan(row_filter="k > 1").to_arrow().sort_by("k").to_pylist()
    driver = Driver(tmp_path, "update", "k")
    driver.write(0, [(1, "new")])
    assert driver.table.scan(row_filter="k > 1").to_arrow().sort_by("k").to_pylist() == before


def test_columns_that_only_the_partition_has(tmp_path: Path) -> None:
    """Files that were added to a table may lack the columns by which they are partitioned."""
    kinds = [StringType(), DateType(), LongType(), BooleanType(), TimestamptzType(), DecimalType(9, 2)]
    values: list[Any] = ["a", 20_000, 7, True, 1_000_000, Decimal("1.25")]
    fields = [NestedField(number, f"c{number}", kind) for number, kind in enumerate(kinds, 3)]
    parts = [
        PartitionField(field.field_id, 1000 + number, IdentityTransform(), field.name)
        for number, field in enumerate(fields)
    ]
    table = Driver(tmp_path, name="another").catalog.create_table(
        ("shop", "t"),
        Schema(NestedField(1, "k", LongType()), NestedField(2, "v", StringType()), *fields),
        partition_spec=PartitionSpec(*parts),
        properties={"format-version": "2"},
    )
    path = tmp_path / "added.parquet"
    columns = [("k", pa.int64(), "1"), ("v", pa.string(), "2")]
    schema = pa.schema(
        [pa.field(name, kind, metadata={"PARQUET:field_id": number}) for name, kind, number in columns]
    )
    pq.write_table(pa.table({"k": [1, 2], "v": ["a", "b"]}, schema=schema), path)
    file = DataFile.from_args(
        content=DataFileContent.DATA,
        file_path=f"file://{path}",
        file_format=FileFormat.PARQUET,
        partition=Record(*values),
        record_count=2,
        file_size_in_bytes=path.stat().st_size,
    )
    file.spec_id = table.spec().spec_id
    with table.transaction() as transaction, transaction.update_snapshot().fast_append() as producer:
        producer.append_data_file(file)
    driver = Driver(tmp_path, "update", "k")
    driver.write(0, [(1, "new")])
    moment = datetime(1970, 1, 1, 0, 0, 1, tzinfo=UTC)
    kept = (2, "b", "a", date(2024, 10, 4), 7, True, moment, Decimal("1.25"))
    assert kept in driver.rows()
    assert len(driver.rows()) == 2


def test_files_that_are_not_parquet_are_refused(tmp_path: Path) -> None:
    driver = Driver(tmp_path, "update", "k")
    file = DataFile.from_args(
        content=DataFileContent.DATA,
        file_path=f"{driver.table.location()}/data/file.orc",
        file_format=FileFormat.ORC,
        partition=Record(),
        record_count=1,
        file_size_in_bytes=1,
    )
    with driver.table.transaction() as transaction, transaction.update_snapshot().fast_append() as producer:
        producer.append_data_file(file)
    with pytest.raises(TableRefusedError) as caught:
        driver.write(0, [(1, "new")])
    assert caught.value.condition == "TABLE_REFUSED.FILE_FORMAT"
    Driver(tmp_path, app_id="other").write(0, [(3, "c")])
    assert len(driver.table.metadata.snapshots) == 2
