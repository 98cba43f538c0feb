"""Backfills of a pump: reading the existing rows of tables in chunks while the pump follows the log."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent import futures
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from penstock.errors import FeedUnavailableError, condition_of
from penstock.feeds.postgres import PostgresFeed
from penstock.feeds.postgres.backfill import Backfill
from penstock.feeds.postgres.catalog import Tables
from penstock.feeds.postgres.feed import OpenPostgresFeed
from penstock.feeds.postgres.following import PlaceInLog, Step
from penstock.feeds.postgres.key_order import Key, KeyOrder
from penstock.feeds.postgres.server import Connection, run
from penstock.feeds.postgres.table_chunks import (
    Chunk,
    TableChanged,
    Visible,
    read_chunk,
    require_backfills,
    visible_now,
)
from penstock.feeds.postgres.table_readers import TableReaders, tables_by_queue
from penstock.json_text import Json
from penstock.pump.backfill_records import TableBackfill
from penstock.pump.plan import PumpPlan
from penstock.pump.recovery_records import mark_as_read

log = logging.getLogger("penstock.pump")

_CHUNK_ROWS = 10_000
_MAX_GAPS = 5_000
_POLL_SECONDS = 0.5
_SCHEMA_CHANGE_SECONDS = 15.0
"""How long a schema change may take to appear in the log or in the catalog."""
_CANCEL_SECONDS = 0.2
_WARN_SECONDS = 30.0
"""How long a backfill waits for open transactions before it logs a warning about the oldest."""


class _ReaderClosed(Exception):
    """The pump is ending."""


class ChunkReader:
    """Reader of chunks in its own thread and on its own connection."""

    def __init__(self, settings: PostgresFeed, name: str) -> None:
        self._settings, self._name = settings, name
        self._closing = threading.Event()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=f"pump {name} backfill")
        self._feed: OpenPostgresFeed | None = None
        self._connection: Connection | None = None
        self._last_future: Future[Any] | None = None
        self.latest_snapshot: Visible | None = None
        """The last snapshot that was taken while waiting; None once it has been processed."""

    def wait(self) -> Future[None]:
        """Wait until every transaction that has written so far has ended.

        A transaction's rows may become visible to other sessions shortly after its commit is in the log.
        """
        future = self._last_future = self._thread.submit(self._wait)
        return future

    def read(self, tables: Tables, order: KeyOrder, after: Key | None, gaps: Sequence[Key]) -> Future[Chunk]:
        """Read the next chunk of a table; the future may raise TableChanged."""
        future = self._last_future = self._thread.submit(self._read, tables, order, after, gaps)
        return future

    def close(self) -> None:
        """Stop reading, and discard the chunk in progress."""
        self._closing.set()
        self._thread.shutdown(wait=False, cancel_futures=True)
        # A cancellation between two statements has no effect.
        while self._last_future is not None and not self._last_future.done():
            if self._connection is not None:
                with suppress(Exception):
                    self._connection.cancel()
            futures.wait([self._last_future], _CANCEL_SECONDS)
        self._thread.shutdown()
        if self._connection is not None:
            self._connection.close()
        if self._feed is not None:
            self._feed.close()

    def _open_connection(self) -> tuple[OpenPostgresFeed, Connection]:
        if self._closing.is_set():
            raise _ReaderClosed
        if self._feed is None:
            self._feed = self._settings.open()
        if self._connection is None or self._connection.closed:
            self._connection = self._feed.server.with_retries(self._feed.server.connect)
            run(self._connection, "chunk_session")
        return self._feed, self._connection

    def _wait(self) -> None:
        feed, connection = self._open_connection()
        with feed.server.translating():
            latest_snapshot, _ = visible_now(connection)
        first_transaction, warn_at = latest_snapshot.next, time.monotonic() + _WARN_SECONDS
        while latest_snapshot.oldest < first_transaction:
            if self._closing.wait(_POLL_SECONDS):
                raise _ReaderClosed
            with feed.server.translating():
                latest_snapshot, _ = visible_now(connection)
            self.latest_snapshot = latest_snapshot
            if time.monotonic() >= warn_at:
                warn_at += _WARN_SECONDS * 10
                self._warn_open_transaction(feed)

    def _warn_open_transaction(self, feed: OpenPostgresFeed) -> None:
        oldest = feed.lag().open_transaction
        if oldest is None:
            return
        log.warning(
            "the backfill of pump %s begins once all transactions that have written have ended. The oldest: "
            "%s. %s",
            self._name,
            oldest.describe(),
            oldest.ended_by,
            extra={
                "action": "backfill_waits",
                "pump": self._name,
                "pid": oldest.pid,
                "seconds": oldest.seconds,
            },
        )

    def _read(self, tables: Tables, order: KeyOrder, after: Key | None, gaps: Sequence[Key]) -> Chunk:
        feed, connection = self._open_connection()
        return read_chunk(feed, connection, tables, order, after, gaps, _CHUNK_ROWS)


@dataclass(frozen=True)
class BackfillStep:
    """A chunk of a table that is ready to be appended."""

    step: Step
    change: Callable[[Json], None]
    """Updates the table's progress in the pump's state."""
    table: str
    progress: TableBackfill | None
    """None once all rows of the table have been read."""


class Backfills:
    """The backfills of a pump, in one session with the server."""

    def __init__(self, settings: PostgresFeed, feed: OpenPostgresFeed, plan: PumpPlan, name: str) -> None:
        self._settings, self._feed, self._name = settings, feed, name
        self._progress: dict[str, TableBackfill] = {}
        self.requested_at = {table: progress.started_at for table, progress in plan.backfills.items()}
        """The time of the request for each backfill, including completed backfills."""
        self.table_backfills: dict[str, Backfill] = {}
        """The backfill of each table, through which its rows from the log pass."""
        self._refused_tables: list[str] = []
        for table, progress in plan.backfills.items():
            planned = plan.tables.by_name[table]
            try:
                require_backfills(feed.server, feed.settings.publication)
                order = KeyOrder.of(feed.server, planned)
            except FeedUnavailableError as error:
                if not progress.again or table in plan.recoveries:
                    raise
                # The pump continues without this backfill.
                self._drop_request(table, error)
                continue
            if not progress.expected:
                (estimate,) = feed.server.fetch("row_estimate", oid=planned.relation.oid)
                progress = replace(progress, expected=estimate.rows)
            self._progress[table] = progress
            self.table_backfills[table] = Backfill(
                feed.server, planned.key, order, progress.after, progress.gaps, reread=progress.again
            )
        self._reader: ChunkReader | None = None
        self._wait_future: Future[None] | None = None
        self._chunk_read: tuple[str, Future[Chunk]] | None = None
        self._ready_chunk: tuple[str, Chunk] | None = None
        self._mismatch_since: float | None = None
        """When the current table was first found to differ from its definition in the plan."""
        self._retry_at = 0.0

    def _drop_request(self, table: str, error: FeedUnavailableError) -> None:
        """Drop the request to reread a table that cannot be reread."""
        self._refused_tables.append(table)
        log.error(
            "pump %s cannot read %s again: %s",
            self._name,
            table,
            error,
            extra={
                "action": "backfill_refused",
                "pump": self._name,
                "table": table,
                "error": condition_of(error),
            },
        )

    @property
    def tables(self) -> Mapping[str, TableBackfill]:
        """The progress of each table whose backfill is not complete."""
        return self._progress

    def start(self) -> None:
        """Begin to read chunks; call it when all rows from the log pass through ``table_backfills``."""
        if self._progress:
            self._reader = ChunkReader(self._settings, self._name)
            self._wait_future = self._reader.wait()

    def close(self) -> None:
        if self._reader is not None:
            self._reader.close()

    def step(self, readers: TableReaders, reached: int, version: int) -> BackfillStep | None:
        """Return the next chunk if it has been read and all earlier rows of the log have been appended.

        Parameters
        ----------
        readers
            The readers of the pump's tables.
        reached
            The log position up to which everything has been appended.
        version
            The version of the last commit that was read.
        """
        if self._reader is None or self._is_waiting(self._reader):
            return None
        self._advance_reads(self._reader, readers)
        if self._ready_chunk is None or reached < self._ready_chunk[1].position:
            return None
        (table, chunk), self._ready_chunk = self._ready_chunk, None
        if chunk.table != readers.tables.by_name[table]:
            # In the log and in later chunks, rows now have different columns or types.
            self._cancel_read()
            return None
        # The chunk is placed between two commits of the log. Another commit may begin at the chunk's
        # position, and a commit is longer than one byte.
        version = max(chunk.position - 1, version + 1)
        for backfill in self.table_backfills.values():
            backfill.forget(chunk.visible)
        batches = self.table_backfills[table].complete(chunk, version)
        return self._record_progress(
            table, chunk, Step(PlaceInLog(version), {table: batches} if batches else {})
        )

    def _is_waiting(self, reader: ChunkReader) -> bool:
        if self._wait_future is None:
            return False
        if not self._wait_future.done():
            latest_snapshot, reader.latest_snapshot = reader.latest_snapshot, None
            if latest_snapshot is not None:
                for backfill in self.table_backfills.values():
                    backfill.forget(latest_snapshot)
            return True
        self._wait_future.result()
        self._wait_future = None
        for table in self._progress:
            log.info(
                "pump %s begins to read the rows of %s",
                self._name,
                table,
                extra={"action": "backfill_started", "pump": self._name, "table": table},
            )
        return False

    def _advance_reads(self, reader: ChunkReader, readers: TableReaders) -> None:
        """Take a chunk that has been read, and begin to read the next one."""
        if self._chunk_read is not None and self._ready_chunk is None and self._chunk_read[1].done():
            (table, future), self._chunk_read = self._chunk_read, None
            try:
                self._ready_chunk = table, future.result()
                self._mismatch_since = None
            except TableChanged:
                self._wait_for_schema_change(table, readers)
        if self._chunk_read is None and time.monotonic() >= self._retry_at:
            self._submit_read(reader, readers)

    def _wait_for_schema_change(self, table: str, readers: TableReaders) -> None:
        """Wait for the log, or the state of the publication, to show how a table has changed."""
        now = time.monotonic()
        self._mismatch_since = self._mismatch_since or now
        if now - self._mismatch_since > _SCHEMA_CHANGE_SECONDS:
            raise self._feed.server.unavailable(
                "CHANGED_IN_BACKFILL",
                f"{table} was altered during its backfill: a name, a type, the key or the row filter no "
                "longer matches its queue. Revert the change; or remove the pump with `penstock pump "
                "remove`, drop the slot, and start again with other queues",
                table=table,
            )
        readers.has_evolved = True
        self._retry_at = now + _POLL_SECONDS

    def changes(self) -> Iterator[Callable[[Json], None]]:
        """Yield changes of the pump's state, which are stored with the rows that were read last."""
        for table in self._refused_tables:
            yield self._progress_change(table)
        self._refused_tables = []
        for table, progress in self._progress.items():
            gaps = tuple(self.table_backfills[table].gaps)
            if gaps != progress.gaps:
                self._progress[table] = replace(progress, gaps=gaps)
                yield self._progress_change(table)

    def _progress_change(self, table: str) -> Callable[[Json], None]:
        progress, requested_at = self._progress.get(table), self.requested_at[table]

        def apply(state: Json) -> None:
            backfills = state.setdefault("backfills", {})
            if backfills.get(table, {}).get("started_at") != requested_at:
                # Another backfill of the table was requested.
                return
            if progress is None:
                backfills.pop(table, None)
                mark_as_read(state, table)
            else:
                backfills[table] = progress.to_json()

        return apply

    def _submit_read(self, reader: ChunkReader, readers: TableReaders) -> None:
        tables = list(self._progress)
        if not tables:
            return
        table = tables[0]
        if self._ready_chunk is not None:
            after: Key | None = self._ready_chunk[1].last
            if not self._ready_chunk[1].more:
                # Whether there is another chunk is known after this one was appended.
                return
        else:
            after = self.table_backfills[table].after
        planned = tables_by_queue(readers.tables, together=False)[table]
        backfill = self.table_backfills[table]
        self._chunk_read = table, reader.read(planned, backfill.order, after, backfill.gaps[:_MAX_GAPS])

    def _cancel_read(self) -> None:
        if self._chunk_read is not None:
            self._chunk_read[1].cancel()
            self._chunk_read = None

    def _record_progress(self, table: str, chunk: Chunk, step: Step) -> BackfillStep:
        row_count, previous, backfill = chunk.count, self._progress[table], self.table_backfills[table]
        if backfill.is_complete:
            del self._progress[table]
        else:
            self._progress[table] = replace(
                previous, after=backfill.after, rows=previous.rows + row_count, gaps=tuple(backfill.gaps)
            )
        return BackfillStep(step, self._progress_change(table), table, self._progress.get(table))
