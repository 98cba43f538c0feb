"""While a database is unavailable, calls wait, retry if that is safe, and apply no change twice."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator

import pytest

import penstock
from penstock.errors import CommitOutcomeUnknownError, StoreUnavailableError
from penstock.store.database import Database, Transaction
from tests.store.programs import SCHEMA
from tests.support.postgres_proxy import Proxy, proxied
from tests.support.raw_sql import run_sql
from tests.support.waiting import wait_until


@pytest.fixture
def behind_proxy(pg_store: penstock.Store, pg_url: str) -> Iterator[tuple[penstock.Store, Proxy]]:
    """The same store, accessed through a proxy."""
    from penstock.testing.stores import with_schema

    url = with_schema(pg_url, pg_store.database.url.options["schema"])
    with proxied(url) as proxy, penstock.connect(proxy.url, create=False) as store:
        yield store, proxy


def _consumers(store: penstock.Store) -> list[str]:
    return store.consumers()


def _add(tx: Transaction, name: str) -> None:
    tx.run("insert_consumer", name=name, now=0)


@pytest.mark.parametrize("happened", [True, False])
def test_a_commit_without_a_response_is_not_retried(
    behind_proxy: tuple[penstock.Store, Proxy], happened: bool
) -> None:
    store, proxy = behind_proxy
    queue = store.create_queue("q", SCHEMA)
    proxy.lose(b"COMMIT\0", deliver=happened)
    with pytest.raises(CommitOutcomeUnknownError, match="or use a producer session, which checks this"):
        queue.append([{"n": 1}])
    # The server may receive the commit a moment after the client has lost the connection.
    wait_until(lambda: queue.info().rows == int(happened))
    assert queue.append([{"n": 2}]).ranges == {0: (int(happened), int(happened) + 1)}


@pytest.mark.parametrize("happened", [True, False])
def test_a_producer_whose_commit_got_no_response_appends_once(
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


def test_idempotent_work_is_repeated_after_a_commit_without_a_response(
    behind_proxy: tuple[penstock.Store, Proxy],
) -> None:
    store, proxy = behind_proxy
    proxy.lose(b"COMMIT\0", deliver=True)
    store.database.run(lambda tx: _add(tx, "a"), idempotent=True)
    assert _consumers(store) == ["a"]


def test_a_read_whose_commit_got_no_response_is_repeated(behind_proxy: tuple[penstock.Store, Proxy]) -> None:
    store, proxy = behind_proxy
    proxy.lose(b"COMMIT\0", deliver=True, times=2)
    assert store.consumers() == []


def test_a_transaction_whose_connection_is_lost_before_the_commit_is_retried(
    behind_proxy: tuple[penstock.Store, Proxy],
) -> None:
    store, proxy = behind_proxy
    queue = store.create_queue("q", SCHEMA)
    proxy.lose(b"payload", deliver=True, times=2)
    assert queue.append([{"n": 1}]).ranges == {0: (0, 1)}
    assert queue.info().rows == 1


def test_calls_wait_for_a_server_that_is_briefly_unavailable(
    behind_proxy: tuple[penstock.Store, Proxy], caplog: pytest.LogCaptureFixture
) -> None:
    store, proxy = behind_proxy
    queue = store.create_queue("q", SCHEMA)
    proxy.lose(b"", deliver=False, times=5)
    with caplog.at_level(logging.WARNING):
        queue.append([{"n": 1}])
    assert queue.info().rows == 1
    assert len(caplog.records) == 5


def test_calls_fail_when_a_server_stays_unavailable(
    behind_proxy: tuple[penstock.Store, Proxy], monkeypatch: pytest.MonkeyPatch
) -> None:
    store, proxy = behind_proxy
    queue = store.create_queue("q", SCHEMA)
    proxy.lose(b"", deliver=False, times=10_000)
    monkeypatch.setattr("penstock.store.database.RETRY_SECONDS", 0.5)
    with pytest.raises(StoreUnavailableError, match="the server is unavailable"):
        queue.append([{"n": 1}])
    proxy.failures = 0
    assert queue.info().rows == 0


def test_a_session_killed_during_a_transaction_is_replaced_and_no_rows_are_duplicated(
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


def test_appends_continue_after_every_idle_session_was_killed(
    pg_store: penstock.Store, caplog: pytest.LogCaptureFixture
) -> None:
    queue = pg_store.create_queue("q", SCHEMA)
    _use_connections(pg_store, 6)
    for backend in _backends(pg_store.database, "idle"):
        run_sql(pg_store.database, f"select pg_terminate_backend({backend})")
    for n in range(5):
        queue.append([{"n": n}])
    assert [row["n"] for row in queue.read(0, 0).to_pylist()] == [0, 1, 2, 3, 4]
    assert len(caplog.records) == 1, "the first that fails speaks for all"
    assert len(_backends(pg_store.database, "idle")) == 1


def _use_connections(store: penstock.Store, count: int) -> None:
    """Use several connections at once, so that the pool keeps them."""
    barrier = threading.Barrier(count)
    threads = [
        threading.Thread(target=lambda: store.database.run(lambda tx: barrier.wait(10), write=False))
        for _ in range(count)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(store.database.pool.idle) == count


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


def test_deadlocked_transactions_both_succeed(pg_store: penstock.Store) -> None:
    """PostgreSQL aborts one of the two transactions, and Penstock retries it."""
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
