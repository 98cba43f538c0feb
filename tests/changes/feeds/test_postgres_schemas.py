"""Tables that change their form, and what cannot be told as rows."""

from __future__ import annotations

import pytest

from penstock.errors import FeedUnavailable
from tests.changes.feeds.postgres import Source, changes, everything


def refused(condition: str) -> pytest.RaisesExc[FeedUnavailable]:
    return pytest.RaisesExc(
        FeedUnavailable, check=lambda error: error.condition == f"FEED_UNAVAILABLE.{condition}"
    )


def test_a_column_that_is_added_needs_a_new_start(source: Source) -> None:
    table = source.table("id int primary key, v text")
    source.make_slot()
    feed = source.feed()
    feed.describe()
    start = feed.oldest()
    source.run(f"INSERT INTO {table} VALUES (1, 'a')", f"ALTER TABLE {table} ADD w int DEFAULT 7")
    source.run(f"INSERT INTO {table} VALUES (2, 'b', 8)")
    schema = feed.describe().schema
    running = source.feed()
    tasks = running.tasks(start, running.newest(start), 10)
    assert [
        row["w"] for task in tasks for batch in running.read(task, schema) for row in batch.to_pylist()
    ] == [None, 8]


def test_a_running_query_stops_at_a_column_that_is_added(source: Source) -> None:
    table = source.table("id int primary key, v text")
    source.make_slot()
    feed = source.feed()
    schema, start = feed.describe().schema, feed.oldest()
    source.run(f"INSERT INTO {table} VALUES (1, 'a')")
    first = feed.newest(start)
    source.run(f"ALTER TABLE {table} ADD w int", f"INSERT INTO {table} VALUES (2, 'b', 8)")
    (task,) = feed.tasks(start, first, 10)
    assert sum(batch.num_rows for batch in feed.read(task, schema)) == 1
    (task,) = feed.tasks(first, feed.newest(first), 10)
    with refused("SCHEMA_CHANGED") as caught:
        list(feed.read(task, schema))
    assert "'w'" in caught.value.message
    # The same without the column in what is read: a query that does not know of it must not go on either.
    with refused("SCHEMA_CHANGED"):
        list(feed.read(task, schema.remove(1)))


def test_a_column_that_is_gone_is_null(source: Source) -> None:
    table = source.table("id int primary key, v text, w int")
    source.make_slot()
    feed = source.feed()
    schema, start = feed.describe().schema, feed.oldest()
    source.run(
        f"INSERT INTO {table} VALUES (1, 'a', 1)",
        f"ALTER TABLE {table} DROP v",
        f"INSERT INTO {table} VALUES (2, 2)",
    )
    (task,) = feed.tasks(start, feed.newest(start), 10)
    rows = [row for batch in feed.read(task, schema) for row in batch.to_pylist()]
    assert [(row["id"], row["v"], row["w"]) for row in rows] == [(1, "a", 1), (2, None, 2)]


def test_what_went_before_the_query_began_is_left_out(source: Source) -> None:
    one = source.table("id int primary key, v text, w int", "one")
    two = source.table("id int primary key", "two")
    gone = source.table("id int primary key", "gone")
    source.make_slot()
    source.run(
        f"INSERT INTO {one} VALUES (1, 'a', 1)",
        f"INSERT INTO {two} VALUES (2)",
        f"INSERT INTO {gone} VALUES (3)",
    )
    source.run(f"ALTER TABLE {one} DROP v", f"ALTER TABLE {one} RENAME TO uno", f"DROP TABLE {gone}")
    source.run(f"INSERT INTO {source.name}.uno VALUES (4, 4)")
    rows = everything(source.feed())
    assert [(row["_table"], row["uno"], row["two"]) for row in rows] == [
        (f"{source.name}.uno", {"id": 1, "w": 1}, None),
        (two, None, {"id": 2}),
        (f"{source.name}.uno", {"id": 4, "w": 4}, None),
    ]
    assert [row["w"] for row in everything(source.feed(tables=("uno",)))] == [1, 4]


def test_a_type_that_changes_is_cast_where_it_fits(source: Source) -> None:
    table = source.table("id int primary key, v int")
    source.make_slot()
    feed = source.feed()
    schema, start = feed.describe().schema, feed.oldest()
    source.run(f"ALTER TABLE {table} ALTER v TYPE bigint", f"INSERT INTO {table} VALUES (1, 5)")
    (task,) = feed.tasks(start, feed.newest(start), 10)
    assert [row["v"] for batch in feed.read(task, schema) for row in batch.to_pylist()] == [5]
    source.run(f"INSERT INTO {table} VALUES (2, 5000000000)")
    (task,) = feed.tasks(start, feed.newest(start), 10)
    with refused("SCHEMA_CHANGED") as caught:
        list(feed.read(task, schema))
    assert "5000000000" in caught.value.message


def test_a_table_that_comes_to_the_publication_or_gets_a_new_name_needs_a_new_start(source: Source) -> None:
    one = source.table("id int primary key", "one")
    source.table("id int primary key", "two")
    source.make_slot()
    feed = source.feed()
    schema, start = feed.describe().schema, feed.oldest()
    three = source.table("id int primary key", "three")
    source.run(f"INSERT INTO {three} VALUES (1)")
    (task,) = feed.tasks(start, feed.newest(start), 10)
    with refused("SCHEMA_CHANGED"):
        list(feed.read(task, schema))
    # A feed of chosen tables has no interest in it.
    chosen = source.feed(tables=("one",))
    assert everything(chosen) == []
    source.run(f"ALTER TABLE {one} RENAME TO uno", f"INSERT INTO {source.name}.uno VALUES (1)")
    (task,) = chosen.tasks(start, chosen.newest(start), 10)
    with refused("SCHEMA_CHANGED") as caught:
        list(chosen.read(task, schema))
    assert "uno" in caught.value.message


def test_a_table_that_was_made_anew_goes_on(source: Source) -> None:
    table = source.table("id int primary key, v text")
    source.make_slot()
    feed = source.feed(tables=("t",))
    start = feed.oldest()
    source.run(f"INSERT INTO {table} VALUES (1, 'a')", f"DROP TABLE {table}")
    source.table("id int primary key, v text")
    source.run(f"INSERT INTO {table} VALUES (1, 'b')")
    assert feed.newest(start) > start
    assert [row["v"] for row in changes(feed, start, feed.newest(start))] == ["a", "b"]


def test_truncate_is_an_error_or_skipped(source: Source) -> None:
    table = source.table("id int primary key")
    source.make_slot()
    feed, skipping = source.feed(), source.feed(truncate="skip")
    start = feed.oldest()
    source.run(f"INSERT INTO {table} VALUES (1)", f"TRUNCATE {table}", f"INSERT INTO {table} VALUES (2)")
    with refused("TRUNCATED") as caught:
        changes(feed, start, feed.newest(start))
    assert table in caught.value.message
    assert [row["id"] for row in changes(skipping, start, feed.newest(start))] == [1, 2]


def test_row_filters_and_column_lists_of_the_publication_hold(source: Source) -> None:
    if source.version < 15:
        pytest.skip("they came with PostgreSQL 15")
    source.run(f"CREATE TABLE {source.name}.t (id int primary key, v text, w text)")
    source.run(f"ALTER PUBLICATION {source.name} ADD TABLE {source.name}.t (id, v) WHERE (id > 1)")
    source.run(f"INSERT INTO {source.name}.t VALUES (1, 'a', 'x'), (2, 'b', 'y')")
    feed = source.feed(snapshot="initial")
    names = feed.describe().schema.names
    feed.begin()
    source.run(f"INSERT INTO {source.name}.t VALUES (0, 'c', 'x'), (3, 'd', 'z')")
    assert names[:3] == ["id", "v", "_commit_sequence"]
    assert [(row["id"], row["v"]) for row in everything(feed)] == [(2, "b"), (3, "d")]


def test_a_partitioned_table_comes_under_its_own_name(source: Source) -> None:
    name = source.name
    source.run(f"CREATE TABLE {name}.p (id int primary key, v text) PARTITION BY RANGE (id)")
    source.run(f"CREATE TABLE {name}.p1 PARTITION OF {name}.p FOR VALUES FROM (0) TO (10)")
    source.run(f"CREATE TABLE {name}.p2 PARTITION OF {name}.p FOR VALUES FROM (10) TO (20)")
    source.run(
        f"ALTER PUBLICATION {name} ADD TABLE {name}.p",
        f"ALTER PUBLICATION {name} SET (publish_via_partition_root)",
    )
    source.run(f"INSERT INTO {name}.p VALUES (1, 'a'), (11, 'b')")
    feed = source.feed(snapshot="initial", tables=("p",))
    feed.begin()
    source.run(f"INSERT INTO {name}.p VALUES (2, 'c'), (12, 'd')")
    assert sorted((row["id"], row["v"]) for row in everything(feed)) == [
        (1, "a"),
        (2, "c"),
        (11, "b"),
        (12, "d"),
    ]
