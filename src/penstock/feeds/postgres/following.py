"""A slot that is followed by one process: the initial copy, and then what the server sends, by table.

The rows are those that a query reads through Spark, with the same checks of each table's form
(:mod:`penstock.feeds.postgres.table_readers`). What the log does not have is found by comparing the state of
the publication every few seconds (:mod:`penstock.feeds.postgres.unlogged`).
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from typing import NamedTuple

import pyarrow as pa

from penstock.errors import DataLostError, FeedUnavailableError
from penstock.feeds.postgres import schema_changes, unlogged
from penstock.feeds.postgres.feed import OpenPostgresFeed
from penstock.feeds.postgres.pgoutput import BEGIN, COMMIT, Decoder
from penstock.feeds.postgres.publication import PublicationState, state_of, tables_left
from penstock.feeds.postgres.replication import Received, ReplicationStream
from penstock.feeds.postgres.rows import skipped_commits
from penstock.feeds.postgres.snapshot import SnapshotPiece
from penstock.feeds.postgres.table_readers import TableReaders
from penstock.feeds.postgres.timelines import left_at, other_history
from penstock.feeds.postgres.times_of_log import TimesOfLog

_PART_BYTES = 32 << 20
"""The messages of a transaction that is not complete are kept up to this size; then its rows are read."""
_PIECE_ROWS = 50_000
_MOST_NAME = 63
"""Bytes of an application's name that the server keeps."""
_CHECK_SECONDS = 5.0
_TIME_SECONDS = 1.0
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

    def add(self, rows: Mapping[str, Sequence[pa.RecordBatch]]) -> None:
        """Add later rows."""
        for name, batches in rows.items():
            self.rows.setdefault(name, []).extend(batches)


class SlotFollower:
    """Follows a slot from a position; not thread-safe.

    Parameters
    ----------
    feed
        The open feed.
    readers
        Those of its tables.
    """

    def __init__(self, feed: OpenPostgresFeed, readers: TableReaders) -> None:
        self._feed, self._readers = feed, readers
        self._decoder = Decoder(0, _END, readers.wants)
        self._stream: ReplicationStream | None = None
        self._kept: list[bytes] = []
        """Messages of a transaction whose commit has not come."""
        self._kept_bytes = 0
        self._failure: FeedUnavailableError | None = None
        """Why what comes next cannot be read."""
        self._removed: tuple[int, FeedUnavailableError] | None = None
        """Up to where the log may have rows of a table that has left the publication, and the error then."""
        self._continued = PlaceInLog()
        """The commit that is to come first, of which some rows were read before."""
        self._check_at = 0.0
        self.has_new_tables = False
        """Whether the publication has tables that are to be read too."""
        self.reached = 0
        """The position up to which everything has been returned by :meth:`read`."""
        self.place = PlaceInLog()
        """How far what :meth:`read` has returned goes, with the commits of which there are no rows."""
        self._unkept = False
        """Whether the state has changed since it was kept."""
        self._times = TimesOfLog()
        self._time_at = 0.0

    def copy(self, after: PlaceInLog) -> Iterator[Step]:
        """Yield the rows of the initial copy, if it is there and not all of it was read before."""
        snapshot = self._feed.snapshots.find()
        if snapshot is None or after.version >= snapshot.version:
            return
        version = snapshot.version
        done = after.part_rows if after.part_version == version else 0
        self._readers.begin(version, done)
        for piece in snapshot.pieces(_PIECE_ROWS):
            if piece.sequence + piece.last - piece.first > done:
                yield from self._piece(piece)
        yield Step(PlaceInLog(version))

    def _piece(self, piece: SnapshotPiece) -> Iterator[Step]:
        """Yield the rows of a piece in steps of some megabytes."""
        version = piece.version
        decoder = Decoder(version - 1, version, self._readers.wants)
        decoder.begin(version, piece.timestamp, piece.sequence, piece.copy.relation)
        step, size = Step(), 0
        with closing(self._feed.snapshots.messages(piece)) as chunks:
            for messages in chunks:
                step.add(self._readers.decode(decoder, messages))
                step.place = PlaceInLog(0, version, decoder.rows)
                size += sum(map(len, messages))
                if size > _PART_BYTES:
                    yield step
                    step, size = Step(), 0
        if step.place.part_version:
            yield step

    def start(self, after: PlaceInLog, application: str, last_row: int) -> PlaceInLog:
        """Begin to receive what comes after a place; the initial copy is dropped. Return the place.

        Another process that still receives under the same name of an application is ended.

        A standby that has taken over may lack the end of the log, without rows of the tables. Then the place
        is where its own log begins.

        Parameters
        ----------
        last_row
            The last commit with rows.

        Raises
        ------
        DataLostError
            When the server does not have all of it any more.
        FeedUnavailableError
            When something has happened that is not in the log, or the server refuses.
        """
        feed, slot, settings = self._feed, self._feed.slot, self._feed.settings
        if after.part_rows and after.part_version in (settings.skip or ()):
            raise feed.server.unavailable(
                "SKIPPED_IN_PART",
                f"commit {after.part_version} cannot be left out any more, since {after.part_rows:,} of its "
                "rows are in the queues: read the column as text, types={…: 'text'}, or replace values that "
                "do not fit with NULL, invalid_values='null'",
                version=after.part_version,
            )
        if feed.snapshots.find() is not None:
            feed.logged(after.version)
        state = slot.state()
        after = self._on_timeline(after, max(last_row, after.part_version))
        feed.require(after.version, state, None)
        if state.flushed <= after.version:
            slot.require_log(after.version)
        self._compare()
        self._readers.begin(after.part_version, after.part_rows)
        skipped = skipped_commits(settings, after.version, _END)
        self._decoder = Decoder(after.version, _END, self._readers.wants, skipped)
        self._kept, self._kept_bytes, self._failure = [], 0, None
        self._continued = after if after.part_rows else PlaceInLog()
        self.place = after
        name = application.encode()[:_MOST_NAME].decode(errors="ignore")
        feed.server.fetch("end_reader", slot=slot.name, application=name)
        self._stream = ReplicationStream(
            feed.server, slot.name, settings.publication, after.version + 1, name
        )
        return after

    def _on_timeline(self, after: PlaceInLog, last_row: int) -> PlaceInLog:
        """Return a place on the server's timeline; refuse a server that lacks rows that were read."""
        server, before = self._feed.server, self._readers.state.timeline
        (now,) = server.fetch("transaction")
        position = left_at(server, before, now.timeline)
        if position is None or position > max(after.version, last_row):
            return after
        if last_row >= position:
            raise other_history(server, now.timeline, position, last_row)
        return PlaceInLog(position - 1)

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
        self._note_time()
        received = self._stream.read(wait)
        messages = self._whole(received)
        if not messages and received.complete is None:
            return None
        step = Step(complete=received.complete)
        if messages:
            self._read_to(messages, step)
        self.reached = max(self.reached, step.complete or 0, step.place.version)
        if self._removed is not None and self.reached >= self._removed[0]:
            self._failure = self._removed[1]
        return step

    def _read_to(self, messages: list[bytes], step: Step) -> None:
        """Read messages, or those before the first commit that cannot be read."""
        decoder, kept = self._decoder.fork(), self._readers.keep()
        try:
            step.add(self._readers.decode(self._decoder, messages))
        except FeedUnavailableError as error:
            messages = messages[: _begin_of(error.parameters.get("version"), messages)]
            if not messages:
                raise
            self._failure, self._decoder, step.complete = error, decoder, None
            self._readers.return_to(kept)
            step.add(self._readers.decode(self._decoder, messages))
        self.place = step.place = self._place(messages[-1])
        self._require_continued(messages, step.place)

    def _note_time(self) -> None:
        now = time.monotonic()
        if now >= self._time_at:
            self._time_at = now + _TIME_SECONDS
            (row,) = self._feed.server.fetch("position")
            self._times.note(int(row.position) - 1, int(row.now))

    @property
    def finalized_until(self) -> int | None:
        """The server's time before which every commit has been returned by :meth:`read`; None if not known.

        In microseconds since 1970. It does not follow from the server's signs of life, which have the current
        time however far it is behind in reading its log.
        """
        return self._times.before(self.reached)

    def _place(self, last: bytes) -> PlaceInLog:
        version = self._decoder.version
        if last[0] == COMMIT:
            return PlaceInLog(version)
        return PlaceInLog(0, version, self._decoder.rows)

    def _require_continued(self, messages: Sequence[bytes], place: PlaceInLog) -> None:
        """Refuse a log without the commit of which rows were read before."""
        version = self._continued.part_version
        if not version or max(place.version, place.part_version) < version:
            return
        self._continued = PlaceInLog()
        if _begin_of(version, messages) == 0 and _version(messages[0]) != version:
            raise DataLostError(
                f"{self._feed.name}: the server does not have commit {version} any more, some rows of which "
                "are in the queues: it was restored from a backup, or another server has taken over without "
                "it. `penstock pump recover` has the pump read all rows again",
                condition="DATA_LOST.HISTORY_CHANGED",
                version=version,
            )

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

    def confirm(self, position: int) -> None:
        """Let the server remove the log before a position, since all rows of it are safe."""
        assert self._stream is not None
        self._stream.confirm(position)

    @property
    def state(self) -> PublicationState:
        """The last known state of the publication."""
        return self._readers.state

    def check(self) -> bool:
        """Refuse what has happened since the last check that is not in the log, every few seconds.

        Return whether the state of the publication is to be kept anew.
        """
        if time.monotonic() >= self._check_at or self._readers.has_evolved:
            self._compare()
        changed, self._unkept = self._unkept, False
        return changed

    def _compare(self) -> None:
        """Compare the state of the publication with the last one."""
        settings, before, tables = self._feed.settings, self._readers.state, self._readers.tables
        now = state_of(self._feed.server, settings.publication, tables).remembering(before)
        changes = unlogged.changes_between(
            self._feed.server,
            settings.publication,
            before,
            now,
            tables,
            self._readers.columns_read(now),
            keeps_emptied=settings.truncate == "skip",
        )
        if self._readers.ignores_new_tables or self._readers.follows_new_tables:
            changes = [change for change in changes if change.table not in self._readers.new_tables(now)]
        self.has_new_tables = self._readers.has_new_tables(now)
        unlogged.refuse(self._feed.name, changes, settings.accept or ())
        self._note_removed(now)
        self._readers.report_invalid()
        self._readers.state, self._readers.has_evolved = now, False
        self._check_at = time.monotonic() + _CHECK_SECONDS
        self._unkept |= now.definitions() != before.definitions()

    def _note_removed(self, now: PublicationState) -> None:
        """Note that a table has left the publication: its rows up to here are still read."""
        left = tables_left(self._readers.tables, now)
        if left and self._removed is None:
            (end,) = self._feed.server.fetch("position")
            self._removed = int(end.position), schema_changes.table_left(self._feed.name, left[0])

    def close(self) -> None:
        self._readers.report_invalid()
        if self._stream is not None:
            self._stream.close()


def _version(message: bytes) -> int | None:
    """Return the commit that a message begins; None for another message."""
    return int.from_bytes(message[1:9], "big") if message[0] == BEGIN else None


def _begin_of(version: object, messages: Sequence[bytes]) -> int:
    """Return where the messages of a commit begin; 0 if that is not here."""
    return next((place for place, message in enumerate(messages) if _version(message) == version), 0)
