"""What one process has open for a feed, and what it remembers of it."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from penstock.errors import DataLost, FeedUnavailable
from penstock.feeds.contract import COMMIT_VERSION
from penstock.feeds.postgres.address import split
from penstock.feeds.postgres.catalog import SEQUENCE, Table, Tables, check_names, domains_of, find, published
from penstock.feeds.postgres.lookahead import Lookahead, truncation
from penstock.feeds.postgres.open_transactions import OpenTransactions
from penstock.feeds.postgres.pgoutput import Decoder, Relation
from penstock.feeds.postgres.publication import state_of
from penstock.feeds.postgres.rows import SNAPSHOTS, Rows
from penstock.feeds.postgres.schema_changes import Fit, SchemaChange
from penstock.feeds.postgres.server import Server, ServerGone, Session
from penstock.feeds.postgres.slot import Slot, SlotLag, SlotState
from penstock.feeds.postgres.snapshot import Snapshot, SnapshotPiece, Snapshots
from penstock.feeds.protocol import Commit, Description

if TYPE_CHECKING:
    from penstock.feeds.postgres.feed import PostgresFeed

log = logging.getLogger("penstock.changes")
_QUIET = 16 << 20
"""Bytes of log without a change after which an empty micro-batch lets the slot move on."""
_ATTEMPTS = 3
_PLANNED_BY = 100_000
"""Messages of the log to look at for what the tables are; what comes later is noticed when it is read."""


@dataclass(frozen=True)
class LogPiece:
    """The commits of a range."""

    after: int
    upto: int
    tables: Tables
    first: int
    """The commit with which the range of all pieces begins."""


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
        self._transactions = OpenTransactions(self._server, feed.slot, feed.transaction_warning or 0.0)
        self._snapshots = Snapshots(self._server, self._slot, required=feed.snapshot == "initial")
        self._tables: Tables | None = None
        self._follows = self._some_columns = False
        self._columns: Sequence[str] | None = None
        self._lookahead: Lookahead | None = None
        self._quiet: tuple[int, int] | None = None
        self._flushed = 0
        self._looked_at: tuple[int, int] | None = None

    def close(self) -> None:
        self._server.close()

    def follow(self, plan: str | None, columns: Sequence[str], some_columns: bool) -> None:
        """Read some columns, by the tables as they were described; as they are when they are looked at first, without a plan."""
        self._follows, self._columns, self._some_columns = True, columns, some_columns
        if plan is not None:
            self._know(Tables.from_json(plan))

    def describe(self, after: int | None) -> Description:
        self._slot.check_server()
        if self._tables is None or not self._follows:
            self._know(self._planned(after))
        if self._feed.snapshot == "none":
            self._slot.state()
        tables = self._known()
        return Description(self._identity(), tables.schema(), tables.contract(), tables.to_json())

    def begin(self) -> int:
        if self._feed.snapshot == "none":
            return self.oldest()
        self._snapshots.make(self._known().tables, self._check_plan)
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
        self._flushed, upto = state.flushed, state.flushed - 1
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

    def publication_state(self) -> dict[str, Any]:
        """The state of the publication at the start of a new query."""
        snapshot = self._snapshots.find()
        if snapshot is not None:
            return dict(snapshot.publication)
        return state_of(self._server, self._feed.publication, self._known()).to_json()

    def stream_end(self, after: int, before: Mapping[str, Any] | None) -> tuple[int, dict[str, Any]]:
        """The version up to which a stream may read now, and the state of the publication with it; see :class:`Lookahead`."""
        upto = self.newest(after)
        looked_at = after, self._flushed
        if before is not None and upto == after and looked_at == self._looked_at:
            # Nothing at all was written since.
            return after, dict(before)
        if self._lookahead is None:
            self._lookahead = Lookahead(self._feed, self._server, self._slot, self._known(), self._columns)
        snapshot = self._snapshots.find()
        start = after if snapshot is None else max(after, min(snapshot.version, upto))
        end, state = self._lookahead.end(start, upto, before, rows_before=start > after)
        self._looked_at = looked_at if end == after else None
        return end, state.to_json()

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
        first = after + 1
        if snapshot is not None and after < snapshot.version <= upto:
            pieces = self._snapshots.pieces(snapshot, rows_per_task)
            found = [SnapshotTask(piece, tables) for piece in pieces]
            after = snapshot.version
        if after < upto:
            found.append(LogPiece(after, upto, tables, first))
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
        return replace(self._slot.state().lag, open_transaction=self._transactions.oldest())

    def warnings(self) -> list[str]:
        told = self._transactions.warning(lambda: self._slot.state().lag.retained)
        return [] if told is None else [told]

    def read_log(self, piece: LogPiece, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
        """The rows of a range; where the connection breaks, on from the row that was given last."""
        self._choose(piece.tables)
        reading = _Reading(self._feed, piece.tables, schema, piece.first, may_skip=True)
        for attempt in range(_ATTEMPTS):
            decoder = reading.decoder(piece.after, piece.upto)
            try:
                # Somebody may have moved the slot since the task was made.
                self._require(piece.after, self._slot.state(), None)
                with closing(self._slot.messages(piece.upto)) as chunks:
                    yield from reading.batches(decoder, chunks)
                reading.report()
                return
            except ServerGone:
                if attempt == _ATTEMPTS - 1:
                    raise

    def read_snapshot(self, task: SnapshotTask, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
        """The rows of a piece of the snapshot."""
        piece = task.piece
        reading = _Reading(self._feed, task.tables, schema, piece.version, may_skip=False)
        for attempt in range(_ATTEMPTS):
            decoder = reading.decoder(piece.version - 1, piece.version)
            decoder.begin(piece.version, piece.timestamp, piece.sequence, piece.copy.relation)
            try:
                with closing(self._snapshots.messages(piece)) as chunks:
                    yield from reading.batches(decoder, chunks)
                reading.report()
                return
            except ServerGone:
                if attempt == _ATTEMPTS - 1:
                    raise

    def _known(self) -> Tables:
        if self._tables is None:
            self._know(self._planned(None))
        assert self._tables is not None
        return self._tables

    def _planned(self, after: int | None) -> Tables:
        """The tables as a reader has to know them that begins after a version, or with the oldest one."""
        tables = find(self._server, self._feed.publication, self._feed.tables)
        state = self._slot.find()
        if state is None or not state.ready:
            return self._read_as(tables)
        snapshot = self._snapshots.find()
        start = self._oldest(state, snapshot)
        start = start if after is None else max(start, after)
        relations: list[Relation] = []
        if snapshot is not None and start < snapshot.version:
            relations += [copy.relation for copy in snapshot.copies if copy.rows]
            start = snapshot.version
        upto = state.flushed - 1
        if upto > start:
            self._choose(tables)
            found = self._slot.relations(start, upto, skipped=self._feed.skip or (), messages=_PLANNED_BY)
            relations += [use.relation for use in found.uses if use.relation.schema != SNAPSHOTS]
        types = {column.type for relation in relations for column in relation.columns}
        domains = {**tables.domains, **domains_of(self._server, types)}
        logged = replace(tables, domains=domains).as_logged(relations)
        return self._read_as(logged)

    def _read_as(self, tables: Tables) -> Tables:
        check_names(self._server, tables)
        try:
            return tables.reading(self._feed.types or {})
        except KeyError as error:
            (name,) = error.args
            raise self._server.unavailable(
                "COLUMN_UNKNOWN",
                f"types names the column {name!r}, which no table has: take it out, or correct it",
                column=name,
            ) from None

    def _check_plan(self, session: Session) -> dict[str, Any]:
        """The state of the publication in a session that is about to copy the tables, which have to be as they are planned."""
        tables = self._known()
        now, _ = published(session, self._feed.publication)
        fit = Fit(
            tables,
            {table.name: {column.name for column in table.relation.columns} for table in tables.tables},
        )
        for each in now:
            found = fit.table_of(each.relation)
            if isinstance(found, Table):
                found = fit.change(found, each.relation)
            if isinstance(found, SchemaChange):
                raise found.before_start(self._feed.name)
        return state_of(session, self._feed.publication, tables).to_json()

    def _know(self, tables: Tables) -> None:
        self._tables = replace(tables, some_columns=self._some_columns)
        self._lookahead = None
        self._choose(tables)

    def _choose(self, tables: Tables) -> None:
        self._slot.choose(
            {table.name: table.relation.oid for table in tables.tables} if tables.chosen else None
        )

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
        self, feed: PostgresFeed, tables: Tables, schema: pa.Schema, first: int, *, may_skip: bool
    ) -> None:
        self._feed = feed
        # These two say where to go on after a broken connection.
        extra = [name for name in (COMMIT_VERSION, SEQUENCE) if schema.get_field_index(name) < 0]
        full = tables.schema()
        shown = pa.schema([*schema, *(full.field(name) for name in extra)])
        self._rows = Rows(
            tables,
            shown,
            feed.name,
            first,
            feed.accept or (),
            nulls_invalid=feed.invalid_values == "null",
            may_skip=may_skip,
        )
        self._schema = schema
        self._done = (-1, -1)

    def decoder(self, after: int, upto: int) -> Decoder:
        skipped = [version for version in self._feed.skip or () if after < version <= upto]
        if skipped:
            log.warning(
                "the rows of commits %s are left out, as skip says",
                skipped,
                extra={"action": "commits_skipped", "slot": self._feed.slot, "versions": skipped},
            )
        return Decoder(after, upto, self._rows.wanted, self._truncated, skipped)

    def batches(self, decoder: Decoder, chunks: Iterator[list[bytes]]) -> Iterator[pa.RecordBatch]:
        for messages in chunks:
            for part in decoder.decode(messages):
                rows = self._rows.batch(part, self._done)
                if rows is not None:
                    yield rows.select(self._schema.names) if len(rows.schema) > len(self._schema) else rows
                    self._done = (rows[COMMIT_VERSION][-1].as_py(), rows[SEQUENCE][-1].as_py())

    def report(self) -> None:
        """Log what was read as null."""
        for (table, column), count in self._rows.invalid.items():
            log.warning(
                "%s of %s has %d values that its type here cannot hold, and that are NULL",
                column,
                table,
                count,
                extra={"action": "invalid_values", "table": table, "column": column, "values": count},
            )

    def _truncated(self, relations: Sequence[Relation], version: int) -> None:
        error = truncation(self._feed, self._rows.fit, relations, version)
        if error is not None:
            raise error
