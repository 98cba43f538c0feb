"""Which columns of an existing table accept which rows."""

from __future__ import annotations

import pyarrow as pa
import pytest

from penstock.errors import InvalidInputError
from penstock.tables.columns import Layout, layout_of
from penstock.tables.names import TableName
from penstock.tables.sql.ddl import ExistingTable, affinity, differences


def layout(kind: pa.DataType, dialect: str) -> Layout:
    return layout_of(TableName("s", "t"), pa.schema([("a", kind)]), (), dialect)


@pytest.mark.parametrize(
    ("kind", "found", "takes"),
    [
        (pa.int32(), "bigint", True),
        (pa.int64(), "integer", False),
        (pa.int64(), "numeric", True),
        (pa.string(), "character varying(5)", True),
        (pa.string(), "uuid", False),
        (pa.float32(), "double precision", True),
        (pa.float64(), "real", False),
        (pa.decimal128(10, 2), "numeric", True),
        (pa.decimal128(10, 2), "numeric(12,2)", True),
        (pa.decimal128(10, 2), "numeric(12,4)", True),
        (pa.decimal128(10, 2), "numeric(10,3)", False),
        (pa.timestamp("us", "UTC"), "timestamp(3) with time zone", False),
        (pa.timestamp("us", "UTC"), "timestamp without time zone", False),
        (pa.list_(pa.int64()), "jsonb", True),
        (pa.list_(pa.int64()), "text", False),
    ],
)
def test_a_postgres_column_accepts_types_that_convert_without_loss(
    kind: pa.DataType, found: str, takes: bool
) -> None:
    there = ExistingTable({"a": found}, frozenset(), frozenset())
    assert (differences(layout(kind, "postgres"), there, complete=False) == []) is takes


@pytest.mark.parametrize(
    ("kind", "declared", "takes"),
    [
        (pa.int64(), "BIGINT", True),
        (pa.bool_(), "BOOLEAN", True),
        (pa.int64(), "REAL", False),
        (pa.string(), "VARCHAR(5)", True),
        (pa.string(), "", True),
        (pa.string(), "NUMERIC", False),
        (pa.decimal128(10, 2), "DECIMAL(10, 2)", False),
        (pa.timestamp("us", "UTC"), "DATETIME", True),
        (pa.binary(), "TEXT", False),
    ],
)
def test_a_sqlite_column_accepts_types_that_its_affinity_does_not_convert(
    kind: pa.DataType, declared: str, takes: bool
) -> None:
    there = ExistingTable({"a": affinity(declared)}, frozenset(), frozenset())
    assert (differences(layout(kind, "sqlite"), there, complete=False) == []) is takes


def test_sqlite_ignores_the_case_of_names() -> None:
    """As for the name of the table: "alter table … add column", the advice, would fail."""
    rows = layout_of(
        TableName("main", "t"), pa.schema([("ID", pa.int64()), ("v", pa.string())]), ("ID",), "sqlite"
    )
    there = ExistingTable({"id": "INTEGER", "V": "TEXT"}, frozenset({"id"}), frozenset({frozenset({"Id"})}))
    assert differences(rows, there, complete=False) == []
    assert differences(rows, there, complete=True) == []
    in_postgres = layout_of(TableName("s", "t"), pa.schema([("ID", pa.int64())]), (), "postgres")
    assert (
        len(
            differences(
                in_postgres, ExistingTable({"id": "bigint"}, frozenset(), frozenset()), complete=False
            )
        )
        == 1
    )


@pytest.mark.parametrize(
    ("name", "dialect", "reason"),
    [
        ("a" * 64, "postgres", "longer than 63 bytes"),
        ("\u00e9" * 32, "postgres", "longer than 63 bytes"),
        ("ctid", "postgres", "system column"),
        ("a\0b", "postgres", "character NUL"),
        ("a\0b", "sqlite", "character NUL"),
    ],
)
def test_a_column_name_that_the_database_cannot_have_is_refused(name: str, dialect: str, reason: str) -> None:
    """PostgreSQL shortens long names without an error, and a second start would not find the column."""
    with pytest.raises(InvalidInputError, match=rf"COLUMN_NAME\].*{reason}") as caught:
        layout_of(TableName("s", "t"), pa.schema([(name, pa.int64())]), (), dialect)
    assert caught.value.parameters["column"] == name


def test_long_names_are_kept_where_the_database_keeps_them() -> None:
    for name, dialect in (("\u00e9" * 31, "postgres"), ("a" * 1000, "sqlite"), ("ctid", "sqlite")):
        rows = layout_of(TableName("s", "t"), pa.schema([(name, pa.int64())]), (), dialect)
        assert [column.name for column in rows.columns] == [name]


def test_extra_columns_are_refused_in_complete_mode_only() -> None:
    there = ExistingTable({"a": "bigint", "b": "text"}, frozenset(), frozenset())
    assert differences(layout(pa.int64(), "postgres"), there, complete=False) == []
    assert len(differences(layout(pa.int64(), "postgres"), there, complete=True)) == 1


def test_a_difference_is_reported_with_the_statement_that_repairs_it() -> None:
    there = ExistingTable({"a": "integer"}, frozenset(), frozenset())
    wider = differences(layout(pa.int64(), "postgres"), there, complete=False)
    assert wider[0].endswith('(alter table "s"."t" alter column "a" type bigint)')
    assert "alter" not in differences(layout(pa.string(), "postgres"), there, complete=False)[0]
    absent = differences(
        layout(pa.string(), "sqlite"), ExistingTable({}, frozenset(), frozenset()), complete=False
    )
    assert absent == ['the table has no column \'a\' (alter table "s"."t" add column "a" TEXT)']
