"""Helpers for tests of pumps that backfill tables which are added to their publication."""

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
from tests.support.pumped import change_rows, create_pump
from tests.support.waiting import wait_until


def await_queue(source: Source, store_url: str, failures: Sequence[BaseException]) -> None:
    def has_rows() -> bool:
        try:
            return bool(failures) or len(change_rows(store_url, f"{source.name}.first")) > 0
        except (StoreNotFoundError, QueueNotFoundError):
            return False

    wait_until(has_rows, 60, "the first queue")
    assert not failures


def create_evolving_pump(source: Source, store_url: str, **options: object) -> penstock.Pump:
    return create_pump(source, store_url, schema_changes="evolve", **options)


def add_to_publication(source: Source, *tables: str) -> None:
    for table in tables or ("added",):
        source.run(f"ALTER PUBLICATION {source.name} ADD TABLE {source.name}.{table}")


@contextmanager
def hold_chunk(
    monkeypatch: pytest.MonkeyPatch, chunk: int, *, after_read: bool = False
) -> Iterator[tuple[threading.Event, threading.Event]]:
    """Block a pump before or after it reads a chunk.

    Yield an event that is set when the pump is blocked, and the event that unblocks it.
    """
    reached, released = threading.Event(), threading.Event()
    read, count = backfills.read_chunk, 0

    def read_when_released(*args: object) -> object:
        nonlocal count
        count += 1
        is_blocked_chunk = count == chunk
        result = read(*args) if is_blocked_chunk and after_read else None
        if is_blocked_chunk:
            reached.set()
            assert released.wait(60)
        return read(*args) if result is None else result

    monkeypatch.setattr(backfills, "read_chunk", read_when_released)
    try:
        yield reached, released
    finally:
        released.set()


@contextmanager
def paused_backfill(
    source: Source, store_url: str, failures: Sequence[BaseException], monkeypatch: pytest.MonkeyPatch
) -> Iterator[None]:
    """Add the table to the publication of a running pump, and block its backfill at the fifth chunk."""
    await_queue(source, store_url, failures)
    add_to_publication(source)
    with hold_chunk(monkeypatch, 5) as (reached, _):
        wait_until(lambda: failures or reached.is_set(), 60, "the fifth chunk")
        yield


def count_appended_rows(source: Source, store_url: str) -> int:
    """Return the number of rows in the table's queue, including those of an unfinished commit."""
    try:
        with penstock.connect(store_url) as store:
            info = store.queue(f"{source.name}.added").info()
            return sum(partition.next_index for partition in info.partitions)
    except (StoreNotFoundError, QueueNotFoundError):
        return 0


def list_backfills(store_url: str) -> dict[str, dict[str, object]]:
    """Return the backfills in the states of a store's pumps."""
    with penstock.connect(store_url) as store:
        records = store.database.run(pumps.list_pumps, write=False)
    return {name: backfill for pump in records for name, backfill in pump.state.get("backfills", {}).items()}


def list_pumped_queues(store_url: str) -> list[str]:
    """Return the queues in the states of a store's pumps. A new table is added together with its backfill."""
    with penstock.connect(store_url) as store:
        records = store.database.run(pumps.list_pumps, write=False)
    return [queue for pump in records for queue in pump.state.get("queues", {}).values()]


def request_table_backfill(store_url: str, pump: str, table: str) -> None:
    with penstock.connect(store_url) as store:
        request_backfill(store, pump, table)
