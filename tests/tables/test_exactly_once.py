"""``ps.exactly_once``: a caller's statements and the ledger row are one transaction, once."""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import psycopg
import pytest
import sqlalchemy

import penstock as ps
from penstock.errors import CheckpointRewound, InvalidInput
from penstock.store.url import parse_url
from tests.tables.support import query

Connect = Callable[[], Any]


@pytest.fixture
def database(store_url: str) -> Iterator[str]:
    """The URL of a database without a store, with a table ``t``."""
    parsed = parse_url(store_url)
    if parsed.dialect == "postgres":
        query(store_url, f"create schema {parsed.schema}")
        schema = parsed.options["schema"]
        yield f"{store_url}&options=-csearch_path%3D{schema}"
    else:
        yield store_url


@pytest.fixture(params=["driver", "driver autocommit", "sqlalchemy"])
def connect(request: pytest.FixtureRequest, database: str) -> Connect:
    parsed = parse_url(database)
    autocommit = request.param == "driver autocommit"
    query(database, "create table t (id bigint)")
    if request.param == "sqlalchemy":
        url = (
            f"sqlite:///{parsed.target}"
            if parsed.dialect == "sqlite"
            else parsed.target.replace("postgresql:", "postgresql+psycopg:", 1)
        )
        return sqlalchemy.create_engine(url, poolclass=sqlalchemy.NullPool).connect
    if parsed.dialect == "sqlite":
        return lambda: closing(
            sqlite3.connect(parsed.target, isolation_level=None if autocommit else "DEFERRED")
        )
    return lambda: closing(psycopg.connect(parsed.target, autocommit=autocommit))


def insert(connection: Any, number: int) -> None:
    text = f"insert into t values ({number})"
    connection.execute(sqlalchemy.text(text) if isinstance(connection, sqlalchemy.Connection) else text)


def write(connect: Connect, batch_id: int, app_id: str = "app") -> bool:
    with connect() as connection, ps.exactly_once(connection, "t", app_id, batch_id) as batch:
        if batch.new:
            insert(connection, batch_id)
        return bool(batch)


def ids(url: str) -> list[int]:
    return sorted(number for (number,) in query(url, "select id from t"))


def test_a_micro_batch_is_written_once(connect: Connect, database: str) -> None:
    assert [write(connect, number) for number in (0, 0, 1, 0, 1)] == [True, False, True, False, False]
    assert write(connect, 0, "another app")
    assert ids(database) == [0, 0, 1]


def test_a_block_that_fails_leaves_nothing(connect: Connect, database: str) -> None:
    def fail() -> None:
        with connect() as connection, ps.exactly_once(connection, "t", "app", 0) as batch:
            assert batch.new
            insert(connection, 0)
            raise OSError("the power is out")

    with pytest.raises(OSError, match="power"):
        fail()
    assert ids(database) == []
    assert write(connect, 0)
    assert ids(database) == [0]


def test_a_transaction_that_is_open_is_the_callers_to_end(connect: Connect, database: str) -> None:
    assert write(connect, 7)
    with connect() as connection:
        if isinstance(connection, sqlite3.Connection) or getattr(connection, "autocommit", False):
            connection.execute("begin")
        insert(connection, 100)
        with ps.exactly_once(connection, "t", "app", 8) as batch:
            assert batch.new
            insert(connection, 8)
        connection.rollback()
    assert ids(database) == [7]
    assert write(connect, 8)
    assert ids(database) == [7, 8]


def test_two_drivers_of_one_micro_batch_write_it_once(connect: Connect, database: str) -> None:
    assert write(connect, 0)
    wrote: list[bool] = []
    with connect() as connection, ps.exactly_once(connection, "t", "app", 1) as batch:
        assert batch.new
        other = threading.Thread(target=lambda: wrote.append(write(connect, 1)))
        other.start()
        other.join(0.3)
        assert wrote == [], "it waits for the first one's end"
        insert(connection, 1)
    other.join(30)
    assert wrote == [False]
    assert ids(database) == [0, 1]


def test_a_checkpoint_from_long_ago_is_refused(connect: Connect, database: str) -> None:
    assert write(connect, 2000)
    with pytest.raises(CheckpointRewound, match="old copy"):
        write(connect, 3)
    assert ids(database) == [2000]
    assert query(database, "select count(*) from penstock_exactly_once") == [(1,)]


def test_wrong_arguments_are_told(tmp_path: Path) -> None:
    with closing(sqlite3.connect(tmp_path / "x.db")) as connection:
        for arguments in ((connection, "", "a", 0), (connection, "t", "a", -1), (connection, "t", "a", True)):
            with pytest.raises(InvalidInput), ps.exactly_once(*arguments):
                raise AssertionError("not reached")
    with pytest.raises(InvalidInput, match="psycopg 3"), ps.exactly_once("sqlite:///x.db", "t", "a", 0):
        raise AssertionError("not reached")
