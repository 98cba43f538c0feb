"""Deletes, in the queues of a recovered pump, of rows that were deleted while the pump was not reading.

Once all rows of a table have been read again, each row that is there has a change from after the beginning of
the recovery in the queue. So a key whose last change is an earlier one, and no delete, was deleted meanwhile.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import pyarrow as pa

from penstock.feeds.contract import CHANGE_TYPE, DELETE
from penstock.feeds.postgres.backfill import as_commit
from penstock.feeds.postgres.catalog import Tables
from penstock.feeds.postgres.feed import OpenPostgresFeed
from penstock.feeds.postgres.following import PlaceInLog, Step
from penstock.feeds.postgres.server import Connection, run
from penstock.feeds.postgres.table_chunks import visible_now
from penstock.feeds.postgres.table_readers import TableReaders, tables_by_queue
from penstock.json_text import Json
from penstock.pump.last_changes import LastChanges
from penstock.pump.plan import PumpPlan
from penstock.pump.recovery_records import mark_as_recovered
from penstock.queue.store import Store

log = logging.getLogger("penstock.pump")

_MAX_KEYS = 10_000
"""The maximum number of deletes in a step."""


@dataclass(frozen=True)
class DeletionStep:
    """Deletes that are ready to be appended."""

    step: Step
    change: Callable[[Json], None] | None
    """Marks the table as recovered in the pump's state; None if more deletes may follow."""


class _DeletedRowSearch:
    """Search for the deleted rows of a table, which reads the table's queue in a thread."""

    def __init__(self, changes: LastChanges) -> None:
        self.changes = changes
        self.deleted = 0
        """The number of deletes so far."""
        self.log_mark: tuple[int, int] | None = None
        """A log position, and the server's time at this position."""
        self._closing = threading.Event()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="pump deletions")
        self._read_future: Future[None] = self._thread.submit(changes.read_new_rows, self._closing.is_set)

    def is_ready(self) -> bool:
        """Return whether the queue has been read almost to its end."""
        if not self._read_future.done():
            return False
        self._read_future.result()
        return True

    def close(self) -> None:
        self._closing.set()
        self._thread.shutdown()
        self.changes.close()


class Deletions:
    """Deletes after a recovery, during one session with the server."""

    def __init__(self, feed: OpenPostgresFeed, plan: PumpPlan, store: Store, name: str) -> None:
        self._feed, self._plan, self._store, self._name = feed, plan, store, name
        self.tables = [table for table, recovery in plan.recoveries.items() if recovery.is_read]
        """Tables that have been reread completely, and whose deletes are not complete."""
        self._current: _DeletedRowSearch | None = None
        self._connection: Connection | None = None

    def add(self, table: str) -> None:
        """Add a table whose backfill is complete, if it is being recovered."""
        if table in self._plan.recoveries:
            self.tables.append(table)

    def close(self) -> None:
        if self._current is not None:
            self._current.close()
        if self._connection is not None:
            self._connection.close()

    def step(self, readers: TableReaders, reached: int, version: int) -> DeletionStep | None:
        """Return the next deletes if everything in the log before their position has been appended.

        Parameters
        ----------
        readers
            The readers of the pump's tables.
        reached
            The log position up to which everything has been appended.
        version
            The version of the last commit.
        """
        if not self.tables:
            return None
        table = self.tables[0]
        if self._current is None:
            planned = readers.tables.by_name[table]
            queue = self._store.queue(self._plan.queues[table])
            self._current = _DeletedRowSearch(LastChanges(queue, planned.key))
        search = self._current
        if not search.is_ready():
            return None
        if search.log_mark is None:
            search.log_mark = self._write_mark()
        position, timestamp = search.log_mark
        if reached < position:
            return None
        # As with chunks of a backfill, another commit may begin at the position.
        return self._deletes(search, readers, table, max(position - 1, version + 1), timestamp)

    def _write_mark(self) -> tuple[int, int]:
        server = self._feed.server
        with server.translating():
            if self._connection is None:
                self._connection = server.connect()
                run(self._connection, "chunk_session")
            _, timestamp = visible_now(self._connection)
            (log_mark,) = run(self._connection, "mark")
        return int(log_mark.position), timestamp

    def _deletes(
        self, search: _DeletedRowSearch, readers: TableReaders, table: str, version: int, timestamp: int
    ) -> DeletionStep:
        # Nothing is appended at the same time, so no key gets a later change.
        search.changes.read_new_rows()
        search.log_mark = None
        keys = search.changes.live_keys(self._plan.recoveries[table].upto, _MAX_KEYS)
        count = len(keys[0])
        if not count:
            self._finish(search, table)
            return DeletionStep(Step(PlaceInLog(version)), lambda state: mark_as_recovered(state, table))
        search.deleted += count
        plan = tables_by_queue(readers.tables, together=False)[table]
        rows = as_commit(_delete_batch(plan, keys), version, timestamp, 0)
        return DeletionStep(Step(PlaceInLog(version), {table: [rows]}), None)

    def _finish(self, search: _DeletedRowSearch, table: str) -> None:
        self.tables.remove(table)
        self._current = None
        search.close()
        log.info(
            "pump %s has recovered %s; %d rows were deleted meanwhile",
            self._name,
            table,
            search.deleted,
            extra={"action": "table_recovered", "pump": self._name, "table": table, "rows": search.deleted},
        )
        if search.changes.is_complete:
            return
        log.warning(
            "queue %s no longer has its first rows, so pump %s cannot find all rows that were deleted from "
            "%s: remove them from copies with `penstock reconcile --repair`",
            self._plan.queues[table],
            self._name,
            table,
            extra={
                "action": "deletes_unknown",
                "pump": self._name,
                "table": table,
                "queue": self._plan.queues[table],
            },
        )


def _delete_batch(plan: Tables, keys: list[pa.Array]) -> pa.RecordBatch:
    """Return deletes with values only in the key columns, as in the log."""
    (table,) = plan.tables
    count, schema = len(keys[0]), plan.schema()
    values = dict(zip(table.key, keys, strict=True)) | {CHANGE_TYPE: pa.repeat(DELETE, count)}
    columns = [values.get(field.name, pa.nulls(count, field.type)) for field in schema]
    return pa.RecordBatch.from_arrays(columns, schema=schema)
