"""A store behind a pooler that assigns one of a few server connections to each transaction."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from urllib.parse import urlsplit

import psycopg
import pytest

import penstock
from penstock.errors import InvalidUrlError, StoreError, StoreLockedError
from penstock.store.postgres import database
from penstock.store.url import parse_url
from penstock.testing import temporary_store
from penstock.testing.stores import with_schema
from tests.store.programs import SCHEMA
from tests.support.pgbouncer import pgbouncer


@pytest.fixture(scope="module")
def pooler(pg_url: str) -> Iterator[str]:
    with pgbouncer(pg_url, size=2) as url:
        yield url


@pytest.fixture
def pooled(pooler: str) -> Iterator[penstock.Store]:
    with temporary_store(pooler) as store:
        yield store


def _through(pooler: str) -> psycopg.Connection[tuple[object, ...]]:
    return psycopg.connect(
        urlsplit(pooler)._replace(query="").geturl(), autocommit=True, prepare_threshold=None
    )


def test_many_writers_and_readers_share_a_few_connections(pooler: str, pooled: penstock.Store) -> None:
    url = with_schema(pooler, pooled.database.url.options["schema"])
    queue = pooled.create_queue("q", SCHEMA, partitions=2, key="n")
    failures: list[BaseException] = []

    def work(first: int) -> None:
        try:
            with penstock.connect(url) as store:
                for n in range(first, first + 20):
                    store.queue("q").append([{"n": n}])
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(100 * each,)) for each in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    rows = [
        n
        for part in range(2)
        for n in queue.read(part, 0, queue.info().partitions[part].next_index)["n"].to_pylist()
    ]
    assert sorted(rows) == sorted(100 * each + n for each in range(12) for n in range(20))


def test_a_transaction_leaves_no_settings_in_a_shared_session(pooler: str, pooled: penstock.Store) -> None:
    with _through(pooler) as other:
        before = other.execute(
            "select name, setting from pg_settings where name <> 'transaction_isolation'"
        ).fetchall()
        pooled.create_queue("q", SCHEMA).append([{"n": 1}])
        for _ in range(4):
            found = other.execute(
                "select name, setting from pg_settings where name <> 'transaction_isolation'"
            ).fetchall()
            assert found == before
            assert other.execute("select count(*) from pg_prepared_statements").fetchone() == (0,)


def test_a_transaction_behind_a_pooler_has_the_settings_of_a_session(pooled: penstock.Store) -> None:
    for write in (True, False):
        shown = pooled.database.run(
            lambda tx: [
                tx.query(f"select current_setting('{name}')")[0][0]
                for name in (
                    "search_path",
                    "lock_timeout",
                    "idle_in_transaction_session_timeout",
                    "enable_seqscan",
                )
            ],
            write=write,
        )
        assert shown == ["pg_catalog, pg_temp", "8s", "10s", "off"]


def test_settings_of_a_role_are_kept_behind_a_pooler(pg_url: str) -> None:
    with psycopg.connect(pg_url, autocommit=True) as admin:
        admin.execute("alter role penstock set lock_timeout = '1234ms'")
        try:
            # A pooler's sessions keep the settings that applied when they began.
            with pgbouncer(pg_url) as pooler, temporary_store(pooler) as store:
                shown = store.database.run(lambda tx: tx.query("select current_setting('lock_timeout')"))
        finally:
            admin.execute("alter role penstock reset lock_timeout")
    assert shown == [("1234ms",)]


def test_a_watch_notices_an_append_through_a_pooler(pooled: penstock.Store) -> None:
    queue = pooled.create_queue("q", SCHEMA)
    with queue.watch() as watch:
        watch.wait({0: 0}, 0)
        waiting = threading.Thread(target=lambda: queue.append([{"n": 1}]))
        waiting.start()
        found = watch.wait({0: 0}, 30)
        waiting.join()
    assert found.ends == {0: 1}


def test_an_owner_lock_is_held_until_it_is_released_behind_a_pooler(pooled: penstock.Store) -> None:
    locks = [pooled.database.owner_lock("one") for _ in range(2)]
    assert locks[0].acquire()
    assert not locks[1].acquire()
    for _ in range(5):
        # The lock stays held whatever server connections the transactions in between use.
        pooled.create_queue(f"q{_}", SCHEMA)
        assert locks[1].held_elsewhere()
    locks[0].release()
    assert locks[1].acquire()
    locks[1].release()


def test_a_lock_timeout_names_the_session_that_holds_the_lock(pooler: str) -> None:
    with temporary_store(f"{pooler}&lock_wait=4s") as store:
        store.create_queue("q", SCHEMA)
        held, done = threading.Event(), threading.Event()

        def hold() -> None:
            with store.database.transaction() as tx:
                tx.all("lock_queue", name="q")
                held.set()
                done.wait(30)

        holder = threading.Thread(target=hold)
        holder.start()
        assert held.wait(30)
        try:
            with pytest.raises(StoreLockedError, match=r"session \d+ \(penstock"):
                store.database.run(lambda tx: tx.all("lock_queue", name="q"))
        finally:
            done.set()
            holder.join()


def test_a_pooler_without_a_direct_address_in_the_url_causes_a_warning(
    pooler: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(database, "_warned_poolers", set())
    plain = urlsplit(pooler)._replace(query="").geturl()
    with caplog.at_level(logging.WARNING), temporary_store(plain):
        pass
    (warning,) = [each for each in caplog.records if getattr(each, "action", "") == "pooled"]
    assert "add direct=host:port to the URL" in warning.getMessage()
    assert str(urlsplit(pooler).password) not in warning.getMessage()


def test_a_direct_connection_to_the_server_causes_no_warning(
    pg_store: penstock.Store, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        pg_store.create_queue("q", SCHEMA)
    assert not [each for each in caplog.records if getattr(each, "action", "") == "pooled"]


def test_a_direct_address_that_is_a_pooler_is_refused(pooler: str) -> None:
    parts = urlsplit(pooler)
    there = f"{parts.hostname}:{parts.port}"
    with pytest.raises(StoreError, match="address of a pooler, too") as caught:
        penstock.connect(parts._replace(query=f"direct={there}").geturl(), timeout=0)
    assert caught.value.condition == "STORE_ERROR.POOLED"


@pytest.mark.parametrize("direct", ["", ":5432", "db:port", "a b"])
def test_a_direct_address_without_a_valid_host_and_port_is_refused(direct: str) -> None:
    with pytest.raises(InvalidUrlError, match="direct is the host and port of the server"):
        parse_url(f"postgresql://u@pooler/db?direct={direct}")


@pytest.mark.parametrize(
    ("direct", "host", "port"),
    [("db", "db", "5432"), ("db:6000", "db", "6000"), ("[::1]:6000", "::1", "6000")],
)
def test_a_direct_address_replaces_all_hosts_of_the_url(direct: str, host: str, port: str) -> None:
    url = parse_url(f"postgresql://u:secret@pooler:6432/db?direct={direct}")
    assert url.pooled
    assert (url.direct()["host"], url.direct()["port"]) == (host, port)
    assert f"direct={direct.replace('[', '%5B').replace(']', '%5D').replace(':', '%3A')}" in str(url)
    assert not parse_url("postgresql://u@db/db").direct()
