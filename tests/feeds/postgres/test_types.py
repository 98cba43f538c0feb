"""Values of PostgreSQL's types equal those of the server's own SELECT."""

from __future__ import annotations

import json
import logging
import math
import re
from datetime import UTC, date, datetime
from decimal import Decimal
from typing import Any

import psycopg
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import FeedUnavailableError
from penstock.feeds.postgres.rows import json_strings
from penstock.feeds.postgres.values import arrow_type, from_text
from tests.support.postgres_source import Source, Stream, everything

TEXT = pa.string()
TYPES: list[tuple[str, pa.DataType, list[str]]] = [
    ("bool", pa.bool_(), ["true", "false"]),
    ("smallint", pa.int16(), ["-32768", "32767"]),
    ("int", pa.int32(), ["-2147483648", "2147483647"]),
    ("bigint", pa.int64(), ["-9223372036854775808", "9223372036854775807"]),
    ("real", pa.float32(), ["1.1", "'NaN'", "'-Infinity'", "3.4e38"]),
    ("double precision", pa.float64(), ["0.1", "1e-300", "'Infinity'", "'-0'"]),
    ("numeric(12, 3)", pa.decimal128(12, 3), ["-123456789.125", "0", "1.1"]),
    ("numeric(38)", pa.decimal128(38, 0), ["99999999999999999999999999999999999999"]),
    ("numeric(3, -2)", pa.decimal128(5, 0), ["12345", "-99900"]),
    ("numeric(2, 4)", pa.decimal128(4, 4), ["0.0012"]),
    ("numeric(39, 1)", TEXT, ["12345678901234567890123456789012345678.5"]),
    ("numeric", TEXT, ["1.10", "'NaN'", "123456789012345678901234567890123456789012345.6789"]),
    ("text", TEXT, ["''", "'é\U0001f600\n\"'", "repeat('long', 5000)"]),
    ("varchar(5)", TEXT, ["'abc'"]),
    ("char(5)", TEXT, ["'ab'"]),
    ('"char"', TEXT, ["'x'"]),
    ("name", TEXT, ["'n'"]),
    ("bytea", pa.binary(), ["'\\x'", "'\\x00ff10'", "decode(repeat('0123456789abcdef', 400), 'hex')"]),
    ("date", pa.date32(), ["'2026-02-28'", "'0001-01-01'", "'9999-12-31'"]),
    ("timestamp", pa.timestamp("us"), ["'2026-02-28 12:34:56.5'", "'1969-12-31 23:59:59.999999'",
        "'0001-01-01'"]),
    ("timestamptz", pa.timestamp("us", "UTC"),
        ["'2026-02-28 12:34:56.123456+05'", "'9999-12-31 23:59:59.999999+00'"]),
    ("time", TEXT, ["'12:34:56.5'"]),
    ("timetz", TEXT, ["'12:34:56+02'"]),
    ("interval", TEXT, ["'1 year 2 days 03:04:05.6'"]),
    ("uuid", TEXT, ["'12345678-1234-1234-1234-123456789abc'"]),
    ("json", TEXT, ["'{\"a\":  1}'"]),
    ("jsonb", TEXT, ["'{\"a\":  [1, null]}'"]),
    ("int[]", TEXT, ["'{1,NULL,3}'", "'{}'"]),
    ("text[]", TEXT, ["array['a b', 'c\"d', NULL]"]),
    ("inet", TEXT, ["'10.0.0.1'", "'10.0.0.0/8'"]),
    ("bit(3)", TEXT, ["B'101'"]),
    ("int4range", TEXT, ["'[1,5)'"]),
    ("point", TEXT, ["'(1,2)'"]),
    ("oid", pa.int64(), ["4294967295"]),
    ("{schema}.mood", TEXT, ["'glad'"]),
    ("{schema}.pair", TEXT, ["row(1, 'a b')", "row(NULL, NULL)", "row(1, NULL)"]),
    ("{schema}.price", pa.decimal128(9, 2), ["12.5"]),
    ("{schema}.dear", pa.decimal128(9, 2), ["99.99"]),
]  # fmt: skip


def make_table(source: Source) -> str:
    schema = source.name
    source.run(
        f"CREATE TYPE {schema}.mood AS ENUM ('sad', 'glad')",
        f"CREATE TYPE {schema}.pair AS (a int, b text)",
        f"CREATE DOMAIN {schema}.price AS numeric(9, 2)",
        f"CREATE DOMAIN {schema}.dear AS {schema}.price CHECK (VALUE > 10)",
    )
    columns = ", ".join(f"c{n} {name.format(schema=schema)}" for n, (name, _, _) in enumerate(TYPES))
    return source.table(f"id int primary key, {columns}")


def insert(source: Source, table: str) -> None:
    rounds = max(len(values) for _, _, values in TYPES)
    for number in range(rounds):
        values = ", ".join(values[number] if number < len(values) else "NULL" for _, _, values in TYPES)
        source.run(f"INSERT INTO {table} VALUES ({number}, {values})")
    source.run(f"INSERT INTO {table} (id) VALUES ({rounds})")


def expected(source: Source, table: str) -> dict[str, list[Any]]:
    """The values as SELECT gives them: as psycopg reads them, or the server's text."""
    found = {}
    with psycopg.connect(source.url, autocommit=True) as connection:
        connection.execute("SET timezone = 'UTC'; SET search_path = 'pg_catalog'")
        for n, (_, kind, _) in enumerate(TYPES):
            # concat() writes values as a result in text form has them.
            value = f"CASE WHEN c{n} IS DISTINCT FROM NULL THEN concat(c{n}) END" if kind == TEXT else f"c{n}"
            rows = connection.execute(f"SELECT {value} FROM {table} ORDER BY id".encode()).fetchall()
            found[f"c{n}"] = [row[0] for row in rows]
    return found


@pytest.mark.parametrize("way", ["log", "snapshot"])
def test_every_type(source: Source, way: str) -> None:
    table = make_table(source)
    if way == "log":
        source.make_slot()
        feed = source.open()
        insert(source, table)
    else:
        insert(source, table)
        feed = source.open(snapshot="initial")
    schema = feed.describe().schema
    rows = everything(feed)
    for name, values in expected(source, table).items():
        sql, kind, _ = TYPES[int(name[1:])]
        assert schema.field(name).type == kind, sql
        for value, found in zip(values, [row[name] for row in rows], strict=True):
            if isinstance(value, float):
                same = (math.isnan(value) and math.isnan(found)) or pa.scalar(value, kind).as_py() == found
                assert same, (sql, value, found)
            else:
                assert found == value, sql


def test_infinite_dates_become_the_limits_of_sparks_dates(source: Source) -> None:
    table = source.table("id int primary key, d date, t timestamp, z timestamptz")
    source.make_slot()
    source.run(
        *(
            f"INSERT INTO {table} VALUES ({n}, '{v}', '{v}', '{v}')"
            for n, v in enumerate(["infinity", "-infinity"])
        )
    )
    last, first = everything(source.open())
    end, start = datetime(9999, 12, 31, 23, 59, 59, 999999), datetime(1, 1, 1)  # noqa: DTZ001 - a timestamp without a zone
    assert (last["d"], last["t"], last["z"]) == (end.date(), end, end.replace(tzinfo=UTC))
    assert (first["d"], first["t"], first["z"]) == (date(1, 1, 1), start, start.replace(tzinfo=UTC))


@pytest.mark.parametrize(
    ("kind", "value"), [("date", "0044-03-15 BC"), ("date", "12000-01-01"), ("numeric(5, 2)", "NaN")]
)
def test_a_value_that_fits_no_type_is_an_error(source: Source, kind: str, value: str) -> None:
    table = source.table(f"id int primary key, v {kind}")
    source.make_slot()
    feed = source.open()
    source.run(f"INSERT INTO {table} VALUES (1, '{value}')")
    with pytest.raises(FeedUnavailableError, match="'v'") as caught:
        everything(feed)
    assert caught.value.condition == "FEED_UNAVAILABLE.VALUE"


INVALID = [
    ("numeric(5, 2)", "NaN", "1.25"),
    ("date", "0044-03-15 BC", "2026-01-01"),
    ("timestamptz", "12000-01-01", "infinity"),
]


def rows_with(source: Source, table: str, *values: str) -> None:
    for number, value in enumerate(values):
        source.run(f"INSERT INTO {table} VALUES ({number}, '{value}')")


@pytest.mark.parametrize(("kind", "bad", "good"), INVALID)
@pytest.mark.parametrize("way", ["log", "snapshot"])
def test_a_value_that_fits_no_type_can_be_read_as_text_or_null(
    source: Source, caplog: pytest.LogCaptureFixture, way: str, kind: str, bad: str, good: str
) -> None:
    table = source.table(f"id int primary key, v {kind}, w int")
    if way == "log":
        source.make_slot()
    rows_with(source, table, good, bad, bad)
    snapshot = "none" if way == "log" else "initial"

    def read(**options: object) -> list[Any]:
        return [row["v"] for row in everything(source.open(snapshot=snapshot, **options))]

    with pytest.raises(FeedUnavailableError, match=re.escape(bad)) as caught:
        read()
    assert caught.value.condition == "FEED_UNAVAILABLE.VALUE"
    # The advice in the message works, also for a slot that has the row, and in a URL.
    assert "types={'v': 'text'}" in caught.value.message
    assert ("skip=" in caught.value.message) == (way == "log")
    texts = [row[0] for row in source.rows(f"SELECT concat(v) FROM {table} ORDER BY id")]
    assert read(types={"v": "text"}) == texts
    assert read(types={"t.v": "text"}) == texts
    with caplog.at_level(logging.WARNING, "penstock.feeds"):
        first, *others = read(invalid_values="null")
    assert first is not None
    assert others == [None, None]
    # Another one may say that the slot waits for an autovacuum.
    found = [vars(record) for record in caplog.records if vars(record)["action"] == "invalid_values"]
    assert [(record["values"], record["column"]) for record in found] == [(2, "v")]


def test_a_numeric_column_as_double(source: Source) -> None:
    table = source.table("id int primary key, v numeric(5, 2)")
    source.make_slot()
    rows_with(source, table, "1.25", "NaN", "-0.5")
    feed = source.open(types={"v": "double"})
    assert feed.describe().schema.field("v").type == pa.float64()
    first, second, third = (row["v"] for row in everything(feed))
    assert (first, math.isnan(second), third) == (1.25, True, -0.5)


def test_a_missing_column_cannot_be_read_as_text(source: Source) -> None:
    source.table("id int primary key")
    with pytest.raises(FeedUnavailableError, match="'v'") as caught:
        source.open(types={"v": "text"}).describe()
    assert caught.value.condition == "FEED_UNAVAILABLE.COLUMN_UNKNOWN"


def test_a_key_that_fits_no_type_is_never_null(source: Source) -> None:
    table = source.table("id numeric(5, 2) primary key")
    source.make_slot()
    source.run(f"INSERT INTO {table} VALUES ('NaN')")
    with pytest.raises(FeedUnavailableError) as caught:
        everything(source.open(invalid_values="null"))
    assert caught.value.condition == "FEED_UNAVAILABLE.VALUE"
    assert [row["id"] for row in everything(source.open(types={"id": "text"}))] == ["NaN"]


def test_a_commit_can_be_skipped_by_its_version(source: Source, caplog: pytest.LogCaptureFixture) -> None:
    table = source.table("id int primary key, v numeric(5, 2)")
    stream = Stream()
    stream.start(source.feed(snapshot="initial"))
    stream.drain()
    rows_with(source, table, "1", "NaN")
    source.run(f"DELETE FROM {table} WHERE id = 1", f"INSERT INTO {table} VALUES (2, 2)")
    for _ in range(2):
        with pytest.raises(FeedUnavailableError) as caught:
            stream.drain()
        stream.start(source.feed(snapshot="initial"))
    version = caught.value.parameters["version"]
    assert f"skip=[{version}]" in caught.value.message
    stream.start(source.feed(snapshot="initial", skip=[version]))
    with caplog.at_level(logging.WARNING, "penstock.feeds"):
        stream.drain()
    assert [(row["_change_type"], row["id"]) for row in stream.rows] == [
        ("insert", 0),
        ("delete", 1),
        ("insert", 2),
    ]
    assert {record.action for record in caplog.records} == {"commits_skipped"}  # type: ignore[attr-defined] # by extra


def test_a_commit_that_changes_a_table_can_be_skipped(source: Source) -> None:
    table = source.table("id int primary key, v int")
    stream = Stream()
    stream.start(source.feed(snapshot="initial"))
    stream.drain()
    source.run(f"INSERT INTO {table} VALUES (1, 1)")
    with source.connection.transaction():
        source.run(
            f"INSERT INTO {table} VALUES (2, 2)",
            f"TRUNCATE {table}",
            f"INSERT INTO {table} VALUES (3, 3)",
        )
    source.run(f"INSERT INTO {table} VALUES (4, 4)")
    with pytest.raises(FeedUnavailableError, match="TRUNCATE") as caught:
        stream.drain()
    stream.start(source.feed(snapshot="initial", skip=[caught.value.parameters["version"]]))
    stream.drain()
    assert [row["id"] for row in stream.rows] == [1, 4]


@settings(max_examples=60)
@given(st.lists(st.none() | st.binary(max_size=20)), st.integers(0, 3))
def test_bytes_are_parsed_from_hex_digits(values: list[bytes | None], skipped: int) -> None:
    text = pa.array([None if value is None else "\\x" + value.hex() for value in values], pa.string())
    found = from_text(text[skipped:], pa.binary())
    found.validate(full=True)
    assert found.to_pylist() == values[skipped:]


@settings(max_examples=60)
@given(st.lists(st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]))))
def test_json_text_reads_back(values: list[str]) -> None:
    assert [json.loads(text) for text in json_strings(pa.array(values, pa.string())).to_pylist()] == values


def test_numeric_types() -> None:
    assert arrow_type(1700, ((10 << 16) | 2) + 4) == pa.decimal128(10, 2)
    assert arrow_type(1700) == pa.string()
    assert from_text(pa.array(["1.5", None]), pa.decimal128(10, 2)).to_pylist() == [Decimal("1.50"), None]
