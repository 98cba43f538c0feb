"""``penstock.exactly_once``: a caller's statements and the ledger row are one transaction, once."""

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

import penstock
from penstock.errors import (
    CheckpointMismatchError,
    CheckpointRewoundError,
    InvalidInputError,
    InvalidNameError,
    StoreUnsafeError,
)
from penstock.store.url import parse_url
from penstock.tables import exactly_once
from tests.support.sql_tables import query
from tests.support.strangers import shared_database
from tests.support.waiting import wait_until

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


def write(connect: Connect, batch_id: int, app_id: str = "app", **options: Any) -> bool:
    with (
        connect() as connection,
        penstock.exactly_once(connection, "t", app_id, batch_id, **options) as batch,
    ):
        if batch.new:
            insert(connection, batch_id)
        return bool(batch)


def ids(url: str) -> list[int]:
    return sorted(number for (number,) in query(url, "select id from t"))


def test_a_micro_batch_is_written_once(connect: Connect, database: str) -> None:
    assert [write(connect, number) for number in (0, 0, 1, 1, 2)] == [True, False, True, False, True]
    assert write(connect, 0, "another app")
    assert ids(database) == [0, 0, 1, 2]
    found = query(database, "select app_id, batch_id from penstock_exactly_once order by app_id")
    assert found == [("another app", 0), ("app", 2)], "the newest one of each"


def test_a_new_checkpoint_under_the_app_id_of_another_is_refused(connect: Connect, database: str) -> None:
    """Its batch ids begin at 0 again, whereas a replay repeats only the newest micro-batch."""
    for number in range(4):
        assert write(connect, number)
    for number in (0, 2):
        with pytest.raises(CheckpointRewoundError, match="needs its own app_id") as caught:
            write(connect, number)
        assert caught.value.parameters == {"app_id": "app", "batch_id": number, "last": 3}
    assert not write(connect, 3)
    assert write(connect, 4)
    assert ids(database) == [0, 1, 2, 3, 4]


def test_a_gap_is_refused(connect: Connect, database: str) -> None:
    """The database was restored from an older backup, or the block was left out."""
    assert write(connect, 0)
    with pytest.raises(CheckpointMismatchError, match="micro-batches between are missing") as caught:
        write(connect, 3)
    assert caught.value.condition == "CHECKPOINT_MISMATCH.BATCHES_MISSING"
    assert caught.value.parameters == {"app_id": "app", "batch_id": 3, "last": 0}
    assert write(connect, 1)
    assert ids(database) == [0, 1]


def test_a_checkpoint_that_is_not_new_is_refused_when_the_database_has_nothing_of_the_app(
    connect: Connect, database: str
) -> None:
    """The database was restored to before the query's first commit."""
    with pytest.raises(CheckpointMismatchError, match="pass new_sink=True") as caught:
        write(connect, 41)
    assert caught.value.condition == "CHECKPOINT_MISMATCH.BATCHES_MISSING"
    assert write(connect, 0)
    with pytest.raises(CheckpointMismatchError, match="micro-batches between are missing"):
        write(connect, 41, new_sink=True)


def test_the_first_micro_batch_of_a_new_sink_may_have_any_number(connect: Connect, database: str) -> None:
    assert write(connect, 41, new_sink=True)
    assert not write(connect, 41)
    assert write(connect, 42)
    assert ids(database) == [41, 42]


def test_another_query_under_the_app_id_is_refused_even_at_its_first_micro_batch(
    connect: Connect, database: str
) -> None:
    assert write(connect, 0, query_id="one")
    assert not write(connect, 0, query_id="one")
    for number in (0, 1):
        with pytest.raises(CheckpointMismatchError, match="another query wrote") as caught:
            write(connect, number, query_id="two")
        assert caught.value.condition == "CHECKPOINT_MISMATCH.OTHER_QUERY"
    assert not write(connect, 0), "who says no query is not asked"
    assert write(connect, 1)
    with pytest.raises(CheckpointMismatchError):
        write(connect, 2, query_id="two")
    assert ids(database) == [0, 1]


def test_a_query_id_given_later_is_checked_from_then_on(connect: Connect, database: str) -> None:
    assert write(connect, 0)
    assert not write(connect, 0, query_id="one")
    assert write(connect, 1, query_id="one")
    with pytest.raises(CheckpointMismatchError):
        write(connect, 2, query_id="two")
    assert ids(database) == [0, 1]


def test_a_paused_driver_that_was_overtaken_writes_nothing(
    connect: Connect, database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It read the ledger before the other driver's two micro-batches, and records its own after them."""
    assert write(connect, 0)
    if parse_url(database).dialect == "sqlite":
        return  # only one at a time is in its transaction
    real = exactly_once.Ledger.newest
    looked: list[Any] = []

    def look(*arguments: Any) -> Any:
        found = real(*arguments)
        if not looked:
            looked.append(found)
            monkeypatch.undo()
            assert write(connect, 1)
            assert write(connect, 2)
        return found

    monkeypatch.setattr(exactly_once.Ledger, "newest", look)
    with pytest.raises(CheckpointRewoundError):
        write(connect, 1)
    assert ids(database) == [0, 1, 2]


def test_a_failing_block_writes_nothing(connect: Connect, database: str) -> None:
    def fail() -> None:
        with connect() as connection, penstock.exactly_once(connection, "t", "app", 0) as batch:
            assert batch.new
            insert(connection, 0)
            raise OSError("the power is out")

    with pytest.raises(OSError, match="power"):
        fail()
    assert ids(database) == []
    assert write(connect, 0)
    assert ids(database) == [0]


def test_an_open_transaction_is_left_to_the_caller_to_end(connect: Connect, database: str) -> None:
    assert write(connect, 7, new_sink=True)
    with connect() as connection:
        if isinstance(connection, sqlite3.Connection) or getattr(connection, "autocommit", False):
            connection.execute("begin")
        insert(connection, 100)
        with penstock.exactly_once(connection, "t", "app", 8) as batch:
            assert batch.new
            insert(connection, 8)
        connection.rollback()
    assert ids(database) == [7]
    assert write(connect, 8)
    assert ids(database) == [7, 8]


def test_two_drivers_write_the_same_micro_batch_once(connect: Connect, database: str) -> None:
    assert write(connect, 0)
    wrote: list[bool] = []
    with connect() as connection, penstock.exactly_once(connection, "t", "app", 1) as batch:
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
    assert write(connect, 2000, new_sink=True)
    with pytest.raises(CheckpointRewoundError, match="old copy"):
        write(connect, 3)
    assert ids(database) == [2000]
    assert query(database, "select count(*) from penstock_exactly_once") == [(1,)]


def test_wrong_arguments_are_refused(tmp_path: Path) -> None:
    with closing(sqlite3.connect(tmp_path / "x.db")) as connection:
        for arguments in ((connection, "", "a", 0), (connection, "t", "a", -1), (connection, "t", "a", True)):
            with pytest.raises(InvalidInputError), penstock.exactly_once(*arguments):
                raise AssertionError("not reached")
        with pytest.raises(InvalidInputError), penstock.exactly_once(connection, "t", "a", 0, query_id=""):
            raise AssertionError("not reached")
    with (
        pytest.raises(InvalidInputError, match="psycopg 3"),
        penstock.exactly_once("sqlite:///x.db", "t", "a", 0),
    ):
        raise AssertionError("not reached")


def test_waiting_for_a_lock_held_by_another_role_times_out(
    pg_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Any role that may connect can hold an advisory lock."""
    monkeypatch.setattr(exactly_once, "DEFAULT_LOCK_WAIT", 0.3)
    with psycopg.connect(pg_url, autocommit=True) as stranger, psycopg.connect(pg_url) as own:
        stranger.execute("select pg_advisory_lock(%s)", [exactly_once.CREATION_LOCK])
        own.execute("create schema held")
        own.execute("set local search_path to held")
        with penstock.exactly_once(own, "t", "app", 0) as batch:
            assert batch.new
        assert own.execute("select count(*) from held.penstock_exactly_once").fetchone() == (1,)
        own.rollback()


def test_a_search_path_without_a_schema_is_refused(pg_url: str) -> None:
    with psycopg.connect(pg_url) as own:
        own.execute("set local search_path to nowhere")
        with (
            pytest.raises(InvalidNameError, match=r"NO_SCHEMA\].*for the ledger"),
            penstock.exactly_once(own, "t", "app", 0),
        ):
            raise AssertionError("not reached")


@pytest.mark.parametrize("what", ["schema", "table"])
def test_a_ledger_that_a_stranger_has_created_is_refused(pg_url: str, what: str) -> None:
    """Its triggers would run with the rights of this connection."""
    with psycopg.connect(pg_url) as own:
        own.execute("create role exactly_once_stranger")
        owner = " authorization exactly_once_stranger" if what == "schema" else ""
        own.execute(f"create schema prepared{owner}".encode())
        own.execute("grant all on schema prepared to exactly_once_stranger")
        own.execute("set local search_path to prepared")
        if what == "table":
            own.execute("set local role exactly_once_stranger")
            own.execute(exactly_once.CREATE.format(ledger="penstock_exactly_once").encode())
            own.execute("set local role none")
        with (
            pytest.raises(StoreUnsafeError, match="role 'exactly_once_stranger'") as caught,
            penstock.exactly_once(own, "t", "app", 0),
        ):
            raise AssertionError("not reached")
        assert caught.value.condition == "STORE_UNSAFE.LEDGER_OWNER"
        with penstock.exactly_once(own, "t", "app", 0, ledger_owner="exactly_once_stranger") as batch:
            assert batch.new
        own.rollback()


def test_a_ledger_that_a_stranger_creates_while_the_app_waits_is_refused(pg_url: str) -> None:
    """Any role that may connect can hold the lock that the app waits for before it creates the ledger."""
    caught: list[BaseException] = []

    def enter() -> None:
        try:
            with (
                psycopg.connect(database.as_role("app")) as own,
                penstock.exactly_once(own, "t", "app", 0),
            ):
                raise AssertionError("not reached")
        except BaseException as error:
            caught.append(error)

    with shared_database(pg_url, "app", "stranger") as database:
        database.run("grant all on schema public to public")
        with psycopg.connect(database.as_role("stranger"), autocommit=True) as stranger:
            stranger.execute("select pg_advisory_lock(%s)", [exactly_once.CREATION_LOCK])
            entering = threading.Thread(target=enter)
            entering.start()
            waiting = "select count(*) from pg_stat_activity where query like '%pg_try_advisory_xact_lock(%'"
            wait_until(lambda: database.run(f"{waiting} and pid <> pg_backend_pid()") == [(1,)], 30)
            stranger.execute(exactly_once.CREATE.format(ledger="public.penstock_exactly_once").encode())
            database.trap("stranger", "public.penstock_exactly_once")
        entering.join()
        (error,) = caught
        assert isinstance(error, StoreUnsafeError), error
        assert error.condition == "STORE_UNSAFE.LEDGER_OWNER"
        assert f"ledger_owner='{database.role('stranger')}'" in error.message
        assert database.trapped() == []


def test_a_ledger_of_a_role_that_one_is_a_member_of_is_used_if_it_is_named(pg_url: str) -> None:
    with psycopg.connect(pg_url) as own:
        for role in ("owning", "writing"):
            own.execute(f"create role exactly_once_{role}".encode())
        own.execute("create schema shared authorization exactly_once_owning")
        own.execute("grant exactly_once_owning to exactly_once_writing")
        own.execute("set local role exactly_once_writing")
        own.execute("set local search_path to shared")
        with (
            pytest.raises(StoreUnsafeError, match="exactly_once_owning"),
            penstock.exactly_once(own, "t", "app", 0),
        ):
            pass
        with penstock.exactly_once(own, "t", "app", 0, ledger_owner="exactly_once_owning") as batch:
            assert batch.new
        own.rollback()
