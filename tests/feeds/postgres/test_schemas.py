"""Tables whose schema changes, and what cannot be expressed as rows."""

from __future__ import annotations

from tests.feeds.postgres.stops import refused
from tests.support.postgres_source import Source, changes, everything


def test_a_range_with_a_schema_change_is_read_on_both_sides_of_it(source: Source) -> None:
    table = source.table("id int primary key, v text")
    source.make_slot()
    feed = source.open()
    start = feed.oldest()
    source.run(f"INSERT INTO {table} VALUES (1, 'a')", f"ALTER TABLE {table} ADD w int")
    source.run(f"INSERT INTO {table} VALUES (2, 'b', 8)")
    upto = feed.newest(start)
    with refused("COLUMN_ADDED") as caught:
        changes(feed, start, upto)
    version = caught.value.parameters["version"]
    for bound in (
        f"ending_version={version - 1}",
        f"starting_version={version}",
        f"starting_version={start + 1}",
    ):
        assert bound in caught.value.message
    before = source.open()
    assert "w" not in before.describe().schema.names
    assert [row["id"] for row in changes(before, start, version - 1)] == [1]
    later = source.open()
    schema = later.describe(version - 1).schema
    tasks = later.tasks(version - 1, upto, 10)
    assert [
        row["w"] for task in tasks for batch in later.read(task, schema) for row in batch.to_pylist()
    ] == [8]


def test_rows_written_before_the_query_started_are_delivered_as_written(source: Source) -> None:
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
    rows = everything(source.open())
    assert [(row["_table"], row["one"], row["two"], row["gone"]) for row in rows] == [
        (one, {"id": 1, "v": "a", "w": 1}, None, None),
        (two, None, {"id": 2}, None),
        (gone, None, None, {"id": 3}),
    ]
    assert [(row["v"], row["w"]) for row in everything(source.open(tables=("uno",)))] == [("a", 1)]


def test_a_deferrable_key_is_refused_as_replica_identity(source: Source) -> None:
    table = source.table("id int, v int, primary key (id) deferrable")
    source.make_slot()
    with refused("NO_REPLICA_IDENTITY"):
        source.open().describe()
    source.run(f"ALTER TABLE {table} REPLICA IDENTITY FULL", f"INSERT INTO {table} VALUES (1, 1)")
    assert [row["id"] for row in everything(source.open())] == [1]


def test_rows_from_before_a_key_was_added_are_refused(source: Source) -> None:
    """Of those that had the same key, some were deleted before the publication had deletes."""
    source.run(f"CREATE TABLE {source.name}.t (id int, v int)")
    source.run(f"ALTER PUBLICATION {source.name} SET (publish = 'insert')")
    source.run(f"ALTER PUBLICATION {source.name} ADD TABLE {source.name}.t")
    source.make_slot()
    source.run(
        f"INSERT INTO {source.name}.t VALUES (1, 1)",
        f"INSERT INTO {source.name}.t VALUES (1, 0)",
        f"DELETE FROM {source.name}.t WHERE v = 0",
        f"ALTER TABLE {source.name}.t ADD PRIMARY KEY (id)",
    )
    source.run(f"ALTER PUBLICATION {source.name} SET (publish = 'insert, update, delete')")
    source.run(f"UPDATE {source.name}.t SET v = 2")
    with refused("KEY_MISSING", table=f"{source.name}.t"):
        everything(source.open())


def test_several_tables_without_a_key(source: Source) -> None:
    one, two = source.table("id int", "one"), source.table("id int", "two")
    source.run(f"ALTER PUBLICATION {source.name} SET (publish = 'insert')")
    source.make_slot()
    source.run(f"INSERT INTO {one} VALUES (1)", f"INSERT INTO {two} VALUES (2)")
    assert [row["_key"] for row in everything(source.open())] == ["{}", "{}"]


def test_truncate_is_an_error_or_skipped(source: Source) -> None:
    table = source.table("id int primary key")
    source.make_slot()
    feed, skipping = source.open(), source.open(truncate="skip")
    start = feed.oldest()
    source.run(f"INSERT INTO {table} VALUES (1)", f"TRUNCATE {table}", f"INSERT INTO {table} VALUES (2)")
    with refused("TRUNCATED") as caught:
        changes(feed, start, feed.newest(start))
    assert table in caught.value.message
    assert [row["id"] for row in changes(skipping, start, feed.newest(start))] == [1, 2]


def test_row_filters_and_column_lists_of_the_publication_are_respected(source: Source) -> None:
    source.run(f"CREATE TABLE {source.name}.t (id int primary key, v text, w text)")
    source.run(f"ALTER PUBLICATION {source.name} ADD TABLE {source.name}.t (id, v) WHERE (id > 1)")
    source.run(f"INSERT INTO {source.name}.t VALUES (1, 'a', 'x'), (2, 'b', 'y')")
    feed = source.open(snapshot="initial")
    names = feed.describe().schema.names
    feed.prepare()
    source.run(f"INSERT INTO {source.name}.t VALUES (0, 'c', 'x'), (3, 'd', 'z')")
    assert names[:3] == ["id", "v", "_commit_sequence"]
    assert [(row["id"], row["v"]) for row in everything(feed)] == [(2, "b"), (3, "d")]


def test_a_partitioned_table_is_delivered_under_its_own_name(source: Source) -> None:
    name = source.name
    source.run(f"CREATE TABLE {name}.p (id int primary key, v text) PARTITION BY RANGE (id)")
    source.run(f"CREATE TABLE {name}.p1 PARTITION OF {name}.p FOR VALUES FROM (0) TO (10)")
    source.run(f"CREATE TABLE {name}.p2 PARTITION OF {name}.p FOR VALUES FROM (10) TO (20)")
    source.run(
        f"ALTER PUBLICATION {name} ADD TABLE {name}.p",
        f"ALTER PUBLICATION {name} SET (publish_via_partition_root)",
    )
    source.run(f"INSERT INTO {name}.p VALUES (1, 'a'), (11, 'b')")
    feed = source.open(snapshot="initial", tables=("p",))
    feed.prepare()
    source.run(f"INSERT INTO {name}.p VALUES (2, 'c'), (12, 'd')")
    assert sorted((row["id"], row["v"]) for row in everything(feed)) == [
        (1, "a"),
        (2, "c"),
        (11, "b"),
        (12, "d"),
    ]
