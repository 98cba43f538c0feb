"""Pumps that backfill the tables that are added to their publication."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pytest

import penstock
from penstock.errors import QueueNotFoundError, StoreNotFoundError
from penstock.pump import backfills
from penstock.pump.backfill_records import request_backfill
from penstock.store.records import pumps
from tests.support.postgres_source import Source
from tests.support.pumped import change_rows, pump_of
from tests.support.waiting import wait_until


def await_queue(source: Source, store_url: str, failures: Sequence[BaseException]) -> None:
    def is_there() -> bool:
        try:
            return bool(failures) or len(change_rows(store_url, f"{source.name}.first")) > 0
        except (StoreNotFoundError, QueueNotFoundError):
            return False

    wait_until(is_there, 60, "the first queue")
    assert not failures


def evolving(source: Source, store_url: str, **options: object) -> penstock.Pump:
    return pump_of(source, store_url, schema_changes="evolve", **options)


def add(source: Source, *tables: str) -> None:
    for table in tables or ("added",):
        source.run(f"ALTER PUBLICATION {source.name} ADD TABLE {source.name}.{table}")


@contextmanager
def held_at(
    monkeypatch: pytest.MonkeyPatch, chunk: int, *, is_read: bool = False
) -> Iterator[tuple[threading.Event, threading.Event]]:
    """Hold up a chunk before or after it ``is_read``: events that it is next, and that it is let go."""
    reached, released = threading.Event(), threading.Event()
    read, count = backfills.read_chunk, 0

    def held(*given: object) -> object:
        nonlocal count
        count += 1
        mine = count == chunk
        result = read(*given) if mine and is_read else None
        if mine:
            reached.set()
            assert released.wait(60)
        return read(*given) if result is None else result

    monkeypatch.setattr(backfills, "read_chunk", held)
    try:
        yield reached, released
    finally:
        released.set()


@contextmanager
def amid_backfill(
    source: Source, store_url: str, failures: Sequence[BaseException], monkeypatch: pytest.MonkeyPatch
) -> Iterator[None]:
    """Add the table to the publication of a pump that runs, and hold it at the fifth chunk in this block."""
    await_queue(source, store_url, failures)
    add(source)
    with held_at(monkeypatch, 5) as (reached, _):
        wait_until(lambda: failures or reached.is_set(), 60, "the fifth chunk")
        yield


def appended(source: Source, store_url: str) -> int:
    """How many rows the queue of the table has, those of a commit that goes on as well."""
    try:
        with penstock.connect(store_url) as store:
            info = store.queue(f"{source.name}.added").info()
            return sum(partition.next_index for partition in info.partitions)
    except (StoreNotFoundError, QueueNotFoundError):
        return 0


def backfills_of(store_url: str) -> dict[str, dict[str, object]]:
    """The backfills in the states of a store's pumps."""
    with penstock.connect(store_url) as store:
        found = store.database.run(pumps.list_pumps, write=False)
    return {name: each for pump in found for name, each in pump.state.get("backfills", {}).items()}


def pumped_queues(store_url: str) -> list[str]:
    """The queues in the states of a store's pumps, which is where a new table is with its backfill."""
    with penstock.connect(store_url) as store:
        found = store.database.run(pumps.list_pumps, write=False)
    return [queue for pump in found for queue in pump.state.get("queues", {}).values()]


def ask(store_url: str, pump: str, table: str) -> None:
    with penstock.connect(store_url) as store:
        request_backfill(store, pump, table)
