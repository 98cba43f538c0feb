"""Append and advance in the caller's own transaction."""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import penstock
from penstock.errors import (
    InvalidInputError,
    OffsetConflictError,
    SchemaMismatchError,
    StoreError,
    StoreUnavailableError,
)
from penstock.testing import temporary_store
from tests.support.queues import SCHEMA, everything, numbers, rows


@pytest.fixture
def connection(store: penstock.Store) -> Iterator[Any]:
    """The application's connection, with a table of the application in the database."""
    target = store.database.url.target
    if store.database.dialect == "sqlite":
        own = sqlite3.connect(target)
        own.execute("create table mine (n integer)")
    else:
        import psycopg

        own = psycopg.connect(target)
        own.execute(f"set search_path to {store.database.url.schema}")
        own.execute("create table mine (n bigint)")
        own.commit()
    yield own
    own.close()


def _mine(connection: Any) -> list[int]:
    found = [row[0] for row in connection.execute("select n from mine order by n").fetchall()]
    connection.rollback()
    return found


@pytest.mark.parametrize("partitions", [1, 4])
def test_rows_and_the_callers_table_are_committed_together(
    store: penstock.Store, connection: Any, partitions: int
) -> None:
    queue = store.create_queue("q", SCHEMA, partitions=partitions, key=["n"])
    connection.execute("insert into mine values (1)")
    result = queue.append(rows(*range(20)), connection=connection)
    assert result.rows == 20
    assert queue.info().rows == 0, "not committed yet"
    connection.commit()
    assert queue.info().rows == 20
    assert _mine(connection) == [1]


def test_rows_and_the_callers_table_are_rolled_back_together(store: penstock.Store, connection: Any) -> None:
    queue = store.create_queue("q", SCHEMA)
    connection.execute("insert into mine values (1)")
    queue.append(rows(1), connection=connection)
    connection.rollback()
    assert (queue.info().rows, _mine(connection)) == (0, [])
    assert queue.append(rows(2)).ranges == {0: (0, 1)}


def test_several_appends_in_one_transaction_follow_each_other(store: penstock.Store, connection: Any) -> None:
    queue, other = store.create_queue("q", SCHEMA), store.create_queue("r", SCHEMA)
    assert queue.append(rows(1, 2), connection=connection).ranges == {0: (0, 2)}
    assert other.append(rows(9), connection=connection).ranges == {0: (0, 1)}
    assert queue.append(rows(3), connection=connection).ranges == {0: (2, 3)}
    connection.commit()
    assert (everything(queue), everything(other)) == ({0: [1, 2, 3]}, {0: [9]})


def test_a_failed_append_leaves_the_transaction_as_it_was(
    store: penstock.Store, connection: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The append fails in the middle, and the caller commits anyway."""
    from penstock.store.log import partition_log

    queue = store.create_queue("q", SCHEMA, partitions=2, key=["n"])
    connection.execute("insert into mine values (1)")
    with pytest.raises(SchemaMismatchError):
        queue.append([{"n": "x"}], connection=connection)

    def fail(*_: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(partition_log, "publish_segments", fail)
    with pytest.raises(ZeroDivisionError):
        queue.append(rows(*range(20)), connection=connection)
    monkeypatch.undo()
    connection.commit()
    assert (queue.info().rows, _mine(connection)) == (0, [1])
    assert all(start == 0 for start, _ in queue.append(rows(*range(20))).ranges.values())


def test_work_and_the_offset_are_committed_together(store: penstock.Store, connection: Any) -> None:
    queue = store.create_queue("q", SCHEMA)
    queue.append(rows(1, 2, 3))
    store.create_consumer("c")
    consumer = queue.register("c", vital=True)
    pull = consumer.pull("q", 0)
    for commit in (False, True):
        connection.execute("insert into mine values (3)")
        consumer.advance("q", 0, old=pull.start, new=pull.end, connection=connection)
        connection.commit() if commit else connection.rollback()
        assert consumer.offsets("q") == {0: 3 if commit else 0}
        assert _mine(connection) == [3] * commit
    with pytest.raises(OffsetConflictError):
        consumer.advance("q", 0, old=0, new=1, connection=connection)
    connection.rollback()


def test_other_appends_wait_for_the_transaction_and_readers_do_not(
    store: penstock.Store, connection: Any
) -> None:
    queue = store.create_queue("q", SCHEMA)
    queue.append(rows(1), connection=connection)
    other = threading.Thread(target=queue.append, args=(rows(2),))
    other.start()
    assert queue.read(0, 0).num_rows == 0
    other.join(0.2)
    assert other.is_alive()
    connection.commit()
    other.join(30)
    assert everything(queue) == {0: [1, 2]}


def test_a_connection_in_autocommit_mode_is_refused(store: penstock.Store) -> None:
    queue = store.create_queue("q", SCHEMA)
    if store.database.dialect == "sqlite":
        own: Any = sqlite3.connect(store.database.url.target, isolation_level=None)
        begin = "begin"
    else:
        import psycopg

        own = psycopg.connect(store.database.url.target, autocommit=True)
        begin = "begin"
    with pytest.raises(
        InvalidInputError, match=r"NO_TRANSACTION\].*(has no open transaction|autocommit mode)"
    ):
        queue.append(rows(1), connection=own)
    own.execute(begin)
    queue.append(rows(2), connection=own)
    own.execute("commit")
    assert everything(queue) == {0: [2]}
    own.close()


def test_the_connections_own_settings_do_not_matter(pg_url: str) -> None:
    import psycopg
    from psycopg.rows import dict_row

    with temporary_store(pg_url) as store:
        queue = store.create_queue("q", SCHEMA, partitions=2, key=["n"])
        own = psycopg.connect(
            pg_url, row_factory=dict_row, cursor_factory=psycopg.ClientCursor, prepare_threshold=None
        )
        with own, own.transaction():
            queue.append(rows(*range(10)), connection=own)
            queue.append(rows(5), connection=own)
        assert queue.info().rows == 11
        own = psycopg.connect(pg_url)
        with own.pipeline():
            queue.append(rows(*range(10)), connection=own)
            own.commit()
        own.close()
        assert queue.info().rows == 21


def test_an_argument_that_is_not_a_connection_to_the_store_is_refused(
    store: penstock.Store, connection: Any
) -> None:
    queue = store.create_queue("q", SCHEMA)
    other: Any = sqlite3.connect(":memory:") if store.database.dialect == "sqlite" else None
    for wrong in ("x", store, object(), connection.cursor(), other):
        if wrong is not None:
            with pytest.raises(
                InvalidInputError,
                match=r"\[INVALID_INPUT\].* takes a |OTHER_DATABASE\].*does not have .* open",
            ):
                queue.append(rows(1), connection=wrong)
    assert queue.info().rows == 0


def test_a_connection_to_another_store_is_refused(
    store: penstock.Store, store_url: str, tmp_path: Path
) -> None:
    queue = store.create_queue("q", SCHEMA)
    if store.database.dialect == "sqlite":
        with penstock.connect(f"sqlite:///{tmp_path}/other.db") as there:
            there.create_queue("q", SCHEMA)
        own: Any = sqlite3.connect(tmp_path / "other.db")
    else:
        import psycopg

        own = psycopg.connect(store.database.url.target, autocommit=True)
        own.execute("drop database if exists elsewhere")
        own.execute("create database elsewhere")
        own.close()
        elsewhere = store.database.url.target.rpartition("/")[0] + "/elsewhere"
        schema = store.database.url.options["schema"]
        own = psycopg.connect(elsewhere)
        with pytest.raises(InvalidInputError, match=r"OTHER_DATABASE\].*is not to"):
            queue.append(rows(1), connection=own)
        assert own.info.transaction_status == psycopg.pq.TransactionStatus.IDLE
        with penstock.connect(f"{elsewhere}?schema={schema}") as there:
            there.create_queue("q", SCHEMA)
    with pytest.raises(InvalidInputError, match=r"OTHER_DATABASE\].*(is not to|does not have .* open)"):
        queue.append(rows(1), connection=own)
    own.rollback()
    own.close()
    assert queue.info().rows == 0
    if store.database.dialect == "postgres":
        own = psycopg.connect(store.database.url.target, autocommit=True)
        own.execute("drop database elsewhere")
        own.close()


@pytest.mark.parametrize("alias", ["store", "my store", 'quo"te', "select", "a.b", ":x"])
def test_a_store_may_be_attached_to_the_applications_database(tmp_path: Path, alias: str) -> None:
    with penstock.connect(f"sqlite:///{tmp_path}/store.db") as store:
        queue = store.create_queue("q", SCHEMA, partitions=2, key=["n"])
        own = sqlite3.connect(tmp_path / "app.db")
        own.execute("create table mine (n integer)")
        own.execute('attach ? as "' + alias.replace('"', '""') + '"', (str(tmp_path / "store.db"),))
        own.row_factory = sqlite3.Row
        for commit in (True, False):
            own.execute("insert into mine values (1)")
            queue.append(rows(*range(10)), connection=own)
            own.commit() if commit else own.rollback()
        assert queue.info().rows == 10
        assert len(own.execute("select * from mine").fetchall()) == 1
        own.close()


def test_a_connection_through_a_symlink_to_the_store_is_accepted(tmp_path: Path) -> None:
    with penstock.connect(f"sqlite:///{tmp_path}/store.db") as store:
        queue = store.create_queue("q", SCHEMA)
        (tmp_path / "link.db").symlink_to(tmp_path / "store.db")
        own = sqlite3.connect(tmp_path / "link.db")
        queue.append(rows(1), connection=own)
        own.commit()
        own.close()
        assert queue.info().rows == 1


def test_a_transaction_with_a_stale_snapshot_is_refused(tmp_path: Path) -> None:
    with penstock.connect(f"sqlite:///{tmp_path}/store.db") as store:
        queue = store.create_queue("q", SCHEMA)
        own = sqlite3.connect(tmp_path / "store.db", isolation_level=None)
        own.execute("begin")
        own.execute("select count(*) from penstock_queue").fetchone()
        queue.append(rows(1))
        with pytest.raises(StoreUnavailableError, match="locked by another writer"):
            queue.append(rows(2), connection=own)
        own.execute("rollback")
        own.close()
        assert everything(queue) == {0: [1]}


def test_an_append_places_keys_by_the_current_number_of_partitions(
    store: penstock.Store, connection: Any
) -> None:
    queue = store.create_queue("q", SCHEMA, partitions=2, key=["n"])
    queue.append(rows(*range(10)))
    store.queue("q").add_partitions(3)
    queue.append(rows(*range(50)), connection=connection)
    connection.commit()
    found: dict[int, set[int]] = {}
    for partition, values in everything(queue).items():
        for value in values:
            found.setdefault(value, set()).add(partition)
    assert all(len(parts) == 1 for parts in found.values())
    assert len(found) == 50


def test_a_snapshot_older_than_the_queues_last_growth_cannot_append(
    store: penstock.Store, connection: Any
) -> None:
    """Its transaction cannot see in which partitions the keys are now."""
    if store.database.dialect != "postgres":
        return
    import psycopg

    queue = store.create_queue("q", SCHEMA, partitions=1, key=["n"])
    connection.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
    connection.execute("select count(*) from mine")
    store.queue("q").add_partitions(3)
    with pytest.raises(StoreUnavailableError, match="could not serialize"):
        queue.append(rows(*range(10)), connection=connection)
    connection.rollback()
    assert queue.info().rows == 0


def test_a_driver_error_is_translated_and_kept_as_the_cause(store: penstock.Store, connection: Any) -> None:
    queue = store.create_queue("q", SCHEMA)
    connection.close()
    with pytest.raises(StoreError) as caught:
        queue.append(rows(1), connection=connection)
    assert caught.value.__cause__ is not None
    assert queue.info().rows == 0


def test_a_connection_of_another_thread_is_reported(tmp_path: Path) -> None:
    with penstock.connect(f"sqlite:///{tmp_path}/store.db") as store:
        queue = store.create_queue("q", SCHEMA)
        own = sqlite3.connect(tmp_path / "store.db")
        failures: list[BaseException] = []

        def work() -> None:
            try:
                queue.append(rows(1), connection=own)
            except BaseException as error:
                failures.append(error)

        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        own.close()
        assert isinstance(failures[0], StoreError)
        assert "thread" in str(failures[0])


def test_appends_with_and_without_a_connection_are_read_in_commit_order(
    store: penstock.Store, connection: Any
) -> None:
    queue = store.create_queue("q", SCHEMA)
    for n in range(5):
        queue.append(rows(n), connection=connection)
        connection.commit()
        queue.append(rows(100 + n))
    assert numbers(queue.read(0, 0)) == [0, 100, 1, 101, 2, 102, 3, 103, 4, 104]
