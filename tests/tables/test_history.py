"""Change rows applied to a table that keeps every version of a row, whatever the order in which
changes arrive.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from pyspark.sql import SparkSession

import penstock
from penstock.errors import InvalidInputError, SchemaMismatchError, TableRefusedError
from penstock.testing import replay_last_batch
from tests.support.spark_queues import one_store
from tests.support.sql_tables import Feed, query, rows, sql_name
from tests.tables.change_tables import SCHEMA, change
from tests.tables.histories import Event, History, deliveries, folded


@pytest.fixture
def feed(spark: SparkSession, store_url: str, tmp_path: Path) -> Feed:
    return Feed(spark, store_url, tmp_path, SCHEMA)


def people(feed: Feed, **more: Any) -> penstock.TableSink:
    return feed.table("people", "id", apply_changes=True, scd_type=2, **more)


def test_every_version_of_a_row_is_kept(feed: Feed) -> None:
    feed.add(change(1, "ada", "insert", 1), change(2, "bob", "insert", 1)).run(people(feed))
    feed.add(
        change(1, "ada", "update_preimage", 2),
        change(1, "eve", "update_postimage", 2),
        change(2, "bob", "delete", 3),
        change(2, "bea", "insert", 5),
        change(1, "eve", "update_preimage", 6),
        change(3, "eve", "update_postimage", 6),
    )
    feed.run(people(feed))
    history = [
        (1, "ada", 1, 2),
        (1, "eve", 2, 6),
        (2, "bea", 5, None),
        (2, "bob", 1, 3),
        (3, "eve", 6, None),
    ]
    assert rows(feed.url, "people") == history
    replay_last_batch(feed.folder / "ck")
    feed.run(people(feed))
    assert rows(feed.url, "people") == history
    current = query(feed.url, f"select id from {sql_name(feed.url, 'people')} where _valid_to is null")
    assert sorted(current) == [(2,), (3,)]


def test_a_late_change_is_inserted_at_its_position(feed: Feed) -> None:
    feed.add(change(1, None, "delete", 7), change(1, "e", "update_postimage", 5)).run(people(feed))
    assert rows(feed.url, "people") == [(1, "e", 5, 7)]
    feed.add(change(1, "a", "insert", 1), change(1, None, "delete", 3), change(2, None, "delete", 4))
    feed.run(people(feed))
    assert rows(feed.url, "people") == [(1, "a", 1, 3), (1, "e", 5, 7)]
    feed.add(change(1, "f", "insert", 6), change(2, "x", "insert", 2), change(1, "c", "insert", 3))
    feed.run(people(feed))
    assert rows(feed.url, "people") == [
        (1, "a", 1, 3),
        (1, "c", 3, 5),
        (1, "e", 5, 6),
        (1, "f", 6, 7),
        (2, "x", 2, 4),
    ]


def test_validity_periods_use_a_user_defined_time(feed: Feed) -> None:
    def timed(frame: Any) -> Any:
        return frame.selectExpr("id", "name", "_change_type", "date_from_unix_date(_commit_version) as day")

    feed.add(change(1, "a", "insert", 0), change(1, "b", "update_postimage", 31))
    feed.run(people(feed, sequence_by="day"), timed)
    days = [tuple(map(str, row)) for row in rows(feed.url, "people", "name, _valid_from, _valid_to")]
    assert days == [("a", "1970-01-01", "1970-02-01"), ("b", "1970-02-01", "None")]


def test_different_changes_with_the_same_position_are_refused(feed: Feed) -> None:
    feed.add(change(1, "one", "insert", 1), change(1, "other", "insert", 1), change(1, "last", "insert", 2))
    with pytest.raises(TableRefusedError, match="sequence_by") as caught:
        feed.run(people(feed))
    assert caught.value.condition == "TABLE_REFUSED.AMBIGUOUS_ORDER"
    assert rows(feed.url, "people") == []


@one_store
def test_a_table_cannot_switch_between_current_rows_and_history(feed: Feed) -> None:
    feed.add(change(1, "ada", "insert", 1)).run(people(feed))
    with pytest.raises(SchemaMismatchError, match="_valid_from"):
        feed.run(feed.table("people", "id", apply_changes=True), checkpoint="other")
    with pytest.raises(InvalidInputError, match=r"COLUMN_NAME\].*rename"):
        feed.run(people(feed), lambda frame: frame.selectExpr("*", "id as _valid_to"))


@one_store
def test_a_dropped_table_starts_over(feed: Feed) -> None:
    feed.add(change(1, "ada", "insert", 5), change(1, None, "delete", 6)).run(people(feed))
    query(feed.url, f"drop table {sql_name(feed.url, 'people')}")
    feed.add(change(1, "bob", "insert", 4)).run(people(feed))
    assert rows(feed.url, "people") == [(1, "bob", 4, None)]


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(batches=deliveries())
def test_changes_in_any_order_equal_a_fold_in_python(
    store: penstock.Store, store_url: str, batches: list[list[Event]]
) -> None:
    name = sql_name(store_url, "t")
    query(store_url, f"drop table if exists {name}")
    table = History(store, store_url)
    for batch_id, batch in enumerate(batches):
        table.apply(batch_id, batch)
        so_far = (event for done in batches[: batch_id + 1] for event in done)
        assert table.rows() == folded(so_far)
