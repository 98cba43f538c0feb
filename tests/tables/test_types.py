"""Spark's types become native SQL types, and names are data."""

from __future__ import annotations

import json
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit, urlunsplit

import pyarrow as pa
import pytest
from pyspark.sql import DataFrame, SparkSession

import penstock
from penstock.errors import (
    InvalidInputError,
    InvalidNameError,
    SchemaMismatchError,
    TableRefusedError,
    UnsupportedTypeError,
)
from penstock.store.url import parse_url
from penstock.tables.sql.staging import load_chunks, refusing_unstorable_text
from tests.support.spark_queues import one_store
from tests.support.sql_tables import Feed, named, query, rows, sql_name

AT = datetime(2026, 1, 31, 12, 0, 0, 123456, tzinfo=UTC)
# The expression, then (type, value) in PostgreSQL and in SQLite; a JSON value is given parsed.
TYPES: dict[str, tuple[str, tuple[str, Any], tuple[str, Any]]] = {
    "flag": ("true", ("boolean", True), ("INTEGER", 1)),
    "tiny": ("7Y", ("smallint", 7), ("INTEGER", 7)),
    "small": ("-300S", ("smallint", -300), ("INTEGER", -300)),
    "whole": ("70000", ("integer", 70000), ("INTEGER", 70000)),
    "long": ("9223372036854775807L", ("bigint", 2**63 - 1), ("INTEGER", 2**63 - 1)),
    "single": ("1.5F", ("real", 1.5), ("REAL", 1.5)),
    "double": ("1e300D", ("double precision", 1e300), ("REAL", 1e300)),
    "money": ("cast('1.50' as decimal(38, 2))", ("numeric(38,2)", Decimal("1.50")), ("TEXT", "1.50")),
    "text": ("'a\"b\\\\c\\n,\\'\\\\.'", ("text", "a\"b\\c\n,'\\."), ("TEXT", "a\"b\\c\n,'\\.")),
    "nothing": ("''", ("text", ""), ("TEXT", "")),
    "bytes": ("x'00ff41'", ("bytea", b"\0\xffA"), ("BLOB", b"\0\xffA")),
    "day": ("date '0099-12-31'", ("date", date(99, 12, 31)), ("TEXT", "0099-12-31")),
    "at": (
        "timestamp '2026-01-31 12:00:00.123456Z'",
        ("timestamp with time zone", AT),
        ("TEXT", "2026-01-31 12:00:00.123456Z"),
    ),
    "local": (
        "timestamp_ntz '2026-01-31 12:00:00.123456'",
        ("timestamp without time zone", AT.replace(tzinfo=None)),
        ("TEXT", "2026-01-31 12:00:00.123456"),
    ),
    "lasted": (
        "interval '-3 04:05:06.000007' day to second",
        ("interval", -timedelta(days=3, hours=4, minutes=5, seconds=6, microseconds=7)),
        ("INTEGER", -273906000007),
    ),
    "never": ("null", ("text", None), ("TEXT", None)),
    "several": ("array(1, null, 3)", ("jsonb", [1, None, 3]), ("TEXT", [1, None, 3])),
    "nested": (
        "named_struct('b', x'41', 'n', cast(null as int), 't', timestamp '2026-01-31 12:00:00.123456Z')",
        ("jsonb", {"b": "QQ==", "n": None, "t": "2026-01-31T12:00:00.123456Z"}),
        ("TEXT", {"b": "QQ==", "n": None, "t": "2026-01-31T12:00:00.123456Z"}),
    ),
    "pairs": ("map('x', 1)", ("jsonb", {"x": 1}), ("TEXT", {"x": 1})),
    "loose": ("""parse_json('{"a": [1, "x"]}')""", ("jsonb", {"a": [1, "x"]}), ("TEXT", {"a": [1, "x"]})),
}


@pytest.fixture
def feed(spark: SparkSession, store_url: str, tmp_path: Path) -> Feed:
    return Feed(spark, store_url, tmp_path, pa.schema([("id", pa.int64())]))


def every_type(frame: DataFrame) -> DataFrame:
    return frame.selectExpr("id", *(f"{expression} as {name}" for name, (expression, _, _) in TYPES.items()))


def declared(url: str, table: str) -> dict[str, str]:
    parsed = parse_url(url)
    if parsed.dialect == "sqlite":
        return {row[1]: row[2] for row in query(url, f"pragma table_info({sql_name(url, table)})")}
    found = query(
        url,
        "select attname, format_type(atttypid, atttypmod) from pg_attribute "
        f"where attrelid = '{sql_name(url, table)}'::regclass and attnum > 0",
    )
    return dict(found)


def test_every_type_has_its_native_form(feed: Feed) -> None:
    feed.add({"id": 1}).run(feed.table("types", "id"), every_type, mode="update")
    place = 1 if feed.url.startswith("postgres") else 2
    types = declared(feed.url, "types")
    assert {name: types[name] for name in TYPES} == {name: told[place][0] for name, told in TYPES.items()}
    ((_, *values),) = rows(feed.url, "types", ", ".join(f'"{name}"' for name in ("id", *TYPES)))
    for (name, told), value in zip(TYPES.items(), values, strict=True):
        wanted = told[place][1]
        found = json.loads(value) if isinstance(wanted, list | dict) and isinstance(value, str) else value
        assert found == wanted, name
        assert type(found) is type(wanted), name
    feed.add({"id": 2}).run(feed.table("types", "id"), every_type, mode="update")
    assert len(rows(feed.url, "types", "id")) == 2, "the table that is there takes the same rows"


NAMES = ["it's; drop table x --", "ünïcödé 表 🙂", 'dou"ble', "%s :id %(x)s", "select", "with.dot"]


def test_any_name_works_for_tables_and_columns(feed: Feed) -> None:
    def renamed(frame: DataFrame) -> DataFrame:
        return frame.toDF("value").selectExpr(*["value"] * len(NAMES)).toDF(*NAMES)

    def found() -> list[int]:
        assert all(len(set(row)) == 1 for row in rows(feed.url, whole))
        return [row[0] for row in rows(feed.url, whole)]

    whole = """it's; drop "%s" -- ünï 表 🙂 with.dot :id %(x)s"""
    feed.add({"id": 1}, {"id": 2}).run(feed.table(whole, *NAMES[:-1]), renamed, mode="update")
    feed.add({"id": 2}, {"id": 3}).run(feed.table(whole, *NAMES[:-1]), renamed, mode="update")
    assert found() == [1, 2, 3]
    feed.store.consumer("c").seek("in", to="earliest")
    feed.run(feed.table(whole), lambda df: renamed(df.groupBy().max("id")), mode="complete", checkpoint="c")
    assert found() == [3]


def test_reserved_and_invalid_names_are_refused(feed: Feed) -> None:
    if feed.url.startswith("sqlite"):
        taken = ["penstock_ledger", "PENSTOCK_mine", "sqlite_x"]
    else:
        taken = [named(feed.url, name) for name in ("ledger", "payload_block", "staged_rows_1")]
        taken += ["a.b.c", "x" * 64]
    for name in taken:
        with pytest.raises(InvalidNameError):
            feed.run(penstock.TableSink(name, url=feed.url))
    query(feed.url, f"create view {sql_name(feed.url, 'seen')} as select 1 as id")
    with pytest.raises(TableRefusedError, match="not a table"):
        feed.run(feed.table("seen"))


@one_store
def test_types_that_no_table_has_are_refused_before_the_query_starts(feed: Feed) -> None:
    with pytest.raises(UnsupportedTypeError, match="st_asbinary"):
        feed.run(
            feed.table("t"),
            lambda df: df.selectExpr("st_geomfromwkb(x'0101000000000000000000F03F0000000000000040') g"),
        )
    with pytest.raises(InvalidInputError, match=r"INPUT.COLUMN_TYPE\].*nested"):
        feed.run(feed.table("t", "a"), lambda df: df.selectExpr("array(id) as a"))
    with pytest.raises(SchemaMismatchError, match=r"DUPLICATE_COLUMN\].*the same name"):
        feed.run(feed.table("t"), lambda df: df.selectExpr("id", "id as ID"))


@pytest.mark.parametrize("store_url", ["postgresql"], indirect=True)
@pytest.mark.parametrize("expression", ["concat('a', chr(0))", "array(concat('a', chr(0)))"])
def test_a_text_with_nul_is_refused(feed: Feed, expression: str) -> None:
    feed.add({"id": 1})
    with pytest.raises(TableRefusedError, match="translate") as caught:
        feed.run(feed.table("t"), lambda df: df.selectExpr(f"{expression} as s"))
    assert caught.value.condition == "TABLE_REFUSED.NUL_CHARACTER"


@pytest.mark.parametrize("store_url", ["sqlite"], indirect=True)
def test_nan_is_refused_where_sqlite_needs_a_value(feed: Feed) -> None:
    """SQLite keeps NULL instead."""
    feed.add({"id": 1})
    nan = "double('nan')"
    key, order = f"{nan} as k", ("1 as k", "'insert' as _change_type", f"{nan} as s")
    changing = feed.table("t", "k", apply_changes=True, sequence_by="s")
    for columns, sink, mode in (([key], feed.table("u", "k"), "update"), (order, changing, "append")):
        with pytest.raises(TableRefusedError, match="nanvl") as caught:
            feed.run(sink, lambda df, columns=columns: df.selectExpr(*columns), mode=mode, checkpoint=mode)
        assert caught.value.condition == "TABLE_REFUSED.NAN"


def test_a_text_that_is_not_utf8_is_refused(feed: Feed) -> None:
    text = "cast(x'61ff' as string)"
    feed.add({"id": 1})
    with pytest.raises(TableRefusedError, match=r"0xff.*make_valid_utf8") as caught:
        feed.run(feed.table("t"), lambda df: df.selectExpr(f"{text} as s"))
    assert caught.value.condition == "TABLE_REFUSED.INVALID_UTF8"
    feed.run(feed.table("t"), lambda df: df.selectExpr(f"make_valid_utf8({text}) as s"))
    assert rows(feed.url, "t") == [("a\ufffd",)]


def test_a_character_that_the_database_has_not_is_refused(pg_url: str) -> None:
    parts = urlsplit(pg_url)
    url = urlunsplit(parts._replace(path="/western"))
    query(pg_url, "create database western encoding 'LATIN1' template template0 lc_collate 'C' lc_ctype 'C'")
    try:
        with penstock.connect(url, create=True) as store:
            texts = pa.record_batch({"c0": ["é", "€"]})
            store.database.run(lambda tx: load_chunks(tx, ["c0 text"], [texts[:1]]))
            with pytest.raises(TableRefusedError, match="LATIN1") as caught, refusing_unstorable_text():
                store.database.run(lambda tx: load_chunks(tx, ["c0 text"], [texts]))
        assert caught.value.condition == "TABLE_REFUSED.ENCODING"
    finally:
        query(pg_url, "drop database western with (force)")


@pytest.mark.few(2)
@pytest.mark.parametrize("kind", ["date", "timestamp", "timestamp_ntz"])
def test_a_date_that_cannot_be_written_is_refused(feed: Feed, kind: str) -> None:
    first = 1 if feed.url.startswith("postgresql") else -32767
    feed.add({"id": 1})
    for beyond in (f"make_date({first}, 1, 1) - 1", "date '+32768-01-01'"):
        with pytest.raises(TableRefusedError, match=r"'day' has a date outside the years .*year\(") as caught:
            feed.run(feed.table("t"), lambda df, end=beyond: df.selectExpr(f"cast({end} as {kind}) as day"))
        assert caught.value.condition == "TABLE_REFUSED.DATE_OUT_OF_RANGE"


def test_the_first_and_the_last_date_are_written(feed: Feed) -> None:
    first = "0001" if feed.url.startswith("postgresql") else "-32767"
    feed.add({"id": 1})
    last = "'+32767-12-31 23:59:59.999999'"
    feed.run(
        feed.table("t"),
        lambda df: df.selectExpr(
            f"make_date({int(first)}, 1, 1) as day",
            f"cast(make_date({int(first)}, 1, 1) as timestamp) as at",
            "date '+32767-12-31' as last_day",
            f"timestamp {last} as last_at",
            f"timestamp_ntz {last} as last_local",
            "cast(null as date) as never",
        ),
    )
    columns = ("day", "at", "last_day", "last_at", "last_local")
    texts = ", ".join(f"cast({column} as text)" for column in columns)
    ((day, at, last_day, last_at, last_local),) = rows(feed.url, "t", texts)
    assert (day, at[: len(day)], last_day) == (f"{first}-01-01", f"{first}-01-01", "32767-12-31")
    assert {last_at[:26], last_local[:26]} == {"32767-12-31 23:59:59.99999"}
