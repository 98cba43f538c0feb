"""Tables in a SQL catalog, in a PostgreSQL server that is away for a while or whose reply is lost."""

from __future__ import annotations

import sqlite3
import uuid
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest
from sqlalchemy.exc import DatabaseError, OperationalError

from penstock.errors import StoreUnavailableError
from penstock.lake import catalogs
from penstock.lake.sql_catalogs import is_transient_sql_error
from tests.support.postgres_proxy import Proxy, proxied
from tests.tables.iceberg.driver import Driver

MODES = {"append": (), "update": ("k",), "complete": ()}


@pytest.fixture
def database(pg_url: str) -> Iterator[str]:
    """The URL of a database of the test's own."""
    name = f"catalog_{uuid.uuid4().hex}"
    with psycopg.connect(pg_url, autocommit=True) as admin:
        admin.execute(f"create database {name}".encode())
        yield f"{pg_url.rpartition('/')[0]}/{name}"
        admin.execute(f"drop database {name} with (force)".encode())


@pytest.fixture
def server(database: str) -> Iterator[Proxy]:
    with proxied(database) as proxy:
        yield proxy


def properties(url: str, folder: Path) -> dict[str, str]:
    uri = url.replace("postgresql:", "postgresql+psycopg:")
    return {"type": "sql", "uri": uri, "warehouse": f"file://{folder}/warehouse"}


@pytest.mark.parametrize("mode", MODES)
def test_a_micro_batch_is_written_once_whichever_reply_is_lost(
    server: Proxy, tmp_path: Path, mode: str
) -> None:
    for number in server.losing_each_commit():
        name = f"t{number}"
        catalog = properties(server.url, tmp_path)
        driver = Driver(tmp_path, mode, *MODES[mode], name=name, catalog=catalog)
        driver.write(0, [(1, "a")], [(2, "b")])
        assert driver.rows() == [(1, "a"), (2, "b")]
    assert number > 1


def test_a_query_outlives_a_restart_of_its_catalog(database: str, tmp_path: Path) -> None:
    driver = Driver(tmp_path, catalog=properties(database, tmp_path))
    driver.write(0, [(1, "a")])
    with psycopg.connect(database, autocommit=True) as admin:
        admin.execute(
            "select pg_terminate_backend(pid) from pg_stat_activity "
            "where datname = current_database() and pid <> pg_backend_pid()"
        )
    driver.write(1, [(2, "b")])
    assert driver.rows() == [(1, "a"), (2, "b")]


def test_a_catalog_that_stays_away_is_reported(
    server: Proxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pauses: list[int] = []
    monkeypatch.setattr(catalogs, "_backoff_seconds", lambda retries: pauses.append(retries) or 0.0)
    driver = Driver(tmp_path, catalog=properties(server.url, tmp_path))
    server.lose(b"", deliver=False, times=10_000)
    with pytest.raises(StoreUnavailableError, match="Check that it is up") as caught:
        driver.write(0, [(1, "a")])
    assert caught.value.condition == "STORE_UNAVAILABLE.ICEBERG"
    assert len(pauses) >= 7


def test_a_catalog_that_refuses_the_login_is_asked_once(
    database: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(catalogs, "_backoff_seconds", None)
    wrong = database.replace("penstock:", "penstock:wrong")
    with pytest.raises(StoreUnavailableError, match="password authentication failed") as caught:
        Driver(tmp_path, catalog=properties(wrong, tmp_path))
    assert "wrong" not in str(caught.value)


@pytest.mark.parametrize(
    ("cause", "transient"),
    [
        (psycopg.OperationalError("connection refused"), True),
        (psycopg.errors.CannotConnectNow("the database system is starting up"), True),
        (psycopg.errors.DeadlockDetected("deadlock detected"), True),
        (psycopg.OperationalError('FATAL:  database "lake" does not exist'), False),
        (psycopg.errors.InsufficientPrivilege("permission denied for table iceberg_tables"), False),
        (sqlite3.OperationalError("database is locked"), True),
        (sqlite3.OperationalError("unable to open database file"), False),
        (OSError("of a driver that is not known"), False),
    ],
)
def test_only_what_may_pass_is_asked_again(cause: Exception, transient: bool) -> None:
    assert is_transient_sql_error(OperationalError("select", {}, cause)) is transient


def test_a_connection_that_any_driver_lost_is_opened_again() -> None:
    assert is_transient_sql_error(DatabaseError("select", {}, OSError(), connection_invalidated=True))
    assert not is_transient_sql_error(OSError())
