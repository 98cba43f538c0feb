"""Problems with a server, a slot or a URL are reported in words, with a remedy, and without a password."""

from __future__ import annotations

import json
import os
import socket
import threading
from contextlib import closing
from functools import reduce
from urllib.parse import urlsplit

import psycopg
import pytest

import penstock
from penstock.errors import (
    ChangelogContractViolationError,
    CheckpointMismatchError,
    DataLostError,
    FeedUnavailableError,
    InvalidInputError,
    InvalidUrlError,
    MissingDependencyError,
)
from penstock.feeds.postgres import PostgresFeed, server, settings, slot
from penstock.feeds.postgres.pgoutput import Decoder
from penstock.feeds.postgres.publication import state_of
from penstock.feeds.postgres.replication import ReplicationStream
from penstock.feeds.urls import parse
from tests.feeds.postgres.stops import started
from tests.support.postgres import start_postgres
from tests.support.postgres_source import Source, everything, open_transaction, source_at
from tests.support.waiting import wait_until

URL = "postgresql://me:s%40cret@db.example:5433/shop?sslmode=require"


def refused(condition: str) -> pytest.RaisesExc[FeedUnavailableError]:
    return pytest.RaisesExc(
        FeedUnavailableError, check=lambda error: error.condition == f"FEED_UNAVAILABLE.{condition}"
    )


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"tables": ("public.a b", "ü&?=")},
        {"snapshot": "none", "truncate": "skip", "lag_warning": 0, "slot_wait": 2.5},
        {"types": {"a:b&": "text", "public.t.v": "double"}, "skip": [7, 5], "invalid_values": "null"},
        {"accept": ["public.o+r:16.17", "public.p:-5+6"]},
        {"trusted_owners": ["app", "a&b= ü"]},
    ],
)
def test_the_url_gives_the_same_feed(options: dict[str, object]) -> None:
    feed = PostgresFeed(URL, publication="pub lication", slot="slot_1", **options)
    assert PostgresFeed.from_url(feed.url) == feed
    assert parse(feed.url) == feed
    assert parse(feed.url).url == feed.url
    assert feed.url.startswith("postgresql://me:s%40cret@db.example:5433/shop?")


def test_a_slot_is_named_after_its_publication() -> None:
    feed = parse("postgresql://h/db?publication=orders_2")
    assert feed == PostgresFeed("postgresql://h/db", "orders_2", "penstock_orders_2")
    assert parse(feed.url) == feed
    assert PostgresFeed("postgresql://h/db?slot=s", "orders").slot == "s"


def test_the_password_is_not_shown() -> None:
    feed = PostgresFeed(URL, "p", "s")
    for text in (repr(feed), str(feed), feed.name):
        assert "cret" not in text
        assert "'s'" in text


@pytest.mark.parametrize(
    ("url", "names"),
    [
        ("postgresql://h/db?slot=s", r"URL.MISSING_PART\].*publication"),
        ("postgresql://h/db?publication=Or-ders", r"URL.MISSING_PART\].*slot=NAME"),
        (f"postgresql://h/db?publication={'p' * 60}", r"URL.MISSING_PART\].*slot=NAME"),
        ("postgresql://h/db?publication=p&slot=Not-This", r"URL.VALUE\].*lower-case"),
        ("postgresql://h/db?publication=p&slot=s&snapshots=none", r"URL.UNKNOWN_PARAMETER\].*'snapshot'"),
        ("postgresql://h/db?publication=p&slot=s&snapshot=no", r"URL.VALUE\].*initial, none"),
        ("postgresql://h/db?publication=p&slot=s&truncate=no", "fail, skip"),
        ("postgresql://h/db?publication=p&slot=s&lag_warning=much", r"URL.VALUE\].*lag_warning"),
        ("postgresql://h/db?publication=p&slot=s&type=price", r"URL.VALUE\].*text, double"),
        ("postgresql://h/db?publication=p&slot=s&type=price:int", "text, double"),
        ("postgresql://h/db?publication=p&slot=s&skip=0/16", r"URL.VALUE\].*integers"),
        ("postgresql://h/db?publication=p&slot=s&invalid_values=skip", "fail, null"),
        ("postgresql:h/db", r"\[INVALID_URL\].*postgresql://"),
    ],
)
def test_a_wrong_url_says_what_is_wrong(url: str, names: str) -> None:
    with pytest.raises(InvalidUrlError, match=names):
        parse(url)


@pytest.mark.parametrize("skip", ["34488752", [1.5], ["0/16"], [None], 7])
def test_versions_to_skip_are_a_list_of_whole_numbers(skip: object) -> None:
    with pytest.raises(InvalidInputError, match="skip is a list of versions"):
        PostgresFeed(URL, "p", "s", skip=skip)  # type: ignore[arg-type]  # on purpose


@pytest.mark.parametrize("owners", ["app", [1], [""], 7])
def test_trusted_owners_are_a_list_of_roles(owners: object) -> None:
    with pytest.raises(InvalidInputError, match="trusted_owners is a list of roles"):
        PostgresFeed(URL, "p", "s", trusted_owners=owners)  # type: ignore[arg-type]  # on purpose


def test_without_the_driver_the_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "psycopg", None)
    with pytest.raises(MissingDependencyError, match=r"penstock-spark\[postgres\]"):
        PostgresFeed(URL, "p", "s")


def test_objects_missing_from_the_catalog(source: Source) -> None:
    with refused("NO_TABLES"):
        source.open().describe()
    source.table("id int primary key", "some")
    with refused("SLOT_MISSING") as caught:
        source.open().describe()
    assert "pg_create_logical_replication_slot" in caught.value.message
    with refused("PUBLICATION_MISSING"):
        source.open(publication="nothing").describe()
    with refused("TABLE_NOT_PUBLISHED") as caught:
        source.open(tables=("sum",)).describe()
    assert f"It has {source.name}.some" in caught.value.message
    source.table("id int", "keyless")
    with refused("NO_REPLICA_IDENTITY"):
        source.open().describe()
    source.run(f"ALTER PUBLICATION {source.name} SET (publish = 'insert')")
    source.make_slot()
    assert source.open(tables=("keyless",)).describe().contract is None


def test_a_column_with_a_name_reserved_by_the_feed(source: Source) -> None:
    source.table('id int primary key, "_Change_type" text')
    with refused("RESERVED_COLUMN"):
        source.open().describe()


def test_a_publication_that_is_dropped_stops_the_query(source: Source) -> None:
    source.table("id int primary key")
    source.make_slot()
    feed = source.open()
    start = feed.oldest()
    source.run(f"DROP PUBLICATION {source.name}")
    with refused("PUBLICATION_MISSING"):
        feed.newest(start)


def test_a_table_that_is_dropped_while_its_description_is_read_is_read_without(source: Source) -> None:
    source.table("id int primary key")
    dropped = source.table("id int primary key", "dropped")
    feed = source.open()
    described: list[str] = []
    reading = threading.Thread(
        target=lambda: described.extend(state_of(feed.server, source.name, feed.known_tables()).tables)
    )
    with psycopg.connect(source.url) as other:
        feed.known_tables()
        other.execute(f"DROP TABLE {dropped}".encode())
        reading.start()
        wait_until(lambda: source.rows("SELECT FROM pg_locks WHERE NOT granted"), 30, "the lock")
        other.commit()
    reading.join(30)
    assert described == [f"{source.name}.t"]


def test_a_slot_of_another_kind(source: Source) -> None:
    source.table("id int primary key")
    source.run(f"SELECT pg_create_physical_replication_slot('{source.name}')")
    with refused("SLOT_UNUSABLE"):
        source.open().describe()


def test_a_slot_that_sends_prepared_transactions_before_their_end(source: Source) -> None:
    table = source.table("id int primary key")
    source.run(f"SELECT pg_create_logical_replication_slot('{source.name}', 'pgoutput', false, true)")
    source.run(
        f"INSERT INTO {table} VALUES (1)",
        "BEGIN",
        f"INSERT INTO {table} VALUES (2)",
        f"PREPARE TRANSACTION '{source.name}'",
    )
    try:
        with refused("SLOT_TWO_PHASE"):
            everything(source.open())
    finally:
        source.run(f"ROLLBACK PREPARED '{source.name}'")


def test_messages_of_another_version_of_the_protocol_are_refused() -> None:
    decoder = Decoder(0, 1, lambda relation, version: True)
    with pytest.raises(ChangelogContractViolationError, match="'S'"):
        list(decoder.decode([b"S\0\0\0\1\1"]))


def test_an_old_server(source: Source, monkeypatch: pytest.MonkeyPatch) -> None:
    source.table("id int primary key")
    monkeypatch.setattr(slot, "_OLDEST_SERVER", 999_999)
    with refused("SERVER_TOO_OLD"):
        source.open().describe()


def test_a_server_that_does_not_decode_its_log() -> None:
    other = start_postgres(wal_level="replica")
    try:
        with source_at(other.url) as source:
            source.table("id int primary key")
            feed = source.open(snapshot="initial")
            for ask in (feed.describe, feed.prepare, source.open(snapshot="initial").prepare):
                with refused("WAL_LEVEL") as caught:
                    ask()
                assert "alter system set wal_level = 'logical'" in caught.value.message
            assert source.slots() == 0
    finally:
        other.stop()


def test_no_slot_is_free(source: Source) -> None:
    source.table("id int primary key")
    (free,) = source.rows(
        "SELECT current_setting('max_replication_slots')::int - count(*) FROM pg_replication_slots"
    )
    for number in range(free[0]):
        source.run(f"SELECT pg_create_physical_replication_slot('{source.name}_{number}')")
    with refused("SLOTS") as caught:
        source.open(snapshot="initial").prepare()
    assert "max_replication_slots" in caught.value.message


def test_a_table_of_several_schemas(source: Source) -> None:
    first = source.table("id int primary key")
    second = f"{source.name}_b"
    source.run(f"CREATE SCHEMA {second}")
    try:
        source.run(
            f"CREATE TABLE {second}.t (id int primary key)",
            f"ALTER PUBLICATION {source.name} ADD TABLE {second}.t",
        )
        source.make_slot()
        with refused("TABLE_AMBIGUOUS") as caught:
            source.open(tables=("t",)).describe()
        assert repr(first) in caught.value.message
        assert source.open(tables=(f"{second}.t",)).describe().contract is not None
    finally:
        source.run(f"DROP SCHEMA {second} CASCADE")


def test_the_tables_of_a_store_are_not_read_with_the_others(source: Source) -> None:
    source.table("id int primary key")
    store = f"{source.name}_store"
    penstock.connect(f"{source.url}?schema={store}", create=True).close()
    try:
        source.run(f"ALTER PUBLICATION {source.name} ADD TABLES IN SCHEMA {store}")
        source.make_slot()
        with refused("STORE_PUBLISHED") as caught:
            source.open().describe()
        assert caught.value.parameters["schema"] == store
        assert "id" in source.open(tables=("t",)).describe().schema.names
    finally:
        source.run(f"DROP SCHEMA {store} CASCADE")


@pytest.mark.parametrize("tables", [None, ("first",)])
def test_two_tables_whose_names_are_equal_with_their_schema(
    source: Source, tables: tuple[str] | None
) -> None:
    source.table("id int primary key", "first")
    schema = f'"{source.name}.b"'
    source.run(f"CREATE SCHEMA {schema}")
    try:
        for name in (f'{source.name}."b.c"', f"{schema}.c"):
            source.run(
                f"CREATE TABLE {name} (id int primary key)",
                f"ALTER PUBLICATION {source.name} ADD TABLE {name}",
            )
        with refused("TABLE_NAMES_EQUAL") as caught:
            source.open(tables=tables).describe()
        assert caught.value.parameters["table"] == f"{source.name}.b.c"
    finally:
        source.run(f"DROP SCHEMA {schema} CASCADE")


def test_failed_logins_and_missing_databases(source: Source) -> None:
    source.table("id int primary key")
    parts = urlsplit(source.url)
    wrong = source.url.replace(f":{parts.password}@", ":wr0ng@")
    with refused("LOGIN") as caught:
        PostgresFeed(wrong, source.name, source.name).open().describe()
    assert "wr0ng" not in str(caught.value)
    with refused("DATABASE"):
        PostgresFeed(source.url.replace("/postgres", "/nowhere"), source.name, source.name).open().describe()


def test_a_server_that_does_not_allow_writes_cannot_hold_the_initial_copy(source: Source) -> None:
    """As a standby."""
    table = source.table("id int primary key")
    url = f"{source.url}?options=-c%20default_transaction_read_only%3Don"
    with refused("READ_ONLY") as caught:
        PostgresFeed(url, source.name, source.name).open().prepare()
    assert 'snapshot="none"' in caught.value.message
    assert source.slots() == 0
    # What the message says works.
    source.make_slot()
    source.run(f"INSERT INTO {table} VALUES (1)")
    feed = PostgresFeed(url, source.name, source.name, snapshot="none").open()
    assert [row["id"] for row in everything(feed)] == [1]


def test_rights_that_a_role_lacks_are_named(source: Source) -> None:
    source.table("id int primary key")
    role, parts = f"r_{source.name}", urlsplit(source.url)
    source.run(f"CREATE ROLE {role} LOGIN PASSWORD 'pw'", f"GRANT USAGE ON SCHEMA {source.name} TO {role}")
    try:
        url = source.url.replace(f"{parts.username}:{parts.password}@", f"{role}:pw@")
        for grant in (None, f"ALTER ROLE {role} REPLICATION"):
            if grant:
                source.run(grant)
            with refused("PRIVILEGE") as caught:
                PostgresFeed(url, source.name, source.name).open().prepare()
            assert 'snapshot="none"' in caught.value.message
        assert source.slots() == 0
        # Reading from a slot needs no more than that.
        source.make_slot()
        assert (
            PostgresFeed(url, source.name, source.name, snapshot="none").open().describe().contract
            is not None
        )
    finally:
        source.run(f"DROP OWNED BY {role}", f"DROP ROLE {role}")


def test_a_slot_in_use_is_waited_for_and_named(source: Source) -> None:
    table = source.table("id int primary key")
    source.make_slot()
    feed, hasty = source.open(slot_wait=30), source.open(slot_wait=0)
    start = feed.oldest()
    source.run(f"INSERT INTO {table} VALUES (1)")
    (task,) = feed.tasks(start, feed.newest(start), 10)
    schema = feed.describe().schema
    held = f"SELECT active FROM pg_replication_slots WHERE slot_name = '{source.name}'"
    with closing(psycopg.connect(source.url, replication="database", autocommit=True)) as holder:
        pid = holder.info.backend_pid
        options = f"proto_version '1', publication_names '{source.name}'"
        holder.pgconn.send_query(f'START_REPLICATION SLOT "{source.name}" LOGICAL 0/0 ({options})'.encode())
        wait_until(lambda: source.rows(held)[0][0])
        for reading in (lambda: hasty.newest(start), lambda: list(hasty.read(task, schema))):
            with refused("SLOT_IN_USE") as caught:
                reading()
            assert str(pid) in caught.value.message
        found: list[int] = []
        patient = [
            threading.Thread(target=lambda: found.append(feed.newest(start))),
            threading.Thread(target=lambda: found.append(sum(b.num_rows for b in feed.read(task, schema)))),
        ]
        for thread in patient:
            thread.start()
    for thread in patient:
        thread.join(30)
    assert min(found) == 1
    assert max(found) > start


@pytest.mark.parametrize(
    ("setting", "value"), [("max_slot_wal_keep_size", "1MB"), ("idle_replication_slot_timeout", "1s")]
)
def test_a_slot_invalidated_by_the_server(source: Source, setting: str, value: str) -> None:
    if not source.rows(f"SELECT FROM pg_settings WHERE name = '{setting}'"):
        pytest.skip(f"this version of PostgreSQL has no {setting}")
    table = source.table("id int primary key, v text")
    source.make_slot()
    feed = source.open()
    start = feed.oldest()
    try:
        source.run(f"ALTER SYSTEM SET {setting} = '{value}'", "SELECT pg_reload_conf()")

        def lost() -> bool:
            source.run(
                f"INSERT INTO {table} VALUES (1, 'x') ON CONFLICT DO NOTHING",
                "SELECT pg_switch_wal()",
                "CHECKPOINT",
            )
            query = f"SELECT wal_status FROM pg_replication_slots WHERE slot_name = '{source.name}'"
            return bool(source.rows(query) == [("lost",)])

        wait_until(lost)
    finally:
        source.run(f"ALTER SYSTEM RESET {setting}", "SELECT pg_reload_conf()")
    with pytest.raises(DataLostError, match=f"see {setting}") as caught:
        feed.newest(start)
    assert caught.value.condition == "DATA_LOST.SLOT_INVALIDATED"


def test_a_broken_connection_is_reopened(source: Source, monkeypatch: pytest.MonkeyPatch) -> None:
    table = source.table("id int primary key, v text")
    source.make_slot()
    feed = source.open()
    schema, start = feed.describe().schema, feed.oldest()
    end_others = (
        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
        " WHERE application_name = 'penstock' AND pid <> pg_backend_pid()"
    )
    source.run(f"INSERT INTO {table} SELECT i, 'x' FROM generate_series(1, 5000) i", end_others)
    upto = feed.newest(start)
    monkeypatch.setattr(server, "_CHUNK_ROWS", 600)
    monkeypatch.setattr(server, "_FETCH_ROWS", 600)
    (task,) = feed.tasks(start, upto, 10)
    ids: list[int] = []
    for number, batch in enumerate(feed.read(task, schema.remove(schema.get_field_index("_commit_version")))):
        ids += batch["id"].to_pylist()
        if number == 2:
            source.run(end_others)
    assert ids == list(range(1, 5001))


def test_a_connection_that_is_lost_as_replication_starts_is_opened_again(
    source: Source, monkeypatch: pytest.MonkeyPatch
) -> None:
    source.table("id int primary key")
    source.make_slot()
    feed = source.open()
    connect, lost = server.Server.connect, 0

    def losing(connecting: server.Server, **options: object) -> psycopg.Connection:
        nonlocal lost
        connection = connect(connecting, **options)
        if options and not lost:
            lost += 1
            with closing(socket.socket(fileno=os.dup(connection.pgconn.socket))) as mine:
                mine.shutdown(socket.SHUT_RDWR)
        return connection

    monkeypatch.setattr(server.Server, "connect", losing)
    with closing(ReplicationStream(feed.server, source.name, source.name, 0, "test")):
        assert lost == 1


def test_an_unreachable_server_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "_ATTEMPTS", 2)
    feed = PostgresFeed("postgresql://me:geheim@127.0.0.1:1/db?connect_timeout=2", "p", "s").open()
    with refused("SERVER") as caught:
        feed.oldest()
    assert "geheim" not in str(caught.value)


def test_connections_are_opened_only_when_needed() -> None:
    feed = PostgresFeed("postgresql://127.0.0.1:1/db", "p", "s")
    assert feed.url
    assert settings.split(feed.url)


def test_a_feed_of_all_tables_omits_the_tables_of_snapshots(source: Source) -> None:
    table = source.table("id int primary key")
    source.run(
        f"INSERT INTO {table} VALUES (1)",
        f"DROP PUBLICATION {source.name}",
        f"CREATE PUBLICATION {source.name} FOR ALL TABLES",
    )
    feed = source.open(snapshot="initial", tables=(table,))
    start = feed.prepare()
    source.run(f"INSERT INTO {table} VALUES (2)")
    assert [row["id"] for row in everything(feed)] == [1, 2]
    feed.logged(feed.newest(start))


STATES: list[object] = [
    {}, 7, [], "state", None, {"tables": 7}, {"tables": {"s.t": "x"}}, {"tables": {"s.u": "1"}},
    {"transaction": 1.5}, {"transaction": "1"}, {"publication": None},
    {"partitions": {"s.t": [1]}}, {"partitions": {"s.t": {"x": "1"}}},
    {"columns": {}}, {"columns": {"s.t": {"id": 1}}}, {"columns": {"s.t": {"id": [1, 23, float("inf")]}}},
    {"widths": {"s.t": -(10**12)}}, {"widths": {"s.t": True}},
    {"keys": {"s.t": 7}}, {"keys": {"s.t": ["d", 1, [-1]]}},
    {"earlier": 7, "since": 1}, {"earlier": {}, "since": 1}, {"earlier": {}},
]  # fmt: skip
OFFSETS: list[dict[str, object]] = [
    {"from": float("inf")}, {"to": None}, {"to": "7"}, {"from": True}, {"from": 1.5}, {"to": 10**30},
    {"from": 10**17}, {"to": []}, {"from": {}},
]  # fmt: skip


DEEP: object = reduce(lambda nested, _: [nested], range(100_000), [])


@pytest.mark.few(12)
@pytest.mark.parametrize(
    ("part", "change"),
    [("state", DEEP), *(("state", change) for change in STATES), *(("offset", change) for change in OFFSETS)],
)
def test_an_offset_that_somebody_edited_is_refused(source: Source, part: str, change: object) -> None:
    source.table("id int primary key")
    stream = started(source)
    source.run(f"INSERT INTO {source.name}.t VALUES (1)")
    stream.drain()
    offset = stream.offsets[-1]
    if part == "offset":
        assert isinstance(change, dict)
        stream.offsets[-1] = offset | change
    elif isinstance(change, dict) and change:
        text = json.dumps(offset["state"] | change)
        stream.offsets[-1] = offset | {"state": json.loads(text.replace('"s.t"', f'"{source.name}.t"'))}
    else:
        stream.offsets[-1] = offset | {"state": change}
    source.run(f"INSERT INTO {source.name}.t VALUES (2)")
    stream.start(source.feed(snapshot="initial"))
    with pytest.raises(CheckpointMismatchError) as caught:
        stream.drain()
    assert caught.value.condition == "CHECKPOINT_MISMATCH.MALFORMED"
    assert len(caught.value.message) < 800


def test_a_server_whose_log_ends_before_what_was_read_is_refused(source: Source) -> None:
    """As after a failover to a standby that lacks the last commits."""
    table = source.table("id int primary key")
    stream = started(source)
    source.run(f"INSERT INTO {table} VALUES (1)")
    stream.drain()
    confirmed = f"SELECT confirmed_flush_lsn FROM pg_replication_slots WHERE slot_name = '{source.name}'"
    before = source.rows(confirmed)
    stream.offsets[-1] = stream.offsets[-1] | {"to": stream.offsets[-1]["to"] + (1 << 30)}
    source.run(f"INSERT INTO {table} VALUES (2)")
    for _ in range(2):
        stream.start(source.feed(snapshot="initial"))
        with pytest.raises(DataLostError) as caught:
            stream.drain()
        assert caught.value.condition == "DATA_LOST.HISTORY_CHANGED"
    assert source.rows(confirmed) == before, "the rows that were not read are kept"


def test_a_slot_that_somebody_is_creating_is_named_and_read_once_it_is_there(source: Source) -> None:
    table = source.table("id int primary key")

    def create() -> None:
        with psycopg.connect(source.url, autocommit=True) as other:
            other.execute("SELECT pg_create_logical_replication_slot(%s, 'pgoutput')", [source.name])

    creation = threading.Thread(target=create)
    with open_transaction(source, f"INSERT INTO {table} VALUES (1)"):
        creation.start()
        wait_until(lambda: source.slots() == 1)
        with pytest.raises(FeedUnavailableError, match="is being created") as caught:
            source.open().oldest()
        assert caught.value.condition == "FEED_UNAVAILABLE.SLOT_NOT_READY"
    creation.join()
    source.run(f"INSERT INTO {table} VALUES (2)")
    assert [row["id"] for row in everything(source.open())] == [2]
