"""Notifications in a PostgreSQL store: an append sends one only if there are watches."""

from __future__ import annotations

import itertools
import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

import penstock
from penstock.store.postgres import watch as postgres_watch
from penstock.store.postgres.watch import PostgresWatch
from tests.store.programs import SCHEMA
from tests.store.waits import LONG, NEVER, later, ready
from tests.support.postgres_proxy import proxied
from tests.support.raw_sql import raw_connection, run_sql
from tests.support.waiting import wait_until


@contextmanager
def overheard(store: penstock.Store, queue: penstock.Queue) -> Iterator[Callable[[], int]]:
    """Return how often a queue's channel was notified since the last call. The listener is not a watch."""
    database, number = store.database, queue.record.queue_id
    schema = database.url.options["schema"]
    ((relation,),) = run_sql(database, f"select '{schema}.partition'::regclass::oid::bigint")
    channel = f"penstock_{relation}_{number}"
    connection = raw_connection(database)
    connection.execute(f"listen {channel}")

    def heard() -> int:
        run_sql(database, f"notify {channel}, 'end'")
        payloads = (notification.payload for notification in connection.notifies(timeout=LONG))
        return len(list(itertools.takewhile(lambda payload: payload != "end", payloads)))

    yield heard
    connection.close()


@pytest.mark.parametrize("partition", [0, None])
def test_an_append_notifies_only_while_there_is_a_watch(
    pg_store: penstock.Store, partition: int | None
) -> None:
    queue = pg_store.create_queue("q", SCHEMA, partitions=2)
    other = pg_store.create_queue("other", SCHEMA)
    rows = [{"n": 1}] * 10
    with overheard(pg_store, queue) as heard:
        queue.append(rows, partition)
        assert heard() == 0
        with queue.watch() as watch, queue.watch():
            watch.wait({0: 10}, 0)
            queue.append(rows, partition)
            assert heard() == 1
            other.append(rows)
            assert heard() == 0
            ours = raw_connection(pg_store.database)
            for end, notified in (("rollback", 0), ("commit", 1)):
                ours.execute("begin")
                queue.append(rows, partition, connection=ours)
                queue.append(rows, partition, connection=ours)
                ours.execute(end)
                assert heard() == notified
            ours.close()
        # The server notices a closed connection a moment later.
        schema = pg_store.database.url.options["schema"]
        held = (
            f"select 1 from pg_locks where locktype = 'advisory' and classid = '{schema}.partition'::regclass"
        )
        wait_until(lambda: not run_sql(pg_store.database, held))
        queue.append(rows, partition)
        assert heard() == 0


def test_appends_neither_hold_nor_wait_for_watch_locks(pg_store: penstock.Store) -> None:
    queue = pg_store.create_queue("q", SCHEMA)
    connection = raw_connection(pg_store.database)
    with connection.transaction():
        queue.append([{"n": 1}], connection=connection)
        text = (
            "select count(*) from pg_locks where locktype = 'advisory' and pid = "
            f"{connection.info.backend_pid}"
        )
        assert run_sql(pg_store.database, text) == [(0,)]
        with queue.watch() as watch:
            assert not watch.wait({0: 0}, 0.2)
            assert isinstance(watch, PostgresWatch)
            assert not watch.misses_no_append, "that transaction does not know of us"
    connection.close()


def test_a_transaction_that_began_before_the_watch_is_found_without_a_notification(
    pg_store: penstock.Store,
) -> None:
    queue = pg_store.create_queue("q", SCHEMA)
    connection = raw_connection(pg_store.database)
    connection.execute("begin")
    queue.append([{"n": 1}], connection=connection)
    with overheard(pg_store, queue) as heard, queue.watch() as watch:
        assert not watch.wait({0: 0}, 0)
        connection.execute("commit")
        assert watch.wait({0: 0}, LONG).ends == {0: 1}
        assert heard() == 0
    connection.close()


def test_a_watch_continues_after_its_session_is_killed(
    pg_store: penstock.Store, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(postgres_watch, "CHECK_SECONDS", NEVER)
    queue = pg_store.create_queue("q", SCHEMA)
    with queue.watch() as watch, caplog.at_level(logging.INFO, "penstock.store"):
        for round_ in range(3):
            positions = ready(watch, queue)
            backend = watch.connection.info.backend_pid
            run_sql(pg_store.database, f"select pg_terminate_backend({backend}, 10000)")
            if round_:
                queue.append([{"n": 1}])
                assert watch.wait(positions, LONG).ends
            else:
                assert not watch.wait(positions, 0.2)
                assert watch.connection.info.backend_pid != backend
            positions = ready(watch, queue)
            appender = later(lambda: queue.append([{"n": 1}]))
            assert watch.wait(positions, LONG).ends
            appender.join()
    actions = [record.action for record in caplog.records]  # type: ignore[attr-defined]
    assert actions == ["watch_lost", "watch_back"] * 3
    _no_password(pg_store, caplog)


def test_a_watch_waits_for_an_unavailable_server(
    pg_store: penstock.Store, pg_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    from penstock.testing.stores import with_schema

    direct = pg_store.create_queue("q", SCHEMA)
    with proxied(with_schema(pg_url, pg_store.database.url.options["schema"])) as proxy:
        with penstock.connect(proxy.url, create=False) as store, store.queue("q").watch() as watch:
            assert not watch.wait({0: 0}, 0)
            proxy.lose(b"", deliver=False, times=10_000)
            assert not watch.wait({0: 0}, 1.5)
            direct.append([{"n": 1}])
            assert not watch.wait({0: 0}, 0.2)
            threading.Timer(0.2, proxy.lose, (b"",), {"deliver": True, "times": 0}).start()
            assert watch.wait({0: 0}, LONG).ends == {0: 1}
        assert [record.levelname for record in caplog.records] == ["WARNING"], "said once"
        _no_password(pg_store, caplog)


def _no_password(store: penstock.Store, caplog: pytest.LogCaptureFixture) -> None:
    for secret in store.database.url.secrets:
        assert secret not in caplog.text
