"""What one process has open for a feed, and what it remembers of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from penstock.changes.contract import COMMIT_VERSION
from penstock.changes.feeds.changelog import Commit, Description
from penstock.changes.feeds.postgres.address import split
from penstock.changes.feeds.postgres.catalog import SEQUENCE, Table, Tables, find, published
from penstock.changes.feeds.postgres.pgoutput import Decoder, Relation
from penstock.changes.feeds.postgres.rows import Rows
from penstock.changes.feeds.postgres.server import Server, ServerGone
from penstock.changes.feeds.postgres.slot import Slot, SlotLag, SlotState
from penstock.changes.feeds.postgres.snapshot import Snapshot, SnapshotPiece, Snapshots
from penstock.errors import DataLost, FeedUnavailable

if TYPE_CHECKING:
    from penstock.changes.feeds.postgres.feed import PostgresFeed

_QUIET = 16 << 20
"""Bytes of log without a change after which an empty micro-batch lets the slot move on."""
_ATTEMPTS = 3


@dataclass(frozen=True)
class LogPiece:
    """The commits of a range."""

    after: int
    upto: int
    tables: Tables


@dataclass(frozen=True)
class SnapshotTask:
    """A piece of the snapshot."""

    piece: SnapshotPiece
    tables: Tables


class Link:
    """One process's view of a feed."""

    def __init__(self, feed: PostgresFeed) -> None:
        self._feed = feed
        server, _ = split(feed.url)
        self._server = Server(server, feed.name, feed.slot_wait or 0.0)
        self._slot = Slot(self._server, feed.slot, feed.publication, feed.lag_warning or 0)
        self._snapshots = Snapshots(self._server, self._slot)
        self._tables: Tables | None = None
        self._quiet: tuple[int, int] | None = None

    def close(self) -> None:
        self._server.close()

    def describe(self) -> Description:
        self._slot.check_server()
        tables = find(self._server, self._feed.publication, self._feed.tables)
        self._know(tables)
        if self._feed.snapshot == "none":
            self._slot.state()
        return Description(self._identity(), tables.schema(), tables.contract())

    def begin(self) -> int:
        if self._feed.snapshot == "none":
            return self.oldest()
        self._snapshots.make(self._known().tables)
        state, snapshot = self._slot.state(), self._snapshots.find()
        oldest = self._oldest(state, snapshot)
        if snapshot is None or oldest >= snapshot.version:
            raise self._slot.used(oldest)
        return oldest

    def oldest(self) -> int:
        return self._oldest(self._slot.state(), self._snapshots.find())

    def newest(self, after: int) -> int:
        self._known()
        state, snapshot = self._slot.state(), self._snapshots.find()
        # A commit that is written from now on begins at the end of the log, or behind it.
        upto = state.flushed - 1
        if snapshot is not None and after < snapshot.version:
            return max(upto, snapshot.version)
        if after < self._oldest(state, snapshot):
            # Something was there; whoever reads it is told that it is gone.
            return max(upto, after)
        if upto <= after or self._quiet == (after, upto):
            return after
        if self._slot.has_changes(after, upto) or upto - after > _QUIET:
            return upto
        self._quiet = after, upto
        return after

    def commits(self, after: int, upto: int, rows: int | None) -> Iterator[Commit]:
        self._known()
        snapshot = self._snapshots.find()
        self._require(after, self._slot.state(), snapshot)
        if snapshot is not None and after < snapshot.version <= upto:
            yield Commit(snapshot.version, snapshot.timestamp, snapshot.rows)
            after = snapshot.version
        yield from self._slot.commits(after, upto, rows)

    def tasks(self, after: int, upto: int, rows_per_task: int) -> Sequence[Any]:
        tables = self._known()
        snapshot = self._snapshots.find()
        self._require(after, self._slot.state(), snapshot)
        found: list[Any] = []
        if snapshot is not None and after < snapshot.version <= upto:
            pieces = self._snapshots.pieces(snapshot, rows_per_task)
            found = [SnapshotTask(piece, tables) for piece in pieces]
            after = snapshot.version
        if after < upto:
            found.append(LogPiece(after, upto, tables))
        return found

    def logged(self, upto: int) -> None:
        snapshot = self._snapshots.find()
        if snapshot is not None:
            if upto < snapshot.version:
                return
            # Before the slot moves: a snapshot belongs to a slot that has not.
            self._snapshots.forget()
        self._slot.advance(upto)

    def lag(self) -> SlotLag:
        return self._slot.state().lag

    def read_log(self, piece: LogPiece, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
        """The rows of a range; where the connection breaks, on from the row that was given last."""
        self._choose(piece.tables)
        reading = self._reading(piece.tables, schema)
        for attempt in range(_ATTEMPTS):
            decoder = reading.decoder(piece.after, piece.upto)
            try:
                # Somebody may have moved the slot since the task was made.
                self._require(piece.after, self._slot.state(), None)
                with closing(self._slot.messages(piece.upto)) as chunks:
                    yield from reading.batches(decoder, chunks)
                return
            except ServerGone:
                if attempt == _ATTEMPTS - 1:
                    raise

    def read_snapshot(self, task: SnapshotTask, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
        """The rows of a piece of the snapshot."""
        piece = task.piece
        reading = self._reading(task.tables, schema)
        for attempt in range(_ATTEMPTS):
            decoder = reading.decoder(piece.version - 1, piece.version)
            decoder.begin(piece.version, piece.timestamp, piece.sequence, piece.copy.relation)
            try:
                with closing(self._snapshots.messages(piece)) as chunks:
                    yield from reading.batches(decoder, chunks)
                return
            except ServerGone:
                if attempt == _ATTEMPTS - 1:
                    raise

    def _reading(self, tables: Tables, schema: pa.Schema) -> _Reading:
        def now() -> Sequence[Table]:
            return published(self._server, self._feed.publication)

        return _Reading(self._feed, tables, schema, now)

    def _known(self) -> Tables:
        if self._tables is None:
            self._know(find(self._server, self._feed.publication, self._feed.tables))
        assert self._tables is not None
        return self._tables

    def _know(self, tables: Tables) -> None:
        self._tables = tables
        self._choose(tables)

    def _choose(self, tables: Tables) -> None:
        chosen = self._feed.tables is not None
        self._slot.choose([table.relation.oid for table in tables.tables] if chosen else None)

    def _identity(self) -> str:
        try:
            system = self._server.all("system")[0].system_identifier
        except FeedUnavailable:
            system = "server"
        (found,) = self._server.all("server")
        tables = "".join(f"/{table}" for table in sorted(self._feed.tables or ()))
        return f"postgresql:{system}/{found.database}/{self._feed.publication}/{self._feed.slot}{tables}"

    def _oldest(self, state: SlotState, snapshot: Snapshot | None) -> int:
        confirmed = state.confirmed - 1
        if snapshot is not None and confirmed <= snapshot.version:
            return snapshot.version - 1
        return confirmed

    def _require(self, after: int, state: SlotState, snapshot: Snapshot | None) -> None:
        oldest = self._oldest(state, snapshot)
        if after < oldest:
            raise DataLost(
                f"{self._feed.name}: the commits from {after + 1} to {oldest} are gone: the slot has been moved on, by another "
                f"query or by hand, or was made anew. To start over, drop the slot and use a new checkpoint, and an empty or another sink: "
                "a new slot comes with the rows as they are. To go on without what is gone, behind "
                f'{oldest}: a new checkpoint and snapshot="none"',
                after=after,
                oldest=oldest,
            )


class _Reading:
    """One read of a task, which remembers how far it has come."""

    def __init__(
        self,
        feed: PostgresFeed,
        tables: Tables,
        schema: pa.Schema,
        published: Callable[[], Sequence[Table]],
    ) -> None:
        self._name, self._truncate = feed.name, feed.truncate
        # These two say where to go on after a broken connection.
        extra = [name for name in (COMMIT_VERSION, SEQUENCE) if schema.get_field_index(name) < 0]
        full = tables.schema()
        self._rows = Rows(
            tables, pa.schema([*schema, *(full.field(name) for name in extra)]), feed.name, published
        )
        self._schema = schema
        self._done = (-1, -1)

    def decoder(self, after: int, upto: int) -> Decoder:
        return Decoder(after, upto, self._rows.wanted, self._truncated)

    def batches(self, decoder: Decoder, chunks: Iterator[list[bytes]]) -> Iterator[pa.RecordBatch]:
        for messages in chunks:
            for part in decoder.decode(messages):
                rows = self._rows.batch(part, self._done)
                if rows is not None:
                    yield rows.select(self._schema.names) if len(rows.schema) > len(self._schema) else rows
                    self._done = (rows[COMMIT_VERSION][-1].as_py(), rows[SEQUENCE][-1].as_py())

    def _truncated(self, relations: Sequence[Relation]) -> None:
        if self._truncate == "skip":
            return
        names = ", ".join(relation.name for relation in relations)
        raise FeedUnavailable(
            f"{self._name}: TRUNCATE has emptied {names}, and a feed of rows cannot say which rows went: start with a new slot "
            "and a new checkpoint, or go on with truncate=\"skip\" where the rows may stay; publish = 'insert, update, delete' "
            "leaves later ones out",
            condition="FEED_UNAVAILABLE.TRUNCATED",
            tables=names,
        )
