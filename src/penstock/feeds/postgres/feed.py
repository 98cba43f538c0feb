"""``PostgresFeed``: the changes of the tables of a PostgreSQL publication."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace

import pyarrow as pa

from penstock.errors import DataLostError, FeedUnavailableError
from penstock.feeds.postgres import catalog
from penstock.feeds.postgres.catalog import SNAPSHOT_SCHEMA, Tables
from penstock.feeds.postgres.lookahead import Lookahead, partition_key_errors
from penstock.feeds.postgres.pgoutput import Relation
from penstock.feeds.postgres.publication import state_of
from penstock.feeds.postgres.rows import RowReader
from penstock.feeds.postgres.schema_changes import Fit, SchemaChange
from penstock.feeds.postgres.server import START_OVER, Server, ServerGone, Session
from penstock.feeds.postgres.settings import FeedSettings
from penstock.feeds.postgres.slot import OpenTransactions, Slot, SlotLag, SlotState
from penstock.feeds.postgres.snapshot import Snapshot, SnapshotPiece, Snapshots
from penstock.feeds.postgres.times_of_log import TimesOfLog
from penstock.feeds.protocol import Commit, Description, OpenFeed, PlannedRead
from penstock.json_text import Json

_MAX_UNCHANGED_BYTES = 16 << 20
"""Bytes of log without changes after which an empty micro-batch advances the slot."""
_ATTEMPTS = 3
_PLANNING_MESSAGES = 100_000
"""Messages of the log to search for table definitions; later changes are detected when they are read."""


@dataclass(frozen=True)
class PostgresFeed(FeedSettings):
    """The changes of the tables of a PostgreSQL publication, through a logical replication slot.

    Each transaction is a commit: its version is the log position (LSN) of its commit record, and its
    timestamp is the server's commit time. Changes can be read again until Spark has logged them; then the
    slot advances.

    A feed of one table has the table's columns. A feed of several tables has ``_table`` ("schema.table"),
    ``_key`` (the key as JSON), and a struct for each table, which is null in the rows of other tables. To
    read one table of a publication, set ``tables`` to its name. ``_commit_sequence`` orders the rows of a
    commit. ``_unchanged`` lists the columns of a row with unchanged TOAST values: a long value that an update
    did not modify is not in the log, unless the table's replica identity is full.

    With the default replica identity, an update has no pre-image, and a delete has only the key. An update
    that changes the key is a delete directly followed by an insert, whose unchanged TOAST values are those of
    the deleted row. A table without a key needs ``replica identity full``; all of its columns together
    identify a row.

    Types: boolean, smallint to bigint, real, double, numeric(p, s) up to 38 digits, date, timestamp with and
    without time zone, and bytea have the corresponding Arrow type. A domain has its base type. All other
    types (numeric without a precision, time, interval, uuid, json, enums, arrays, …) are PostgreSQL's text.
    Infinite dates and times become the first and the last ones in Spark. Other dates before year 1 or after
    9999, and NaN in a numeric with a precision, are an error: see ``types`` and ``invalid_values``.

    Parameters
    ----------
    url
        The URL of the database, as for libpq. Its query may contain the other parameters; ``table`` may be
        repeated.
    publication
        The publication: ``create publication … for table …``.
    slot
        The name of the replication slot: lower-case letters, digits and underscores. Each query needs its own
        slot. By default ``penstock_`` and the publication's name, if the name has only these characters.
    tables
        Tables of the publication to read, as "schema.table" or "table"; None for all.
    snapshot
        ``initial``: a streaming query with a new checkpoint creates the slot, and first reads the existing
        rows, as inserts of one commit. They are copied inside the database into the schema
        ``penstock_snapshots``, and the copy is dropped when they are logged. If the slot has already been
        read, or was created manually, a query with a new checkpoint is refused, because it would miss rows.
        ``none``: the slot has to exist, and a query reads the changes that it still has.
    truncate
        What to do if a table is truncated: ``fail`` the query, or ``skip`` the TRUNCATE, so that the copy
        keeps the rows.
    accept
        Changes to accept although they are not in the log, so that the copy may lack them. The error that
        stops the query has the values to pass.
    types
        Columns to read as ``text`` or ``double`` instead of their own type: ``{"price": "text"}``, or with
        the table if several tables have the column, ``{"orders.price": "double"}``. Text can represent every
        value.
    invalid_values
        What to do with a value that the type of its column cannot represent, such as NaN in a numeric with a
        precision: ``fail`` the query, or ``null``, which replaces it with NULL and logs the number of
        replaced values.
    skip
        Versions of commits to skip; the copy will lack their rows.
    lag_warning
        Bytes of log that the slot may retain on the server before a warning is logged; 0 for no warning.
    transaction_warning
        Seconds that a transaction may be open on the server before a warning is logged and added to the
        progress of the query, because the slot retains the log from its start on; 0 for no warning.
    slot_wait
        Seconds to wait for another reader to release the slot.
    trusted_owners
        Roles whose functions may run with the privileges of the feed's role; in a URL, repeat ``owner``. The
        initial copy runs functions in indexes, extended statistics and partition keys of the tables. It is
        refused if one of them is owned by a role other than these, the feed's own role, superusers and the
        owner of the database.

    Raises
    ------
    InvalidUrlError
        For a parameter that is invalid, missing or unknown.
    MissingDependencyError
        When psycopg is not installed.
    """

    @classmethod
    def from_url(cls, url: str) -> PostgresFeed:
        """Return the feed of a URL."""
        return cls(url)

    def open(self, planned: PlannedRead | None = None) -> OpenPostgresFeed:
        """Open the feed in this process; the caller closes it."""
        return OpenPostgresFeed(self, planned)

    def prepare(self) -> int:
        """Return the version after which a new query starts; create the slot if ``snapshot="initial"``."""
        with closing(self.open()) as feed:
            return feed.prepare()

    def lag(self) -> SlotLag:
        """Return how much log the slot retains, how much is unconfirmed, and the oldest open transaction."""
        with closing(self.open()) as feed:
            return feed.lag()


@dataclass(frozen=True)
class ReadTask:
    """Task that reads commits from the log, or a piece of the snapshot."""

    tables: Tables
    first: int
    """The first commit of the range of all tasks."""
    after: int
    upto: int
    piece: SnapshotPiece | None = None


class OpenPostgresFeed(OpenFeed):
    """A PostgreSQL feed that is open in one process.

    Without a plan, it reads the tables as they are defined on first use.
    """

    def __init__(self, settings: FeedSettings, planned: PlannedRead | None = None) -> None:
        self.settings = settings
        self.name = settings.name
        self.server = Server(settings.server, self.name, settings.slot_wait or 0.0)
        self.slot = Slot(self.server, settings.slot, settings.publication, settings.lag_warning or 0)
        self._transactions = OpenTransactions(self.server, settings.slot, settings.transaction_warning or 0.0)
        self.snapshots = Snapshots(
            self.server,
            self.slot,
            self._transactions.oldest,
            required=settings.snapshot == "initial",
            trusted=settings.trusted_owners or (),
        )
        self._planned = planned
        self._tables: Tables | None = None
        self._lookahead: Lookahead | None = None
        self._range_without_changes: tuple[int, int] | None = None
        """The last range that was found to have no changes."""
        self._flushed = 0
        self._searched: tuple[int, int] | None = None
        """The version and the end of the log at the last lookahead that found no commits to read."""
        self._times = TimesOfLog()
        self._known_end = 0, 0
        """The end that was last returned, and the version up to which no commits follow it."""
        if planned is not None and planned.plan is not None:
            self._set_tables(Tables.from_json(planned.plan))

    def close(self) -> None:
        self.server.close()

    def describe(self, after: int | None = None) -> Description:
        """Describe the tables as defined in the log after a version, or from the oldest unread row on."""
        self.slot.check_server()
        if self._tables is None or self._planned is None:
            self._set_tables(self._tables_after(after))
        if self.settings.snapshot == "none":
            self.slot.state()
        tables = self.known_tables()
        return Description(self.identity(), tables.schema(), tables.contract(), tables.to_json())

    def prepare(self) -> int:
        if self.settings.snapshot == "none":
            return self.oldest()
        self.snapshots.create(self.known_tables().tables, self._check_plan)
        state, snapshot = self.slot.state(), self.snapshots.find()
        oldest = self._oldest(state, snapshot)
        if snapshot is None or oldest >= snapshot.version:
            raise self.slot.already_read(oldest)
        return oldest

    def oldest(self) -> int:
        return self._oldest(self.slot.state(), self.snapshots.find())

    def newest(self, after: int) -> int:
        """Return the end of the log if there are changes after ``after``; otherwise ``after``."""
        self.known_tables()
        state, snapshot = self.slot.state(), self.snapshots.find()
        # Later commits start at or after the end of the log.
        self._flushed, upto = state.flushed, state.flushed - 1
        self._times.record(state.written - 1, state.now)
        end = self._end_with_changes(after, upto, state, snapshot)
        self._known_end = end, max(end, upto)
        return end

    def _end_with_changes(self, after: int, upto: int, state: SlotState, snapshot: Snapshot | None) -> int:
        if snapshot is not None and after < snapshot.version:
            return max(upto, snapshot.version)
        if after < self._oldest(state, snapshot):
            # The read of the range raises the error for commits that are gone.
            return max(upto, after)
        if upto <= after or self._range_without_changes == (after, upto):
            return after
        if self.slot.has_changes(after, upto) or upto - after > _MAX_UNCHANGED_BYTES:
            return upto
        self._range_without_changes = after, upto
        return after

    def stream_start(self) -> Json:
        snapshot = self.snapshots.find()
        if snapshot is not None:
            return dict(snapshot.publication)
        return state_of(self.server, self.settings.publication, self.known_tables()).to_json()

    def stream_end(self, after: int, state: Json | None) -> int:
        """Return the version up to which a stream can read now; see :class:`Lookahead`."""
        upto = self.newest(after)
        searched = after, self._flushed
        if state is not None and upto == after and searched == self._searched:
            # Nothing has been written since.
            return after
        if self._lookahead is None:
            columns = None if self._planned is None else self._planned.columns
            self._lookahead = Lookahead(self.settings, self.server, self.slot, self.known_tables(), columns)
        snapshot = self.snapshots.find()
        start = after if snapshot is None else max(after, min(snapshot.version, upto))
        end = self._lookahead.end(start, upto, state, rows_before=start > after)
        self._searched = searched if end == after else None
        if end < upto:
            self._known_end = end, end
        return end

    def finalized_until(self, upto: int) -> int | None:
        end, known = self._known_end
        return self._times.before(known if upto == end else upto)

    def stream_state(self, upto: int, state: Json | None) -> Json | None:
        return state if self._lookahead is None else self._lookahead.state_at(upto, state)

    def commits(self, after: int, upto: int, rows: int | None = None) -> Iterator[Commit]:
        self.known_tables()
        snapshot = self.snapshots.find()
        self.require(after, self.slot.state(), snapshot)
        if snapshot is not None and after < snapshot.version <= upto:
            yield Commit(snapshot.version, snapshot.timestamp, snapshot.rows)
            after = snapshot.version
        yield from self.slot.commits(after, upto, rows)

    def tasks(self, after: int, upto: int, rows_per_task: int) -> Sequence[ReadTask]:
        """Return several tasks for the snapshot, but only one for the log, because a slot has one reader."""
        tables = self.known_tables()
        snapshot = self.snapshots.find()
        self.require(after, self.slot.state(), snapshot)
        tasks: list[ReadTask] = []
        first = after + 1
        if snapshot is not None and after < snapshot.version <= upto:
            version = snapshot.version
            tasks += [
                ReadTask(tables, version, version - 1, version, piece)
                for piece in snapshot.pieces(rows_per_task)
            ]
            after = version
        if after < upto:
            self._require_partition_keys(tables, after, upto)
            tasks.append(ReadTask(tables, first, after, upto))
        return tasks

    def _require_partition_keys(self, tables: Tables, after: int, upto: int) -> None:
        """Refuse rows of partitions that do not log their table's key, unless a lookahead checks this."""
        if self._lookahead is None and any(table.partitioned for table in tables.tables):
            relations = self.slot.relations(after, upto, skipped=self.settings.skip or ())
            for _, error in partition_key_errors(self.settings.name, self.server, tables, relations):
                raise error

    def read(self, task: ReadTask, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
        """Read the rows of a task; if the connection is lost, resume after the last row."""
        piece = task.piece
        rows = RowReader(self.settings, task.tables, schema, task.first, from_log=piece is None)
        for attempt in range(_ATTEMPTS):
            decoder = rows.decoder(task.after, task.upto)
            if piece is not None:
                decoder.begin(piece.version, piece.timestamp, piece.sequence, piece.copy.relation)
            try:
                with closing(self._messages(task)) as chunks:
                    yield from rows.batches(decoder, chunks)
                rows.report_invalid()
                return
            except ServerGone:
                if attempt == _ATTEMPTS - 1:
                    raise

    def logged(self, upto: int) -> None:
        """Advance the slot, and drop the snapshot's copies."""
        snapshot = self.snapshots.find()
        if snapshot is not None:
            if upto < snapshot.version:
                return
            # Drop the snapshot first: it is only valid for a slot that has not advanced.
            self.snapshots.drop()
        self.slot.advance(upto)

    def lag(self) -> SlotLag:
        return replace(self.slot.state().lag, open_transaction=self._transactions.oldest())

    def warnings(self) -> list[str]:
        warning = self._transactions.warning(lambda: self.slot.state().lag.retained)
        return [] if warning is None else [warning]

    def _messages(self, task: ReadTask) -> Generator[list[bytes], None, None]:
        if task.piece is not None:
            return self.snapshots.messages(task.piece)
        self.slot.choose(task.tables)
        # Another reader may have advanced the slot since the task was created.
        self.require(task.after, self.slot.state(), None)
        return self.slot.messages(task.upto)

    def known_tables(self) -> Tables:
        """Return the tables as they are read; without a plan, as defined at the oldest unread row."""
        if self._tables is None:
            self._set_tables(self._tables_after(None))
        assert self._tables is not None
        return self._tables

    def _tables_after(self, after: int | None) -> Tables:
        """Return the tables for a read that begins after a version, or at the oldest one."""
        tables = catalog.load_tables(self.server, self.settings.publication, self.settings.tables)
        state = self.slot.find()
        if state is None or not state.ready:
            return self._with_types(tables)
        snapshot = self.snapshots.find()
        start = self._oldest(state, snapshot)
        start = start if after is None else max(start, after)
        relations: list[Relation] = []
        if snapshot is not None and start < snapshot.version:
            relations += [copy.relation for copy in snapshot.copies if copy.rows]
            start = snapshot.version
        self.slot.choose(tables)
        logged = self.slot.relations(
            start, state.flushed - 1, skipped=self.settings.skip or (), messages=_PLANNING_MESSAGES
        )
        relations += [relation for relation in logged.uses if relation.schema != SNAPSHOT_SCHEMA]
        types = {column.type for relation in relations for column in relation.columns}
        domains = {**tables.domains, **catalog.domains_of(self.server, types)}
        return self._with_types(replace(tables, domains=domains).as_logged(relations))

    def _with_types(self, tables: Tables) -> Tables:
        catalog.check_names(self.server, tables)
        return tables.reading_as(self.server, self.settings.types or {})

    def _check_plan(self, session: Session) -> Json:
        """Check the planned tables in the session that copies them; return the state of the publication."""
        tables = self.known_tables()
        current, _ = catalog.published(session, self.settings.publication)
        fit = Fit(tables, {table.name: table.relation.names for table in tables.tables})
        for table in current:
            change = fit.reads(table.relation)
            if isinstance(change, SchemaChange):
                raise change.before_start(self.name)
        return state_of(session, self.settings.publication, tables).to_json()

    def _set_tables(self, tables: Tables) -> None:
        some_columns = self._planned is not None and self._planned.some_columns
        self._tables = replace(tables, some_columns=some_columns)
        self._lookahead = None
        self.slot.choose(tables)

    def identity(self) -> str:
        """Return the identity of the feed, without secrets."""
        try:
            system = self.server.fetch("system")[0].system_identifier
        except ServerGone:
            raise
        except FeedUnavailableError:
            system = "server"
        (row,) = self.server.fetch("server")
        tables = "".join(f"/{table}" for table in sorted(self.settings.tables or ()))
        return f"postgresql:{system}/{row.database}/{self.settings.publication}/{self.settings.slot}{tables}"

    def _oldest(self, state: SlotState, snapshot: Snapshot | None) -> int:
        confirmed = state.confirmed - 1
        if snapshot is not None and confirmed <= snapshot.version:
            return snapshot.version - 1
        return confirmed

    def require(self, after: int, state: SlotState, snapshot: Snapshot | None) -> None:
        """Refuse to read after a version if some of the following commits are gone."""
        oldest = self._oldest(state, snapshot)
        if after < oldest:
            raise DataLostError(
                f"{self.name}: the commits from {after + 1} to {oldest} are gone: another query advanced the "
                f"slot, or it was recreated. {START_OVER.capitalize()}; "
                f'or continue after {oldest} with a new checkpoint and snapshot="none"',
                condition="DATA_LOST.SLOT",
                after=after,
                oldest=oldest,
            )
