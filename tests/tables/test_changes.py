"""Change rows applied to a table: its current rows, whatever the order in which changes arrive."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql import SparkSession

import penstock
from penstock.errors import InvalidInputError, InvalidOptionError, SchemaMismatchError, TableRefusedError
from penstock.testing import replay_last_batch
from tests.support.spark_queues import one_store
from tests.support.sql_tables import Feed, query, rows, sql_name
from tests.tables.change_tables import SCHEMA, ChangeTable, change


@pytest.fixture
def feed(spark: SparkSession, store_url: str, tmp_path: Path) -> Feed:
    return Feed(spark, store_url, tmp_path, SCHEMA)


def people(feed: Feed, **more: Any) -> penstock.TableSink:
    return feed.table("people", "id", apply_changes=True, **more)


def test_inserts_updates_and_deletes_are_applied(feed: Feed) -> None:
    feed.add(change(1, "ada", "insert", 1), change(2, "bob", "insert", 1), change(3, "cyd", "insert", 1))
    feed.run(people(feed))
    assert rows(feed.url, "people") == [(1, "ada"), (2, "bob"), (3, "cyd")]
    feed.add(
        change(1, "ada", "update_preimage", 2),
        change(1, "eve", "update_postimage", 2),
        change(2, "bob", "delete", 3),
        change(3, "cyd", "update_preimage", 3),
        change(4, "cyd", "update_postimage", 3),
    )
    feed.run(people(feed))
    assert rows(feed.url, "people") == [(1, "eve"), (4, "cyd")], "a row whose key changed leaves its old key"
    replay_last_batch(feed.folder / "ck")
    feed.run(people(feed))
    assert rows(feed.url, "people") == [(1, "eve"), (4, "cyd")]


def test_only_the_last_change_of_a_key_in_a_micro_batch_is_applied(feed: Feed) -> None:
    feed.add(
        change(1, "third", "update_postimage", 3),
        change(1, "first", "insert", 1),
        change(2, "gone", "insert", 1),
        change(1, "second", "update_postimage", 2),
        change(2, "gone", "delete", 2),
    )
    feed.run(people(feed))
    assert rows(feed.url, "people") == [(1, "third")]


def test_late_and_repeated_changes_have_no_effect(feed: Feed) -> None:
    feed.add(change(1, "new", "insert", 5), change(2, None, "delete", 5)).run(people(feed))
    feed.add(
        change(1, "old", "update_postimage", 4),
        change(1, "new", "insert", 5),
        change(2, "late", "insert", 4),
        change(2, None, "delete", 5),
    )
    feed.run(people(feed))
    assert rows(feed.url, "people") == [(1, "new")]
    feed.add(change(2, "again", "insert", 6)).run(people(feed))
    assert rows(feed.url, "people") == [(1, "new"), (2, "again")]


def test_a_user_defined_column_orders_the_changes(feed: Feed) -> None:
    def ordered(frame: Any) -> Any:
        return frame.withColumn("at", frame["name"]).drop("_commit_version", "_commit_timestamp")

    sink = people(feed, sequence_by="at")
    feed.add(change(1, "é", "insert", 1), change(1, "f", "insert", 9), change(1, "Z", "insert", 5)).run(
        sink, ordered
    )
    assert rows(feed.url, "people") == [(1, "é", "é")], "text in the order of its bytes"
    with pytest.raises(SchemaMismatchError, match=r"KEYS_CHANGED\].*start over"):
        feed.run(
            people(feed, sequence_by="_commit_version"),
            lambda df: df.selectExpr("*", "name as at"),
            checkpoint="b",
        )


@pytest.mark.parametrize("store_url", ["sqlite"], indirect=True)
@pytest.mark.parametrize("kind", ["date", "timestamp"])
@pytest.mark.parametrize("year", ["+10000", "0000", "-0001"])
def test_times_that_sqlite_does_not_order_are_refused(feed: Feed, kind: str, year: str) -> None:
    def ordered(frame: Any) -> Any:
        return frame.selectExpr("id", "_change_type", f"cast(name as {kind}) as at")

    sink = people(feed, sequence_by="at")
    feed.add(change(1, "9999-12-31", "insert", 1)).run(sink, ordered)
    feed.add(change(1, f"{year}-01-01", "insert", 2))
    with pytest.raises(TableRefusedError, match=r"'at' orders changes.*years 1 to 9999") as caught:
        feed.run(sink, ordered)
    assert caught.value.condition == "TABLE_REFUSED.DATE_OUT_OF_RANGE"


def test_different_changes_with_the_same_position_are_refused(feed: Feed) -> None:
    feed.add(change(1, "one", "insert", 1), change(1, "other", "insert", 1))
    with pytest.raises(TableRefusedError, match="sequence_by") as caught:
        feed.run(people(feed))
    assert caught.value.condition == "TABLE_REFUSED.AMBIGUOUS_ORDER"
    assert rows(feed.url, "people") == []


@pytest.mark.parametrize("scd_type", [1, 2])
def test_a_new_column_of_a_feed_is_refused_until_the_table_has_it(feed: Feed, scd_type: int) -> None:
    feed.add(change(1, "ada", "insert", 1), change(2, "bob", "insert", 1)).run(
        people(feed, scd_type=scd_type)
    )
    feed.queue.add_columns([pa.field("note", pa.string())])
    feed.queue.append([{**change(1, "eve", "update_postimage", 2), "note": "n"}])
    with pytest.raises(SchemaMismatchError, match=r"TABLE_DIFFERS\].*alter table") as caught:
        feed.run(people(feed, scd_type=scd_type))
    assert [row[:2] for row in rows(feed.url, "people")] == [(1, "ada"), (2, "bob")]
    query(feed.url, caught.value.message.split("(")[1].split(")")[0])
    feed.run(people(feed, scd_type=scd_type))
    assert rows(feed.url, "people", "id, name, note")[-2:] == [(1, "eve", "n"), (2, "bob", None)]


@pytest.mark.parametrize("scd_type", [1, 2])
def test_changes_with_other_keys_than_before_are_refused(feed: Feed, scd_type: int) -> None:
    """What was applied by the old keys says nothing of the new ones."""
    feed.add(change(1, "ada", "insert", 1)).run(people(feed, scd_type=scd_type))
    names = "name" if scd_type == 1 else "name, _valid_from"
    query(feed.url, f"create unique index by_name on {sql_name(feed.url, 'people')} ({names})")
    feed.add(change(2, "bob", "insert", 2))
    with pytest.raises(
        SchemaMismatchError, match=r"KEYS_CHANGED\].*keys \(id \w+\).*these have the keys \(name"
    ):
        feed.run(
            feed.table("people", "name", apply_changes=True, scd_type=scd_type),
            lambda frame: frame.selectExpr("*", "id as other").drop("id").withColumnRenamed("other", "id"),
        )
    assert len(rows(feed.url, "people")) == 1
    feed.run(people(feed, scd_type=scd_type))
    assert len(rows(feed.url, "people")) == 2


def test_a_key_may_get_a_wider_type(feed: Feed) -> None:
    feed.add(change(1, "ada", "insert", 1)).run(
        people(feed), lambda frame: frame.withColumn("id", frame["id"].cast("int"))
    )
    feed.add(change(2**40, "bob", "insert", 2), change(1, "eve", "update_postimage", 2))
    if "sqlite" not in feed.url:
        with pytest.raises(SchemaMismatchError, match=r"TABLE_DIFFERS\].*alter table") as caught:
            feed.run(people(feed))
        query(feed.url, caught.value.message.split("(")[1].split(")")[0])
    feed.run(people(feed))
    replay_last_batch(feed.folder / "ck")
    feed.run(people(feed))
    assert rows(feed.url, "people") == [(1, "eve"), (2**40, "bob")]


def test_a_dropped_table_starts_over(feed: Feed) -> None:
    feed.add(change(1, "ada", "insert", 5)).run(people(feed))
    query(feed.url, f"drop table {sql_name(feed.url, 'people')}")
    feed.store.consumer("c").seek("in", to="earliest")
    feed.run(people(feed), checkpoint="again")
    assert rows(feed.url, "people") == [(1, "ada")]


@pytest.mark.parametrize("scd_type", [1, 2])
def test_an_empty_table_that_was_recreated_by_hand_starts_over(feed: Feed, scd_type: int) -> None:
    feed.add(change(1, "ada", "insert", 5), change(2, None, "delete", 6)).run(people(feed, scd_type=scd_type))
    expected, name = rows(feed.url, "people"), sql_name(feed.url, "people")
    _recreate(feed, scd_type)
    assert rows(feed.url, "people") == []
    feed.store.consumer("c").seek("in", to="earliest")
    feed.run(people(feed, scd_type=scd_type), checkpoint="again")
    assert rows(feed.url, "people") == expected
    query(feed.url, f"delete from {name}")
    feed.add(change(1, "late", "insert", 4), change(2, "late", "insert", 6)).run(
        people(feed, scd_type=scd_type), checkpoint="again"
    )
    late = [(1, "late", 4, None), (2, "late", 6, None)] if scd_type == 2 else [(2, "late")]
    assert rows(feed.url, "people") == late, "the recreated table has a record of its own"


def _recreate(feed: Feed, scd_type: int) -> None:
    """Drop a table and create it again, as a user does who wants other types or indexes."""
    name = sql_name(feed.url, "people")
    query(feed.url, f"drop table {name}")
    columns = "id bigint not null, name text"
    keys = "id"
    if scd_type == 2:
        columns, keys = f"{columns}, _valid_from bigint not null, _valid_to bigint", "id, _valid_from"
    query(feed.url, f"create table {name} ({columns}, primary key ({keys}))")


def test_a_table_that_was_recreated_with_its_rows_still_knows_their_last_changes(feed: Feed) -> None:
    feed.add(change(1, "ada", "insert", 5)).run(people(feed))
    _recreate(feed, 1)
    query(feed.url, f"insert into {sql_name(feed.url, 'people')} values (1, 'ada')")
    feed.add(change(1, "late", "insert", 4), change(2, "bob", "insert", 4)).run(people(feed))
    assert rows(feed.url, "people") == [(1, "ada"), (2, "bob")]


@pytest.mark.parametrize("scd_type", [1, 2])
def test_a_new_table_may_take_the_name_of_a_renamed_one(feed: Feed, scd_type: int) -> None:
    feed.add(change(1, "ada", "insert", 5)).run(people(feed, scd_type=scd_type))
    expected = rows(feed.url, "people")
    query(feed.url, f"alter table {sql_name(feed.url, 'people')} rename to people_before")
    feed.store.consumer("c").seek("in", to="earliest")
    feed.run(people(feed, scd_type=scd_type), checkpoint="again")
    assert rows(feed.url, "people") == rows(feed.url, "people_before") == expected


@pytest.mark.all_kinds
@pytest.mark.parametrize("scd_type", [1, 2])
def test_a_table_whose_record_is_missing_is_refused(feed: Feed, scd_type: int) -> None:
    """Otherwise late changes would replace newer ones."""
    feed.add(change(1, "ada", "insert", 5)).run(people(feed, scd_type=scd_type))
    expected = rows(feed.url, "people")
    query(feed.url, f"drop table {_record_of(feed)}")
    feed.add(change(1, "late", "insert", 4))
    with pytest.raises(TableRefusedError, match=r"drop .*people.* to start over") as refused:
        feed.run(people(feed, scd_type=scd_type))
    assert refused.value.condition == "TABLE_REFUSED.CHANGES_FORGOTTEN"
    assert rows(feed.url, "people") == expected


def _record_of(feed: Feed) -> str:
    """The name of the table with the changes applied to the only table."""
    if feed.url.startswith("sqlite"):
        found = query(feed.url, "select name from sqlite_schema where name like 'penstock_applied%'")
    else:
        schema = sql_name(feed.url, "t").partition(".")[0]
        found = query(
            feed.url,
            "select oid::regclass::text from pg_class "
            f"where relnamespace = '{schema}'::regnamespace and relname like 'applied%' and relkind = 'r'",
        )
    ((name,),) = found
    return str(name)


def test_a_table_whose_rows_were_deleted_still_knows_their_last_changes(feed: Feed) -> None:
    feed.add(change(1, "ada", "insert", 5)).run(people(feed))
    query(feed.url, f"delete from {sql_name(feed.url, 'people')}")
    feed.add(change(1, "of another server", "insert", 4), change(2, "bob", "insert", 4)).run(people(feed))
    assert rows(feed.url, "people") == [(2, "bob")]


@one_store
@pytest.mark.parametrize(
    ("row", "condition"),
    [
        (change(1, "x", "upsert", 1), "TABLE_REFUSED.UNKNOWN_CHANGE_TYPE"),
        ({"id": 1, "_change_type": "insert"}, "TABLE_REFUSED.NULL_SEQUENCE"),
        ({"_change_type": "delete", "_commit_version": 1}, "TABLE_REFUSED.NULL_KEY"),
    ],
)
def test_an_invalid_change_is_refused(feed: Feed, row: dict[str, Any], condition: str) -> None:
    feed.add(row)
    with pytest.raises(TableRefusedError) as caught:
        feed.run(people(feed))
    assert caught.value.condition == condition


@one_store
def test_wrong_arguments_are_refused_before_the_query_starts(feed: Feed) -> None:
    with pytest.raises(InvalidOptionError, match=r"OPTION.VALUE\].*scd_type"):
        people(feed, scd_type=3)
    with pytest.raises(InvalidOptionError, match=r"OPTION.MISSING\].*apply_changes"):
        feed.table("people", "id", scd_type=2)
    with pytest.raises(InvalidOptionError, match=r"OPTION.MISSING\].*keys"):
        feed.table("people", apply_changes=True)
    with pytest.raises(InvalidOptionError, match=r"OPTION.MISSING\].*apply_changes"):
        feed.table("people", "id", sequence_by="at")
    with pytest.raises(InvalidOptionError, match=r"OPTION.CONFLICT\].*append"):
        feed.pipeline(people(feed), mode="update")
    with pytest.raises(InvalidInputError, match=r"CHANGE_COLUMN_MISSING\].*have no _change_type"):
        feed.run(people(feed), lambda df: df.drop("_change_type"))


@pytest.mark.parametrize("seed", range(8))
def test_changes_in_any_order_equal_a_fold_in_python(
    store: penstock.Store, store_url: str, seed: int
) -> None:
    """Each change a few times, in any micro-batch."""
    rng = random.Random(seed)
    table = ChangeTable(store, store_url)
    history = [
        (f"k{key}", 100 * key + version, version, rng.choice([0, 1, 1]))
        for key in range(12)
        for version in rng.sample(range(20), 6)
    ]
    events = [event for event in history for _ in range(rng.randint(1, 3))]
    rng.shuffle(events)
    for batch_id in range(4):
        table.apply(batch_id, events[batch_id::4])
    last = {key: (value, present) for key, value, _, present in sorted(history, key=lambda event: event[2])}
    assert table.rows() == sorted((key, value) for key, (value, present) in last.items() if present)
