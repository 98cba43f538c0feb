"""Following a slot in one process: reads the initial copy, then the changes that the server streams, by
table.

The rows and the checks of each table's columns are the same as in a query that reads through Spark
(:mod:`penstock.feeds.postgres.table_readers`). Changes that are not in the log are detected by comparing the
state of the publication every few seconds (:mod:`penstock.feeds.postgres.unlogged`).
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
from penstock.feeds.postgres.publication import PublicationState, removed_tables, state_of
from penstock.feeds.postgres.replication import Received, ReplicationStream
from penstock.feeds.postgres.rows import skipped_commits
from penstock.feeds.postgres.snapshot import SnapshotPiece
from penstock.feeds.postgres.table_readers import TableReaders
from penstock.feeds.postgres.timelines import other_history, timeline_left_at
from penstock.feeds.postgres.times_of_log import TimesOfLog

_PART_BYTES = 32 << 20
"""Size up to which the messages of an incomplete transaction are buffered before its rows are read."""
_PIECE_ROWS = 50_000
_MAX_NAME_BYTES = 63
"""Maximum length of an application name on the server, in bytes."""
_CHECK_SECONDS = 5.0
_TIME_SECONDS = 1.0
_END = 2**63 - 1


class PlaceInLog(NamedTuple):
    """How far a log has been read."""

    version: int = 0
    """The last complete commit; 0 if unchanged."""
    part_version: int = 0
    """The next commit, if some of its rows have been read; otherwise 0."""
    part_rows: int = 0
    """The number of rows of that commit that have been read."""


_UNCHANGED = PlaceInLog()


@dataclass
class Step:
    """Rows in log order, and how far the log has been read with them."""

    place: PlaceInLog = _UNCHANGED
    rows: dict[str, list[pa.RecordBatch]] = field(default_factory=dict)
    """The rows by table; under ALL if all tables share one schema."""
    complete: int | None = None
    """The position up to which the log is complete with these rows; None if unknown."""

    def add(self, rows: Mapping[str, Sequence[pa.RecordBatch]]) -> None:
        """Append later rows."""
        for name, batches in rows.items():
            self.rows.setdefault(name, []).extend(batches)


class SlotFollower:
    """Follower of a slot from a position on; not thread-safe.

    Parameters
    ----------
    feed
        The open feed.
    readers
        The readers of its tables.
    """

    def __init__(self, feed: OpenPostgresFeed, readers: TableReaders) -> None:
        self._feed, self._readers = feed, readers
        self._decoder = Decoder(0, _END, readers.wants)
        self._stream: ReplicationStream | None = None
        self._buffered: list[bytes] = []
        """Buffered messages of a transaction whose commit has not arrived."""
        self._buffered_bytes = 0
        self._failure: FeedUnavailableError | None = None
        """The error to raise next, because the next commit cannot be read."""
        self._removed_table: tuple[int, FeedUnavailableError] | None = None
        """Position up to which the log may have rows of a removed table, and the error to raise then."""
        self._resumed_commit = PlaceInLog()
        """The commit that has to come first, because some of its rows were read before."""
        self._check_at = 0.0
        self.has_new_tables = False
        """Whether the publication has new tables that have to be read."""
        self.reached = 0
        """The position up to which :meth:`read` has returned all rows."""
        self.place = PlaceInLog()
        """How far :meth:`read` has read the log, including commits without rows."""
        self._is_state_unsaved = False
        """Whether the publication state has changed since the caller last stored it."""
        self._times = TimesOfLog()
        self._time_at = 0.0

    def copy(self, after: PlaceInLog) -> Iterator[Step]:
        """Yield the rows of the initial copy that have not been read yet, if the copy exists."""
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
        """Yield the rows of a piece in steps of several megabytes."""
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
        """Start streaming after a place in the log, and drop the initial copy. Return the place.

        A process that still streams from the slot with the same application name is terminated.

        A standby that was promoted may lack the end of the log. If the missing part has no rows of the
        tables, the returned place is where the standby's own timeline begins.

        Parameters
        ----------
        last_row
            The last commit with rows.

        Raises
        ------
        DataLostError
            When the server no longer has all of the log after the place.
        FeedUnavailableError
            When there were changes that are not in the log, or the server refuses.
        """
        feed, slot, settings = self._feed, self._feed.slot, self._feed.settings
        if after.part_rows and after.part_version in (settings.skip or ()):
            raise feed.server.unavailable(
                "SKIPPED_IN_PART",
                f"commit {after.part_version} can no longer be skipped, because {after.part_rows:,} of its "
                "rows are in the queues: read the column as text with types={…: 'text'}, or replace invalid "
                "values with NULL with invalid_values='null'",
                version=after.part_version,
            )
        if feed.snapshots.find() is not None:
            feed.logged(after.version)
        state = slot.state()
        after = self._place_on_timeline(after, max(last_row, after.part_version))
        feed.require(after.version, state, None)
        if state.flushed <= after.version:
            slot.require_log(after.version)
        self._compare()
        self._readers.begin(after.part_version, after.part_rows)
        skipped = skipped_commits(settings, after.version, _END)
        self._decoder = Decoder(after.version, _END, self._readers.wants, skipped)
        self._buffered, self._buffered_bytes, self._failure = [], 0, None
        self._resumed_commit = after if after.part_rows else PlaceInLog()
        self.place = after
        name = application.encode()[:_MAX_NAME_BYTES].decode(errors="ignore")
        feed.server.fetch("end_reader", slot=slot.name, application=name)
        self._stream = ReplicationStream(
            feed.server, slot.name, settings.publication, after.version + 1, name
        )
        return after

    def _place_on_timeline(self, after: PlaceInLog, last_row: int) -> PlaceInLog:
        """Return a place on the server's timeline; refuse a server that lacks rows which were read."""
        server, before = self._feed.server, self._readers.state.timeline
        (now,) = server.fetch("transaction")
        position = timeline_left_at(server, before, now.timeline)
        if position is None or position > max(after.version, last_row):
            return after
        if last_row >= position:
            raise other_history(server, now.timeline, position, last_row)
        return PlaceInLog(position - 1)

    def read(self, wait: float) -> Step | None:
        """Return the rows since the last step, waiting at most ``wait`` seconds; None if nothing arrived.

        Raises
        ------
        ServerGone
            When the connection is closed; call :meth:`start` again.
        FeedUnavailableError
            When the next commit cannot be read.
        """
        assert self._stream is not None
        if self._failure is not None:
            raise self._failure
        self._record_time()
        received = self._stream.read(wait)
        messages = self._readable(received)
        if not messages and received.complete is None:
            return None
        step = Step(complete=received.complete)
        if messages:
            self._read_to(messages, step)
        self.reached = max(self.reached, step.complete or 0, step.place.version)
        if self._removed_table is not None and self.reached >= self._removed_table[0]:
            self._failure = self._removed_table[1]
        return step

    def _read_to(self, messages: list[bytes], step: Step) -> None:
        """Read messages into a step, up to the first commit that cannot be read."""
        decoder, saved = self._decoder.fork(), self._readers.save()
        try:
            step.add(self._readers.decode(self._decoder, messages))
        except FeedUnavailableError as error:
            messages = messages[: _first_message_of(error.parameters.get("version"), messages)]
            if not messages:
                raise
            self._failure, self._decoder, step.complete = error, decoder, None
            self._readers.restore(saved)
            step.add(self._readers.decode(self._decoder, messages))
        self.place = step.place = self._place(messages[-1])
        self._require_resumed_commit(messages, step.place)

    def _record_time(self) -> None:
        now = time.monotonic()
        if now >= self._time_at:
            self._time_at = now + _TIME_SECONDS
            (row,) = self._feed.server.fetch("position")
            self._times.record(int(row.position) - 1, int(row.now))

    @property
    def finalized_until(self) -> int | None:
        """The server's time before which :meth:`read` has returned all commits; None if unknown.

        The time is in microseconds since 1970. The server's keepalive messages cannot be used for it: they
        have the current time, even if the server lags behind in reading its log.
        """
        return self._times.before(self.reached)

    def _place(self, last: bytes) -> PlaceInLog:
        version = self._decoder.version
        if last[0] == COMMIT:
            return PlaceInLog(version)
        return PlaceInLog(0, version, self._decoder.rows)

    def _require_resumed_commit(self, messages: Sequence[bytes], place: PlaceInLog) -> None:
        """Refuse a log that lacks the commit that was partly read before."""
        version = self._resumed_commit.part_version
        if not version or max(place.version, place.part_version) < version:
            return
        self._resumed_commit = PlaceInLog()
        if _first_message_of(version, messages) == 0 and _version(messages[0]) != version:
            raise DataLostError(
                f"{self._feed.name}: the server no longer has commit {version}, but some of its rows are in "
                "the queues: the server was restored from a backup, or a standby without the commit was "
                "promoted. `penstock pump recover` makes the pump read all rows again",
                condition="DATA_LOST.HISTORY_CHANGED",
                version=version,
            )

    def _readable(self, received: Received) -> list[bytes]:
        """Return messages of complete transactions, or of a large incomplete one; buffer the others."""
        buffered, new = self._buffered, received.messages
        if received.complete_messages:
            complete_messages, self._buffered = (
                [*buffered, *new[: received.complete_messages]],
                new[received.complete_messages :],
            )
            self._buffered_bytes = sum(map(len, self._buffered))
            return complete_messages
        buffered += new
        self._buffered_bytes += received.bytes
        if self._buffered_bytes <= _PART_BYTES:
            return []
        self._buffered, self._buffered_bytes = [], 0
        return buffered

    def confirm(self, position: int) -> None:
        """Confirm that all rows before a position are stored, so that the server may remove the log."""
        assert self._stream is not None
        self._stream.confirm(position)

    @property
    def state(self) -> PublicationState:
        """The last known state of the publication."""
        return self._readers.state

    def check(self) -> bool:
        """Refuse changes since the last check that are not in the log; this checks every few seconds.

        Return whether the state of the publication has to be stored again.
        """
        if time.monotonic() >= self._check_at or self._readers.has_evolved:
            self._compare()
        changed, self._is_state_unsaved = self._is_state_unsaved, False
        return changed

    def _compare(self) -> None:
        """Compare the state of the publication with the last known one."""
        settings, before, tables = self._feed.settings, self._readers.state, self._readers.tables
        now = state_of(self._feed.server, settings.publication, tables).with_dropped_columns(before)
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
        self._record_removed(now)
        self._readers.report_invalid()
        self._readers.state, self._readers.has_evolved = now, False
        self._check_at = time.monotonic() + _CHECK_SECONDS
        self._is_state_unsaved |= now.definitions() != before.definitions()

    def _record_removed(self, now: PublicationState) -> None:
        """Record that a table was removed from the publication; its rows up to now are still read."""
        removed = removed_tables(self._readers.tables, now)
        if removed and self._removed_table is None:
            (end,) = self._feed.server.fetch("position")
            self._removed_table = (
                int(end.position),
                schema_changes.removed_in_pump(self._feed.name, removed[0]),
            )

    def close(self) -> None:
        self._readers.report_invalid()
        if self._stream is not None:
            self._stream.close()


def _version(message: bytes) -> int | None:
    """Return the commit of a Begin message; None for other messages."""
    return int.from_bytes(message[1:9], "big") if message[0] == BEGIN else None


def _first_message_of(version: object, messages: Sequence[bytes]) -> int:
    """Return the index of the first message of a commit; 0 if it is not among the messages."""
    return next((place for place, message in enumerate(messages) if _version(message) == version), 0)
