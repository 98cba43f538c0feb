"""Helpers for tests of pumps that recover, and the tables that result from their queues."""

from __future__ import annotations

import json
import random
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any

import psycopg

import penstock
from penstock.errors import PenstockError, condition_of
from penstock.feeds.queue_feed import QueueFeed
from penstock.pump.recovery_records import request_recovery
from penstock.store.database import Transaction
from penstock.store.records import pumps
from penstock.store.records.pumps import PumpRecord
from tests.support.postgres_source import Row, Source
from tests.support.pumped import (
    COLUMNS,
    KEYS,
    TABLES,
    await_equal,
    change,
    change_rows,
    create_pump,
    running,
    sort_by_commit,
    source_tables,
)
from tests.support.waiting import wait_until


def fold(rows: Sequence[Row], key: Sequence[str], columns: Sequence[str]) -> dict[object, Row]:
    """Apply change rows to a table, where updates may insert rows and deletes may be of missing rows."""
    state: dict[object, Row] = {}
    deleted: Row = {}
    for row in rows:
        row_key = tuple(row[name] for name in key)
        if row["_change_type"] == "delete":
            deleted = state.pop(row_key, {})
        elif row["_change_type"] != "update_preimage":
            unchanged, old = row.get("_unchanged") or (), state.get(row_key, deleted)
            state[row_key] = {name: old.get(name) if name in unchanged else row[name] for name in columns}
    return state


def queue_rows(store_url: str, queue: str) -> list[Row]:
    """Return the rows of a queue in order, and check that each is there once and in its commit."""
    feed = QueueFeed(queue, store_url).open()
    newest = feed.newest(-1)
    commits = {commit.version: commit.rows for commit in feed.commits(-1, newest) if commit.rows}
    rows = sort_by_commit(change_rows(store_url, queue))
    assert Counter(row["_commit_version"] for row in rows if row["_commit_version"] <= newest) == commits
    positions = {(row["_commit_version"], row["_commit_sequence"]) for row in rows}
    assert len(positions) == len(rows)
    return rows


def recovered_tables(store_url: str, source: Source) -> dict[str, dict[object, Row]]:
    """Return the tables that result from the queues."""
    return {
        name: fold(queue_rows(store_url, f"{source.name}.{name}"), KEYS[name], COLUMNS[name])
        for name in TABLES
    }


def read_pump(store_url: str) -> PumpRecord:
    with penstock.connect(store_url) as store:
        (record,) = store.database.run(pumps.list_pumps, write=False)
    return record


def is_recovered(store_url: str) -> bool:
    state = read_pump(store_url).state
    return not (state.get("recoveries") or state.get("recovery_request") or state.get("backfills"))


def await_recovered(store_url: str, source: Source, failures: Sequence[BaseException]) -> None:
    """Wait until a recovery is complete and the queues have the rows of the tables, or the pump fails."""
    wait_until(
        lambda: (
            failures
            or (is_recovered(store_url) and recovered_tables(store_url, source) == source_tables(source))
        ),
        60,
        "the queues have the rows of the tables",
        interval=0.25,
    )
    assert not failures


def recover(store_url: str, *, force: bool = False, server: str | None = None) -> None:
    """Request a recovery of a store's pump."""
    with penstock.connect(store_url) as store:
        request_recovery(store, read_pump(store_url).name, force=force, server=server)


def system_identifier(source: Source) -> str:
    ((identifier,),) = source.rows("SELECT system_identifier FROM pg_control_system()")
    return str(identifier)


def failure_of(pump: penstock.Pump) -> PenstockError:
    """Run a pump until it fails, and return its error."""
    with running(pump) as failures:
        wait_until(lambda: failures, 60, "the end of the pump")
    (failure,) = failures
    assert isinstance(failure, PenstockError)
    return failure


def condition_at_start(pump: penstock.Pump) -> str:
    return condition_of(failure_of(pump))


@contextmanager
def changes_in_background(url: str, name: str) -> Iterator[Callable[[], int]]:
    """Change the tables from another session in the background. Yield a function that counts the changes."""
    end, count = threading.Event(), 0

    def write() -> None:
        nonlocal count
        rng = random.Random(7)
        with psycopg.connect(url, autocommit=True) as connection:
            source = Source(url, name, connection)
            while not end.is_set():
                with suppress(psycopg.errors.UniqueViolation):
                    change(source, rng)
                count += 1
                end.wait(0.005)

    thread = threading.Thread(target=write)
    thread.start()
    try:
        yield lambda: count
    finally:
        end.set()
        thread.join(60)


def change_in_the_gap(source: Source, seed: int = 5) -> None:
    """Make changes of all kinds while no pump reads them."""
    rng = random.Random(seed)
    for _ in range(40):
        change(source, rng)
    orders, stock = f"{source.name}.orders", f"{source.name}.stock"
    source.run(
        f"DELETE FROM {orders} WHERE id % 5 = 0",
        f"UPDATE {orders} SET id = id + {seed}00000 WHERE id % 7 = 1 AND id < 10000",
        f"INSERT INTO {orders} SELECT n, 'gap', n FROM generate_series({seed}80001, {seed}80050) AS n",
        f"UPDATE {stock} SET item = item || ' {seed}' WHERE item LIKE 'item 3%'",
        f"DELETE FROM {stock} WHERE item = 'item 4'",
    )


def read_pump_state(store_url: str) -> dict[str, Any]:
    return dict(read_pump(store_url).state)


@contextmanager
def reconnect(url: str, source: Source) -> Iterator[Source]:
    """Connect the source to the server that now has its URL."""
    with psycopg.connect(url, autocommit=True) as connection:
        yield Source(url, source.name, connection)


def run_pump_to_end(source: Source, store_url: str, **options: object) -> None:
    """Run a pump that copies the tables and some changes, and stop it."""
    rng = random.Random(1)
    with running(create_pump(source, store_url, **options)) as failures:
        await_equal(store_url, source, failures)
        for _ in range(20):
            change(source, rng)
        await_equal(store_url, source, failures)


@contextmanager
def recovery_during_changes(source: Source, store_url: str, **options: object) -> Iterator[None]:
    """Recover while the tables change, and wait until the queues have the rows of the tables."""
    recover(store_url, server=system_identifier(source))
    with running(create_pump(source, store_url, **options)) as failures:
        with changes_in_background(source.url, source.name) as count:
            wait_until(lambda: failures or count() > 50, 60, "changes")
            yield
            _await_recovery(store_url, failures)
        assert not failures
        await_recovered(store_url, source, failures)


def _await_recovery(store_url: str, failures: list[BaseException]) -> None:
    wait_until(
        lambda: failures or not read_pump_state(store_url).get("recoveries", {"?": 1}),
        60,
        "the end of the recovery",
    )


def shift_versions(store_url: str, offset: int) -> None:
    """Increase later versions of a stopped pump by an offset, as a recovery on another server does."""

    def shift(tx: Transaction) -> None:
        (record,) = pumps.list_pumps(tx)
        after = replace(record.position, version=record.position.version + offset)
        assert pumps.move_pump(tx, record.name, record.owner, record.position, after)
        state = record.state | {"offset": offset}
        pumps.set_pump_state(tx, record.name, record.owner, json.dumps(state))

    with penstock.connect(store_url) as store:
        store.database.run(shift)
