"""Helpers for tests of queues."""

from __future__ import annotations

from typing import Any

import pyarrow as pa

import penstock
from tests.support.raw_sql import run_sql

SCHEMA = pa.schema([("n", pa.int64()), ("s", pa.string())])


def without_disk_sync(url: str) -> str:
    """Return the URL with commits that do not wait for the disk, and may be lost in a power failure."""
    return url + (
        "?synchronous=normal" if url.startswith("sqlite") else "&options=-c%20synchronous_commit%3Doff"
    )


def numbers(rows: pa.Table) -> list[Any]:
    return list(rows.column("n").to_pylist())


def rows(*values: int) -> list[dict[str, Any]]:
    return [{"n": value} for value in values]


def everything(queue: penstock.Queue) -> dict[int, list[Any]]:
    """Return all numbers in each partition."""
    return {
        part.partition: numbers(queue.read(part.partition, part.first_index)) if part.rows else []
        for part in queue.info().partitions
    }


def await_maintenance(store: penstock.Store) -> None:
    """Wait until requested maintenance has ended."""
    thread = store.maintainer.thread
    if thread is not None:
        thread.join(30)


def backdate(store: penstock.Store, seconds: int) -> None:
    """Make all rows look as if they had been appended earlier."""
    database = store.database
    for text in (
        (
            "update penstock.segment "
            "set first_timestamp = first_timestamp - {0}, last_timestamp = last_timestamp - {0}"
        ),
        "update penstock.partition set last_timestamp = last_timestamp - {0}, last_clock = last_clock - {0}",
    ):
        run_sql(database, text.format(seconds * 1_000_000))
