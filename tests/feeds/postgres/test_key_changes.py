"""Keys and replica identities that change while a query runs, and while it does not."""

from __future__ import annotations

import pytest

from tests.feeds.postgres.stops import TIMES_OF_CHANGE, keys, refused, rows_after_restart, started
from tests.support.postgres_source import Source, everything

OTHER_KEYS = {
    "replica identity by an index": ["ALTER TABLE {t} REPLICA IDENTITY USING INDEX t_code_key"],
    "the primary key on another column": ["ALTER TABLE {t} DROP CONSTRAINT t_pkey",
        "ALTER TABLE {t} ADD PRIMARY KEY (code)"],
    "a key with a column more": ["ALTER TABLE {t} DROP CONSTRAINT t_pkey",
        "ALTER TABLE {t} ADD PRIMARY KEY (id, code)"],
}  # fmt: skip


@pytest.mark.few(4)
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


@pytest.mark.parametrize("when", ["while it runs", "while it is down"])
@pytest.mark.parametrize("identity", ["DEFAULT", "USING INDEX t_code_key"])
def test_rows_inserted_while_a_table_has_no_key_are_refused(source: Source, identity: str, when: str) -> None:
    """Several of them may have the key that the copy identifies rows by."""
    table = source.table("id int primary key, code text not null unique, v int")
    source.run(f"ALTER TABLE {table} REPLICA IDENTITY {identity}", f"INSERT INTO {table} VALUES (1, 'a', 1)")
    stream = started(source)
    constraint = "t_pkey" if identity == "DEFAULT" else "t_code_key"
    source.run(
        f"INSERT INTO {table} VALUES (2, 'b', 2)",
        f"ALTER TABLE {table} DROP CONSTRAINT {constraint}",
        f"INSERT INTO {table} VALUES (1, 'c', 3)"
        if identity == "DEFAULT"
        else f"INSERT INTO {table} VALUES (3, 'a', 3)",
    )
    if when == "while it is down":
        # The plan has a key again; the rows from before it have not.
        source.run(
            f"ALTER TABLE {table} REPLICA IDENTITY FULL",
            f"DELETE FROM {table} WHERE v = 3",
            f"ALTER TABLE {table} ADD CONSTRAINT {constraint} "
            + ("PRIMARY KEY (id)" if identity == "DEFAULT" else "UNIQUE (code)"),
            f"ALTER TABLE {table} REPLICA IDENTITY {identity}",
        )
        stream.start(source.feed(snapshot="initial"))
    with refused("KEY_MISSING", table=table) as caught:
        stream.drain()
    assert "start over" in caught.value.message
    assert keys(stream.rows, "id") == [("insert", 1), ("insert", 2)]
    if when == "while it is down":
        stream.start(source.feed(snapshot="initial"))
        with refused("KEY_MISSING", table=table):
            stream.drain()


def test_a_batch_refuses_rows_inserted_while_the_table_had_no_key(source: Source) -> None:
    table = source.table("id int primary key")
    source.make_slot()
    source.run(
        f"ALTER TABLE {table} DROP CONSTRAINT t_pkey",
        f"INSERT INTO {table} VALUES (1)",
        f"ALTER TABLE {table} ADD PRIMARY KEY (id)",
    )
    with refused("KEY_MISSING", table=table) as caught:
        everything(source.open())
    assert "start over" in caught.value.message
    assert "two ranges" not in caught.value.message


def test_rows_without_an_identity_are_read_where_all_columns_identify_them(source: Source) -> None:
    table = source.table("id int, v int")
    source.run(f"ALTER TABLE {table} REPLICA IDENTITY FULL", f"INSERT INTO {table} VALUES (1, 1)")
    stream = started(source)
    source.run(
        f"ALTER TABLE {table} REPLICA IDENTITY DEFAULT",
        f"INSERT INTO {table} VALUES (2, 2)",
        f"ALTER TABLE {table} REPLICA IDENTITY FULL",
        f"DELETE FROM {table}",
    )
    stream.start(source.feed(snapshot="initial"))
    assert keys(stream.drain(), "id") == [("insert", 2), ("delete", 1), ("delete", 2)]


@pytest.mark.few(3)
@pytest.mark.parametrize("when", ["while it runs", "while it is down"])
@pytest.mark.parametrize(
    ("key", "identity", "finally_identity"),
    [
        ("id", "FULL", "FULL"),
        ("code", "FULL", "FULL"),
        ("id", "NOTHING", "DEFAULT"),
        ("id", "FULL", "DEFAULT"),
    ],
)
def test_a_new_primary_key_that_is_not_in_the_log_is_refused(
    source: Source, key: str, identity: str, finally_identity: str, when: str
) -> None:
    """While there was none, several rows may have had one key; later changes do not say which they mean."""
    table = source.table("id int primary key, code text not null, v int")
    source.run(f"INSERT INTO {table} VALUES (1, 'a', 1)")
    if identity == finally_identity:
        source.run(f"ALTER TABLE {table} REPLICA IDENTITY {identity}")
    stream = started(source)
    source.run(
        f"ALTER TABLE {table} REPLICA IDENTITY {identity}",
        f"ALTER TABLE {table} DROP CONSTRAINT t_pkey",
        f"INSERT INTO {table} VALUES (1, 'b', 2)",
    )
    source.run(f"ALTER TABLE {table} REPLICA IDENTITY FULL", f"DELETE FROM {table} WHERE code = 'a'")
    source.run(
        f"ALTER TABLE {table} ADD PRIMARY KEY ({key})",
        f"ALTER TABLE {table} REPLICA IDENTITY {finally_identity}",
        f"INSERT INTO {table} VALUES (2, 'c', 3)",
    )
    if when == "while it is down":
        stream.start(source.feed(snapshot="initial"))
    with refused("KEY_REPLACED", table=table) as caught:
        stream.drain()
    stream.start(source.feed(snapshot="initial", accept=caught.value.parameters["accept"]))
    assert len(stream.drain()) >= 2
    source.run(f"INSERT INTO {table} VALUES (4, 'd', 4)")
    stream.start(source.feed(snapshot="initial"))
    assert keys(stream.drain(), "id", "code") == [("insert", 4, "d")]


@pytest.mark.parametrize("identity", ["DEFAULT", "FULL", "NOTHING"])
def test_a_new_primary_key_is_carried_where_only_inserts_are_published(source: Source, identity: str) -> None:
    table = source.table("id int primary key, v int")
    source.run(
        f"ALTER PUBLICATION {source.name} SET (publish = 'insert')",
        f"ALTER TABLE {table} REPLICA IDENTITY {identity}",
    )
    stream = started(source)
    source.run(
        f"ALTER TABLE {table} DROP CONSTRAINT t_pkey",
        f"INSERT INTO {table} VALUES (1, 1)",
        f"ALTER TABLE {table} ADD PRIMARY KEY (id)",
        f"INSERT INTO {table} VALUES (2, 2)",
    )
    assert keys(stream.drain(), "id") == [("insert", 1), ("insert", 2)]


def test_a_rebuilt_index_and_a_renamed_key_are_carried_with_replica_identity_full(source: Source) -> None:
    table = source.table("id int primary key, code text not null, v int")
    source.run(f"ALTER TABLE {table} REPLICA IDENTITY FULL")
    stream = started(source)
    source.run(
        f"INSERT INTO {table} VALUES (1, 'a', 1)",
        f"REINDEX INDEX CONCURRENTLY {source.name}.t_pkey",
        f"VACUUM FULL {table}",
        f"ALTER TABLE {table} RENAME CONSTRAINT t_pkey TO other",
        f"UPDATE {table} SET v = 2",
    )
    assert len(stream.drain()) == 3


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
    assert "it logs 'id', but rows" in caught.value.message


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
