"""What the queue's tests share."""

from __future__ import annotations

from typing import Any

import pyarrow as pa

import penstock

SCHEMA = pa.schema([("n", pa.int64()), ("s", pa.string())])


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
    """Let the upkeep that was asked for end."""
    thread = store._maintainer._thread
    if thread is not None:
        thread.join(30)
