"""A pump recovers on another server: a standby without all commits, a restored one, an upgraded one."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import psycopg
import psycopg.sql

from tests.support.pgtools import program
from tests.support.postgres import start_postgres
from tests.support.postgres_proxy import proxied
from tests.support.postgres_source import Row, Source
from tests.support.pumped import TABLES, await_equal, change_rows, create_pump, fill, running
from tests.support.recovered import (
    await_recovered,
    change_in_the_gap,
    failure_of,
    fold,
    queue_rows,
    read_pump,
    read_pump_state,
    reconnect,
    recover,
    recovery_during_changes,
    run_pump_to_end,
    system_identifier,
)
from tests.support.standby import await_slot, with_standby
from tests.support.upgraded import upgradable_server
from tests.support.waiting import wait_until

KINDS = ("size", "id")


@contextmanager
def shop_at(url: str) -> Iterator[Source]:
    """Two tables with rows, and one whose key has a type of its own, on a server that is not kept."""
    with psycopg.connect(url, autocommit=True) as connection:
        source = Source(url, "shop", connection)
        source.run("CREATE SCHEMA shop", "CREATE PUBLICATION shop")
        source.run("CREATE TYPE shop.size AS ENUM ('small', 'large')")
        for name, columns in TABLES.items():
            source.table(columns, name)
        source.table("size shop.size, id int, n int, PRIMARY KEY (size, id)", "kinds")
        source.run(
            "INSERT INTO shop.kinds SELECT (ARRAY['small', 'large'])[n % 2 + 1]::shop.size, n, n "
            "FROM generate_series(1, 40) AS n"
        )
        fill(source, 1, 500)
        yield source


def write_much_log(source: Source) -> None:
    """Have the positions of what comes next in the log far above those of another server."""
    source.run(
        "SELECT pg_logical_emit_message(false, 'fill', repeat('x', 20000000))",
        "UPDATE shop.stock SET n = n + 1",
    )


def change_kinds(source: Source) -> None:
    source.run(
        "DELETE FROM shop.kinds WHERE id % 4 = 0",
        "UPDATE shop.kinds SET size = 'small' WHERE id % 4 = 1",
        "UPDATE shop.kinds SET n = 0 WHERE id % 4 = 2",
    )


def has_the_same_kinds(source: Source, store_url: str) -> bool:
    names = (*KINDS, "n")
    made = fold(queue_rows(store_url, "shop.kinds"), KINDS, names)
    found: list[Row] = [
        dict(zip(names, row, strict=True)) for row in source.rows("SELECT size::text, id, n FROM shop.kinds")
    ]
    return made == {(row["size"], row["id"]): row for row in found}


def check_recovery(source: Source, store_url: str, condition: str) -> None:
    """Change a server that has taken the place of another one, recover, and change it once more."""
    change_in_the_gap(source)
    change_kinds(source)
    before = {name: queue_rows(store_url, f"shop.{name}") for name in TABLES}
    failure = failure_of(create_pump(source, store_url))
    assert failure.condition == condition
    assert "penstock pump recover" in failure.message
    with recovery_during_changes(source, store_url):
        pass
    with running(create_pump(source, store_url)) as failures:
        fill(source, 99_901, 99_905)
        change_kinds(source)
        await_recovered(store_url, source, failures)
        wait_until(lambda: failures or has_the_same_kinds(source, store_url), 60, "the other rows")
        assert not failures
    assert source.rows("SELECT slot_name FROM pg_replication_slots WHERE NOT temporary") == [("shop",)]
    for name, rows in before.items():
        now = queue_rows(store_url, f"shop.{name}")
        assert now[: len(rows)] == rows
        times = [row["_commit_timestamp"] for row in now]
        assert times == sorted(times)


def test_a_standby_that_lacks_commits_takes_over(store_url: str) -> None:
    with with_standby() as pair, shop_at(pair.url) as source:
        pair.follow()
        has_slots = source.version >= 17
        with running(create_pump(source, store_url)) as failures:
            await_equal(store_url, source, failures)
            if has_slots:
                await_slot(pair, lambda: source.run("UPDATE shop.stock SET n = n + 1"), "shop")
            pair.pause()
            # What the pump has read, and the standby never gets.
            change_in_the_gap(source, 8)
            change_kinds(source)
            write_much_log(source)
            await_equal(store_url, source, failures)
        pair.take_over()
        with reconnect(pair.url, source) as now:
            condition = "DATA_LOST.HISTORY_CHANGED" if has_slots else "FEED_UNAVAILABLE.SLOT_MISSING"
            check_recovery(now, store_url, condition)
        assert read_pump_state(store_url)["offset"] > 0


def test_a_restored_database_takes_the_place_of_the_source(store_url: str) -> None:
    old, new = start_postgres(), start_postgres()
    try:
        with proxied(old.url) as proxy, shop_at(proxy.url) as source:
            write_much_log(source)
            run_pump_to_end(source, store_url)
            change_in_the_gap(source, 8)
            dumped = subprocess.run([program("pg_dump"), old.url], capture_output=True, check=True)
            with psycopg.connect(new.url, autocommit=True) as connection:
                # So that no object has the same id.
                connection.execute(b"CREATE TABLE public.other (id int); CREATE TYPE public.t AS ENUM ('a')")
            subprocess.run(
                [program("psql"), "-q", "-v", "ON_ERROR_STOP=1", new.url], input=dumped.stdout, check=True
            )
            with psycopg.connect(new.url, autocommit=True) as connection:
                password = psycopg.sql.Literal(urlsplit(old.url).password)
                connection.execute(psycopg.sql.SQL("ALTER ROLE penstock PASSWORD {}").format(password))
            feed = read_pump_state(store_url)["feed"]
            proxy.lead_to(new.url)
            with reconnect(proxy.url, source) as now:
                _check_unnamed(now, store_url)
                check_recovery(now, store_url, "CHECKPOINT_MISMATCH.OTHER_SERVER")
                state = read_pump_state(store_url)
                assert state["offset"] > 0
                assert state["feed"] != feed
                # The offset is not added twice.
                (end,) = now.rows("SELECT pg_current_wal_lsn() - '0/0'")[0]
                assert read_pump(store_url).position.version <= end + state["offset"]
                _check_idle(now, store_url)
    finally:
        old.stop()
        new.stop()


def _check_unnamed(source: Source, store_url: str) -> None:
    """A pump reads from no other server that is not named: its URL may be wrong, and rows be deleted."""
    before = read_pump(store_url).state
    for server in (None, "1"):
        recover(store_url, force=True, server=server)
        failure = failure_of(create_pump(source, store_url))
        assert failure.condition == "CHECKPOINT_MISMATCH.OTHER_SERVER"
        assert f"recover shop --server {system_identifier(source)}" in failure.message
        now = read_pump(store_url).state
        assert {**now, "recovery_request": None} == {**before, "recovery_request": None}


def _check_idle(source: Source, store_url: str) -> None:
    """The slot also advances while only other tables change."""
    confirmed = "SELECT max(confirmed_flush_lsn) - '0/0' FROM pg_replication_slots WHERE slot_name = 'shop'"
    with running(create_pump(source, store_url)) as failures:
        source.run("CREATE TABLE public.idle AS SELECT generate_series(1, 1000)")
        (end,) = source.rows("SELECT pg_current_wal_lsn() - '0/0'")[0]
        wait_until(lambda: failures or source.rows(confirmed)[0][0] >= end - 200, 60, "the end of the log")
        assert not failures


def test_a_server_is_upgraded(tmp_path: Path) -> None:
    store_url = f"sqlite:///{tmp_path}/store.db"
    with upgradable_server() as server, shop_at(server.url) as source:
        run_pump_to_end(source, store_url)
        change_in_the_gap(source, 8)
        before = source.version
        server.upgrade()
        with reconnect(server.url, source) as now:
            assert now.version > before
            check_recovery(now, store_url, "CHECKPOINT_MISMATCH.OTHER_SERVER")
    assert change_rows(store_url, "shop.orders")
