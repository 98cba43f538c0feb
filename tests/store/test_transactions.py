"""Transactions are atomic, isolated and durable, and share a pool of connections."""

from __future__ import annotations

import contextlib
import sqlite3
import threading

import pyarrow as pa
import pytest

import penstock
from penstock.errors import StoreError
from penstock.store import pool
from penstock.store.database import Transaction
from tests.store.programs import SCHEMA
from tests.support.raw_sql import raw_connection
from tests.support.waiting import wait_until


def _consumers(store: penstock.Store) -> list[str]:
    return store.consumers()


def _add(tx: Transaction, name: str) -> None:
    tx.run("insert_consumer", name=name, now=0)


@pytest.mark.parametrize("error", [ZeroDivisionError, KeyboardInterrupt])
def test_a_block_that_raises_is_rolled_back_and_the_next_one_works(
    store: penstock.Store, error: type[BaseException]
) -> None:
    def work(tx: Transaction) -> None:
        _add(tx, "a")
        raise error

    with pytest.raises(error):
        store.database.run(work)
    store.create_consumer("b")
    assert _consumers(store) == ["b"]


def test_a_transaction_with_a_failed_statement_is_not_committed(pg_store: penstock.Store) -> None:
    def work(tx: Transaction) -> None:
        _add(tx, "a")
        with contextlib.suppress(Exception):
            tx.run("insert_partition", queue_id=1, partition=0, total=None)

    with pytest.raises(StoreError, match="cannot be committed"):
        pg_store.database.run(work)
    assert _consumers(pg_store) == []


def test_a_read_transaction_sees_one_snapshot_and_cannot_write(store: penstock.Store) -> None:
    with store.database.transaction(write=False) as tx:
        assert tx.all("list_consumers") == []
        store.create_consumer("a")
        assert tx.all("list_consumers") == []
    if store.database.dialect == "postgres":
        with pytest.raises(StoreError), store.database.transaction(write=False) as tx:
            _add(tx, "b")
    assert _consumers(store) == ["a"]


def test_threads_share_few_connections(store: penstock.Store) -> None:
    queue = store.create_queue("q", SCHEMA)
    failures: list[BaseException] = []

    def work(number: int) -> None:
        try:
            for n in range(5):
                queue.append([{"n": number * 100 + n}])
                queue.read(0, 0, max_rows=2)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(2 * pool.POOL_SIZE)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert len({row["n"] for row in queue.read(0, 0).to_pylist()}) == 10 * pool.POOL_SIZE
    assert len(store.database.pool.idle) <= pool.POOL_SIZE


def test_unused_connections_are_closed(store: penstock.Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "IDLE_SECONDS", 0.05)
    monkeypatch.setattr(pool, "idle_closer", pool.IdleConnectionCloser())
    closed, disconnect = [], store.database.disconnect
    monkeypatch.setattr(
        store.database.pool, "disconnect", lambda each: (closed.append(each), disconnect(each))
    )
    with store.database.transaction() as outer:
        with store.database.transaction(write=False):
            pass
        wait_until(lambda: len(closed) == 1)
        _add(outer, "a")  # whose connection is in use, and stays open
    wait_until(lambda: len(closed) == 2)
    wait_until(lambda: not pool.idle_closer.running)
    assert _consumers(store) == ["a"]
    wait_until(lambda: len(closed) == 3)


def test_a_connection_in_regular_use_stays_open(
    store: penstock.Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.consumers()
    (before,) = store.database.pool.idle
    for _ in range(5):
        assert store.database.pool.close_unused()
        store.consumers()
    assert store.database.pool.idle == [before]


def test_an_error_of_the_caller_keeps_the_connection(store: penstock.Store) -> None:
    store.consumers()
    (before,) = store.database.pool.idle
    for _ in range(3):
        with pytest.raises(penstock.errors.ConsumerNotFoundError):
            store.consumer("nobody")
    assert store.database.pool.idle == [before]


def test_a_transaction_open_when_the_store_is_closed_can_still_commit(store: penstock.Store) -> None:
    with store.database.transaction() as tx:
        store.close()
        _add(tx, "a")
    assert store.database.pool.idle == []
    with penstock.connect(_url(store)) as again:
        assert _consumers(again) == ["a"]


def _url(store: penstock.Store) -> str:
    database = store.database
    if database.dialect == "sqlite":
        return str(database.url)
    from penstock.testing.stores import with_schema

    return with_schema(database.url.target, database.url.options["schema"])


def test_the_servers_default_isolation_level_does_not_matter(pg_store: penstock.Store) -> None:
    admin = raw_connection(pg_store.database)
    admin.execute("alter role current_user set default_transaction_isolation = 'serializable'")
    try:
        with penstock.connect(_url(pg_store)) as store:
            level = "show transaction_isolation"
            with store.database.transaction() as tx:
                assert tx._cursor.execute(level).fetchone()[0] == "read committed"
            with store.database.transaction(write=False) as tx:
                assert tx._cursor.execute(level).fetchone()[0] == "repeatable read"
    finally:
        admin.execute("alter role current_user reset default_transaction_isolation")
        admin.close()


def test_numbers_of_any_size_share_one_prepared_statement(pg_store: penstock.Store) -> None:
    queue = pg_store.create_queue("q", SCHEMA)
    for n in (1, 40_000, 3_000_000_000, 2**62):
        for _ in range(8):
            queue.append([{"n": n}])
            pg_store.database.run(
                lambda tx, n=n: tx.one("segment_at", queue_id=1, partition=0, row_index=n),
                write=False,
            )
    with pg_store.database.transaction(write=False) as tx:
        names = tx._cursor.execute(  # type: ignore[attr-defined]
            "select count(*) from pg_prepared_statements where statement like '%segment%end_index >%limit 1%'"
        ).fetchone()
    assert names[0] <= 1


def test_sums_are_returned_as_int_or_float(store: penstock.Store) -> None:
    queue = store.create_queue("q", SCHEMA)
    queue.append(pa.table({"n": [1, 2], "s": ["a", "b"]}, schema=SCHEMA))
    info = store.info()
    assert [type(value) for value in vars(info).values()].count(int) == 8
    store.create_consumer("c")
    lag = queue.register("c").lag("q")
    assert (type(lag.rows), type(lag.bytes), type(lag.seconds)) == (int, int, float)


def test_driver_errors_are_the_cause_of_store_errors(store: penstock.Store) -> None:
    driver = sqlite3.Error if store.database.dialect == "sqlite" else Exception
    with pytest.raises(StoreError) as caught, store.database.transaction() as tx:
        tx.execute("select nonsense from nowhere")
    assert isinstance(caught.value.__cause__, driver)
    assert "nowhere" in str(caught.value)


def test_only_a_transaction_that_is_not_durable_skips_the_wait_for_the_disk(store: penstock.Store) -> None:
    show, waits = (
        ("pragma synchronous", {True: 2, False: 1})
        if store.database.dialect == "sqlite"
        else ("show synchronous_commit", {True: "on", False: "off"})
    )
    for durable in (True, False, False, True):
        found = store.database.run(lambda tx: tx.query(show), durable=durable)
        assert found[0][0] == waits[durable]
