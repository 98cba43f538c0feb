"""Pumps that recover, and the tables that the rows of their queues then make."""

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
    ordered,
    pump_of,
    running,
    source_tables,
)
from tests.support.waiting import wait_until


def fold(rows: Sequence[Row], key: Sequence[str], columns: Sequence[str]) -> dict[object, Row]:
    """What change rows make of a table if updates also insert, and deletes may be of rows that are gone."""
    state: dict[object, Row] = {}
    gone: Row = {}
    for row in rows:
        place = tuple(row[name] for name in key)
        if row["_change_type"] == "delete":
            gone = state.pop(place, {})
        elif row["_change_type"] != "update_preimage":
            unknown, old = row.get("_unchanged") or (), state.get(place, gone)
            state[place] = {name: old.get(name) if name in unknown else row[name] for name in columns}
    return state


def queue_rows(store_url: str, queue: str) -> list[Row]:
    """The rows of a queue in their order, none of which is there twice, or in the range of another commit."""
    feed = QueueFeed(queue, store_url).open()
    newest = feed.newest(-1)
    commits = {each.version: each.rows for each in feed.commits(-1, newest) if each.rows}
    rows = ordered(change_rows(store_url, queue))
    assert Counter(row["_commit_version"] for row in rows if row["_commit_version"] <= newest) == commits
    places = {(row["_commit_version"], row["_commit_sequence"]) for row in rows}
    assert len(places) == len(rows)
    return rows


def recovered_tables(store_url: str, source: Source) -> dict[str, dict[object, Row]]:
    """What the queues make."""
    return {
        name: fold(queue_rows(store_url, f"{source.name}.{name}"), KEYS[name], COLUMNS[name])
        for name in TABLES
    }


def the_pump(store_url: str) -> PumpRecord:
    with penstock.connect(store_url) as store:
        (record,) = store.database.run(pumps.list_pumps, write=False)
    return record


def is_recovered(store_url: str) -> bool:
    state = the_pump(store_url).state
    return not (state.get("recoveries") or state.get("recovery_request") or state.get("backfills"))


def await_recovered(store_url: str, source: Source, failures: Sequence[BaseException]) -> None:
    """Wait until a recovery is complete and the queues have what the tables have, or the pump has failed."""
    wait_until(
        lambda: (
            failures
            or (is_recovered(store_url) and recovered_tables(store_url, source) == source_tables(source))
        ),
        60,
        "the queues to have what the tables have",
        interval=0.25,
    )
    assert not failures


def recover(store_url: str, *, force: bool = False, server: str | None = None) -> None:
    """Ask the pump of a store to recover."""
    with penstock.connect(store_url) as store:
        request_recovery(store, the_pump(store_url).name, force=force, server=server)


def system_identifier(source: Source) -> str:
    ((found,),) = source.rows("SELECT system_identifier FROM pg_control_system()")
    return str(found)


def failure_of(pump: penstock.Pump) -> PenstockError:
    """The error with which a pump ends."""
    with running(pump) as failures:
        wait_until(lambda: failures, 60, "the end of the pump")
    (failure,) = failures
    assert isinstance(failure, PenstockError)
    return failure


def condition_at_start(pump: penstock.Pump) -> str:
    return condition_of(failure_of(pump))


@contextmanager
def changing(url: str, name: str) -> Iterator[Callable[[], int]]:
    """Change the tables from another session meanwhile: how often that was done."""
    end, count = threading.Event(), 0

    def write() -> None:
        nonlocal count
        chance = random.Random(7)
        with psycopg.connect(url, autocommit=True) as connection:
            source = Source(url, name, connection)
            while not end.is_set():
                with suppress(psycopg.errors.UniqueViolation):
                    change(source, chance)
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
    """Change rows of all kinds, which no pump reads."""
    chance = random.Random(seed)
    for _ in range(40):
        change(source, chance)
    orders, stock = f"{source.name}.orders", f"{source.name}.stock"
    source.run(
        f"DELETE FROM {orders} WHERE id % 5 = 0",
        f"UPDATE {orders} SET id = id + {seed}00000 WHERE id % 7 = 1 AND id < 10000",
        f"INSERT INTO {orders} SELECT n, 'gap', n FROM generate_series({seed}80001, {seed}80050) AS n",
        f"UPDATE {stock} SET item = item || ' {seed}' WHERE item LIKE 'item 3%'",
        f"DELETE FROM {stock} WHERE item = 'item 4'",
    )


def states(store_url: str) -> dict[str, Any]:
    return dict(the_pump(store_url).state)


@contextmanager
def reached(url: str, source: Source) -> Iterator[Source]:
    """The same source, on the server that is at its URL now."""
    with psycopg.connect(url, autocommit=True) as connection:
        yield Source(url, source.name, connection)


def pumped(source: Source, store_url: str, **options: object) -> None:
    """Run a pump that copies the tables and some changes, and ends."""
    chance = random.Random(1)
    with running(pump_of(source, store_url, **options)) as failures:
        await_equal(store_url, source, failures)
        for _ in range(20):
            change(source, chance)
        await_equal(store_url, source, failures)


@contextmanager
def recovering(source: Source, store_url: str, **options: object) -> Iterator[None]:
    """Recover while the tables change; in the end the queues have what the tables have."""
    recover(store_url, server=system_identifier(source))
    with running(pump_of(source, store_url, **options)) as failures:
        with changing(source.url, source.name) as count:
            wait_until(lambda: failures or count() > 50, 60, "changes")
            yield
            _await_done(store_url, failures)
        assert not failures
        await_recovered(store_url, source, failures)


def _await_done(store_url: str, failures: list[BaseException]) -> None:
    wait_until(
        lambda: failures or not states(store_url).get("recoveries", {"?": 1}), 60, "the end of the recovery"
    )


def shift_versions(store_url: str, offset: int) -> None:
    """Have later versions of a stopped pump be higher by an offset, as after a recovery on another server."""

    def shift(tx: Transaction) -> None:
        (record,) = pumps.list_pumps(tx)
        after = replace(record.position, version=record.position.version + offset)
        assert pumps.move_pump(tx, record.name, record.owner, record.position, after)
        state = record.state | {"offset": offset}
        pumps.set_pump_state(tx, record.name, record.owner, json.dumps(state))

    with penstock.connect(store_url) as store:
        store.database.run(shift)
