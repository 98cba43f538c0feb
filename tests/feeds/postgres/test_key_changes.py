"""Keys and replica identities that change while a query runs, and while it does not."""

from __future__ import annotations

import pytest

from tests.feeds.postgres.source import Source
from tests.feeds.postgres.stops import TIMES_OF_CHANGE, keys, refused, rows_after_restart, started

OTHER_KEYS = {
    "replica identity by an index": ["ALTER TABLE {t} REPLICA IDENTITY USING INDEX t_code_key"],
    "the primary key on another column": ["ALTER TABLE {t} DROP CONSTRAINT t_pkey",
        "ALTER TABLE {t} ADD PRIMARY KEY (code)"],
    "a key with a column more": ["ALTER TABLE {t} DROP CONSTRAINT t_pkey",
        "ALTER TABLE {t} ADD PRIMARY KEY (id, code)"],
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "when", "several"),
    [
        *((name, when, False) for name in OTHER_KEYS for when in TIMES_OF_CHANGE),
        *((name, TIMES_OF_CHANGE[0], True) for name in OTHER_KEYS),
    ],
)
def test_a_change_of_the_identifying_columns_ends_the_query(
    source: Source, name: str, when: str, several: bool
) -> None:
    table = source.table("id int primary key, code text not null unique, v int")
    if several:
        source.table("n int primary key", "other")
    source.run(f"INSERT INTO {table} VALUES (1, 'a', 1), (2, 'b', 2)")
    stream = started(source)
    source.run(f"UPDATE {table} SET v = v + 1 WHERE id = 1")
    if when == "while it runs":
        assert len(stream.drain()) == 1
    source.run(*(statement.format(t=table) for statement in OTHER_KEYS[name]))
    source.run(f"UPDATE {table} SET v = 9 WHERE id = 1", f"DELETE FROM {table} WHERE id = 2")
    if when == "while it is down":
        stream.start(source.feed(snapshot="initial"))
        assert len(stream.batches) == 1
    seen = len(stream.rows)
    with refused("KEY_CHANGED", table=table) as caught:
        stream.drain()
    assert "'code'" in caught.value.message
    assert len(stream.rows) == seen + (when != "while it runs")
    # Started again, it reads the rows as they are identified now.
    stream.start(source.feed(snapshot="initial"))
    update, delete = stream.drain()
    if several:
        assert None not in (update["_key"], delete["_key"])
        assert "null" not in update["_key"] + delete["_key"]
        assert '"code":"b"' in delete["_key"]
    else:
        assert (update["code"], update["v"], delete["code"]) == ("a", 9, "b")


@pytest.mark.parametrize("several", [False, True], ids=["one table", "several tables"])
def test_a_renamed_key_column_ends_the_query(source: Source, several: bool) -> None:
    table = source.table("id int primary key, v int")
    if several:
        source.table("n int primary key", "other")
    source.run(f"INSERT INTO {table} VALUES (1, 1), (2, 2)")
    stream = started(source)
    source.run(f"ALTER TABLE {table} RENAME id TO number", f"DELETE FROM {table} WHERE number = 2")
    (row,) = rows_after_restart(stream, source, "KEY_CHANGED")
    if several:
        assert row["_key"] == '{"number":2}'
    else:
        assert (row["_change_type"], row["number"]) == ("delete", 2)


def test_a_new_replica_identity_with_the_same_key_is_accepted(source: Source) -> None:
    table = source.table("id int primary key, v int")
    source.run(f"INSERT INTO {table} VALUES (1, 1)")
    stream = started(source)
    source.run(f"ALTER TABLE {table} REPLICA IDENTITY FULL", f"UPDATE {table} SET v = 2")
    source.run(f"ALTER TABLE {table} REPLICA IDENTITY DEFAULT", f"UPDATE {table} SET v = 3")
    assert keys(stream.drain(), "id", "v") == [
        ("update_preimage", 1, 1),
        ("update_postimage", 1, 2),
        ("update_postimage", 1, 3),
    ]


def test_a_new_primary_key_with_replica_identity_full(source: Source) -> None:
    table = source.table("id int primary key, code text not null, v int")
    source.run(f"ALTER TABLE {table} REPLICA IDENTITY FULL", f"INSERT INTO {table} VALUES (1, 'a', 1)")
    stream = started(source)
    source.run(
        f"ALTER TABLE {table} DROP CONSTRAINT t_pkey",
        f"ALTER TABLE {table} ADD PRIMARY KEY (code)",
        f"UPDATE {table} SET id = 5",
    )
    assert keys(rows_after_restart(stream, source, "KEY_CHANGED"), "id", "code") == [
        ("update_preimage", 1, "a"),
        ("update_postimage", 5, "a"),
    ]


def partitioned(source: Source) -> str:
    """Create a table with one partition, which is published under the table's name."""
    table = f"{source.name}.p"
    source.run(
        f"CREATE TABLE {table} (id int primary key, code int not null) PARTITION BY RANGE (id)",
        f"CREATE TABLE {source.name}.p1 PARTITION OF {table} FOR VALUES FROM (0) TO (10)",
        f"ALTER PUBLICATION {source.name} ADD TABLE {table}",
        f"ALTER PUBLICATION {source.name} SET (publish_via_partition_root)",
    )
    return table


@pytest.mark.parametrize("change", ["DELETE FROM {}", "UPDATE {} SET id = 2 WHERE id = 1"])
@pytest.mark.parametrize("mended", [False, True], ids=["now", "for a while"])
def test_a_partition_with_a_replica_identity_of_its_own_is_refused(
    source: Source, change: str, mended: bool
) -> None:
    """Its log does not say that the table's key has changed, nor which row was deleted."""
    table = partitioned(source)
    source.run(f"INSERT INTO {table} VALUES (1, 1)")
    stream = started(source)
    source.run(
        f"CREATE UNIQUE INDEX p1_code ON {source.name}.p1 (code)",
        f"INSERT INTO {table} VALUES (3, 3)",
        f"ALTER TABLE {source.name}.p1 REPLICA IDENTITY USING INDEX p1_code",
        change.format(table),
    )
    if mended:
        source.run(f"ALTER TABLE {source.name}.p1 REPLICA IDENTITY DEFAULT")
    with refused("KEY_UNKNOWN", table=table):
        stream.drain()
    assert keys(stream.rows, "id") == [("insert", 1), ("insert", 3)]


def test_partitions_do_not_follow_the_replica_identity_of_their_table(source: Source) -> None:
    """PostgreSQL leaves them at the primary key, so their log lacks a part of the table's key."""
    table = partitioned(source)
    source.run(
        f"CREATE UNIQUE INDEX p_code ON {table} (id, code)",
        f"ALTER TABLE {table} REPLICA IDENTITY USING INDEX p_code",
    )
    stream = started(source)
    source.run(f"INSERT INTO {table} VALUES (1, 1)", f"UPDATE {table} SET code = 2")
    with refused("KEY_UNKNOWN", table=table) as caught:
        stream.drain()
    assert "it logs 'id', and rows" in caught.value.message


def test_a_batch_refuses_a_partition_that_lacks_the_key_and_reads_on_after_it(source: Source) -> None:
    table = partitioned(source)
    source.run(
        f"CREATE UNIQUE INDEX p1_code ON {source.name}.p1 (code)",
    )
    source.make_slot()
    feed = source.open()
    source.run(
        f"ALTER TABLE {source.name}.p1 REPLICA IDENTITY USING INDEX p1_code",
        f"INSERT INTO {table} VALUES (1, 1)",
        f"UPDATE {table} SET id = 2",
    )
    first = feed.newest(feed.oldest())
    with refused("KEY_UNKNOWN", table=table):
        feed.tasks(feed.oldest(), first, 100)
    source.run(f"ALTER TABLE {source.name}.p1 REPLICA IDENTITY DEFAULT", f"INSERT INTO {table} VALUES (3, 3)")
    assert len(feed.tasks(first, feed.newest(first), 100)) == 1


def test_a_partition_that_logs_whole_rows_is_read(source: Source) -> None:
    table = partitioned(source)
    stream = started(source)
    source.run(
        f"INSERT INTO {table} VALUES (1, 1)",
        f"ALTER TABLE {source.name}.p1 REPLICA IDENTITY FULL",
        f"UPDATE {table} SET id = 2",
    )
    assert [row[:2] for row in keys(stream.drain(), "id")] == [("insert", 1), ("delete", 1), ("insert", 2)]
