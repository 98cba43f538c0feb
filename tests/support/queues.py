"""What the queue's tests share."""

from __future__ import annotations

from typing import Any

import pyarrow as pa

import penstock
from tests.support.raw_sql import run_sql

SCHEMA = pa.schema([("n", pa.int64()), ("s", pa.string())])


def hurried(url: str) -> str:
    """The same store, for what does not have to survive a power cut: nothing waits for the disk."""
    return url + (
        "?synchronous=normal" if url.startswith("sqlite") else "&options=-c%20synchronous_commit%3Doff"
    )


def numbers(rows: pa.Table) -> list[Any]:
    return list(rows.column("n").to_pylist())


def rows(*values: int) -> list[dict[str, Any]]:
    return [{"n": value} for value in values]


def everything(queue: penstock.Queue) -> dict[int, list[Any]]:
    """The numbers of each partition, from its first row on."""
    return {
        part.partition: numbers(queue.read(part.partition, part.first_index)) if part.rows else []
        for part in queue.info().partitions
    }


def settle(store: penstock.Store) -> None:
    """Let the maintenance that was asked for end."""
    thread = store.maintainer.thread
    if thread is not None:
        thread.join(30)


def backdate(store: penstock.Store, seconds: int) -> None:
    """As if everything so far had been appended earlier."""
    database = store.database
    for text in (
        (
            "update penstock.segment "
            "set first_timestamp = first_timestamp - {0}, last_timestamp = last_timestamp - {0}"
        ),
        "update penstock.partition set last_timestamp = last_timestamp - {0}, last_clock = last_clock - {0}",
    ):
        run_sql(database, text.format(seconds * 1_000_000))
