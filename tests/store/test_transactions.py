"""Transactions: all or nothing, again while the database is away, and never twice."""

from __future__ import annotations

import contextlib
import logging
import sqlite3
import threading
import uuid
from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pytest

import penstock
from penstock.errors import CommitOutcomeUnknown, StoreError, StoreUnavailable
from penstock.store import pool
from penstock.store.database import Database, Transaction
from tests.store.programs import SCHEMA
from tests.store.proxy import Proxy, proxied
from tests.store.support import raw_connection, run_sql


@pytest.fixture
def database(store: penstock.Store) -> Database:
    return store.database


@pytest.fixture
def pg_store(pg_url: str) -> Iterator[penstock.Store]:
    from tests.support.postgres import drop_schema, with_schema

    schema = f"t_{uuid.uuid4().hex}"
    with penstock.connect(with_schema(pg_url, schema)) as store:
        yield store
    drop_schema(pg_url, schema)


@pytest.fixture
def behind_proxy(pg_store: penstock.Store, pg_url: str) -> Iterator[tuple[penstock.Store, Proxy]]:
    """The same store through a proxy."""
    from tests.support.postgres import with_schema

    url = with_schema(pg_url, pg_store.database.url.options["schema"])
    with proxied(url) as proxy, penstock.connect(proxy.url, create=False) as store:
        yield store, proxy


def _consumers(store: penstock.Store) -> list[str]:
    return store.consumers()


def _add(tx: Transaction, name: str) -> None:
    tx.run("insert_consumer", name=name, now=0)


@pytest.mark.parametrize("error", [ZeroDivisionError, KeyboardInterrupt])
def test_a_block_that_raises_leaves_nothing_and_the_next_one_works(
    store: penstock.Store, error: type[BaseException]
) -> None:
    def work(tx: Transaction) -> None:
        _add(tx, "a")
        raise error

    with pytest.raises(error):
        store.database.run(work)
    store.create_consumer("b")
    assert _consumers(store) == ["b"]


def test_a_transaction_one_of_whose_statements_failed_is_not_committed(pg_store: penstock.Store) -> None:
    def work(tx: Transaction) -> None:
        _add(tx, "a")
        with contextlib.suppress(Exception):
            tx.run("insert_partition", queue_id=1, partition=0, total=None)

    with pytest.raises(StoreError, match="cannot be committed"):
        pg_store.database.run(work)
    assert _consumers(pg_store) == []


def test_a_reading_transaction_sees_one_moment_and_cannot_write(store: penstock.Store) -> None:
    with store.database.transaction(write=False) as tx:
        assert tx.all("list_consumers") == []
        store.create_consumer("a")
        assert tx.all("list_consumers") == []
    if store.database.dialect == "postgres":
        with pytest.raises(StoreError), store.database.transaction(write=False) as tx:
            _add(tx, "b")
    assert _consumers(store) == ["a"]


def test_a_session_killed_in_mid_transaction_is_replaced_and_nothing_is_doubled(
    pg_store: penstock.Store, caplog: pytest.LogCaptureFixture
) -> None:
    queue = pg_store.create_queue("q", SCHEMA)
    attempts = []

    def work(tx: Transaction) -> None:
        _add(tx, "a")
        attempts.append(1)
        if len(attempts) < 3:
            (backend,) = _backends(pg_store.database, "idle in transaction")
            run_sql(pg_store.database, f"select pg_terminate_backend({backend})")
        _add(tx, "b")

    with caplog.at_level(logging.WARNING):
        pg_store.database.run(work)
    assert len(attempts) == 3
    assert _consumers(pg_store) == ["a", "b"]
    assert [record.action for record in caplog.records] == ["store_retry"] * 2  # type: ignore[attr-defined]
    assert queue.append([{"n": 1}]).ranges == {0: (0, 1)}


def test_appends_go_on_after_every_idle_session_was_killed(pg_store: penstock.Store) -> None:
    queue = pg_store.create_queue("q", SCHEMA)
    _use_connections(pg_store, 6)
    for backend in _backends(pg_store.database, "idle"):
        run_sql(pg_store.database, f"select pg_terminate_backend({backend})")
    for n in range(5):
        queue.append([{"n": n}])
    assert [row["n"] for row in queue.read(0, 0).to_pylist()] == [0, 1, 2, 3, 4]
    assert len(_backends(pg_store.database, "idle")) == 1


def _use_connections(store: penstock.Store, count: int) -> None:
    """Have so many connections in the pool."""
    barrier = threading.Barrier(count)
    threads = [
        threading.Thread(target=lambda: store.database.run(lambda tx: barrier.wait(10), write=False))
        for _ in range(count)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(store.database._pool._idle) == count


def _backends(database: Database, state: str) -> list[int]:
    rows = run_sql(
        database,
        f"select pid from pg_stat_activity where application_name = 'penstock' and state = '{state}' "
        "and pid <> pg_backend_pid() and query like '%" + database.url.options["schema"] + "%'",
    )
    return [row[0] for row in rows] or [
        row[0]
        for row in run_sql(
            database,
            f"select pid from pg_stat_activity where application_name = 'penstock' and state = '{state}' "
            "and pid <> pg_backend_pid()",
        )
    ]


@pytest.mark.parametrize("happened", [True, False])
def test_a_commit_without_an_answer_is_not_tried_again(
    behind_proxy: tuple[penstock.Store, Proxy], happened: bool
) -> None:
    store, proxy = behind_proxy
    queue = store.create_queue("q", SCHEMA)
    proxy.lose(b"COMMIT\0", deliver=happened)
    with pytest.raises(CommitOutcomeUnknown, match="or use a producer session, which knows"):
        queue.append([{"n": 1}])
    assert queue.info().rows == int(happened)
    assert queue.append([{"n": 2}]).ranges == {0: (int(happened), int(happened) + 1)}


@pytest.mark.parametrize("happened", [True, False])
def test_a_producer_whose_commit_had_no_answer_appends_once(
    behind_proxy: tuple[penstock.Store, Proxy], happened: bool
) -> None:
    store, proxy = behind_proxy
    queue = store.create_queue("q", SCHEMA)
    producer = store.producer("q", "web")
    proxy.lose(b"COMMIT\0", deliver=happened)
    result = producer.append([{"n": 1}], 7)
    assert result.skipped == happened
    assert (producer.sequence, producer.skipped) == (7, int(happened))
    assert [row["n"] for row in queue.read(0, 0).to_pylist()] == [1]


def test_work_that_may_be_repeated_is_after_a_commit_without_an_answer(
    behind_proxy: tuple[penstock.Store, Proxy],
) -> None:
    store, proxy = behind_proxy
    proxy.lose(b"COMMIT\0", deliver=True)
    store.database.run(lambda tx: _add(tx, "a"), idempotent=True)
    assert _consumers(store) == ["a"]


def test_a_read_whose_end_had_no_answer_is_repeated(behind_proxy: tuple[penstock.Store, Proxy]) -> None:
    store, proxy = behind_proxy
    proxy.lose(b"COMMIT\0", deliver=True, times=2)
    assert store.consumers() == []


def test_a_connection_lost_before_the_commit_is_tried_again(
    behind_proxy: tuple[penstock.Store, Proxy],
) -> None:
    store, proxy = behind_proxy
    queue = store.create_queue("q", SCHEMA)
    proxy.lose(b"payload", deliver=True, times=2)
    assert queue.append([{"n": 1}]).ranges == {0: (0, 1)}
    assert queue.info().rows == 1


def test_a_server_that_is_away_for_a_while_is_waited_for(
    behind_proxy: tuple[penstock.Store, Proxy], caplog: pytest.LogCaptureFixture
) -> None:
    store, proxy = behind_proxy
    queue = store.create_queue("q", SCHEMA)
    proxy.lose(b"", deliver=False, times=5)
    with caplog.at_level(logging.WARNING):
        queue.append([{"n": 1}])
    assert queue.info().rows == 1
    assert len(caplog.records) == 5


def test_a_server_that_stays_away_fails_in_the_end(
    behind_proxy: tuple[penstock.Store, Proxy], monkeypatch: pytest.MonkeyPatch
) -> None:
    store, proxy = behind_proxy
    queue = store.create_queue("q", SCHEMA)
    proxy.lose(b"", deliver=False, times=10_000)
    monkeypatch.setattr("penstock.store.database.RETRY_SECONDS", 0.5)
    with pytest.raises(StoreUnavailable, match="the server is away"):
        queue.append([{"n": 1}])
    proxy.failures = 0
    assert queue.info().rows == 0


def test_two_that_wait_for_each_other_both_get_through(pg_store: penstock.Store) -> None:
    """PostgreSQL ends one of the two; it is tried again."""
    for name in ("a", "b"):
        pg_store.create_queue(name, SCHEMA)
    both = threading.Barrier(2)
    runs: list[str] = []

    def work(first: str, second: str) -> None:
        def inside(tx: Transaction) -> None:
            tx.one("lock_queue", name=first)
            if len(runs) < 2:
                runs.append(first)
                both.wait(10)
            runs.append(first)
            tx.one("lock_queue", name=second)

        pg_store.database.run(inside)

    threads = [threading.Thread(target=work, args=names) for names in (("a", "b"), ("b", "a"))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()
    assert len(runs) >= 5


def test_a_writer_waits_for_another_in_sqlite(tmp_path: Any) -> None:
    with penstock.connect(f"sqlite:///{tmp_path}/x.db?busy_timeout=50") as store:
        queue = store.create_queue("q", SCHEMA)
        other = raw_connection(store.database)
        other.execute("begin immediate")
        done = threading.Thread(target=queue.append, args=([{"n": 1}],))
        done.start()
        done.join(0.3)
        assert done.is_alive()
        other.execute("rollback")
        done.join(20)
        assert queue.info().rows == 1
        other.close()


def test_a_writer_that_never_ends_is_reported_in_sqlite(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.store.database.RETRY_SECONDS", 0.2)
    with penstock.connect(f"sqlite:///{tmp_path}/x.db?busy_timeout=50") as store:
        queue = store.create_queue("q", SCHEMA)
        other = raw_connection(store.database)
        other.execute("begin immediate")
        with pytest.raises(StoreUnavailable, match="locked by another writer"):
            queue.append([{"n": 1}])
        assert queue.info().rows == 0, "readers are not held up"
        other.close()


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

    threads = [threading.Thread(target=work, args=(number,)) for number in range(2 * pool.SIZE)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert len({row["n"] for row in queue.read(0, 0).to_pylist()}) == 10 * pool.SIZE
    assert len(store.database._pool._idle) <= pool.SIZE


def test_the_caller_s_own_error_keeps_the_connection(store: penstock.Store) -> None:
    store.consumers()
    (before,) = store.database._pool._idle
    for _ in range(3):
        with pytest.raises(penstock.errors.ConsumerNotFound):
            store.consumer("nobody")
    assert store.database._pool._idle == [before]


def test_a_connection_in_use_when_the_store_is_closed_ends_its_transaction(store: penstock.Store) -> None:
    with store.database.transaction() as tx:
        store.close()
        _add(tx, "a")
    assert store.database._pool._idle == []
    with penstock.connect(_url(store)) as again:
        assert _consumers(again) == ["a"]


def _url(store: penstock.Store) -> str:
    database = store.database
    if database.dialect == "sqlite":
        return str(database.url)
    from tests.support.postgres import with_schema

    return with_schema(database.url.target, database.url.options["schema"])


def test_the_server_s_default_isolation_does_not_matter(pg_store: penstock.Store) -> None:
    admin = raw_connection(pg_store.database)
    admin.execute("alter role current_user set default_transaction_isolation = 'serializable'")
    try:
        with penstock.connect(_url(pg_store)) as store:
            level = "show transaction_isolation"
            with store.database.transaction() as tx:
                assert tx._cursor.execute(level).fetchone()[0] == "read committed"  # type: ignore[attr-defined]
            with store.database.transaction(write=False) as tx:
                assert tx._cursor.execute(level).fetchone()[0] == "repeatable read"  # type: ignore[attr-defined]
    finally:
        admin.execute("alter role current_user reset default_transaction_isolation")
        admin.close()


def test_numbers_of_any_size_are_one_prepared_statement(pg_store: penstock.Store) -> None:
    queue = pg_store.create_queue("q", SCHEMA)
    for n in (1, 40_000, 3_000_000_000, 2**62):
        for _ in range(8):
            queue.append([{"n": n}])
            pg_store.database.run(
                lambda tx, n=n: tx.one("segment_at", queue_id=1, partition=0, row_index=n),  # type: ignore[misc]
                write=False,
            )
    with pg_store.database.transaction(write=False) as tx:
        names = tx._cursor.execute(  # type: ignore[attr-defined]
            "select count(*) from pg_prepared_statements where statement like '%segment%end_index >%limit 1%'"
        ).fetchone()
    assert names[0] <= 1


def test_no_sum_comes_as_a_decimal(store: penstock.Store) -> None:
    queue = store.create_queue("q", SCHEMA)
    queue.append(pa.table({"n": [1, 2], "s": ["a", "b"]}, schema=SCHEMA))
    info = store.info()
    assert [type(value) for value in vars(info).values()].count(int) == 8
    store.create_consumer("c")
    lag = queue.register("c").lag("q")
    assert (type(lag.rows), type(lag.bytes), type(lag.seconds)) == (int, int, float)


def test_the_driver_s_errors_are_the_cause_of_ours(store: penstock.Store) -> None:
    driver = sqlite3.Error if store.database.dialect == "sqlite" else Exception
    with pytest.raises(StoreError) as caught, store.database.transaction() as tx:
        tx.execute("select nonsense from nowhere")
    assert isinstance(caught.value.__cause__, driver)
    assert "nowhere" in str(caught.value)


def test_writers_take_turns_in_sqlite(tmp_path: Any) -> None:
    """One that writes in a loop does not keep others waiting."""
    url = f"sqlite:///{tmp_path}/x.db?synchronous=normal"
    with penstock.connect(url) as busy, penstock.connect(url) as patient:
        queue = busy.create_queue("q", SCHEMA)
        stop = threading.Event()

        def loop() -> None:
            while not stop.is_set():
                queue.append([{"n": 1}])

        threads = [threading.Thread(target=loop) for _ in range(3)]
        for thread in threads:
            thread.start()
        own = patient.queue("q")
        between = []
        for _ in range(30):
            before = queue.info().rows
            (start, _), *_ = own.append([{"n": 2}]).ranges.values()
            between.append(start - before)
        stop.set()
        for thread in threads:
            thread.join()
    assert sorted(between)[15] < 30


def test_a_turn_that_does_not_come_is_reported(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from penstock.store.turns import Turn

    monkeypatch.setattr("penstock.store.database.RETRY_SECONDS", 0.2)
    with penstock.connect(f"sqlite:///{tmp_path}/x.db?busy_timeout=100") as store:
        queue = store.create_queue("q", SCHEMA)
        other = Turn(f"{tmp_path}/x.db-lock")
        assert other.take(1)
        with pytest.raises(StoreUnavailable, match=r"it was not our turn within 0.1 s"):
            queue.append([{"n": 1}])
        assert queue.info().rows == 0
        other.give_back()
        for n in range(3):
            queue.append([{"n": n}])
        assert queue.info().rows == 3


def test_nobody_keeps_a_turn_that_came_too_late(tmp_path: Any) -> None:
    from penstock.store.turns import Turn
    from tests.support.waiting import wait_until

    one, two, three = (Turn(f"{tmp_path}/lock") for _ in range(3))
    assert one.take(1)
    assert not two.take(0.05)
    assert not two.take(0.05)
    one.give_back()
    wait_until(lambda: three.take(0.05), 10)
    assert not two.take(0.05)
    three.give_back()
    wait_until(lambda: two.take(0.05), 10)
    one.close()
    two.close()
    three.close()
