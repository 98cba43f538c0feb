"""Backfills of a pump where tables, publications and stores are not as one would wish."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import psycopg
import pyarrow as pa
import pytest

import penstock
from penstock.errors import InvalidInputError, StoreError, condition_of
from penstock.feeds.postgres import following
from penstock.feeds.postgres.backfill import Backfill
from penstock.feeds.postgres.catalog import Table
from penstock.feeds.postgres.following import SlotFollower, Step
from penstock.feeds.postgres.key_order import KeyOrder
from penstock.feeds.postgres.pgoutput import Column, Relation
from penstock.feeds.postgres.rows import KeyedRows
from penstock.feeds.postgres.table_chunks import Chunk
from penstock.pump import appender, backfills, planning
from penstock.pump.backfill_records import backfills_of as checked_backfills
from penstock.store.database import Transaction
from penstock.store.records import pumps
from tests.support.backfilled import (
    add_to_publication,
    await_queue,
    create_evolving_pump,
    hold_chunk,
    list_backfills,
    list_pumped_queues,
    request_table_backfill,
)
from tests.support.postgres_source import Row, Source, apply
from tests.support.pumped import SimulatedCrash, change_rows, create_pump, running, sort_by_commit
from tests.support.waiting import wait_until


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backfills, "_CHUNK_ROWS", 100)


@pytest.fixture
def grown(source: Source) -> Source:
    """A publication that has one table, beside another with rows that it does not have yet."""
    source.table("id int PRIMARY KEY", "first", f"INSERT INTO {source.name}.first VALUES (1)")
    source.run(
        f"CREATE TABLE {source.name}.added (id int PRIMARY KEY, v int)",
        f"INSERT INTO {source.name}.added SELECT n, n FROM generate_series(1, 1000) AS n",
    )
    return source


@pytest.fixture
def store_url(tmp_path_factory: pytest.TempPathFactory) -> str:
    return f"sqlite:///{tmp_path_factory.mktemp('store')}/penstock.db"


def ids(store_url: str, queue: str) -> list[object]:
    return [row["id"] for row in change_rows(store_url, queue)]


@pytest.mark.parametrize(
    "change",
    [
        "ADD r float DEFAULT random()",
        "ADD g int GENERATED ALWAYS AS (v * 2) STORED",
        "ALTER v SET DEFAULT 4, ALTER v TYPE int USING (v + 0)",
    ],
)
def test_a_table_that_is_rewritten_meanwhile_does_not_look_empty(
    grown: Source, store_url: str, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    with running(create_evolving_pump(grown, store_url)) as failures:
        await_queue(grown, store_url, failures)
        add_to_publication(grown)
        with hold_chunk(monkeypatch, 4) as (reached, released):
            wait_until(lambda: failures or reached.is_set(), 60, "the fourth chunk")
            with psycopg.connect(grown.url) as other:
                other.execute(f"ALTER TABLE {grown.name}.added {change}".encode())
                released.set()
                wait_until(
                    lambda: grown.rows("SELECT FROM pg_locks WHERE NOT granted"), 30, "the chunk waits"
                )
                other.commit()
        wait_until(lambda: failures or not list_backfills(store_url), 60, "all rows")
    assert not failures
    assert sorted(ids(store_url, f"{grown.name}.added")) == list(range(1, 1001))


@pytest.mark.parametrize("dies", [False, True])
def test_a_table_that_is_added_within_a_large_transaction_does_not_change_its_parts(
    grown: Source, store_url: str, monkeypatch: pytest.MonkeyPatch, dies: bool
) -> None:
    monkeypatch.setattr(following, "_PART_BYTES", 1 << 14)
    name, added = grown.name, f"{grown.name}.added"
    with running(create_evolving_pump(grown, store_url)) as failures:
        await_queue(grown, store_url, failures)
        if dies:
            monkeypatch.setattr(appender, "append_commits", _dying_at(4))
        _write_large_transaction(grown)
        # A pump may plan the new table before it reads the transaction.
        wait_until(lambda: failures or (not dies and added in list_pumped_queues(store_url)), 60, "its end")
    assert [type(each) for each in failures] == [SimulatedCrash] * dies
    monkeypatch.undo()
    with running(create_evolving_pump(grown, store_url)) as failures:
        wait_until(lambda: failures or added in list_pumped_queues(store_url), 60, "the new table")
        wait_until(lambda: failures or not list_backfills(store_url), 60, "all rows")
    assert not failures
    for table in ("first", "added"):
        expected = [row[0] for row in grown.rows(f"SELECT id FROM {name}.{table} ORDER BY id")]
        assert sorted(ids(store_url, f"{name}.{table}")) == expected


def _write_large_transaction(grown: Source) -> None:
    """Commit rows of two tables, one of which is published meanwhile."""
    name = grown.name
    with grown.connection.transaction():
        grown.run(f"INSERT INTO {name}.first SELECT n FROM generate_series(2, 300) AS n")
        add_to_publication(grown)
        for first in range(10_000, 14_000, 200):
            grown.run(
                f"INSERT INTO {name}.added SELECT n, n FROM generate_series({first}, {first + 99}) AS n",
                f"INSERT INTO {name}.first SELECT n FROM generate_series({first}, {first + 199}) AS n",
            )


def _dying_at(number: int) -> Callable[..., object]:
    append, count = appender.append_commits, 0

    def appending(*given: object) -> object:
        nonlocal count
        count += 1
        if count == number:
            raise SimulatedCrash
        return append(*given)

    return appending


def _queues(store_url: str) -> list[str]:
    with penstock.connect(store_url) as store:
        return store.queues()


def _ends_with(grown: Source, store_url: str, *statements: str) -> str | None:
    """What ends a pump when something is done to the source while it runs."""
    with running(create_evolving_pump(grown, store_url)) as failures:
        await_queue(grown, store_url, failures)
        grown.run(*statements)
        wait_until(lambda: failures, 60, "the end")
    (failure,) = failures
    return condition_of(failure)


@pytest.mark.parametrize("published", ["insert", "insert, update"])
def test_tables_are_not_added_where_not_all_changes_are_published(
    grown: Source, store_url: str, published: str
) -> None:
    grown.run(f"ALTER PUBLICATION {grown.name} SET (publish = '{published}')")
    condition = _ends_with(grown, store_url, f"ALTER PUBLICATION {grown.name} ADD TABLE {grown.name}.added")
    assert condition == "FEED_UNAVAILABLE.PARTLY_PUBLISHED"
    assert _queues(store_url) == [f"{grown.name}.first"]


def test_a_part_of_a_key_does_not_identify_rows(source: Source) -> None:
    source.run(
        f"ALTER PUBLICATION {source.name} SET (publish = 'insert')",
        f"CREATE TABLE {source.name}.t (a int, b int, v int, PRIMARY KEY (a, b))",
        f"ALTER PUBLICATION {source.name} ADD TABLE {source.name}.t (a, v)",
    )
    source.make_slot()
    (table,) = source.open().known_tables().tables
    assert (table.key, table.keyed) == ((), False)


def test_a_table_without_a_key_cannot_be_asked_for(grown: Source, store_url: str) -> None:
    grown.run(
        f"CREATE TABLE {grown.name}.other (id int)", f"ALTER TABLE {grown.name}.other REPLICA IDENTITY FULL"
    )
    add_to_publication(grown, "other")
    with running(create_pump(grown, store_url)) as failures:
        await_queue(grown, store_url, failures)
        with pytest.raises(InvalidInputError, match="no primary key"):
            request_table_backfill(store_url, grown.name, f"{grown.name}.other")
    assert not failures


def test_a_table_that_cannot_be_read_again_does_not_end_the_pump(
    grown: Source, store_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    with running(create_pump(grown, store_url)) as failures:
        await_queue(grown, store_url, failures)
    grown.run(f"ALTER PUBLICATION {grown.name} SET (publish = 'insert')")
    token = _accepted(grown, store_url)
    request_table_backfill(store_url, grown.name, f"{grown.name}.first")
    grown.run(f"INSERT INTO {grown.name}.first VALUES (2)")
    pump = create_pump(grown, store_url) if token is None else _accepting(grown, store_url, token)
    with running(pump) as failures:
        wait_until(lambda: failures or ids(store_url, f"{grown.name}.first") == [1, 2], 60, "a row")
        grown.run(f"INSERT INTO {grown.name}.first VALUES (3)")
        wait_until(lambda: failures or not list_backfills(store_url), 60, "the request to be forgotten")
    assert not failures
    assert "backfill_refused" in {getattr(record, "action", "") for record in caplog.records}


def _accepted(grown: Source, store_url: str) -> list[str] | None:
    """What a pump asks to accept, if anything."""
    with running(create_pump(grown, store_url)) as failures:
        wait_until(lambda: failures, 60, "the refusal")
    (failure,) = failures
    found = getattr(failure, "parameters", {}).get("accept")
    return None if found is None else list(found)


def _accepting(grown: Source, store_url: str, token: list[str]) -> penstock.Pump:
    return penstock.Pump(grown.feed(snapshot="initial", accept=token), store_url)


def test_a_domain_in_a_key_runs_nothing_of_its_owner(grown: Source, store_url: str) -> None:
    name, role = grown.name, f"{grown.name}_owner"
    grown.run(
        f"CREATE ROLE {role}",
        f"GRANT CREATE, USAGE ON SCHEMA {name} TO {role}",
        f"CREATE TABLE {name}.seen (who text)",
        f"GRANT ALL ON {name}.seen TO {role}",
        f"SET ROLE {role}",
        f"CREATE FUNCTION {name}.spy(t text) RETURNS bool LANGUAGE plpgsql AS $$ BEGIN "
        f"IF current_user <> '{role}' THEN RAISE EXCEPTION 'run by %', current_user; END IF; "
        "RETURN true; END $$",
        f"CREATE DOMAIN {name}.word AS text CHECK ({name}.spy(VALUE))",
        f"CREATE TABLE {name}.words (id {name}.word PRIMARY KEY, v int)",
        f"INSERT INTO {name}.words SELECT n, n FROM generate_series(1, 500) AS n",
        "RESET ROLE",
    )
    try:
        with running(create_evolving_pump(grown, store_url)) as failures:
            await_queue(grown, store_url, failures)
            add_to_publication(grown, "words")
            for _ in range(20):
                grown.run(
                    f"SET ROLE {role}", f"UPDATE {name}.words SET v = v + 1 WHERE id < '3'", "RESET ROLE"
                )
            wait_until(
                lambda: failures or (len(ids(store_url, f"{name}.first")) and _is_done(store_url, name)),
                60,
                "all",
            )
        assert not failures
        assert len(set(ids(store_url, f"{name}.words"))) == 500
    finally:
        grown.run(
            "RESET ROLE", f"DROP TABLE {name}.words", f"DROP OWNED BY {role} CASCADE", f"DROP ROLE {role}"
        )


def _is_done(store_url: str, name: str) -> bool:
    return f"{name}.words" in list_pumped_queues(store_url) and not list_backfills(store_url)


def test_a_filter_in_the_store_is_not_run_at_the_source(
    grown: Source, store_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backfills, "_SCHEMA_CHANGE_SECONDS", 0.5)
    add_to_publication(grown)
    with running(create_pump(grown, store_url)) as failures:
        await_queue(grown, store_url, failures)
    request_table_backfill(store_url, grown.name, f"{grown.name}.added")
    with penstock.connect(store_url) as store:

        def poison(tx: Transaction) -> None:
            (found,) = pumps.list_pumps(tx)
            state = found.state
            tables = json.loads(state["tables"])
            for table in tables["tables"]:
                table["filter"] = "pg_advisory_lock(4711) IS NOT NULL"
            state["tables"] = json.dumps(tables)
            pumps.set_pump_state(tx, found.name, found.owner, json.dumps(state))

        store.database.run(poison)
    with running(create_pump(grown, store_url)) as failures:
        wait_until(lambda: failures, 60, "the end")
    assert [condition_of(each) for each in failures] == ["FEED_UNAVAILABLE.CHANGED_IN_BACKFILL"]
    assert not grown.rows("SELECT FROM pg_locks WHERE locktype = 'advisory' AND objid = 4711")


def test_many_keys_that_change_without_their_values_take_linear_time() -> None:
    relation = Relation(1, "s", "t", (Column("id", 20, -1, True),))
    table = Table(relation, ((20, -1),), ("id",), True)

    def seconds(count: int) -> float:
        # Each row moves from one that was not read to one that was.
        numbers = np.arange(2 * count)
        keys = np.where(numbers % 2 == 0, 10**9 + numbers, -numbers)
        needs = np.where(numbers % 2 == 0, -1, numbers - 1)
        rows = KeyedRows([pa.array(keys).cast(pa.string())], np.zeros(2 * count, np.int64), needs, needs >= 0)
        sieve = Backfill(None, ("id",), KeyOrder(table, ()), ("0",), reread=False)  # type: ignore[arg-type]
        begun = time.perf_counter()
        held = sieve.rows_to_hold(rows)
        assert held.all()
        assert len(sieve.gaps) == count
        return time.perf_counter() - begun

    seconds(1_000)
    few = min(seconds(10_000) for _ in range(3))
    assert min(seconds(80_000) for _ in range(3)) < 8 * 3 * max(few, 0.01)


def test_a_pump_that_waits_for_a_locked_table_stops_at_once(
    grown: Source, store_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pump = create_evolving_pump(grown, store_url)
    with running(pump) as failures:
        await_queue(grown, store_url, failures)
        add_to_publication(grown)
        with hold_chunk(monkeypatch, 2) as (reached, released), psycopg.connect(grown.url) as other:
            wait_until(lambda: failures or reached.is_set(), 60, "the second chunk")
            other.execute(f"LOCK TABLE {grown.name}.added IN ACCESS EXCLUSIVE MODE".encode())
            released.set()
            wait_until(lambda: grown.rows("SELECT FROM pg_locks WHERE NOT granted"), 30, "the chunk waits")
            pump.stop()
            wait_until(lambda: not pump.status().active, 10, "the end of the pump")
    assert not failures


def test_a_table_without_columns_is_left_alone(
    grown: Source, store_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(following, "_CHECK_SECONDS", 0.1)
    plan, planned = planning.Planner.plan, 0

    def counted(self: planning.Planner) -> object:
        nonlocal planned
        planned += 1
        return plan(self)

    monkeypatch.setattr(planning.Planner, "plan", counted)
    grown.run(f"CREATE TABLE {grown.name}.none ()")
    with running(create_evolving_pump(grown, store_url)) as failures:
        await_queue(grown, store_url, failures)
        add_to_publication(grown, "none")
        grown.run(f"INSERT INTO {grown.name}.first VALUES (2)")
        wait_until(lambda: failures or len(ids(store_url, f"{grown.name}.first")) == 2, 60, "a row")
        time.sleep(1)
    assert not failures
    assert planned <= 2


GOOD = {"after": ["1"], "rows": 1, "expected": 2, "started_at": 3, "again": False, "gaps": []}


@pytest.mark.parametrize(
    "change",
    [
        {"after": "1"},
        {"after": [1]},
        {"after": ["\ud800"]},
        {"rows": -5},
        {"rows": float("inf")},
        {"expected": 10**400},
        {"started_at": True},
        {"gaps": [["1"], "2"]},
        {"gaps": None},
    ],
)
def test_a_backfill_in_the_store_that_is_not_as_written_is_refused(change: dict[str, object]) -> None:
    assert checked_backfills("p", {"backfills": {"t": GOOD}})["t"].after == ("1",)
    with pytest.raises(StoreError, match="the state of pump 'p'"):
        checked_backfills("p", {"backfills": {"t": GOOD | change}})


@pytest.mark.parametrize("in_parts", [False, True])
def test_changes_that_came_with_a_chunk_do_not_come_again_after_a_death(
    grown: Source, store_url: str, monkeypatch: pytest.MonkeyPatch, in_parts: bool
) -> None:
    monkeypatch.setattr(following, "_PART_BYTES", 1 << (12 if in_parts else 25))
    monkeypatch.setattr(appender, "_CONFIRM_INTERVAL_SECONDS", 1e9)
    name = f"{grown.name}.added"
    with running(create_evolving_pump(grown, store_url)) as failures:
        await_queue(grown, store_url, failures)
        with chunk_that_meets_commit(monkeypatch) as (is_held, meets_commit):
            add_to_publication(grown)
            wait_until(lambda: failures or is_held(), 60, "the first chunk")
            meets_commit.set()
            with grown.connection.transaction():
                grown.run(f"DELETE FROM {name} WHERE id <= 50")
                for _ in range(4):
                    grown.run(f"UPDATE {name} SET v = v + 1 WHERE id <= 150")
            wait_until(lambda: failures, 60, "the death of the pump")
    assert [type(each) for each in failures] == [SimulatedCrash]
    monkeypatch.undo()
    with running(create_evolving_pump(grown, store_url)) as failures:
        wait_until(lambda: failures or not list_backfills(store_url), 60, "all rows")
    assert not failures
    state: dict[object, Row] = {}
    apply(sort_by_commit(change_rows(store_url, name)), ("id",), ("id", "v"), state)
    expected = [{"id": n, "v": n + 4 * (n <= 150)} for n in range(51, 1001)]
    assert [state[key] for key in sorted(state)] == expected


@contextmanager
def chunk_that_meets_commit(
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[tuple[Callable[[], bool], threading.Event]]:
    """Hold up the first chunk, when it is read, until all or a part of a transaction has come.

    Yield whether it is held up and the log has come as far, and what to set for the transaction. The pump
    dies at its second append after the chunk continues.
    """
    chunks: list[Chunk] = []
    reached, meets_commit, released = 0, threading.Event(), threading.Event()
    read_chunk, read = backfills.read_chunk, SlotFollower.read

    def held(*given: object) -> Chunk:
        chunk = read_chunk(*given)
        chunks.append(chunk)
        if len(chunks) == 1:
            assert released.wait(60)
        return chunk

    def reading(follower: SlotFollower, wait: float) -> Step | None:
        nonlocal reached
        step = read(follower, wait)
        reached = follower.reached
        comes = meets_commit.is_set() and step is not None and any(step.place)
        if comes and not released.is_set():
            monkeypatch.setattr(appender, "append_commits", dying)
            released.set()
        return step

    dying = _dying_at(2)
    monkeypatch.setattr(backfills, "read_chunk", held)
    monkeypatch.setattr(SlotFollower, "read", reading)
    try:
        yield lambda: bool(chunks) and reached >= chunks[0].position, meets_commit
    finally:
        released.set()
