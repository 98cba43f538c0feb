"""The ledger (idempotency table): records what each app, micro-batch and task has committed to each sink.

It makes the replay of a committed micro-batch a no-op.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from penstock.store.database import Database, Row, Transaction
from penstock.store.records.catalog import QUEUE_SINK, list_queues, queue_sink

WHOLE_BATCH = -1
KEPT_BATCHES = 1000
"""The minimum number of micro-batches that the ledger keeps for each sink and app. A checkpoint keeps 100 by
default.
"""
PRUNE_EVERY = 16
"""Every 16th micro-batch deletes old entries."""
IDLE_MICROSECONDS = 30 * 86_400_000_000
"""If an app has not committed for this long, all but its newest entries are deleted; in microseconds."""
IDLE_KEPT_BATCHES = 10
"""The number of micro-batches before the newest one whose entries then stay."""
CLEANUP_LIMIT = 100
"""The most dropped sinks, idle apps and apps with marks that one cleanup handles, each."""


@dataclass(frozen=True)
class LedgerEntry:
    ranges: str
    rows: int
    batch_id: int
    logged: str | None = None
    """The offset that the query's checkpoint logs for the micro-batch. The ledger keeps it at least for the
    two newest micro-batches.
    """


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


def insert_entry(
    tx: Transaction, key: LedgerKey, ranges: str, rows: int, logged: str | None = None
) -> LedgerEntry | None:
    """Insert an entry and return None, or return the existing entry."""
    if tx.run(
        "insert_ledger", ranges=ranges, row_count=rows, logged=logged, now=tx.write_time(), **key.fields()
    ):
        return None
    return find_entry(tx, key)


def find_entry(tx: Transaction, key: LedgerKey) -> LedgerEntry | None:
    row = tx.one("find_ledger", **key.fields())
    return _entry(row)


def newest_entry(tx: Transaction, sink: str, app_id: str, before: int = 2**62) -> LedgerEntry | None:
    """Return the entry of the newest whole micro-batch of a sink and app whose number is below ``before``."""
    row = tx.one("newest_ledger", sink=sink, app_id=app_id, before=before)
    return _entry(row)


def _entry(row: Row | None) -> LedgerEntry | None:
    return None if row is None else LedgerEntry(row.ranges, row.row_count, row.batch_id, row.logged)


@dataclass(frozen=True)
class AdjacentEntries:
    """The ledger entries of a micro-batch and of the one before it."""

    previous: LedgerEntry | None
    tasks: Mapping[int, int]
    """The number of rows of each task of the micro-batch that has its own entry."""
    empty: bool


def adjacent_entries(tx: Transaction, key: LedgerKey) -> AdjacentEntries:
    rows = tx.all("ledger_around", sink=key.sink, app_id=key.app_id, batch_id=key.batch_id)
    before = (row for row in rows if row.task == WHOLE_BATCH and row.batch_id < key.batch_id)
    tasks = {row.task: row.row_count for row in rows if row.task >= 0 and row.batch_id == key.batch_id}
    return AdjacentEntries(_entry(next(before, None)), tasks, empty=not rows)


def task_input(tx: Transaction, key: LedgerKey) -> str | None:
    """Return the input that tasks of a micro-batch have recorded in their own entries; None if there are no
    such entries.
    """
    row = tx.one("first_ledger_task", sink=key.sink, app_id=key.app_id, batch_id=key.batch_id)
    return None if row is None else str(row.ranges)


def newest_batch_if_rewound(tx: Transaction, key: LedgerKey) -> int | None:
    """Return the newest micro-batch of the sink and app if all other entries are newer than this micro-batch;
    otherwise None. In the first case the ledger may have deleted an earlier entry of this micro-batch.
    """
    row = tx.one("newest_batch", **key.fields())
    return None if row is None else int(row.batch_id)


def prune(tx: Transaction, key: LedgerKey) -> None:
    """With every 16th micro-batch, delete old entries, and the logged offsets of all but the two newest."""
    if key.batch_id % PRUNE_EVERY:
        return
    tx.run("prune_ledger", sink=key.sink, app_id=key.app_id, batch_id=key.batch_id - KEPT_BATCHES)
    last = key.batch_id - 2
    tx.run("forget_logged", sink=key.sink, app_id=key.app_id, first=last - PRUNE_EVERY, last=last)


def clean_up(database: Database) -> int:
    """Delete entries and marks that no query can need; return the number of sinks and apps cleaned up.

    - Entries of dropped queues. A new queue with the same name has another generation, so it is a different
      sink.
    - Older entries of an app that has not committed for a long time. If the app starts again, it repeats its
      newest micro-batch, and earlier ones are refused.
    - Marks of apps without entries. A mark stands for a consumer of another store, and prevents repeated
      rows. A mark is written together with an entry, and an app's newest entry is kept as long as the sink
      exists. So marks without entries belong to dropped queues.
    """
    sinks, idle, orphans = database.run(_deletable_entries, write=False)
    for sink in sinks:
        _delete(database, "delete_sink_ledger", sink=sink)
    for sink, app_id, batch_id in idle:
        _delete(database, "prune_ledger", sink=sink, app_id=app_id, batch_id=batch_id)
    for app_id in orphans:
        _delete(database, "delete_orphaned_marks", app_id=app_id)
        _delete(database, "delete_orphaned_sources", app_id=app_id)
    return len(sinks) + len(idle) + len(orphans)


def _delete(database: Database, statement: str, **parameters: str | int) -> None:
    database.run(lambda tx: tx.run(statement, **parameters), idempotent=True)


def _deletable_entries(tx: Transaction) -> tuple[list[str], list[tuple[str, str, int]], list[str]]:
    """Return three lists: dropped sinks, idle apps each with the first micro-batch to keep, and apps whose
    marks may be deleted.
    """
    now = tx.now()
    existing = {queue_sink(queue) for queue in list_queues(tx)}
    sinks = [row.sink for row in tx.all("ledger_sinks") if row.sink.startswith(QUEUE_SINK)]
    idle = tx.all(
        "idle_apps", before=now - IDLE_MICROSECONDS, now=now, keep=IDLE_KEPT_BATCHES, most=CLEANUP_LIMIT
    )
    orphans = tx.all("orphaned_mark_apps", most=CLEANUP_LIMIT)
    return (
        [sink for sink in sinks if sink not in existing][:CLEANUP_LIMIT],
        [(row.sink, row.app_id, row.newest - IDLE_KEPT_BATCHES) for row in idle],
        [row.app_id for row in orphans],
    )
