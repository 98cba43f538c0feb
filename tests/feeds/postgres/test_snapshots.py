"""A feed begins with the existing rows: all of them, once, and the same ones again after a crash."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from typing import Any

import psycopg
import pytest

from penstock.errors import DataLostError, FeedUnavailableError
from penstock.feeds.postgres import snapshot
from penstock.feeds.postgres.feed import OpenPostgresFeed
from tests.support.postgres_source import Row, Source, apply, changes, everything, source_at
from tests.support.strangers import RAN, SharedDatabase, shared_database


def copies(source: Source) -> int:
    return source.rows(
        "SELECT count(*) FROM pg_class WHERE relnamespace = to_regnamespace('penstock_snapshots') AND "
        "relkind = 'r' AND relname <> 'slots'"
    )[0][0]


def test_the_existing_rows_are_the_first_commit(source: Source) -> None:
    table = source.table("id int primary key, v text")
    source.run(f"INSERT INTO {table} SELECT i, 'v' || i FROM generate_series(1, 25) i")
    feed = source.open(snapshot="initial")
    schema, start = feed.describe().schema, feed.prepare()
    source.run(f"DELETE FROM {table} WHERE id <= 20", f"INSERT INTO {table} VALUES (26, 'new')")
    upto = feed.newest(start)
    first, *later = feed.commits(start, upto)
    assert (first.rows, [commit.rows for commit in later]) == (25, [20, 1])
    assert first.version == start + 1
    tasks = feed.tasks(start, first.version, 10)
    assert len(tasks) == 3
    rows = [row for task in reversed(tasks) for batch in feed.read(task, schema) for row in batch.to_pylist()]
    assert sorted((row["id"], row["v"], row["_commit_sequence"]) for row in rows) == [
        (i, f"v{i}", i - 1) for i in range(1, 26)
    ]
    assert {(row["_change_type"], row["_commit_version"]) for row in rows} == {("insert", first.version)}
    state: dict[object, Row] = {}
    apply(everything(feed), ("id",), ("id", "v"), state)
    assert sorted(row["id"] for row in state.values()) == [21, 22, 23, 24, 25, 26]
    assert feed.newest(first.version - 1) >= upto


def test_the_snapshot_is_kept_until_it_is_logged(source: Source) -> None:
    table = source.table("id int primary key")
    source.run(f"INSERT INTO {table} VALUES (1)")
    before = copies(source)
    feed = source.open(snapshot="initial")
    start = feed.prepare()
    (commit,) = feed.commits(start, feed.newest(start))
    (task,) = feed.tasks(start, commit.version, 10)
    feed.logged(start)
    assert copies(source) == before + 1
    again = source.open(snapshot="initial")
    assert again.prepare() == start
    feed.logged(commit.version)
    feed.logged(commit.version)
    assert copies(source) == before
    assert feed.oldest() == commit.version
    assert again.describe()
    with pytest.raises(DataLostError):
        list(feed.read(task, feed.describe().schema))
    with pytest.raises(DataLostError):
        feed.tasks(start, commit.version, 10)
    # A process that still thinks that the snapshot is there gets the error too.
    assert source.slots() == 1


def test_an_empty_table_has_an_empty_snapshot(source: Source) -> None:
    table = source.table("id int primary key")
    feed = source.open(snapshot="initial")
    start = feed.prepare()
    assert everything(feed) == []
    feed.logged(start + 1)
    source.run(f"INSERT INTO {table} VALUES (1)")
    assert [row["id"] for row in everything(feed, feed.oldest())] == [1]


def test_concurrent_writers_cause_no_gap_and_no_overlap(source: Source) -> None:
    table = source.table("id bigserial primary key, writer int, v text")
    source.table("id int primary key", "other")
    stop = threading.Event()

    def write(number: int) -> None:
        with psycopg.connect(source.url) as connection:
            while not stop.is_set():
                connection.execute(
                    f"INSERT INTO {table} (writer, v) VALUES (%s, 'a'), (%s, 'b')".encode(), [number, number]
                )
                connection.execute(
                    f"UPDATE {table} SET v = v || 'x' WHERE writer = %s AND id %% 7 = 0".encode(), [number]
                )
                connection.commit()

    writers = [threading.Thread(target=write, args=[number]) for number in range(3)]
    for writer in writers:
        writer.start()
    try:
        feed = source.open(snapshot="initial", tables=("t",))
        start = feed.prepare()
        after_snapshot = feed.newest(start)
    finally:
        stop.set()
        for writer in writers:
            writer.join(30)
    state: dict[object, Row] = {}
    middle = changes(feed, start, after_snapshot)
    apply(middle, ("id",), ("id", "writer", "v"), state)
    apply(everything(feed, after_snapshot), ("id",), ("id", "writer", "v"), state)
    found = Counter(tuple(row.values()) for row in state.values())
    assert found == Counter(source.rows(f"SELECT id, writer, v FROM {table}"))
    assert middle


@pytest.mark.parametrize("point", ["begin_snapshot", "end_snapshot"])
def test_a_half_finished_snapshot_is_recreated(
    source: Source, monkeypatch: pytest.MonkeyPatch, point: str
) -> None:
    table = source.table("id int primary key")
    source.run(f"INSERT INTO {table} VALUES (1)")
    before = copies(source)
    run = snapshot.run

    def dying(connection: Any, statement: str, /, **parameters: object) -> Any:
        found = run(connection, statement, **parameters) if statement == "begin_snapshot" else []
        if statement == point:
            raise KeyboardInterrupt
        return found or run(connection, statement, **parameters)

    monkeypatch.setattr(snapshot, "run", dying)
    with pytest.raises(KeyboardInterrupt):
        source.open(snapshot="initial").prepare()
    assert source.slots() == (point == "end_snapshot")
    monkeypatch.undo()
    source.run(f"INSERT INTO {table} VALUES (2)")
    feed = source.open(snapshot="initial")
    assert [row["id"] for row in everything(feed)] == [1, 2]
    assert next(iter(feed.commits(feed.oldest(), feed.newest(feed.oldest())))).rows == 2
    assert copies(source) == before + 1


def test_concurrent_processes_create_one_snapshot(source: Source) -> None:
    table = source.table("id int primary key")
    source.run(f"INSERT INTO {table} SELECT generate_series(1, 1000)")
    found: list[int] = []
    threads = [
        threading.Thread(target=lambda: found.append(source.open(snapshot="initial").prepare()))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(found) == 4
    assert len(set(found)) == 1


def test_several_tables_are_in_one_snapshot(source: Source) -> None:
    one = source.table('"Id" int primary key, "a ""b" text', "one")
    two = source.table("id int primary key", '"T W""o"')
    source.run(f"INSERT INTO {one} VALUES (1, 'x')", f"INSERT INTO {two} VALUES (5), (6)")
    feed = source.open(snapshot="initial")
    rows = everything(feed)
    assert [(row["_key"], row["_commit_sequence"]) for row in rows] == [
        ('{"id":5}', 0),
        ('{"id":6}', 1),
        ('{"Id":1}', 2),
    ]
    assert rows[2]["one"] == {"Id": 1, 'a "b': "x"}
    assert rows[0]['T W"o'] == {"id": 5}


def test_a_recreated_slot_does_not_fill_an_old_checkpoints_gap(source: Source) -> None:
    table = source.table("id int primary key")
    feed = source.open(snapshot="initial")
    start = feed.prepare()
    source.run(f"INSERT INTO {table} VALUES (1)")
    upto = feed.newest(start)
    feed.logged(upto)
    source.drop_slot()
    source.run(f"INSERT INTO {table} VALUES (2)")
    with pytest.raises(FeedUnavailableError, match="no replication slot"):
        feed.newest(upto)
    again = source.open(snapshot="initial")
    assert [row["id"] for row in everything(again)] == [1, 2]
    with pytest.raises(DataLostError):
        again.tasks(upto, again.newest(upto), 10)


def test_a_new_query_is_refused_where_its_slot_has_lost_rows(source: Source) -> None:
    table = source.table("id int primary key")
    source.run(f"INSERT INTO {table} VALUES (1)")
    feed = source.open(snapshot="initial")
    start = feed.prepare()
    assert source.open(snapshot="initial").prepare() == start, "nothing has been logged yet"
    feed.logged(feed.newest(start))
    source.run(f"INSERT INTO {table} VALUES (2)")
    with pytest.raises(FeedUnavailableError, match=f"pg_drop_replication_slot..{source.name}") as caught:
        source.open(snapshot="initial").prepare()
    assert caught.value.condition == "FEED_UNAVAILABLE.SLOT_USED"
    assert [row["id"] for row in everything(source.open())] == [2], "what is left, for who wants that"
    source.drop_slot()
    assert [row["id"] for row in everything(source.open(snapshot="initial"))] == [1, 2]


def test_a_slot_that_advanced_before_its_snapshot_was_read_is_refused_as_start(source: Source) -> None:
    table = source.table("id int primary key")
    source.open(snapshot="initial").prepare()
    source.run(f"INSERT INTO {table} VALUES (1)")
    source.run(f"SELECT pg_replication_slot_advance('{source.name}', pg_current_wal_lsn())")
    with pytest.raises(FeedUnavailableError, match="has been read"):
        source.open(snapshot="initial").prepare()


def test_a_manually_created_slot_is_read_from_its_position_if_requested(source: Source) -> None:
    table = source.table("id int primary key")
    source.run(f"INSERT INTO {table} VALUES (1)")
    source.make_slot()
    source.run(f"INSERT INTO {table} VALUES (2)")
    with pytest.raises(FeedUnavailableError, match="was created manually"):
        source.open(snapshot="initial").prepare()
    assert [row["id"] for row in everything(source.open(snapshot="none"))] == [2]


def test_a_slot_is_created_only_when_a_query_starts(source: Source) -> None:
    source.table("id int primary key")
    feed = source.open(snapshot="initial")
    assert feed.describe().contract is not None
    for ask in (feed.oldest, feed.lag, lambda: feed.newest(0)):
        with pytest.raises(FeedUnavailableError, match="no replication slot"):
            ask()
    assert source.slots() == 0
    feed.prepare()
    assert source.slots() == 1


def test_a_process_that_stalls_while_creating_the_snapshot_is_named(
    source: Source, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(snapshot, "_LOCK_WAIT", 0.5)
    source.table("id int primary key")
    with psycopg.connect(source.url, autocommit=True) as other:
        other.execute("SELECT pg_advisory_lock(hashtextextended('penstock slot ' || %s, 0))", [source.name])
        with pytest.raises(
            FeedUnavailableError, match=rf"pg_terminate_backend\({other.info.backend_pid}\)"
        ) as caught:
            source.open(snapshot="initial").prepare()
        assert caught.value.condition == "FEED_UNAVAILABLE.SNAPSHOT_LOCKED"
    assert source.slots() == 0
    assert source.open(snapshot="initial").prepare()


def test_a_reader_that_stalls_in_the_snapshot_does_not_block_the_query_forever(
    source: Source, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = source.table("id int primary key")
    source.run(f"INSERT INTO {table} VALUES (1)")
    feed = source.open(snapshot="initial")
    start = feed.prepare()
    ((place,),) = source.rows(
        f"SELECT tables -> 0 ->> 'place' FROM penstock_snapshots.slots WHERE slot = '{source.name}'"
    )
    monkeypatch.setattr(snapshot, "_LOCK_WAIT", 0.5)
    with psycopg.connect(source.url) as reader:
        reader.execute(f"SELECT * FROM penstock_snapshots.{place}".encode())
        with pytest.raises(FeedUnavailableError) as caught:
            feed.logged(start + 1)
        assert caught.value.condition == "FEED_UNAVAILABLE.SNAPSHOT_LOCKED"
    feed.logged(start + 1)
    assert feed.oldest() == start + 1


@pytest.fixture
def shared(pg_url: str) -> Iterator[SharedDatabase]:
    """A database without snapshots, which a stranger uses too."""
    with shared_database(pg_url, "stranger") as made:
        yield made


def refused_owner(shared: SharedDatabase, feed: OpenPostgresFeed, what: str) -> None:
    with pytest.raises(FeedUnavailableError) as caught:
        everything(feed)
    assert caught.value.condition == "FEED_UNAVAILABLE.SCHEMA_OWNER"
    assert f"{what} belongs to the role '{shared.role('stranger')}'" in caught.value.message


def test_a_schema_for_snapshots_created_by_another_role_is_refused(shared: SharedDatabase) -> None:
    """The feed's role is one that may read everything, and a table's owner may give it a trigger, or make a
    view of it."""
    with source_at(shared.url) as source:
        source.table("id int primary key")
        shared.run("create schema penstock_snapshots", role="stranger")
        refused_owner(shared, source.open(snapshot="initial"), "the schema penstock_snapshots")
        shared.run(
            "create view penstock_snapshots.slots as select 'x' as slot, 'read' as state, "
            "1::bigint as consistent_point, 1::bigint as copied_at, '[]'::jsonb as tables",
            role="stranger",
        )
        refused_owner(shared, source.open(snapshot="initial"), "the schema penstock_snapshots")


def test_a_table_of_slots_that_another_role_creates_at_the_same_time_is_refused(
    shared: SharedDatabase, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = snapshot.run

    def overtaken(connection: Any, statement: str, /, **parameters: object) -> list[Any]:
        if statement == "create_slots":
            shared.run(
                "create table penstock_snapshots.slots (slot text primary key, state text, "
                "consistent_point bigint, copied_at bigint, tables jsonb, publication jsonb)",
                role="stranger",
            )
            shared.trap("stranger", "penstock_snapshots.slots")
        return run(connection, statement, **parameters)

    monkeypatch.setattr(snapshot, "run", overtaken)
    with source_at(shared.url) as source:
        source.table("id int primary key")
        shared.run("create schema penstock_snapshots", "grant all on schema penstock_snapshots to public")
        refused_owner(shared, source.open(snapshot="initial"), "penstock_snapshots.slots")
    assert shared.trapped() == []


def test_a_copy_that_another_role_has_put_in_the_place_of_a_dropped_one_is_not_read(
    shared: SharedDatabase,
) -> None:
    """A view's functions run with the rights of its reader."""
    with source_at(shared.url) as source:
        source.run(f"insert into {source.table('id int primary key')} values (1)")
        feed = source.open(snapshot="initial")
        feed.prepare()
        ((place,),) = source.rows("select tables -> 0 ->> 'place' from penstock_snapshots.slots")
        source.run(
            f"drop table penstock_snapshots.{place}", "grant all on schema penstock_snapshots to public"
        )
        view = f"penstock_snapshots.{place}"
        shared.run(
            f"create view {view} as select 1::bigint as n, ''::bytea as change",
            f"grant select on {view} to public",
            role="stranger",
        )
        refused_owner(shared, feed, view)


def test_a_view_that_takes_the_place_of_a_table_during_the_copy_is_not_read(
    shared: SharedDatabase, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The catalog in the copy's transaction still has the table, and its name leads to the view already."""

    class Overtaken(snapshot.Session):
        def __init__(self, *given: Any) -> None:
            super().__init__(*given)
            shared.run(
                f"drop table {table}",
                f"create function {trap}() returns int language plpgsql as "
                f"$$ begin insert into {RAN} values (current_user); return 1; end $$",
                f"create view {table} as select {trap}() as id",
                role="stranger",
            )

    monkeypatch.setattr(snapshot, "Session", Overtaken)
    with source_at(shared.url) as source:
        table, trap = source.table("id int primary key"), f"{source.name}.trap"
        for what in (f"table {table}", f"schema {source.name}"):
            source.run(f"alter {what} owner to {shared.role('stranger')}")
        assert shared.trapped() == []
        source.run(f"grant all on {RAN} to public")
        with pytest.raises(FeedUnavailableError) as caught:
            source.open(snapshot="initial").prepare()
        assert caught.value.condition == "FEED_UNAVAILABLE.TABLE_RECREATED"
        assert shared.trapped() == []


@pytest.mark.parametrize("partitioned", [False, True])
def test_a_table_that_is_rewritten_before_it_is_copied_does_not_look_empty(
    source: Source, monkeypatch: pytest.MonkeyPatch, partitioned: bool
) -> None:
    """Its earlier rows cannot be seen in the copy's transaction any more."""

    class Overtaken(snapshot.Session):
        def __init__(self, *given: Any) -> None:
            super().__init__(*given)
            source.run(f"ALTER TABLE {table} ALTER v TYPE int USING (v + 0)")

    if partitioned:
        source.run(f"ALTER PUBLICATION {source.name} SET (publish_via_partition_root = true)")
        table = source.table("id int primary key, v int) PARTITION BY RANGE (id", "t")
        source.run(f"CREATE TABLE {table}_all PARTITION OF {table} DEFAULT")
    else:
        table = source.table("id int primary key, v int")
    source.run(f"INSERT INTO {table} VALUES (1, 1)")
    with monkeypatch.context() as patch:
        patch.setattr(snapshot, "Session", Overtaken)
        with pytest.raises(FeedUnavailableError) as caught:
            source.open(snapshot="initial").prepare()
    assert caught.value.condition == "FEED_UNAVAILABLE.TABLE_RECREATED"
    assert [row["id"] for row in everything(source.open(snapshot="initial"))] == [1]


def test_a_promoted_standby_has_the_slot(source: Source) -> None:
    if source.version < 17:
        pytest.skip("slots fail over since PostgreSQL 17")
    source.table("id int primary key")
    with pytest.raises(FeedUnavailableError) as caught:
        source.open(snapshot="none").describe()
    assert "failover => true" in caught.value.message
    source.open(snapshot="initial").prepare()
    query = f"SELECT failover FROM pg_replication_slots WHERE slot_name = '{source.name}'"
    assert source.rows(query) == [(True,)]
