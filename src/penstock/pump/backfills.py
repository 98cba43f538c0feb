"""Backfills of a pump: the existing rows of tables, read in chunks while the pump follows the log."""

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
from penstock.pump.recovery_records import note_read

log = logging.getLogger("penstock.pump")

_CHUNK_ROWS = 10_000
_MOST_GAPS = 5_000
_POLL_SECONDS = 0.5
_CHANGE_SECONDS = 15.0
"""How long a change of a table may take to appear in the log or in the catalog."""
_CANCEL_SECONDS = 0.2
_WARN_SECONDS = 30.0
"""How long a backfill waits for open transactions before a warning names the oldest."""


class _Closed(Exception):
    """The pump is ending."""


class ChunkReader:
    """Reads chunks in a thread of its own, on its own connection."""

    def __init__(self, settings: PostgresFeed, name: str) -> None:
        self._settings, self._name = settings, name
        self._closing = threading.Event()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=f"pump {name} backfill")
        self._feed: OpenPostgresFeed | None = None
        self._connection: Connection | None = None
        self._last: Future[Any] | None = None
        self.seen: Visible | None = None
        """While it waits: what was visible at its last check."""

    def wait(self) -> Future[None]:
        """Wait until each transaction that has written by now has ended.

        Even after the log has a transaction's commit, other sessions may not see its rows for a moment.
        """
        waiting = self._last = self._thread.submit(self._wait)
        return waiting

    def read(self, tables: Tables, order: KeyOrder, after: Key | None, gaps: Sequence[Key]) -> Future[Chunk]:
        """Read the next rows of a table; the result may be the error TableChanged."""
        reading = self._last = self._thread.submit(self._read, tables, order, after, gaps)
        return reading

    def close(self) -> None:
        """Stop reading, and discard what is being read."""
        self._closing.set()
        self._thread.shutdown(wait=False, cancel_futures=True)
        # A cancellation between two statements has no effect.
        while self._last is not None and not self._last.done():
            if self._connection is not None:
                with suppress(Exception):
                    self._connection.cancel()
            futures.wait([self._last], _CANCEL_SECONDS)
        self._thread.shutdown()
        if self._connection is not None:
            self._connection.close()
        if self._feed is not None:
            self._feed.close()

    def _opened(self) -> tuple[OpenPostgresFeed, Connection]:
        if self._closing.is_set():
            raise _Closed
        if self._feed is None:
            self._feed = self._settings.open()
        if self._connection is None or self._connection.closed:
            self._connection = self._feed.server.with_retries(self._feed.server.connect)
            run(self._connection, "chunk_session")
        return self._feed, self._connection

    def _wait(self) -> None:
        feed, connection = self._opened()
        with feed.server.translating():
            seen, _ = visible_now(connection)
        first, warn_at = seen.next, time.monotonic() + _WARN_SECONDS
        while seen.oldest < first:
            if self._closing.wait(_POLL_SECONDS):
                raise _Closed
            with feed.server.translating():
                seen, _ = visible_now(connection)
            self.seen = seen
            if time.monotonic() >= warn_at:
                warn_at += _WARN_SECONDS * 10
                self._warn(feed)

    def _warn(self, feed: OpenPostgresFeed) -> None:
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
        feed, connection = self._opened()
        return read_chunk(feed, connection, tables, order, after, gaps, _CHUNK_ROWS)


@dataclass(frozen=True)
class BackfillStep:
    """A chunk as a step of a pump."""

    step: Step
    change: Callable[[Json], None]
    """Stores the progress of the table in the pump's state."""
    table: str
    progress: TableBackfill | None
    """None once all rows of the table have been read."""


class Backfills:
    """The backfills of a pump, in one session with the server."""

    def __init__(self, settings: PostgresFeed, feed: OpenPostgresFeed, plan: PumpPlan, name: str) -> None:
        self._settings, self._feed, self._name = settings, feed, name
        self._progress: dict[str, TableBackfill] = {}
        self.started = {table: progress.started_at for table, progress in plan.backfills.items()}
        """When each backfill was requested, including those that are complete."""
        self.sieves: dict[str, Backfill] = {}
        """For the readers of the tables."""
        self._refused: list[str] = []
        for table, progress in plan.backfills.items():
            planned = plan.tables.by_name[table]
            try:
                require_backfills(feed.server, feed.settings.publication)
                order = KeyOrder.of(feed.server, planned)
            except FeedUnavailableError as error:
                if not progress.again or table in plan.recoveries:
                    raise
                # The pump continues without this backfill.
                self._refuse(table, error)
                continue
            if not progress.expected:
                (estimate,) = feed.server.fetch("row_estimate", oid=planned.relation.oid)
                progress = replace(progress, expected=estimate.rows)
            self._progress[table] = progress
            self.sieves[table] = Backfill(
                feed.server, planned.key, order, progress.after, progress.gaps, reread=progress.again
            )
        self._reader: ChunkReader | None = None
        self._waiting: Future[None] | None = None
        self._reading: tuple[str, Future[Chunk]] | None = None
        self._ready: tuple[str, Chunk] | None = None
        self._changed_at: float | None = None
        """When a table was first found to differ from the definition that it is to be read with."""
        self._not_before = 0.0

    def _refuse(self, table: str, error: FeedUnavailableError) -> None:
        """Drop the request for a table that cannot be read again."""
        self._refused.append(table)
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
        """The progress of each table that is not complete."""
        return self._progress

    def start(self) -> None:
        """Begin reading chunks; call it once all rows from the log pass through the sieves."""
        if self._progress:
            self._reader = ChunkReader(self._settings, self._name)
            self._waiting = self._reader.wait()

    def close(self) -> None:
        if self._reader is not None:
            self._reader.close()

    def step(self, readers: TableReaders, reached: int, version: int) -> BackfillStep | None:
        """Return the next chunk if it has been read, and all earlier rows of the log have been appended.

        Parameters
        ----------
        readers
            Those of the pump's tables.
        reached
            The position in the log up to which everything has been appended.
        version
            The last commit that was read.
        """
        if self._reader is None or self._waits(self._reader):
            return None
        self._read_on(self._reader, readers)
        if self._ready is None or reached < self._ready[1].position:
            return None
        (table, chunk), self._ready = self._ready, None
        if chunk.table != readers.tables.by_name[table]:
            # From here on, rows have other columns or types, in the log and in later chunks.
            self._give_up_reading()
            return None
        # Between two commits in the log, each of which takes more than one byte: another one may begin at the
        # chunk's position.
        version = max(chunk.position - 1, version + 1)
        for sieve in self.sieves.values():
            sieve.forget(chunk.visible)
        batches = self.sieves[table].complete(chunk, version)
        return self._noted(table, chunk, Step(PlaceInLog(version), {table: batches} if batches else {}))

    def _waits(self, reader: ChunkReader) -> bool:
        if self._waiting is None:
            return False
        if not self._waiting.done():
            seen, reader.seen = reader.seen, None
            if seen is not None:
                for sieve in self.sieves.values():
                    sieve.forget(seen)
            return True
        self._waiting.result()
        self._waiting = None
        for table in self._progress:
            log.info(
                "pump %s begins to read the rows of %s",
                self._name,
                table,
                extra={"action": "backfill_started", "pump": self._name, "table": table},
            )
        return False

    def _read_on(self, reader: ChunkReader, readers: TableReaders) -> None:
        """Take the chunk that has been read, and begin reading the next one."""
        if self._reading is not None and self._ready is None and self._reading[1].done():
            (table, future), self._reading = self._reading, None
            try:
                self._ready = table, future.result()
                self._changed_at = None
            except TableChanged:
                self._await_change(table, readers)
        if self._reading is None and time.monotonic() >= self._not_before:
            self._submit(reader, readers)

    def _await_change(self, table: str, readers: TableReaders) -> None:
        """Allow time for the log, or the publication's state, to show how a table has changed."""
        now = time.monotonic()
        self._changed_at = self._changed_at or now
        if now - self._changed_at > _CHANGE_SECONDS:
            raise self._feed.server.unavailable(
                "CHANGED_IN_BACKFILL",
                f"{table} was altered while its rows are read: a name, a type, the key or the row filter is "
                "another one than in its queue. Change it back; or remove the pump with `penstock pump "
                "remove`, drop the slot, and start again with other queues",
                table=table,
            )
        readers.has_evolved = True
        self._not_before = now + _POLL_SECONDS

    def changes(self) -> Iterator[Callable[[Json], None]]:
        """Yield changes of the pump's state, to be stored with the rows that were read last."""
        for table in self._refused:
            yield self._change(table)
        self._refused = []
        for table, progress in self._progress.items():
            gaps = tuple(self.sieves[table].gaps)
            if gaps != progress.gaps:
                self._progress[table] = replace(progress, gaps=gaps)
                yield self._change(table)

    def _change(self, table: str) -> Callable[[Json], None]:
        progress, started = self._progress.get(table), self.started[table]

        def change(state: Json) -> None:
            backfills = state.setdefault("backfills", {})
            if backfills.get(table, {}).get("started_at") != started:
                # The table was requested again.
                return
            if progress is None:
                backfills.pop(table, None)
                note_read(state, table)
            else:
                backfills[table] = progress.to_json()

        return change

    def _submit(self, reader: ChunkReader, readers: TableReaders) -> None:
        tables = list(self._progress)
        if not tables:
            return
        table = tables[0]
        if self._ready is not None:
            after: Key | None = self._ready[1].last
            if not self._ready[1].more:
                # The next chunk depends on whether the table is complete by then.
                return
        else:
            after = self.sieves[table].after
        planned = tables_by_queue(readers.tables, together=False)[table]
        sieve = self.sieves[table]
        self._reading = table, reader.read(planned, sieve.order, after, sieve.gaps[:_MOST_GAPS])

    def _give_up_reading(self) -> None:
        if self._reading is not None:
            self._reading[1].cancel()
            self._reading = None

    def _noted(self, table: str, chunk: Chunk, step: Step) -> BackfillStep:
        count, before, sieve = chunk.count, self._progress[table], self.sieves[table]
        if sieve.is_complete:
            del self._progress[table]
        else:
            self._progress[table] = replace(
                before, after=sieve.after, rows=before.rows + count, gaps=tuple(sieve.gaps)
            )
        return BackfillStep(step, self._change(table), table, self._progress.get(table))
