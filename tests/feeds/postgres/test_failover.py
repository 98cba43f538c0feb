"""A standby takes over from a server that is read: nothing is lost or repeated, or the standby is refused."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import psycopg
import pytest

import penstock
from penstock.errors import DataLostError, FeedUnavailableError, condition_of
from penstock.feeds.postgres.table_chunks import require_backfills
from tests.support.postgres_source import Stream
from tests.support.pumped import change_rows, running
from tests.support.standby import Pair, await_slot, run, with_standby
from tests.support.waiting import wait_until


@pytest.fixture
def pair() -> Iterator[Pair]:
    with with_standby() as made:
        with psycopg.connect(made.url, autocommit=True) as connection:
            if connection.info.server_version < 170_000:
                pytest.skip("slots are synchronized from PostgreSQL 17 on")
            connection.execute(b"CREATE TABLE t (id int PRIMARY KEY)")
            connection.execute(b"CREATE PUBLICATION p FOR TABLE t")
        yield made


def feed(pair: Pair) -> penstock.PostgresFeed:
    return penstock.PostgresFeed(pair.url, "p", "p", snapshot="initial")


def ids(rows: list[dict[str, object]]) -> list[object]:
    return [
        row["id"] for row in sorted(rows, key=lambda row: (row["_commit_version"], row["_commit_sequence"]))
    ]


def test_a_pump_goes_on_with_a_standby_that_has_what_it_has(pair: Pair, tmp_path: Path) -> None:
    store = f"sqlite:///{tmp_path}/store.db"
    pair.follow()
    with running(penstock.Pump(feed(pair), store)) as failures:
        run(pair.url, "INSERT INTO t VALUES (1)")
        wait_until(lambda: failures or read(store) == [1], 60, "the first row")
        run(pair.url, "INSERT INTO t VALUES (2)")
        wait_until(lambda: failures or read(store) == [1, 2], 60, "the second row")
        await_slot(pair)
        pair.take_over()
        run(pair.url, "INSERT INTO t VALUES (3)")
        wait_until(lambda: failures or read(store) == [1, 2, 3], 60, "the row of the standby")
    assert not failures
    run(pair.url, "INSERT INTO t VALUES (4)")
    with running(penstock.Pump(feed(pair), store)) as failures:
        wait_until(lambda: failures or read(store) == [1, 2, 3, 4], 60, "the last row")
    assert not failures


def read(store: str) -> list[object]:
    try:
        return ids(change_rows(store, "t"))
    except penstock.PenstockError:
        return []


@pytest.mark.parametrize("lacks_rows", [True, False])
def test_a_pump_refuses_a_standby_that_lacks_rows_and_goes_on_if_it_lacks_none(
    pair: Pair, tmp_path: Path, lacks_rows: bool
) -> None:
    store = f"sqlite:///{tmp_path}/store.db"
    pair.follow()
    with running(penstock.Pump(feed(pair), store)) as failures:
        run(pair.url, "INSERT INTO t VALUES (1)")
        wait_until(lambda: failures or read(store) == [1], 60, "the first row")
        await_slot(pair)
        pair.pause()
        if lacks_rows:
            run(pair.url, "INSERT INTO t VALUES (2)")
            wait_until(lambda: failures or read(store) == [1, 2], 60, "the second row")
        else:
            run(pair.url, "CREATE TABLE other AS SELECT generate_series(1, 1000)")
            (end,) = position(pair.url)
            wait_until(lambda: failures or stored(store) >= end - 200, 60, "the end of the log")
        assert not failures
    pair.take_over()
    # A position that the standby lacked; then more than it lacked, so that its log is no shorter.
    run(pair.url, "INSERT INTO t VALUES (3)", "CREATE TABLE another AS SELECT generate_series(1, 100000)")
    with running(penstock.Pump(feed(pair), store)) as failures:
        wait_until(lambda: failures or read(store) == [1, 3], 60, "the end, or the row of the standby")
    assert [condition_of(each) for each in failures] == (["DATA_LOST.HISTORY_CHANGED"] if lacks_rows else [])
    assert read(store) == ([1, 2] if lacks_rows else [1, 3])


def position(url: str) -> tuple[int]:
    with psycopg.connect(url) as connection:
        row = connection.execute("SELECT (pg_current_wal_flush_lsn() - '0/0')::bigint").fetchone()
    assert row is not None
    return row


def stored(store: str) -> int:
    from penstock.store.records import pumps

    with penstock.connect(store) as opened:
        (found,) = opened.database.run(pumps.list_pumps, write=False)
        return found.position.version


def go_on(pair: Pair, stream: Stream) -> None:
    run(pair.url, "INSERT INTO t VALUES (0)", "DELETE FROM t WHERE id = 0")
    stream.drain()


@pytest.mark.parametrize("lacks_rows", [True, False])
def test_a_stream_goes_on_with_a_standby_unless_it_lacks_rows(pair: Pair, lacks_rows: bool) -> None:
    pair.follow()
    stream = Stream()
    stream.start(feed(pair))
    stream.drain()
    run(pair.url, "INSERT INTO t VALUES (1)")
    stream.drain()
    await_slot(pair, lambda: go_on(pair, stream))
    if lacks_rows:
        pair.pause()
        run(pair.url, "INSERT INTO t VALUES (2)")
        stream.drain()
    pair.take_over()
    run(pair.url, "CREATE TABLE another AS SELECT generate_series(1, 100000)", "INSERT INTO t VALUES (3)")
    stream.start(feed(pair))
    if lacks_rows:
        with pytest.raises(DataLostError) as caught:
            stream.drain()
        assert caught.value.condition == "DATA_LOST.HISTORY_CHANGED"
    else:
        stream.drain()
    assert [row["id"] for row in stream.rows if row["id"]] == ([1, 2] if lacks_rows else [1, 3])


def test_tables_are_not_backfilled_from_a_standby(pair: Pair) -> None:
    pair.follow()
    opened = penstock.PostgresFeed(pair.standby_url, "p", "p").open()
    with closing(opened), pytest.raises(FeedUnavailableError) as caught:
        require_backfills(opened.server, "p")
    assert caught.value.condition == "FEED_UNAVAILABLE.BACKFILL_ON_STANDBY"
