"""Values of every type: a copy as its query writes it is equal, and each damaged value is found."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support.postgres_source import Source
from tests.support.reconciled import CopiedTable, copied_table

# A type, some values in SQL, and a value that is none of them.
VALUES = {
    "boolean": (["true", "false"], None),
    "smallint": (["-32768", "7"], "8"),
    "bigint": (["-9223372036854775808", "9007199254740993"], "9007199254740992"),
    "real": (["1.1::real", "'Infinity'::real", "-0.0"], "1.2"),
    "double precision": (["0.1", "1e300", "'-Infinity'::float8"], "0.2"),
    "numeric(10, 2)": (["1.50", "-0.01"], "1.51"),
    "numeric": (["1.50", "1.5", "'NaN'", "1e40"], None),
    "text": (["''", "'é\n\"x\",'", "E'\\\\N'", "'NULL'", "repeat('long ', 5000)"], "'other'"),
    "varchar(9)": (["'a'", "'a '"], "'a  '"),
    "char(5)": (["'ab'", "''"], "'xy'"),
    "bytea": (["'\\x00ff'", "''"], None),
    "date": (["'2026-01-31'", "'0001-01-01'", "'infinity'"], None),
    "timestamp": (["'2026-01-31 12:00:00.000001'", "'-infinity'"], None),
    "timestamptz": (["'2026-01-31 12:00:00+05'", "'9999-12-31 23:59:59.999999+00'"], None),
    "time": (["'12:00:00.5'"], "'12:00:01'"),
    "interval": (["'1 day 2 hours'"], "'x'"),
    "uuid": (["'11111111-2222-3333-4444-555555555555'"], "'x'"),
    "jsonb": (["'{\"a\": [1, null]}'", "'null'"], "'{}'"),
    "json": (["'{\"a\":  1}'"], "'{}'"),
    "int[]": (["'{1,NULL,3}'", "'{}'"], "'{1}'"),
    "text[]": (["'{\"a,b\",NULL}'"], "'{a}'"),
    "inet": (["'10.0.0.1/8'"], "'x'"),
}


COLUMNS = [f"c{number}" for number in range(len(VALUES))]
OTHERS = {
    name: (kind, str(other))
    for name, (kind, (_, other)) in zip(COLUMNS, VALUES.items(), strict=True)
    if other is not None
}


@contextmanager
def values(source: Source, kind: str, folder: Path, *columns: str) -> Iterator[CopiedTable]:
    """A table with a column for each type, and a row for each of their values and for NULL; and a copy."""
    listed = ", ".join(f"c{number} {column}" for number, column in enumerate(columns))
    table = source.table(f"id int PRIMARY KEY, {listed}", "v")
    lists = [VALUES[column][0] for column in columns]
    for number in range(max(map(len, lists)) + 1):
        row = [each[number] if number < len(each) else "NULL" for each in lists]
        source.run(f"INSERT INTO {table} VALUES ({number}, {', '.join(row)})")
    with copied_table(source, table, kind, folder) as made:
        yield made


@contextmanager
def one_row_each(source: Source, kind: str, folder: Path) -> Iterator[CopiedTable]:
    """A table with a column for each type: two rows for each of them, with and without values; and a copy."""
    listed = ", ".join(f"{name} {column}" for name, column in zip(COLUMNS, VALUES, strict=True))
    table = source.table(f"id int PRIMARY KEY, {listed}", "v")
    first = ", ".join(each[0] for each, _ in VALUES.values())
    for number in range(len(VALUES)):
        source.run(f"INSERT INTO {table} VALUES ({number}, {first})")
        source.run(f"INSERT INTO {table} (id) VALUES ({number + len(VALUES)})")
    with copied_table(source, table, kind, folder) as made:
        yield made


@pytest.mark.few(16)
def test_a_copy_with_the_same_values_is_equal(source: Source, kind: str, tmp_path: Path) -> None:
    with values(source, kind, tmp_path, *VALUES) as made:
        assert made.compare().equal


@pytest.mark.few(12)
def test_null_instead_of_a_value_and_a_value_instead_of_null_are_found(
    source: Source, kind: str, tmp_path: Path
) -> None:
    with one_row_each(source, kind, tmp_path) as made:
        damaged = {}
        for number, (name, (listed, _)) in enumerate(zip(COLUMNS, VALUES.values(), strict=True)):
            without = number + len(VALUES)
            made.update(name, "NULL", f"id = {number}")
            source.run(f"UPDATE {made.table} SET {name} = {listed[0]} WHERE id = {without}")
            damaged |= {number: (name,), without: (name,)}
        found = made.compare(most_rows=100)
        assert {row.key["id"]: row.columns for row in found.differing_rows} == damaged
        assert made.compare(repair=True).repaired == len(damaged)
        assert made.compare().equal


@pytest.mark.few(12)
def test_another_value_is_found(source: Source, kind: str, tmp_path: Path) -> None:
    with one_row_each(source, kind, tmp_path) as made:
        for name, (column, value) in OTHERS.items():
            is_decimal = column == "numeric(10, 2)"
            cast = f"CAST({value} AS DECIMAL(10, 2))" if is_decimal and kind == "delta" else value
            text = f"'{value}'" if is_decimal and kind == "sqlite" else cast
            made.update(name, text, f"id = {COLUMNS.index(name)}")
        found = made.compare()
        damaged = {COLUMNS.index(name): (name,) for name in OTHERS}
        assert {row.key["id"]: row.columns for row in found.differing_rows} == damaged


def test_the_scale_of_a_numeric_without_one_counts(source: Source, kind: str, tmp_path: Path) -> None:
    with values(source, kind, tmp_path, "numeric") as made:
        made.update("c0", "'1.500'", "id = 0")
        assert made.compare().different == 1


def test_nan_is_found_where_the_copy_can_hold_it(source: Source, kind: str, tmp_path: Path) -> None:
    table = source.table(
        "id int PRIMARY KEY, v float8", "v", f"INSERT INTO {source.name}.v VALUES (1, 'NaN'), (2, 1)"
    )
    with copied_table(source, table, kind, tmp_path) as made:
        assert made.compare().equal
        source.run(f"UPDATE {table} SET v = 'NaN' WHERE id = 2")
        assert [row.key["id"] for row in made.compare().differing_rows] == [2]


def test_a_value_of_another_type_is_found(source: Source, tmp_path: Path) -> None:
    """SQLite columns take values of any type."""
    table = source.table("id int PRIMARY KEY, n int, d date, b boolean", "v")
    source.run(f"INSERT INTO {table} SELECT n, n, '2026-01-01', true FROM generate_series(1, 50) AS n")
    with copied_table(source, table, "sqlite", tmp_path) as made:
        made.update("n", "'abc'", "id = 3")
        made.update("d", "'soon'", "id = 4")
        made.update("b", "2", "id = 5")
        made.update("n", "x'00'", "id = 6")
        source.run(f"UPDATE {table} SET n = NULL WHERE id IN (7, 8)")
        made.update("n", "'abc'", "id = 7")
        made.update("n", "NULL", "id = 8")
        found = sorted(made.compare().differing_rows, key=lambda row: row.key["id"])
        assert [(row.key["id"], row.columns) for row in found] == [
            (3, ("n",)), (4, ("d",)), (5, ("b",)), (6, ("n",)), (7, ("n",)),
        ]  # fmt: skip
        assert made.compare(repair=True).repaired == 5
        assert made.compare().equal


def test_an_unchanged_toast_value_that_was_lost_is_found(source: Source, kind: str, tmp_path: Path) -> None:
    table = source.table("id int PRIMARY KEY, long text, n int", "v")
    source.run(
        f"ALTER TABLE {table} ALTER long SET STORAGE EXTERNAL",
        f"INSERT INTO {table} SELECT n, repeat(n::text, 4000), n FROM generate_series(1, 20) AS n",
    )
    with copied_table(source, table, kind, tmp_path) as made:
        made.update("long", "NULL", "id = 5")
        made.update("long", "''", "id = 6")
        assert {row.key["id"]: row.columns for row in made.compare().differing_rows} == {
            5: ("long",),
            6: ("long",),
        }
