"""Tables that come, go and change places while a query runs, and while it does not."""

from __future__ import annotations

import uuid
from concurrent.futures import ThreadPoolExecutor
from urllib.parse import urlsplit

import psycopg
import pytest
from psycopg import sql

from penstock.errors import FeedUnavailableError
from tests.feeds.postgres.stops import TIMES_OF_CHANGE, keys, refused, rows_after_restart, started
from tests.support.postgres_source import Row, Source, Stream, apply, open_transaction, source_at

RECREATED = {
    "dropped and recreated": ["DROP TABLE {t}", "CREATE TABLE {t} (id int primary key, v int)",
        "ALTER PUBLICATION {p} ADD TABLE {t}"],
    "swapped": ["CREATE TABLE {t}_new (id int primary key, v int)", "ALTER PUBLICATION {p} ADD TABLE {t}_new",
                "ALTER TABLE {t} RENAME TO t_old", "ALTER TABLE {t}_new RENAME TO t",
                "ALTER PUBLICATION {p} DROP TABLE {p}.t_old"],
}  # fmt: skip


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("name", "when", "chosen"),
    [
        *((name, TIMES_OF_CHANGE[0], chosen) for name in RECREATED for chosen in (False, True)),
        *((name, TIMES_OF_CHANGE[1], False) for name in RECREATED),
    ],
)
def test_a_recreated_table_ends_the_query_until_that_is_accepted(
    source: Source, name: str, when: str, chosen: bool
) -> None:
    table = source.table("id int primary key, v int")
    options = {"tables": ("t",)} if chosen else {}
    source.run(f"INSERT INTO {table} VALUES (1, 1)")
    stream = started(source, **options)
    source.run(*(statement.format(t=table, p=source.name) for statement in RECREATED[name]))
    if when == "while it is down":
        stream.start(source.feed(snapshot="initial", **options))
    with refused("TABLE_RECREATED", table=table) as caught:
        stream.drain()
    source.run(f"INSERT INTO {table} VALUES (2, 2)")
    accept = caught.value.parameters["accept"]
    assert str(accept) in caught.value.message
    for _ in range(2):
        stream.start(source.feed(snapshot="initial", **options))
        with refused("TABLE_RECREATED"):
            stream.drain()
    stream.start(source.feed(snapshot="initial", accept=accept, **options))
    assert keys(stream.drain(), "id", "v") == [("insert", 2, 2)]
    # Once it has gone on, nothing needs to be accepted any more.
    source.run(f"INSERT INTO {table} VALUES (3, 3)")
    stream.start(source.feed(snapshot="initial", **options))
    assert keys(stream.drain(), "id", "v") == [("insert", 3, 3)]


def test_a_second_table_ends_a_query_of_all_tables(source: Source) -> None:
    table = source.table("id int primary key")
    stream = started(source)
    chosen = started(source, tables=("t",), slot=f"{source.name}_chosen")
    source.run(f"INSERT INTO {table} VALUES (1)")
    other = source.table("n int primary key", "other")
    source.run(f"INSERT INTO {other} VALUES (5)", f"INSERT INTO {table} VALUES (2)")
    with refused("TABLE_NOT_COPIED", table=other) as caught:
        stream.drain()
    stream.start(source.feed(snapshot="initial", accept=caught.value.parameters["accept"]))
    rows = stream.drain()
    assert [(row["_table"], row["_key"]) for row in rows] == [
        (table, '{"id":1}'),
        (other, '{"n":5}'),
        (table, '{"id":2}'),
    ]
    assert keys(chosen.drain(), "id") == [("insert", 1), ("insert", 2)]


def test_a_new_table_of_a_published_schema(source: Source) -> None:
    table = source.table("id int primary key")
    source.run(f"ALTER PUBLICATION {source.name} SET TABLES IN SCHEMA {source.name}")
    stream = started(source)
    source.run(f"INSERT INTO {table} VALUES (1)", f"CREATE TABLE {source.name}.other (n int primary key)")
    source.run(f"INSERT INTO {source.name}.other VALUES (5)", f"INSERT INTO {table} VALUES (2)")
    # All of its rows are in the log, so starting again is enough.
    rows = rows_after_restart(stream, source, "TABLE_ADDED")
    assert keys(stream.batches[1], "id") == [("insert", 1)]
    assert [row["_key"] for row in rows] == ['{"n":5}', '{"id":2}']


def test_tables_of_a_publication_of_all_tables(pg_url: str) -> None:
    """In a database of its own, since it publishes all of it, the copies of the snapshot too."""
    database = f"all_{uuid.uuid4().hex[:8]}"
    with psycopg.connect(pg_url, autocommit=True) as server:
        server.execute(sql.SQL("create database {}").format(sql.Identifier(database)))
        try:
            with source_at(urlsplit(pg_url)._replace(path=f"/{database}").geturl()) as source:
                _change_all_tables(source)
        finally:
            server.execute(sql.SQL("drop database {} with (force)").format(sql.Identifier(database)))


def _change_all_tables(source: Source) -> None:
    table, other, name = f"{source.name}.t", f"{source.name}.other", source.name
    source.run(
        f"CREATE TABLE {table} (id int primary key)",
        f"DROP PUBLICATION {name}",
        f"CREATE PUBLICATION {name} FOR ALL TABLES",
        f"INSERT INTO {table} VALUES (1)",
    )
    stream = started(source)
    assert keys(stream.rows, "id") == [("insert", 1)]
    source.run(f"INSERT INTO {table} VALUES (2)", f"CREATE TABLE {other} (n int primary key, v int)")
    source.run(f"INSERT INTO {other} VALUES (5, 50)", f"INSERT INTO {table} VALUES (3)")
    rows = rows_after_restart(stream, source, "TABLE_ADDED")
    assert keys(stream.batches[1], "id") == [("insert", 2)]
    assert [(row["_key"], row["other"]) for row in rows] == [
        ('{"n":5}', {"n": 5, "v": 50}),
        ('{"id":3}', None),
    ]
    source.run(f"DROP TABLE {other}", f"CREATE TABLE {other} (n int primary key, v int)")
    with refused("TABLE_RECREATED", table=other) as caught:
        stream.drain()
    source.run(f"ALTER TABLE {other} ADD w int", f"INSERT INTO {other} VALUES (6, 60, 600)")
    accept = caught.value.parameters["accept"]
    stream.start(source.feed(snapshot="initial", accept=accept))
    assert [row["other"] for row in stream.drain()] == [{"n": 6, "v": 60, "w": 600}]
    source.run(f"DROP TABLE {other}")
    with refused("TABLE_REMOVED", table=other):
        stream.drain()


def test_a_table_created_changed_and_dropped_between_two_micro_batches(source: Source) -> None:
    table = source.table("id int primary key")
    stream = started(source)
    source.run(f"INSERT INTO {table} VALUES (1)")
    stream.drain()
    source.run(f"INSERT INTO {table} VALUES (2)")
    other = source.table("n int primary key", "other")
    source.run(
        f"INSERT INTO {other} VALUES (5)",
        f"ALTER TABLE {other} ADD w int",
        f"INSERT INTO {other} VALUES (6, 6)",
        f"DROP TABLE {other}",
        f"INSERT INTO {table} VALUES (3)",
    )
    conditions = []
    for _ in range(6):
        try:
            stream.drain()
        except FeedUnavailableError as error:
            conditions.append(error.condition.partition(".")[2])
            stream.start(source.feed(snapshot="initial"))
    assert conditions == ["TABLE_ADDED", "COLUMN_ADDED", "TABLE_REMOVED"]
    assert keys([row for row in stream.rows if "id" in row], "id") == [("insert", 1), ("insert", 2)]
    assert [row["_key"] for row in stream.rows if "_key" in row] == ['{"n":5}', '{"n":6}', '{"id":3}']


def test_a_table_that_joins_and_leaves_the_publication_between_two_micro_batches(source: Source) -> None:
    table = source.table("id int primary key")
    stream = started(source)
    other = f"{source.name}.other"
    source.run(
        f"CREATE TABLE {other} (n int primary key, v int)",
        f"INSERT INTO {other} VALUES (5, 5)",
        f"ALTER PUBLICATION {source.name} ADD TABLE {other}",
        f"UPDATE {other} SET v = 6",
        f"ALTER PUBLICATION {source.name} DROP TABLE {other}",
        f"INSERT INTO {table} VALUES (1)",
    )
    for _ in range(2):
        # Its row was inserted before it was published: starting again does not bring it.
        with refused("TABLE_NOT_COPIED", table=other) as caught:
            stream.drain()
        stream.start(source.feed(snapshot="initial"))
    assert stream.rows == []
    stream.start(source.feed(snapshot="initial", accept=caught.value.parameters["accept"]))
    with refused("TABLE_REMOVED", table=other):
        stream.drain()
    assert [row["_key"] for row in stream.rows] == ['{"n":5}', '{"id":1}']


def test_a_table_that_leaves_the_publication_ends_the_query(source: Source) -> None:
    table = source.table("id int primary key")
    other = source.table("n int primary key", "other")
    source.run(f"INSERT INTO {other} VALUES (1)")
    stream = started(source)
    source.run(f"ALTER PUBLICATION {source.name} DROP TABLE {other}", f"INSERT INTO {table} VALUES (2)")
    assert keys(rows_after_restart(stream, source, "TABLE_REMOVED"), "id") == [("insert", 2)]
    source.run(f"INSERT INTO {table} VALUES (3)")
    assert keys(stream.drain(), "id") == [("insert", 3)]


def test_a_table_that_leaves_the_publication_with_unread_rows(source: Source) -> None:
    """How often it left and came back, nothing tells: its rows in the log may not be all."""
    table = source.table("id int primary key")
    other = source.table("n int primary key, v int", "other")
    stream = started(source)
    source.run(
        f"ALTER PUBLICATION {source.name} DROP TABLE {other}",
        f"INSERT INTO {other} VALUES (1, 1)",
        f"ALTER PUBLICATION {source.name} ADD TABLE {other}",
        f"UPDATE {other} SET v = 2",
        f"ALTER PUBLICATION {source.name} DROP TABLE {other}",
        f"INSERT INTO {table} VALUES (2)",
    )
    for _ in range(2):
        with refused("TABLE_REMOVED", table=other) as caught:
            stream.drain()
        stream.start(source.feed(snapshot="initial"))
    assert stream.rows == []
    accept = caught.value.parameters["accept"]
    stream.start(source.feed(snapshot="initial", accept=accept))
    with refused("TABLE_REMOVED", table=other):
        stream.drain()
    assert [row["_key"] for row in stream.rows] == ['{"n":1}', '{"id":2}']
    stream.start(source.feed(snapshot="initial"))
    source.run(f"INSERT INTO {table} VALUES (3)")
    assert keys(stream.drain(), "id") == [("insert", 3)]


def test_rows_of_a_table_that_has_left_may_be_read_in_several_micro_batches(source: Source) -> None:
    table = source.table("id int primary key")
    other = source.table("n int primary key", "other")
    stream = Stream(maxRowsPerTrigger="1")
    stream.start(source.feed(snapshot="initial"))
    stream.drain()
    for number in range(3):
        source.run(f"INSERT INTO {other} VALUES ({number})")
    source.run(f"ALTER PUBLICATION {source.name} DROP TABLE {other}", f"INSERT INTO {table} VALUES (2)")
    with refused("TABLE_REMOVED", table=other) as caught:
        stream.drain()
    accept = caught.value.parameters["accept"]
    for rows in (1, 2):
        stream.start(source.feed(snapshot="initial", accept=accept))
        stream.step()
        assert len(stream.rows) == rows
    stream.start(source.feed(snapshot="initial", accept=accept))
    with refused("TABLE_REMOVED", table=other):
        stream.drain()
    assert [row["_key"] for row in stream.rows] == ['{"n":0}', '{"n":1}', '{"n":2}']
    stream.start(source.feed(snapshot="initial"))
    assert keys(stream.drain(), "id") == [("insert", 2)]


def test_unread_rows_of_a_dropped_table_are_delivered_first(source: Source) -> None:
    table = source.table("id int primary key")
    other = source.table("n int primary key", "other")
    stream = started(source)
    source.run(f"INSERT INTO {other} VALUES (1)", f"DROP TABLE {other}", f"INSERT INTO {table} VALUES (2)")
    stream.start(source.feed(snapshot="initial"))
    with refused("TABLE_REMOVED", table=other):
        stream.drain()
    assert [row["_key"] for row in stream.rows] == ['{"n":1}', '{"id":2}']
    source.run(f"INSERT INTO {table} VALUES (3)")
    stream.start(source.feed(snapshot="initial"))
    assert keys(stream.drain(), "id") == [("insert", 3)]


def test_a_table_that_left_the_publication_temporarily_lacks_rows(source: Source) -> None:
    table = source.table("id int primary key")
    stream = started(source)
    source.run(
        f"ALTER PUBLICATION {source.name} DROP TABLE {table}",
        f"INSERT INTO {table} VALUES (1)",
        f"ALTER PUBLICATION {source.name} ADD TABLE {table}",
        f"INSERT INTO {table} VALUES (2)",
    )
    with refused("TABLE_PUBLISHED_AGAIN", table=table) as caught:
        stream.drain()
    stream.start(source.feed(snapshot="initial", accept=caught.value.parameters["accept"]))
    assert keys(stream.drain(), "id") == [("insert", 2)]


def test_a_publication_that_publishes_less_temporarily(source: Source) -> None:
    table = source.table("id int primary key")
    stream = started(source)
    source.run(f"ALTER PUBLICATION {source.name} SET (publish = 'insert, update')")
    with refused("PUBLICATION_CHANGED") as caught:
        stream.drain()
    stream.start(source.feed(snapshot="initial", accept=caught.value.parameters["accept"]))
    source.run(f"INSERT INTO {table} VALUES (2)")
    assert keys(stream.drain(), "id") == [("insert", 2)]


def test_a_commit_with_rows_from_before_and_after_a_change(source: Source) -> None:
    table = source.table("id int primary key, v int")
    stream = started(source)
    source.run(f"INSERT INTO {table} VALUES (1, 1)")
    with source.connection.transaction():
        source.run(
            f"INSERT INTO {table} VALUES (2, 2)",
            f"ALTER TABLE {table} ADD w int",
            f"INSERT INTO {table} VALUES (3, 3, 3)",
        )
    source.run(f"INSERT INTO {table} VALUES (4, 4, 4)")
    for _ in range(2):
        with refused("CHANGED_IN_COMMIT", table=table) as caught:
            stream.drain()
        assert "'w'" in caught.value.message
        stream.start(source.feed(snapshot="initial"))
    stream.start(source.feed(snapshot="initial", skip=[caught.value.parameters["version"]]))
    stream.drain()
    assert [(row["id"], row.get("w")) for row in stream.rows] == [(1, None), (4, 4)]


def test_a_table_dropped_before_its_snapshot_was_read(source: Source) -> None:
    table = source.table("id int primary key")
    other = source.table("n int primary key", "other")
    source.run(f"INSERT INTO {other} VALUES (1)")
    stream = Stream()
    stream.start(source.feed(snapshot="initial"))
    source.run(f"DROP TABLE {other}", f"INSERT INTO {table} VALUES (2)")
    stream.start(source.feed(snapshot="initial"))
    with refused("TABLE_REMOVED", table=other):
        stream.drain()
    assert [row["_key"] for row in stream.rows] == ['{"n":1}', '{"id":2}']
    stream.start(source.feed(snapshot="initial"))
    source.run(f"INSERT INTO {table} VALUES (3)")
    assert keys(stream.drain(), "id") == [("insert", 3)]


def test_a_renamed_table(source: Source) -> None:
    table = source.table("id int primary key")
    stream = started(source)
    source.run(f"ALTER TABLE {table} RENAME TO u", f"INSERT INTO {source.name}.u VALUES (1)")
    assert keys(stream.drain(), "id") == [("insert", 1)], "of one table the name does not matter"
    other = source.table("n int primary key", "other")
    several = started(source, slot=f"{source.name}_several")
    source.run(f"ALTER TABLE {other} RENAME TO another", f"INSERT INTO {source.name}.another VALUES (1)")
    with refused("TABLE_RENAMED") as caught:
        several.drain()
    mend = f"alter table {source.name}.another rename to other"
    assert mend in caught.value.message
    source.run(mend, f"INSERT INTO {other} VALUES (2)")


@pytest.mark.parametrize(
    "gone", ["DROP TABLE {table}", "ALTER TABLE {table} RENAME TO earlier"], ids=["dropped", "renamed"]
)
@pytest.mark.parametrize("dropped_too", [False, True], ids=["the second exists", "the second is dropped"])
@pytest.mark.parametrize("known", [True, False], ids=["before the checkpoint", "since the checkpoint"])
def test_rows_of_two_tables_that_had_a_name_in_turn(
    source: Source, gone: str, dropped_too: bool, known: bool
) -> None:
    """The rows of both are in the log; deletes of the first one's are not."""
    table, columns = source.table("id int primary key"), "n int primary key, v int"
    other = source.table(columns, "other") if known else f"{source.name}.other"
    stream = started(source)
    if not known:
        source.table(columns, "other")
    source.run(f"INSERT INTO {other} VALUES (5, 50)", gone.format(table=other))
    source.table(columns, "other")
    source.run(f"INSERT INTO {other} VALUES (6, 60)")
    source.run(*([f"DROP TABLE {other}"] if dropped_too else []))
    source.run(f"INSERT INTO {table} VALUES (1)")
    conditions, accept = [], ()
    for _ in range(8):
        stream.start(source.feed(snapshot="initial", accept=accept))
        try:
            stream.drain()
            break
        except FeedUnavailableError as error:
            conditions.append(error.condition.partition(".")[2])
            accept = error.parameters.get("accept", accept)
    # If the second one still exists, its token is in the list of an earlier condition already.
    assert "TABLE_RECREATED" in conditions or (not dropped_too and conditions)
    assert [row["other"] for row in stream.rows if row["_table"] == other] == [
        {"n": 5, "v": 50},
        {"n": 6, "v": 60},
    ]
    assert keys(stream.rows, "_key") == [
        ("insert", f'{{"{key}":{value}}}') for key, value in (("n", 5), ("n", 6), ("id", 1))
    ]


def test_tables_whose_struct_columns_would_have_the_same_name(source: Source) -> None:
    name = source.name
    source.table("id int primary key")
    source.table("id int primary key", f"{name}_t")
    source.run(f"CREATE SCHEMA {name}_2")
    try:
        source.run(
            f"CREATE TABLE {name}_2.t (id int primary key)", f"ALTER PUBLICATION {name} ADD TABLE {name}_2.t"
        )
        with refused("RESERVED_COLUMN", column=f"{name}_t"):
            Stream().start(source.feed(snapshot="none"))
    finally:
        source.run(f"DROP SCHEMA {name}_2 CASCADE")


@pytest.mark.parametrize("tables", [None, ("t",)], ids=["all tables", "a named one"])
def test_a_table_created_with_the_name_of_a_renamed_one(source: Source, tables: tuple[str] | None) -> None:
    """A publication follows the table, not the name."""
    table, renamed = source.table("id int primary key"), f"{source.name}.t_old"
    stream = started(source, tables=tables)
    source.run(
        f"ALTER TABLE {table} RENAME TO t_old",
        f"CREATE TABLE {table} (id int primary key)",
        f"INSERT INTO {table} VALUES (1)",
        f"INSERT INTO {renamed} VALUES (2)",
    )
    if tables is None:
        assert keys(stream.drain(), "id") == [("insert", 2)]
        return
    with refused("TABLE_RENAMED", table=renamed):
        stream.drain()
    with refused("TABLE_NOT_PUBLISHED"):
        stream.start(source.feed(snapshot="initial", tables=tables))


def test_a_table_created_with_the_name_of_a_renamed_one_in_a_published_schema(source: Source) -> None:
    table = f"{source.name}.t"
    source.run(
        f"CREATE TABLE {table} (id int primary key)",
        f"ALTER PUBLICATION {source.name} SET TABLES IN SCHEMA {source.name}",
    )
    stream = started(source)
    source.run(f"ALTER TABLE {table} RENAME TO t_old", f"CREATE TABLE {table} (id int primary key)")
    with refused("TABLE_RECREATED", table=table):
        stream.drain()


def test_children_that_inherit_are_tables_of_their_own(source: Source) -> None:
    table, name = f"{source.name}.t", source.name
    source.run(
        f"CREATE TABLE {table} (id int primary key)",
        f"CREATE TABLE {name}.c (primary key (id)) INHERITS ({table})",
        f"ALTER PUBLICATION {name} ADD TABLE {table}",
        f"INSERT INTO {table} VALUES (1)",
        f"INSERT INTO {name}.c VALUES (2)",
    )
    stream = started(source)
    assert [(row["_table"], row["_key"]) for row in stream.rows] == [
        (f"{name}.c", '{"id":2}'),
        (table, '{"id":1}'),
    ]
    source.run(
        f"CREATE TABLE {name}.later (primary key (id)) INHERITS ({table})",
        f"INSERT INTO {name}.later VALUES (3)",
        f"INSERT INTO {table} VALUES (4)",
    )
    assert [row["_key"] for row in stream.drain()] == ['{"id":4}']
    source.run(f"ALTER PUBLICATION {name} ADD TABLE {name}.later")
    with refused("TABLE_NOT_COPIED", table=f"{name}.later"):
        stream.drain()


@pytest.mark.parametrize("end", ["commit", "rollback"])
def test_rows_of_other_tables_are_delivered_while_a_table_is_being_changed(source: Source, end: str) -> None:
    table = source.table("id int primary key, v int")
    other = source.table("n int primary key", "other")
    stream = started(source)
    with open_transaction(source, f"ALTER TABLE {table} ADD w int") as connection:
        connection.execute(f"INSERT INTO {table} (id) VALUES (1)".encode())
        source.run(f"INSERT INTO {other} VALUES (1)")
        with ThreadPoolExecutor() as threads:
            drained = threads.submit(stream.drain)
            try:
                assert [row["_key"] for row in drained.result(20)] == ['{"n":1}']
            finally:
                getattr(connection, end)()
    source.run(f"INSERT INTO {other} VALUES (2)")
    if end == "commit":
        with refused("COLUMN_ADDED", table=table):
            stream.drain()
        stream.start(source.feed(snapshot="initial"))
    rows = stream.drain()
    assert [row["_key"] for row in rows] == ['{"id":1}'] * (end == "commit") + ['{"n":2}']


@pytest.mark.parametrize("end", ["COMMIT", "ROLLBACK"])
def test_rows_of_other_tables_are_delivered_while_a_change_is_prepared(source: Source, end: str) -> None:
    table = source.table("id int primary key, v int")
    other = source.table("n int primary key, v text", "other")
    source.run(f"ALTER TABLE {other} REPLICA IDENTITY FULL")
    stream = started(source)
    with psycopg.connect(source.url, autocommit=True) as connection:
        for statement in ("BEGIN", f"ALTER TABLE {table} ADD w int", f"PREPARE TRANSACTION '{source.name}'"):
            connection.execute(statement.encode())
    source.run(f"INSERT INTO {other} VALUES (1)")
    with ThreadPoolExecutor() as threads:
        drained = threads.submit(stream.drain)
        try:
            assert [row["_key"] for row in drained.result(20)] == ['{"n":1}']
        finally:
            source.run(f"{end} PREPARED '{source.name}'")
    source.run(f"INSERT INTO {table} (id) VALUES (1)")
    if end == "COMMIT":
        with refused("COLUMN_ADDED", table=table):
            stream.drain()
        stream.start(source.feed(snapshot="initial"))
    assert [row["_key"] for row in stream.drain()] == ['{"id":1}']


def test_a_table_recreated_while_another_one_was_being_changed(source: Source) -> None:
    table = source.table("id int primary key, v int")
    other = source.table("n int primary key", "other")
    stream = started(source)
    source.run(f"INSERT INTO {table} VALUES (1, 1)")
    stream.drain()
    with open_transaction(source, f"LOCK TABLE {other} IN ACCESS EXCLUSIVE MODE"):
        source.run(f"DROP TABLE {table}")
        source.table("id int primary key, v int")
        stream.drain()
    source.run(f"INSERT INTO {other} VALUES (1)")
    with refused("TABLE_RECREATED", table=table):
        stream.drain()


def test_truncate_ends_the_query_after_earlier_rows_are_delivered(source: Source) -> None:
    table = source.table("id int primary key")
    stream = started(source)
    source.run(f"INSERT INTO {table} VALUES (1)", f"TRUNCATE {table}", f"INSERT INTO {table} VALUES (2)")
    for _ in range(2):
        with refused("TRUNCATED"):
            stream.drain()
        assert keys(stream.rows, "id") == [("insert", 1)]
        stream.start(source.feed(snapshot="initial"))
    stream.start(source.feed(snapshot="initial", truncate="skip"))
    assert keys(stream.drain(), "id") == [("insert", 2)]


def test_a_copy_follows_its_table_through_schema_changes(source: Source) -> None:
    table = source.table("id int primary key, v int")
    source.run(f"INSERT INTO {table} SELECT i, i FROM generate_series(1, 5) i")
    stream = started(source)
    source.run(f"UPDATE {table} SET v = 10 WHERE id = 1", f"ALTER TABLE {table} ADD w text")
    source.run(f"UPDATE {table} SET w = 'x' WHERE id < 3", f"DELETE FROM {table} WHERE id = 5")
    with refused("COLUMN_ADDED"):
        stream.drain()
    stream.start(source.feed(snapshot="initial"))
    stream.drain()
    copy: dict[object, Row] = {}
    apply([{"w": None, **row} for row in stream.rows], ("id",), ("id", "v", "w"), copy)
    assert sorted(tuple(row.values()) for row in copy.values()) == source.rows(
        f"SELECT * FROM {table} ORDER BY id"
    )
