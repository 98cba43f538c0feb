"""The ledger: what each (sink, app, micro-batch, task) has committed, so that a replay is a no-op."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol

from penstock.store.database import Transaction

WHOLE_BATCH = -1
KEEP = 1000
"""Micro-batches of a sink and app that the ledger remembers; far more than any checkpoint does by default (100)."""

QUEUE_SINK = "queue:"


class QueueSink(Protocol):
    """What tells a queue from others of its name."""

    @property
    def name(self) -> str: ...

    @property
    def generation(self) -> int: ...


def queue_sink(queue: QueueSink) -> str:
    """Return the name of a queue in the ledger; a queue that is recreated is another sink."""
    return f"{QUEUE_SINK}{queue.name}:{queue.generation}"


@dataclass(frozen=True)
class LedgerEntry:
    ranges: str
    rows: int
    batch_id: int
    logged: str | None = None
    """The offset that the query's checkpoint logs for it; of the newest micro-batch alone."""


@dataclass(frozen=True)
class LedgerKey:
    sink: str
    app_id: str
    batch_id: int
    task: int = WHOLE_BATCH

    @property
    def whole(self) -> LedgerKey:
        """The key of the whole micro-batch."""
        return replace(self, task=WHOLE_BATCH)

    @property
    def before(self) -> LedgerKey:
        """The key of the whole micro-batch before this one."""
        return replace(self, task=WHOLE_BATCH, batch_id=self.batch_id - 1)

    def fields(self) -> dict[str, str | int]:
        return {"sink": self.sink, "app_id": self.app_id, "batch_id": self.batch_id, "task": self.task}


def enter(
    tx: Transaction, key: LedgerKey, ranges: str, rows: int, logged: str | None = None
) -> LedgerEntry | None:
    """Write the entry; return the one that was there before, if there was one."""
    if tx.run("insert_ledger", ranges=ranges, row_count=rows, logged=logged, now=tx.now(), **key.fields()):
        return None
    return find(tx, key)


def find(tx: Transaction, key: LedgerKey) -> LedgerEntry | None:
    row = tx.one("find_ledger", **key.fields())
    return None if row is None else LedgerEntry(row.ranges, row.row_count, row.batch_id, row.logged)


def newest(tx: Transaction, sink: str, app_id: str, before: int = 2**62) -> LedgerEntry | None:
    """The newest whole micro-batch of a sink and app, of those with a lower number than ``before``."""
    row = tx.one("newest_ledger", sink=sink, app_id=app_id, before=before)
    return None if row is None else LedgerEntry(row.ranges, row.row_count, row.batch_id, row.logged)


def tasks(tx: Transaction, key: LedgerKey) -> dict[int, int]:
    """The rows of each task of a micro-batch that has an entry of its own."""
    rows = tx.all("ledger_tasks", sink=key.sink, app_id=key.app_id, batch_id=key.batch_id)
    return {row.task: row.row_count for row in rows}


def task_input(tx: Transaction, key: LedgerKey) -> str | None:
    """What those tasks of a micro-batch that have an entry of their own have written of; None when none has."""
    row = tx.one("first_ledger_task", sink=key.sink, app_id=key.app_id, batch_id=key.batch_id)
    return None if row is None else str(row.ranges)


def rewound(tx: Transaction, key: LedgerKey) -> int | None:
    """The newest micro-batch of the sink and app, where all that the ledger remembers is newer: it may have forgotten this one."""
    row = tx.one("newest_batch", sink=key.sink, app_id=key.app_id, batch_id=key.batch_id)
    return None if row is None else int(row.batch_id)


def prune(tx: Transaction, key: LedgerKey) -> None:
    tx.run("prune_ledger", sink=key.sink, app_id=key.app_id, batch_id=key.batch_id - KEEP)
