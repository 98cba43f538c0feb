"""Backfills of a pump: each row comes once, and each change of it in its order."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import psycopg
import pytest

import penstock
from penstock.errors import (
    InvalidInputError,
    PumpNotFoundError,
    QueueNotFoundError,
    StoreNotFoundError,
    condition_of,
)
from penstock.feeds.postgres import following
from penstock.pump import appender, backfills
from penstock.store.records import pumps
from tests.pump.changing_table import (
    KINDS,
    Kind,
    await_rows,
    change,
    changing,
    is_equal,
    queue_rows,
    source_rows,
)
from tests.support.backfilled import (
    add_to_publication,
    await_queue,
    count_appended_rows,
    create_evolving_pump,
    hold_chunk,
    list_backfills,
    paused_backfill,
    request_table_backfill,
)
from tests.support.postgres_source import Source, open_transaction
from tests.support.pumped import SimulatedCrash, change_rows, create_pump, running, sort_by_commit
from tests.support.waiting import wait_until


@pytest.fixture
def grown(source: Source, request: pytest.FixtureRequest) -> tuple[Source, Kind]:
    """A publication that has one table, beside another with rows that it does not have yet."""
    kind = KINDS[getattr(request, "param", "number")]
    columns, value = (text.replace("{schema}", source.name) for text in (kind.columns, kind.value))
    kind = replace(kind, columns=columns, value=value)
    source.table("id int PRIMARY KEY", "first", f"INSERT INTO {source.name}.first VALUES (1)")
    name = f"{source.name}.added"
    source.run(f"CREATE TYPE {source.name}.size AS ENUM ('small', 'large', 'huge')")
    source.run(f"CREATE TABLE {name} ({kind.columns})", f"ALTER TABLE {name} ALTER big SET STORAGE EXTERNAL")
    if kind.full:
        source.run(f"ALTER TABLE {name} REPLICA IDENTITY FULL")
    source.run(
        f"INSERT INTO {name} SELECT {kind.value.format(n='n')}, n, repeat('x', n % 2 * 3000) "
        "FROM generate_series(1, 2000) AS n"
    )
    return source, kind


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backfills, "_CHUNK_ROWS", 100)


@pytest.mark.few(2)
@pytest.mark.parametrize("grown", KINDS, indirect=True)
def test_a_table_that_is_added_comes_with_its_rows_while_it_changes(
    grown: tuple[Source, Kind], store_url: str
) -> None:
    add_while_it_changes(*grown, store_url)


def add_while_it_changes(source: Source, kind: Kind, store_url: str) -> None:
    with running(create_evolving_pump(source, store_url)) as failures:
        await_queue(source, store_url, failures)
        with changing(source, kind):
            add_to_publication(source)
            wait_until(
                lambda: failures or count_appended_rows(source, store_url) > 2500, 60, "rows of the table"
            )
        await_rows(source, store_url, kind, failures)
        assert list_backfills(store_url) == {}


def test_chunks_have_positions_of_their_own_however_often_the_pump_moves_without_rows(
    grown: tuple[Source, Kind], store_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(appender, "_CONFIRM_INTERVAL_SECONDS", 0.0)
    monkeypatch.setattr(backfills, "_CHUNK_ROWS", 20)
    add_while_it_changes(*grown, store_url)


@pytest.mark.parametrize("after_commit", [True, False])
def test_a_pump_that_dies_goes_on_where_it_was(
    grown: tuple[Source, Kind], store_url: str, monkeypatch: pytest.MonkeyPatch, after_commit: bool
) -> None:
    source, kind = grown
    move, append, moved = pumps.move_pump, appender.append_commits, 0

    def count() -> None:
        nonlocal moved
        moved += 1
        if moved % 7 == 0:
            raise SimulatedCrash

    def dying(*given: object) -> object:
        count()
        return move(*given)

    def appending(*given: object) -> None:
        append(*given)
        count()

    with running(create_evolving_pump(source, store_url)) as failures:
        await_queue(source, store_url, failures)
    if after_commit:
        monkeypatch.setattr(appender, "append_commits", appending)
    else:
        monkeypatch.setattr(pumps, "move_pump", dying)
    add_to_publication(source)
    chance, deaths = random.Random(3), 0
    for _ in range(60):
        with running(create_evolving_pump(source, store_url)) as failures:
            while not failures and not (deaths > 3 and is_equal(source, store_url, kind)):
                change(source.connection, source, kind, chance)
        assert all(isinstance(each, SimulatedCrash) for each in failures)
        if not failures:
            break
        deaths += 1
    assert not failures
    assert deaths > 3
    assert is_equal(source, store_url, kind)


@pytest.mark.parametrize("restarts", [True, False])
def test_a_row_whose_key_changes_is_read_again_if_its_values_did_not_come(
    grown: tuple[Source, Kind], store_url: str, monkeypatch: pytest.MonkeyPatch, restarts: bool
) -> None:
    source, kind = grown
    name = f"{source.name}.added"
    with running(create_evolving_pump(source, store_url)) as failures:
        await_queue(source, store_url, failures)
    add_to_publication(source)
    pump = create_evolving_pump(source, store_url)
    with hold_chunk(monkeypatch, 4) as (reached, released), running(pump) as failures:
        wait_until(lambda: failures or reached.is_set(), 60, "the fourth chunk")
        # The rows up to 200, at least, were appended; the new values of these are in the log alone.
        source.run(
            f"DELETE FROM {name} WHERE id IN (11, 13)",
            f"UPDATE {name} SET id = 11 WHERE id = 1501",
            f"UPDATE {name} SET v = -1 WHERE id = 11",
            f"UPDATE {name} SET id = 13 WHERE id = 1503",
            f"DELETE FROM {name} WHERE id = 13",
            f"UPDATE {name} SET id = 13 WHERE id = 1505",
            f"UPDATE {name} SET id = 3017 WHERE id = 17",
        )
        wait_until(lambda: failures or _gaps(store_url) == [["11"], ["13"]], 60, "the gaps")
        if restarts:
            pump.stop()
        released.set()
        if not restarts:
            await_rows(source, store_url, kind, failures)
    with running(create_evolving_pump(source, store_url)) as failures:
        await_rows(source, store_url, kind, failures)


def _gaps(store_url: str) -> object:
    (backfill,) = list_backfills(store_url).values()
    return backfill["gaps"]


def test_rows_of_a_transaction_that_is_in_the_log_before_others_can_see_it_are_not_lost(
    grown: tuple[Source, Kind], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    source, kind = grown
    name, store_url = f"{source.name}.added", f"sqlite:///{tmp_path / 'store.db'}"
    with running(create_evolving_pump(source, store_url)) as failures:
        await_queue(source, store_url, failures)
        source.run("SET synchronous_commit TO local")
        add_to_publication(source)
        with hold_chunk(monkeypatch, 4) as (reached, released):
            wait_until(lambda: failures or reached.is_set(), 60, "the fourth chunk")
            with _waiting_for_a_standby(source, name):
                # The log goes on, and the pump is behind the transaction that others do not see.
                source.run(f"UPDATE {name} SET v = -2 WHERE id = 1")
                wait_until(lambda: failures or _value(source, store_url, 1) == -2, 60, "the update")
                released.set()
                wait_until(lambda: failures or count_appended_rows(source, store_url) > 700, 60, "more rows")
        await_rows(source, store_url, kind, failures)
    rows = sort_by_commit(change_rows(store_url, name))
    assert [(row["_change_type"], row["v"]) for row in rows if row["id"] == 350] == [
        ("insert", 350),
        ("update_postimage", -1),
    ]
    assert [row["_change_type"] for row in rows if row["id"] == 450] == ["insert", "delete"]


@contextmanager
def _waiting_for_a_standby(source: Source, name: str) -> Iterator[None]:
    """Meanwhile a transaction of changes is in the log, and nobody sees it: its commit awaits a standby."""

    def names(standbys: str) -> None:
        source.run(f"ALTER SYSTEM SET synchronous_standby_names = '{standbys}'", "SELECT pg_reload_conf()")

    def commit() -> None:
        with psycopg.connect(source.url) as connection:
            connection.execute(f"UPDATE {name} SET v = -1 WHERE id IN (250, 350)".encode())
            connection.execute(f"DELETE FROM {name} WHERE id = 450".encode())
            connection.execute(f"UPDATE {name} SET id = 5250, v = -1 WHERE id = 351".encode())

    def waits() -> bool:
        return bool(source.rows("SELECT FROM pg_stat_activity WHERE wait_event = 'SyncRep'"))

    names("nobody")
    thread = threading.Thread(target=commit)
    try:
        wait_until(lambda: source.rows("SHOW synchronous_standby_names") == [("nobody",)], 30, "the setting")
        thread.start()
        wait_until(waits, 30, "the commit")
        yield
    finally:
        names("")
        thread.join(60)


def _value(source: Source, store_url: str, number: int) -> object:
    """The newest value of a row in the queue."""
    return queue_rows(source, store_url, KINDS["number"]).get((number,), {}).get("v")


def test_a_table_is_read_again_while_it_changes(grown: tuple[Source, Kind], store_url: str) -> None:
    source, kind = grown
    name = f"{source.name}.added"
    add_to_publication(source)
    with running(create_pump(source, store_url)) as failures:
        await_rows(source, store_url, kind, failures)
    source.run(f"UPDATE {name} SET v = -7 WHERE id % 2 = 0")
    (version,) = source.rows("SELECT pg_current_wal_lsn() - '0/0'")[0]
    with changing(source, kind), running(create_pump(source, store_url)) as failures:
        wait_until(lambda: failures or count_appended_rows(source, store_url) > 3500, 60, "changes")
        request_table_backfill(store_url, source.name, f"{source.name}.added")
        wait_until(lambda: failures or not list_backfills(store_url), 60, "all rows")
        assert not failures
    with running(create_pump(source, store_url)) as failures:
        await_rows(source, store_url, kind, failures)
    rows = change_rows(store_url, name)
    updated = {row["id"] for row in rows if row["_change_type"] == "update_postimage"}
    assert {key for (key,) in source_rows(source, kind)} <= updated | {
        row["id"] for row in rows if row["_change_type"] == "insert" and row["_commit_version"] > int(version)
    }


def test_several_tables_come_one_after_another_also_without_rows(
    grown: tuple[Source, Kind], store_url: str
) -> None:
    source, kind = grown
    source.run(f"CREATE TABLE {source.name}.empty (id int PRIMARY KEY)")
    with running(create_evolving_pump(source, store_url)) as failures:
        await_queue(source, store_url, failures)
        with changing(source, kind, 1):
            add_to_publication(source, "added", "empty")
            wait_until(
                lambda: failures or count_appended_rows(source, store_url) > 2500, 60, "rows of the table"
            )
        await_rows(source, store_url, kind, failures)
        wait_until(lambda: failures or not list_backfills(store_url), 60, "the empty table")
        source.run(f"INSERT INTO {source.name}.empty VALUES (1)")
        wait_until(lambda: failures or change_rows(store_url, f"{source.name}.empty"), 60, "a row")
    # Both are tables like the first one from then on.
    source.run(f"INSERT INTO {source.name}.empty VALUES (2)", f"DELETE FROM {source.name}.added WHERE id = 7")
    with running(create_pump(source, store_url)) as failures:
        wait_until(
            lambda: failures or len(change_rows(store_url, f"{source.name}.empty")) == 2, 60, "another row"
        )
        await_rows(source, store_url, kind, failures)


def test_parts_of_a_large_transaction_are_held_back_like_others(
    grown: tuple[Source, Kind], store_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(following, "_PART_BYTES", 1 << 14)
    source, kind = grown
    name = f"{source.name}.added"
    with running(create_evolving_pump(source, store_url)) as failures:
        with paused_backfill(source, store_url, failures, monkeypatch), source.connection.transaction():
            source.run(f"UPDATE {name} SET v = -v", f"DELETE FROM {name} WHERE id % 5 = 0")
            source.run(f"INSERT INTO {name} SELECT n, n, '' FROM generate_series(3001, 5000) AS n")
        with changing(source, kind):
            wait_until(
                lambda: failures or count_appended_rows(source, store_url) > 6000, 60, "rows of the table"
            )
        await_rows(source, store_url, kind, failures)


def test_columns_that_come_and_go_meanwhile_come_and_go_in_the_queue(
    grown: tuple[Source, Kind], store_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, kind = grown
    name = f"{source.name}.added"
    with running(create_evolving_pump(source, store_url)) as failures:
        with paused_backfill(source, store_url, failures, monkeypatch):
            source.run(
                f"ALTER TABLE {name} ADD more int",
                f"UPDATE {name} SET more = id",
                f"ALTER TABLE {name} DROP big",
            )
        without = replace(kind, names=("id", "v", "more"))
        wait_until(lambda: failures or not list_backfills(store_url), 60, "all rows")
        source.run(f"UPDATE {name} SET v = v + 1 WHERE id = 1999")
        await_rows(source, store_url, without, failures)


def test_a_type_that_the_queue_cannot_hold_ends_the_pump(
    grown: tuple[Source, Kind], store_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, _ = grown
    monkeypatch.setattr(backfills, "_SCHEMA_CHANGE_SECONDS", 0.5)
    with running(create_evolving_pump(source, store_url)) as failures:
        with paused_backfill(source, store_url, failures, monkeypatch):
            source.run(f"ALTER TABLE {source.name}.added ALTER v TYPE text")
        wait_until(lambda: failures, 60, "the end")
    assert [condition_of(each) for each in failures] == ["FEED_UNAVAILABLE.CHANGED_IN_BACKFILL"]


def test_a_backfill_waits_for_transactions_that_are_open_and_says_so(
    grown: tuple[Source, Kind],
    store_url: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    source, kind = grown
    caplog.set_level("INFO", "penstock.pump")
    monkeypatch.setattr(backfills, "_WARN_SECONDS", 0.1)
    name = f"{source.name}.added"
    with running(create_evolving_pump(source, store_url)) as failures:
        await_queue(source, store_url, failures)
        with open_transaction(source, f"INSERT INTO {name} VALUES (0, 0, '')") as other:
            add_to_publication(source)
            wait_until(lambda: failures or "backfill_waits" in actions(caplog), 60, "the warning")
            source.run(
                f"UPDATE {name} SET v = -1 WHERE id = 5", f"INSERT INTO {source.name}.first VALUES (2)"
            )
            wait_until(
                lambda: failures or len(change_rows(store_url, f"{source.name}.first")) == 2, 60, "a row"
            )
            assert count_appended_rows(source, store_url) == 0
            other.execute(f"INSERT INTO {name} VALUES (-1, 0, '')".encode())
            other.commit()
        await_rows(source, store_url, kind, failures)
    assert {"backfill_started", "backfill_complete"} <= actions(caplog)


def actions(caplog: pytest.LogCaptureFixture) -> set[str]:
    return {getattr(record, "action", "") for record in caplog.records}


@pytest.mark.parametrize("columns", ["id int, v int", "v {schema}.own, id int, PRIMARY KEY (v, id)"])
def test_a_table_whose_rows_have_no_known_order_is_left_out_until_they_have(
    grown: tuple[Source, Kind],
    store_url: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    columns: str,
) -> None:
    monkeypatch.setattr(following, "_CHECK_SECONDS", 0.1)
    source, kind = grown
    other = f"{source.name}.other"
    source.run(
        f"CREATE TYPE {source.name}.own AS (a int, b int)",
        f"CREATE TABLE {other} ({columns.format(schema=source.name)})",
    )
    with running(create_evolving_pump(source, store_url)) as failures:
        await_queue(source, store_url, failures)
        add_to_publication(source, "other", "added")
        source.run(f"INSERT INTO {other} (id, v) VALUES (1, NULL)" if "own" not in columns else "SELECT 1")
        await_rows(source, store_url, kind, failures)
        assert "table_left_out" in actions(caplog)
        begun = len(caplog.records)
        time.sleep(1)
        assert len(caplog.records) == begun, "it is looked at once"
        source.run(f"ALTER TABLE {other} DROP v", f"ALTER TABLE {other} ADD PRIMARY KEY (id)")
        source.run(f"INSERT INTO {other} VALUES (2)")
        wait_until(lambda: failures or _ids(store_url, other) >= {2}, 60, "the other table")
    assert not failures
    assert _ids(store_url, other) == ({1, 2} if "own" not in columns else {2})


def _ids(store_url: str, queue: str) -> set[object]:
    try:
        return {row["id"] for row in change_rows(store_url, queue)}
    except QueueNotFoundError:
        return set()


def test_new_tables_are_left_out_or_refused_by_the_other_policies(
    grown: tuple[Source, Kind], store_url: str
) -> None:
    source, kind = grown
    with running(create_pump(source, store_url, schema_changes="ignore")) as failures:
        await_queue(source, store_url, failures)
        add_to_publication(source)
        source.run(
            f"INSERT INTO {source.name}.added VALUES (0, 0, '')",
            f"INSERT INTO {source.name}.first VALUES (2)",
        )
        wait_until(lambda: failures or len(change_rows(store_url, f"{source.name}.first")) == 2, 60, "a row")
    # What was left out comes as soon as it is to be read.
    with running(create_evolving_pump(source, store_url)) as failures:
        await_rows(source, store_url, kind, failures)


def test_what_cannot_be_read_again_is_refused(source: Source, store_url: str) -> None:
    source.table("id int PRIMARY KEY", "first", f"INSERT INTO {source.name}.first VALUES (1)")
    with running(create_pump(source, store_url, queue="together")) as failures:
        wait_until(lambda: failures or _has_begun(store_url), 60, "the pump")
        with pytest.raises(InvalidInputError, match="one queue for all tables"):
            request_table_backfill(store_url, source.name, f"{source.name}.first")
    with pytest.raises(PumpNotFoundError, match="penstock pump list"):
        request_table_backfill(store_url, "other", f"{source.name}.first")


def test_a_table_that_the_pump_does_not_have_is_not_read_again(
    grown: tuple[Source, Kind], store_url: str
) -> None:
    source, _ = grown
    with running(create_pump(source, store_url)) as failures:
        await_queue(source, store_url, failures)
    with pytest.raises(InvalidInputError, match=f"Did you mean '{source.name}.first'"):
        request_table_backfill(store_url, source.name, f"{source.name}.frist")


def _has_begun(store_url: str) -> bool:
    try:
        with penstock.connect(store_url, create=False) as store:
            return any(pump.state for pump in store.database.run(pumps.list_pumps, write=False))
    except StoreNotFoundError:
        return False
