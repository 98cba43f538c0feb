"""A slot that is followed by one process: the initial copy, and then what the server sends, by table.

The rows are those that a query reads through Spark, with the same checks of each table's form
(:mod:`penstock.feeds.postgres.schema_changes`). What the log does not have is found by comparing the state of
the publication every few seconds (:mod:`penstock.feeds.postgres.unlogged`).
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import pyarrow as pa

from penstock.errors import FeedUnavailableError
from penstock.feeds.postgres import unlogged
from penstock.feeds.postgres.catalog import Table, Tables, domains_of
from penstock.feeds.postgres.feed import OpenPostgresFeed
from penstock.feeds.postgres.pgoutput import BEGIN, COMMIT, Changes, Decoder, Relation, Truncation
from penstock.feeds.postgres.publication import PublicationState, state_of
from penstock.feeds.postgres.replication import Received, ReplicationStream
from penstock.feeds.postgres.rows import RowReader
from penstock.feeds.postgres.schema_changes import Fit, SchemaChange, evolved

REFUSE = "refuse"
EVOLVE = "evolve"
CHANGES = (REFUSE, EVOLVE, "ignore")
ALL = ""
"""Stands for all tables where their rows come in one form."""
_PART_BYTES = 32 << 20
"""The messages of a transaction that is not complete are kept up to this size; then its rows are read."""
_PIECE_ROWS = 50_000
_MOST_NAME = 63
"""Bytes of an application's name that the server keeps."""
_CHECK_SECONDS = 5.0
_END = 2**63 - 1


class PlaceInLog(NamedTuple):
    """How far the rows of a log go."""

    version: int = 0
    """The last commit that is complete; 0 if it is as before."""
    part_version: int = 0
    """The next commit, of which some rows were read; 0 if none were."""
    part_rows: int = 0
    """How many."""


_AS_BEFORE = PlaceInLog()


@dataclass
class Step:
    """Rows in the order of the log, and how far they go."""

    place: PlaceInLog = _AS_BEFORE
    rows: dict[str, list[pa.RecordBatch]] = field(default_factory=dict)
    """The rows by table; those of all tables under ALL if they come in one form."""
    complete: int | None = None
    """The position up to which everything has come, with these rows; None if that is not known."""
    sent_at: int | None = None
    """The server's time then, in microseconds since 1970."""


def tables_by_queue(tables: Tables, together: bool) -> dict[str, Tables]:
    """Return how the rows of each table are read; those of all of them under ALL if they come in one form."""
    if together:
        return {ALL: tables}
    chosen = tables.chosen or len(tables.tables) > 1
    return {
        table.name: replace(tables, tables=(table,), several=False, chosen=chosen) for table in tables.tables
    }


class SlotFollower:
    """Follows a slot from a position; not thread-safe.

    Parameters
    ----------
    feed
        The open feed.
    tables
        How its tables are read.
    state
        The last known state of the publication.
    together
        Whether the rows of all tables come in one form, rather than each table's in its own.
    changes
        What to do when columns are added or dropped: one of CHANGES.
    """

    def __init__(
        self,
        feed: OpenPostgresFeed,
        tables: Tables,
        state: PublicationState,
        *,
        together: bool,
        changes: str = REFUSE,
    ) -> None:
        self._changes = changes
        self._feed, self._tables, self._together = feed, tables, together
        self.state = state
        self.plans = tables_by_queue(tables, together)
        """How the rows of each table are read; those of all of them under ALL."""
        columns = {table.name: table.relation.names for table in tables.tables}
        self._fit = Fit(tables, {**columns}, feed.settings.accept or ())
        self._readers: dict[str, RowReader] = {}
        self._reading_of: dict[Relation, _Reading | None] = {}
        self._failure: FeedUnavailableError | None = None
        """Why what comes next cannot be read."""
        self._decoder = Decoder(0, _END, self._wants)
        self._stream: ReplicationStream | None = None
        self._kept: list[bytes] = []
        """Messages of a transaction whose commit has not come."""
        self._kept_bytes = 0
        self._check_at = 0.0

    def copy(self, after: PlaceInLog) -> Iterator[Step]:
        """Yield the rows of the initial copy, if it is there and not all of it was read before."""
        snapshot = self._feed.snapshots.find()
        if snapshot is None or after.version >= snapshot.version:
            return
        version, pieces = snapshot.version, snapshot.pieces(_PIECE_ROWS)
        self._begin(after if after.part_version == version else PlaceInLog(after.version))
        for number, piece in enumerate(pieces, start=1):
            rows = piece.sequence + piece.last - piece.first
            if rows <= after.part_rows and after.part_version == version and number < len(pieces):
                continue
            decoder = Decoder(version - 1, version, self._wants)
            decoder.begin(version, piece.timestamp, piece.sequence, piece.copy.relation)
            step = Step(PlaceInLog(0, version, rows))
            with closing(self._feed.snapshots.messages(piece)) as chunks:
                for messages in chunks:
                    self._decode(decoder, messages, step)
            if number == len(pieces):
                step.place = PlaceInLog(version)
            yield step
        if not pieces:
            yield Step(PlaceInLog(version))

    def start(self, after: PlaceInLog, application: str) -> None:
        """Begin to receive what comes after a place; the initial copy is dropped.

        Another process that still receives under the same name of an application is ended.

        Raises
        ------
        DataLostError
            When the server does not have all of it any more.
        FeedUnavailableError
            When something has happened that is not in the log, or the server refuses.
        """
        feed, slot = self._feed, self._feed.slot
        if feed.snapshots.find() is not None:
            feed.logged(after.version)
        state = slot.state()
        feed.require(after.version, state, None)
        if state.flushed <= after.version:
            slot.require_log(after.version)
        self.check()
        self._begin(after)
        self._decoder = Decoder(after.version, _END, self._wants, feed.settings.skip or ())
        self._kept, self._kept_bytes = [], 0
        name = application.encode()[:_MOST_NAME].decode(errors="ignore")
        feed.server.fetch("end_reader", slot=slot.name, application=name)
        self._stream = ReplicationStream(
            feed.server, slot.name, feed.settings.publication, after.version + 1, name
        )

    def read(self, wait: float) -> Step | None:
        """Return what has come since the last step, waiting at most that many seconds; None for nothing.

        Raises
        ------
        ServerGone
            When the connection is closed: start again.
        FeedUnavailableError
            When the next commit cannot be read.
        """
        assert self._stream is not None
        if self._failure is not None:
            raise self._failure
        received = self._stream.read(wait)
        messages = self._whole(received)
        if not messages and received.complete is None:
            return None
        step = Step(complete=received.complete, sent_at=received.sent_at)
        if messages:
            self._read_to(messages, step)
        return step

    def _read_to(self, messages: list[bytes], step: Step) -> None:
        """Read messages, or those before the first commit that cannot be read."""
        before = self._decoder.fork()
        places = [(reader, reader.place) for reader in self._all_readers()]
        try:
            self._decode(self._decoder, messages, step)
        except FeedUnavailableError as error:
            readable = messages[: _begin_of(error.parameters.get("version"), messages)]
            if not readable:
                raise
            self._failure, self._decoder = error, before
            for reader, place in places:
                reader.resume_after(*place)
            step.rows, step.complete = {}, None
            messages = readable
            self._decode(self._decoder, messages, step)
        step.place = self._place(messages[-1])

    def _all_readers(self) -> list[RowReader]:
        evolved = [reading.reader for reading in self._reading_of.values() if reading is not None]
        return list({id(reader): reader for reader in [*self._readers.values(), *evolved]}.values())

    def _whole(self, received: Received) -> list[bytes]:
        """Return the messages of complete transactions, or many of one that is not, and keep the others."""
        kept, new = self._kept, received.messages
        if received.whole:
            whole, self._kept = [*kept, *new[: received.whole]], new[received.whole :]
            self._kept_bytes = sum(map(len, self._kept))
            return whole
        kept += new
        self._kept_bytes += received.bytes
        if self._kept_bytes <= _PART_BYTES:
            return []
        self._kept, self._kept_bytes = [], 0
        return kept

    def _place(self, last: bytes) -> PlaceInLog:
        version = self._decoder.version
        if last[0] == COMMIT:
            return PlaceInLog(version)
        return PlaceInLog(0, version, self._decoder.rows)

    def confirm(self, position: int) -> None:
        """Let the server remove the log before a position, since all rows of it are safe."""
        assert self._stream is not None
        self._stream.confirm(position)

    def check(self) -> bool:
        """Refuse what has happened since the last check that is not in the log; at most every few seconds.

        Return whether the state of the publication is to be kept anew.
        """
        if time.monotonic() < self._check_at:
            return False
        settings, before = self._feed.settings, self.state
        now = state_of(self._feed.server, settings.publication, self._tables).remembering(before)
        columns = {name: self._fit.columns_of(oid, name) for oid, name in now.names.items()}
        changes = unlogged.changes_between(
            self._feed.server,
            settings.publication,
            before,
            now,
            self._tables,
            columns,
            keeps_emptied=settings.truncate == "skip",
        )
        unlogged.refuse(self._feed.name, changes, settings.accept or ())
        self.state, self._check_at = now, time.monotonic() + _CHECK_SECONDS
        return now.definitions() != before.definitions()

    def close(self) -> None:
        if self._stream is not None:
            self._stream.close()

    def _begin(self, after: PlaceInLog) -> None:
        self._reading_of, self._failure = {}, None
        self._readers = {name: self._reader(plan) for name, plan in self.plans.items()}
        if after.part_rows:
            for reader in self._readers.values():
                reader.resume_after(after.part_version, after.part_rows - 1)

    def _reader(self, plan: Tables) -> RowReader:
        return RowReader(self._feed.settings, plan, plan.schema(), 0, from_log=True)

    def _wants(self, relation: Relation, version: int) -> bool:
        """Whether a relation's rows are read; raises if they do not fit."""
        if relation not in self._reading_of:
            self._reading_of[relation] = self._reading(relation, version)
        return self._reading_of[relation] is not None

    def _reading(self, relation: Relation, version: int) -> _Reading | None:
        table = self._fit.reads(relation)
        if table is None:
            return None
        if isinstance(table, SchemaChange):
            return self._evolved(relation, version, table)
        name = ALL if self._together else table.name
        self._readers[name].wants(relation, version)
        return _Reading(name, self._readers[name])

    def _evolved(self, relation: Relation, version: int, change: SchemaChange) -> _Reading:
        """Return how rows are read whose table has got or lost columns; raise if that is to be refused."""
        table = self._fit.table_of(relation)
        form = None
        if self._changes != REFUSE and not self._together and isinstance(table, Table):
            domains = domains_of(self._feed.server, {column.type for column in relation.columns})
            tables = replace(self._tables, domains={**self._tables.domains, **domains})
            form = evolved(table, relation, tables, change, keeps_new=self._changes == EVOLVE)
        if form is None or self._renames(form, relation):
            raise change.in_pump(self._feed.name, version)
        plan = replace(self.plans[form.name], tables=(form,), domains=tables.domains, some_columns=True)
        reader = self._reader(plan)
        reader.resume_after(*self._readers[form.name].place)
        reader.wants(relation, version)
        self._readers[form.name] = reader
        return _Reading(form.name, reader)

    def _renames(self, form: Table, relation: Relation) -> bool:
        """Whether a column that the form lacks is there under another name: its values would be lost."""
        settings, planned = self._feed.settings, self._tables.by_oid.get(relation.oid)
        now = state_of(self._feed.server, settings.publication, self._tables).remembering(self.state)
        name = now.names.get(relation.oid)
        if name is None or planned is None:
            # The table is gone, or another one with its name.
            return False
        names = {number: column for column, (number, *_) in now.columns[name].items()}
        numbers = {column: number for column, (number, *_) in now.columns[name].items()}
        numbers |= now.dropped.get(name, {})
        gone = [column for column in planned.relation.names if column not in form.relation.names]
        # A number that is not known is 0.
        return any(not numbers.get(each) or names.get(numbers[each], each) != each for each in gone)

    def _decode(self, decoder: Decoder, messages: Sequence[bytes], step: Step) -> None:
        for part in decoder.decode(messages):
            if isinstance(part, Truncation):
                for reader in self._readers.values():
                    reader.check_truncation(part)
                continue
            mine: dict[str, tuple[RowReader, list[Changes]]] = {}
            for changes in part:
                reading = self._reading_of[changes.relation]
                assert reading is not None
                mine.setdefault(reading.name, (reading.reader, []))[1].append(changes)
            for name, (reader, of_reader) in mine.items():
                rows = reader.rows_of(of_reader)
                if rows is not None and rows.num_rows:
                    step.rows.setdefault(name, []).append(rows)


class _Reading(NamedTuple):
    """How the rows of one form of a table are read."""

    name: str
    """The table's; ALL if all come in one form."""
    reader: RowReader


def _begin_of(version: object, messages: Sequence[bytes]) -> int:
    """Return where the messages of a commit begin; 0 if that is not here."""
    for index, message in enumerate(messages):
        if message[0] == BEGIN and int.from_bytes(message[1:9], "big") == version:
            return index
    return 0
