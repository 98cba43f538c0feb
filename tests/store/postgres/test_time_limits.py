"""Limits of the server, the role or the URL on how long statements and transactions may take."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import psycopg
import pytest

import penstock
from penstock.errors import StoreUnavailableError
from penstock.store.database import Transaction
from penstock.testing import temporary_store
from tests.support.pgtools import server_version
from tests.support.postgres import start_postgres

SLOW = "select pg_sleep(0.6)"
LIMIT = "200ms"
needs_transaction_timeout = pytest.mark.skipif(server_version() < 17, reason="came with PostgreSQL 17")


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.store.database.RETRY_SECONDS", 0.0)


@contextmanager
def limited(pg_url: str, setting: str) -> Iterator[penstock.Store]:
    """A store whose URL sets a limit."""
    with temporary_store(f"{pg_url}?options=-c%20{setting}%3D{LIMIT}") as store:
        yield store


def sleep(tx: Transaction) -> list[tuple[Any, ...]]:
    return tx.query(SLOW)


def test_limits_that_hold_for_the_whole_server_do_not_end_long_statements() -> None:
    limits = ["statement_timeout", *(["transaction_timeout"] if server_version() >= 17 else [])]
    server = start_postgres(**dict.fromkeys(limits, LIMIT))
    try:
        with temporary_store(server.url) as store:
            assert store.database.run(sleep) == [("",)]
    finally:
        server.stop()


def test_a_statement_that_takes_too_long_for_its_role_says_so(pg_url: str, impatient: None) -> None:
    with limited(pg_url, "statement_timeout") as store:
        with pytest.raises(StoreUnavailableError, match="alter role … set statement_timeout = 0") as caught:
            store.database.run(sleep)
        assert caught.value.condition == "STORE_UNAVAILABLE.STATEMENT_CANCELED"
        assert store.database.run(lambda tx: tx.query("select 1")) == [(1,)]


def test_a_lock_is_waited_for_longer_than_a_statement_may_take(pg_url: str) -> None:
    with limited(pg_url, "statement_timeout") as store, psycopg.connect(pg_url) as other:
        other.execute("select pg_advisory_xact_lock(815)")
        release = threading.Timer(1.0, other.rollback)
        release.start()
        started = time.monotonic()
        store.database.run(lambda tx: tx.query("select pg_advisory_xact_lock(815)"))
        assert time.monotonic() - started > 0.5
        release.join()


@needs_transaction_timeout
def test_a_transaction_that_takes_too_long_for_its_role_says_so(pg_url: str, impatient: None) -> None:
    with limited(pg_url, "transaction_timeout") as store:
        with pytest.raises(StoreUnavailableError, match="alter role … set transaction_timeout = 0") as caught:
            store.database.run(sleep)
        assert caught.value.condition == "STORE_UNAVAILABLE.TRANSACTION_TIMEOUT"


@needs_transaction_timeout
def test_a_transaction_that_is_idle_for_too_long_was_certainly_not_committed(
    pg_url: str, impatient: None
) -> None:
    def work(tx: Transaction) -> None:
        tx.run("insert_consumer", name="a", now=0)
        time.sleep(0.6)

    with limited(pg_url, "transaction_timeout") as store:
        with pytest.raises(StoreUnavailableError) as caught:
            store.database.run(work)
        assert caught.value.condition == "STORE_UNAVAILABLE.TRANSACTION_TIMEOUT"
        assert store.consumers() == []
