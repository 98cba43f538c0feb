"""SQL tables that are altered while a query runs: the error says what the table lacks."""

from __future__ import annotations

from pathlib import Path

import pytest
from pyspark.sql import SparkSession

import penstock
from penstock.errors import SchemaMismatchError
from tests.support.sql_tables import Feed, query, rows, sql_name
from tests.tables.change_tables import SCHEMA, change


@pytest.fixture
def feed(spark: SparkSession, store_url: str, tmp_path: Path) -> Feed:
    return Feed(spark, store_url, tmp_path, SCHEMA)


def sink(feed: Feed, kind: str) -> penstock.TableSink:
    if kind.startswith("changes"):
        return feed.table("people", "id", apply_changes=True, scd_type=int(kind[-1]))
    return feed.table("people", *(() if kind == "append" else ("id",)))


def run_until_altered(feed: Feed, kind: str, *statements: str) -> SchemaMismatchError:
    """Alter the table between two micro-batches of a query, and return the query's error."""
    mode = "update" if kind == "update" else "append"
    feed.add(change(1, "ada", "insert", 1))
    query_ = feed.pipeline(sink(feed, kind), mode=mode).start(
        checkpoint=feed.folder / "ck", trigger=penstock.Trigger.processing_time()
    )
    try:
        query_.processAllAvailable()
        for statement in statements:
            query(feed.url, statement.format(table=sql_name(feed.url, "people")))
        feed.add(change(2, "bob", "insert", 2))
        with pytest.raises(SchemaMismatchError) as caught:
            query_.processAllAvailable()
    finally:
        query_.stop()
    return caught.value


@pytest.mark.parametrize("kind", ["append", "update", "changes 1", "changes 2"])
def test_a_dropped_column_is_named(feed: Feed, kind: str) -> None:
    error = run_until_altered(feed, kind, "alter table {table} rename column name to label")
    assert error.condition == "SCHEMA_MISMATCH.TABLE_DIFFERS"
    assert "no column 'name'" in error.message
    query(feed.url, f"alter table {sql_name(feed.url, 'people')} rename column label to name")
    feed.run(sink(feed, kind), mode="update" if kind == "update" else "append")
    assert [row[:2] for row in rows(feed.url, "people")] == [(1, "ada"), (2, "bob")]


@pytest.mark.parametrize("store_url", ["postgresql"], indirect=True)
@pytest.mark.parametrize("kind", ["append", "update", "changes 1"])
def test_a_column_that_has_become_required_is_named(feed: Feed, kind: str) -> None:
    error = run_until_altered(
        feed,
        kind,
        "alter table {table} add column town text not null default 'Ulm'",
        "alter table {table} alter column town drop default",
    )
    assert error.condition == "SCHEMA_MISMATCH.TABLE_DIFFERS"
    assert "'town' is NOT NULL without a default" in error.message
