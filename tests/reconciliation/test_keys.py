"""Keys of every type, and names that SQL has to quote."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.reconciliation.opening import open_copy
from penstock.reconciliation.scanning import is_ranged
from penstock.reconciliation.source import SourceTable
from tests.support.postgres_source import Source
from tests.support.reconciled import CopiedTable, copied_table

# A type, an expression of n that gives distinct keys, and whether PostgreSQL copies are compared by ranges.
KEYS = {
    "smallint": ("n - 500", True),
    "bigint": ("n * 9000000000 - 4000000000000", True),
    "numeric(12, 3)": ("n / 8.0 - 60", True),
    "numeric": ("n / 8.0 - 60", False),
    "boolean": ("n = 1", True),
    "text": ("repeat(chr(65 + n % 26), 1 + n % 3) || n", True),
    "varchar(20)": ("'é' || n", True),
    "char(8)": ("'k' || n", False),
    "bytea": ("decode(lpad(to_hex(n * 37), 6, '0'), 'hex')", True),
    "date": ("date '2026-01-01' + n", True),
    "timestamp": ("timestamp '2026-01-01' + n * interval '1.000001 second'", True),
    "timestamptz": ("timestamptz '2026-01-01 00:00+00' - n * interval '1 hour'", True),
    "uuid": ("md5(n::text)::uuid", True),
    "time": ("time '00:00' + n * interval '1 second'", False),
    'text COLLATE "C.utf8"': ("'k' || n", False),
    'text COLLATE "und-x-icu"': ("CASE n % 2 WHEN 0 THEN 'a' ELSE 'B' END || n", False),
}


def compared_by_ranges(made: CopiedTable) -> bool:
    table = SourceTable(made.feed, None)
    copy = open_copy(made.sink, made.url, table)
    try:
        return is_ranged(table, copy)
    finally:
        copy.close()
        table.close()


@pytest.mark.few(8)
@pytest.mark.parametrize("column", KEYS)
def test_keys_of_each_type(source: Source, kind: str, tmp_path: Path, column: str) -> None:
    expression, ranged = KEYS[column]
    if "icu" in column and not source.rows("SELECT FROM pg_collation WHERE collname = 'und-x-icu'"):
        pytest.skip("the server has no ICU")
    table = source.table(f"k {column} PRIMARY KEY, v int", "t")
    last = 2 if column == "boolean" else 1000
    source.run(f"INSERT INTO {table} SELECT {expression}, n FROM generate_series(1, {last}) AS n")
    with copied_table(source, table, kind, tmp_path) as made:
        assert compared_by_ranges(made) == (ranged and kind == "postgresql")
        assert made.compare(range_rows=64).equal
        made.update("v", "-1", f"v = {last // 2}")
        made.delete(f"v = {last}")
        source.run(
            f"DELETE FROM {table} WHERE v BETWEEN 100 AND 102", f"UPDATE {table} SET v = 0 WHERE v = 200"
        )
        found = made.compare(range_rows=64, repair=True)
        extra, changed = (0, 1) if last == 2 else (3, 2)
        assert (found.missing, found.extra, found.different) == (1, extra, changed)
        assert (
            sum(each.missing + each.extra + each.different for each in found.differing_ranges)
            == 2 + 2 * extra // 2 + changed - 1
        )
        assert found.repaired == found.differences
        assert made.compare(range_rows=64).equal


@pytest.mark.all_kinds
@pytest.mark.parametrize(
    ("column", "old", "new"), [("numeric", "1.5", "1.50"), ("interval", "1 day", "24:00:00")]
)
def test_keys_that_are_equal_in_postgresql_and_read_differently(
    source: Source, kind: str, tmp_path: Path, column: str, old: str, new: str
) -> None:
    table = source.table(f"k {column} PRIMARY KEY, v int", "t")
    source.run(f"INSERT INTO {table} VALUES ('{old}', 1), ('3', 3)")
    with copied_table(source, table, kind, tmp_path) as made:
        source.run(f"UPDATE {table} SET k = '{new}' WHERE v = 1")
        found = made.compare(repair=True)
        kinds = {row.key["k"]: row.kind for row in found.differing_rows}
        assert kinds == {old: "extra", new: "missing"}
        assert found.differences == found.repaired == 2
        assert made.compare().equal


def test_differing_rows_are_counted_in_the_range_of_their_number(
    source: Source, kind: str, tmp_path: Path
) -> None:
    table = source.table("k numeric PRIMARY KEY, v int", "t")
    source.run(f"INSERT INTO {table} SELECT n, 0 FROM generate_series(1, 40) AS n")
    source.run(f"INSERT INTO {table} VALUES ('NaN', 0), ('-7', 0)")
    with copied_table(source, table, kind, tmp_path) as made:
        source.run(f"UPDATE {table} SET v = 1 WHERE k IN (9, 10, 'NaN', -7)")
        made.insert([{"k": "none", "v": 0}])
        found = [
            (each.after and each.after["k"], each.upto and each.upto["k"], each.different)
            for each in made.compare(range_rows=10).differing_ranges
        ]
        assert found == [(None, "9", 2), ("9", "19", 1), ("39", None, 1)]


@pytest.mark.few(1)
def test_composite_keys(source: Source, kind: str, tmp_path: Path) -> None:
    table = source.table("a int, b text, c date, v int, PRIMARY KEY (c, a, b)", "t")
    source.run(
        f"INSERT INTO {table} SELECT n % 10, 'k' || n % 7, date '2026-01-01' + n / 70, n "
        "FROM generate_series(0, 999) AS n"
    )
    with copied_table(source, table, kind, tmp_path) as made:
        assert compared_by_ranges(made) == (kind == "postgresql")
        assert made.compare(range_rows=9).equal
        made.delete("v IN (0, 500, 999)")
        made.update("v", "-5", "v = 700")
        found = made.compare(range_rows=9, repair=True)
        assert (found.missing, found.extra, found.different) == (3, 0, 1)
        assert set(found.differing_rows[0].key) == {"a", "b", "c"}
        assert made.compare(range_rows=9).equal


def test_an_extra_key_that_is_no_value_of_the_sources_type(source: Source, kind: str, tmp_path: Path) -> None:
    table = source.table("k uuid, a int[], v int, PRIMARY KEY (k, a)", "t")
    source.run(f"INSERT INTO {table} SELECT md5(n::text)::uuid, ARRAY[n], n FROM generate_series(0, 99) AS n")
    with copied_table(source, table, kind, tmp_path) as made:
        made.insert([{"k": f"no uuid {n}", "a": "{", "v": n} for n in range(5)])
        made.delete("v = 50")
        found = made.compare(range_rows=30, repair=True)
        assert (found.missing, found.extra, found.different, found.repaired) == (1, 5, 0, 6)
        assert made.compare(range_rows=30).equal


def test_a_key_of_all_columns(source: Source, kind: str, tmp_path: Path) -> None:
    table = source.table("a int PRIMARY KEY", "t")
    source.run(f"INSERT INTO {table} SELECT n FROM generate_series(0, 99) AS n")
    with copied_table(source, table, kind, tmp_path) as made:
        made.delete("a = 5")
        source.run(f"DELETE FROM {table} WHERE a = 6")
        found = made.compare(range_rows=9, repair=True)
        assert (found.missing, found.extra, found.different) == (1, 1, 0)
        assert made.compare(range_rows=9).equal


HOSTILE = ['a"b', "it's", "select", "Ünïcode", "100%s", ":name", "with space", "back\\slash"]


def test_hostile_names(source: Source, kind: str, tmp_path: Path) -> None:
    names = ['"' + name.replace('"', '""') + '"' for name in HOSTILE]
    table = f'{source.name}."T"" %s\'x"'
    columns = ", ".join(f"{name} text" for name in names[1:])
    source.run(f"CREATE TABLE {table} ({names[0]} text PRIMARY KEY, {columns})")
    source.run(f"ALTER PUBLICATION {source.name} ADD TABLE {table}")
    values = ", ".join("'v' || n || ' ''%s \\ :x \"'" for _ in names)
    source.run(f"INSERT INTO {table} SELECT {values} FROM generate_series(0, 99) AS n")
    name = "T\" %s'x"
    with copied_table(
        source, f"{source.name}.{name}", kind, tmp_path, "copy" if kind == "delta" else name, quoted=table
    ) as made:
        assert made.compare(range_rows=30).equal
        source.run(
            f"DELETE FROM {table} WHERE {names[0]} LIKE 'v7%'",
            f"UPDATE {table} SET {names[4]} = '' WHERE {names[0]} LIKE 'v1 %'",
        )
        found = made.compare(range_rows=30, repair=True)
        assert (found.missing, found.extra, found.different) == (0, 11, 1)
        assert [row.columns for row in found.differing_rows if row.kind == "different"] == [("100%s",)]
        assert made.compare(range_rows=30).equal


@pytest.mark.parametrize("kind", ["postgresql"])
def test_partitioned_tables_and_row_filters(source: Source, kind: str, tmp_path: Path) -> None:
    table = f"{source.name}.parts"
    source.run(
        f"CREATE TABLE {table} (id int PRIMARY KEY, v int) PARTITION BY RANGE (id)",
        f"CREATE TABLE {table}_1 PARTITION OF {table} FOR VALUES FROM (0) TO (500)",
        f"CREATE TABLE {table}_2 PARTITION OF {table} FOR VALUES FROM (500) TO (1000)",
        f"INSERT INTO {table} SELECT n, n % 10 FROM generate_series(0, 999) AS n",
        f"ALTER PUBLICATION {source.name} SET (publish_via_partition_root = true)",
        f"ALTER PUBLICATION {source.name} ADD TABLE {table} WHERE (id % 2 = 0)",
    )
    with copied_table(source, table, kind, tmp_path) as made:
        found = made.compare(range_rows=100)
        assert found.equal
        assert found.rows == 500
        made.delete("id IN (4, 600)")
        # The source has this row, and the publication does not.
        made.insert([{"id": 5, "v": 5}])
        found = made.compare(range_rows=100, repair=True)
        assert (found.missing, found.extra, found.different, found.repaired) == (2, 1, 0, 3)
        assert made.compare().equal
