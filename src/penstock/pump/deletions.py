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
from penstock.pump.recovery_records import note_recovered
from penstock.queue.store import Store

log = logging.getLogger("penstock.pump")

_MOST_KEYS = 10_000


@dataclass(frozen=True)
class DeletionStep:
    """Deletes of rows as a step of a pump."""

    step: Step
    change: Callable[[Json], None] | None
    """Records in the pump's state that the table is recovered; None if more deletes may follow."""


class _Search:
    """The search for the deleted rows of one table, which reads its queue in a thread."""

    def __init__(self, changes: LastChanges) -> None:
        self.changes = changes
        self.found = 0
        """How many rows have been deleted."""
        self.mark: tuple[int, int] | None = None
        """A position in the log, and the server's time then."""
        self._closing = threading.Event()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="pump deletions")
        self._reading: Future[None] = self._thread.submit(changes.read_on, self._closing.is_set)

    def is_ready(self) -> bool:
        """Whether almost the whole queue has been read."""
        if not self._reading.done():
            return False
        self._reading.result()
        return True

    def close(self) -> None:
        self._closing.set()
        self._thread.shutdown()
        self.changes.close()


class Deletions:
    """The deletes of a recovered pump, in one session with the server."""

    def __init__(self, feed: OpenPostgresFeed, plan: PumpPlan, store: Store, name: str) -> None:
        self._feed, self._plan, self._store, self._name = feed, plan, store, name
        self.tables = [table for table, recovery in plan.recoveries.items() if recovery.is_read]
        """Tables whose rows have all been read again, and whose recovery is not complete."""
        self._search: _Search | None = None
        self._connection: Connection | None = None

    def begin(self, table: str) -> None:
        """Begin with a table of which all rows have been read, if it is being recovered."""
        if table in self._plan.recoveries:
            self.tables.append(table)

    def close(self) -> None:
        if self._search is not None:
            self._search.close()
        if self._connection is not None:
            self._connection.close()

    def step(self, readers: TableReaders, reached: int, version: int) -> DeletionStep | None:
        """Return the next deletes, once everything in the log before their position has been appended.

        Parameters
        ----------
        readers
            Those of the pump's tables.
        reached
            The position in the log up to which everything has been appended.
        version
            The last commit.
        """
        if not self.tables:
            return None
        table = self.tables[0]
        if self._search is None:
            planned = readers.tables.by_name[table]
            queue = self._store.queue(self._plan.queues[table])
            self._search = _Search(LastChanges(queue, planned.key))
        search = self._search
        if not search.is_ready():
            return None
        if search.mark is None:
            search.mark = self._mark()
        position, timestamp = search.mark
        if reached < position:
            return None
        # Another commit may begin at the position, as for chunks of a backfill.
        return self._deletes(search, readers, table, max(position - 1, version + 1), timestamp)

    def _mark(self) -> tuple[int, int]:
        server = self._feed.server
        with server.translating():
            if self._connection is None:
                self._connection = server.connect()
                run(self._connection, "chunk_session")
            _, timestamp = visible_now(self._connection)
            (mark,) = run(self._connection, "mark")
        return int(mark.position), timestamp

    def _deletes(
        self, search: _Search, readers: TableReaders, table: str, version: int, timestamp: int
    ) -> DeletionStep:
        # Nothing is appended meanwhile, so no key has a later change.
        search.changes.read_on()
        search.mark = None
        keys = search.changes.live(self._plan.recoveries[table].upto, _MOST_KEYS)
        count = len(keys[0])
        if not count:
            self._end(search, table)
            return DeletionStep(Step(PlaceInLog(version)), lambda state: note_recovered(state, table))
        search.found += count
        plan = tables_by_queue(readers.tables, together=False)[table]
        rows = as_commit(_as_deletes(plan, keys), version, timestamp, 0)
        return DeletionStep(Step(PlaceInLog(version), {table: [rows]}), None)

    def _end(self, search: _Search, table: str) -> None:
        self.tables.remove(table)
        self._search = None
        search.close()
        log.info(
            "pump %s has recovered %s; %d rows were deleted meanwhile",
            self._name,
            table,
            search.found,
            extra={"action": "table_recovered", "pump": self._name, "table": table, "rows": search.found},
        )
        if search.changes.is_whole:
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


def _as_deletes(plan: Tables, keys: list[pa.Array]) -> pa.RecordBatch:
    """Return deletes that have only the keys, as the log has them."""
    (table,) = plan.tables
    count, schema = len(keys[0]), plan.schema()
    known = dict(zip(table.key, keys, strict=True)) | {CHANGE_TYPE: pa.repeat(DELETE, count)}
    columns = [known.get(field.name, pa.nulls(count, field.type)) for field in schema]
    return pa.RecordBatch.from_arrays(columns, schema=schema)
