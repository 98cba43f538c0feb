"""The initial snapshot: the rows that existed when the slot was created, as its first commit.

The server creates a slot together with a snapshot of the database, which has all rows that the slot will not
send. They are copied inside the server, as the Insert messages that the slot would have sent for them, so
that a replay of a micro-batch reads the same rows even if the tables have changed. The copy is dropped when
Spark has logged it.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass

from penstock.errors import DataLostError
from penstock.feeds.postgres.catalog import SNAPSHOT_SCHEMA, Table
from penstock.feeds.postgres.pgoutput import Relation
from penstock.feeds.postgres.row_messages import row_messages
from penstock.feeds.postgres.server import Connection, Row, Server, Session, SlotInUse, quoted, run
from penstock.feeds.postgres.slot import FAILOVER_SINCE, OpenTransaction, Slot
from penstock.feeds.postgres.table_rows import lock_table, require_trusted_functions
from penstock.json_text import Json
from penstock.store.postgres.connection import CREATED_CONCURRENTLY
from penstock.store.postgres.trusted_owners import find_foreign_owner
from penstock.store.statements import bind

log = logging.getLogger("penstock.feeds")
_SLOTS = "slots"
_LOCK_WAIT = 60.0
"""Seconds to wait for another process that creates, drops or reads the snapshot."""
_TRIES = 5


@dataclass(frozen=True)
class Copy:
    """The copied rows of one table."""

    place: str
    """The table in penstock_snapshots that has the rows."""
    relation: Relation
    rows: int

    @classmethod
    def from_json(cls, value: Json) -> Copy:
        return cls(value["place"], Relation.from_json(value["relation"]), value["rows"])


@dataclass(frozen=True)
class Snapshot:
    """The copies of all tables."""

    version: int
    """The position at which the slot starts, minus one: less than the version of every later commit."""
    timestamp: int
    copies: tuple[Copy, ...]
    publication: Json
    """The state of the publication when the snapshot was created."""

    @property
    def rows(self) -> int:
        return sum(copy.rows for copy in self.copies)

    def pieces(self, rows_per_task: int) -> list[SnapshotPiece]:
        """Divide the copies into pieces of ``rows_per_task`` rows."""
        pieces, before, size = [], 0, max(1, rows_per_task)
        for copy in self.copies:
            for first in range(0, copy.rows, size):
                last = min(copy.rows, first + size)
                pieces.append(SnapshotPiece(self.version, self.timestamp, copy, first, last, before + first))
            before += copy.rows
        return pieces


@dataclass(frozen=True)
class SnapshotPiece:
    """Rows ``(first, last]`` of a copy, counted from 1."""

    version: int
    timestamp: int
    copy: Copy
    first: int
    last: int
    sequence: int
    """The position of the first row in the commit."""


class Snapshots:
    """The snapshot of a slot, in the schema penstock_snapshots.

    If the role has no privileges for the schema, the snapshot is ignored, or the role is refused if it is
    ``required``. ``oldest_transaction`` returns the transaction that the creation of a slot waits for. The
    ``trusted`` roles may own the schema, and functions that run when the tables are copied.
    """

    def __init__(
        self,
        server: Server,
        slot: Slot,
        oldest_transaction: Callable[[], OpenTransaction | None],
        *,
        required: bool,
        trusted: Sequence[str],
    ) -> None:
        self._server, self._slot, self._required, self._trusted = server, slot, required, trusted
        self._oldest_transaction = oldest_transaction
        self._is_logged = False

    def find(self) -> Snapshot | None:
        """Return the slot's snapshot; None if there is none, or if it has already been logged."""
        if self._is_logged:
            return None
        row = self._row()
        if row is None or row.state != "complete":
            self._is_logged = row is not None and row.state == "read"
            return None
        copies = tuple(map(Copy.from_json, row.tables))
        return Snapshot(row.consistent_point - 1, row.copied_at, copies, row.publication)

    def create(self, tables: Sequence[Table], check: Callable[[Session], Json]) -> None:
        """Create the slot and its snapshot if the slot does not exist; only one process does this at a time.

        An incomplete snapshot of a killed process is removed first.

        Parameters
        ----------
        check
            Function that is called in the snapshot's transaction. It refuses tables that differ from the
            plan, and returns the state of the publication.
        """
        if self._exists(self._row()):
            return
        with self._locked() as connection:
            row = self._row()
            if self._exists(row):
                return
            is_incomplete = self._slot.find() is not None
            # Check this first: a slot that is created before an error would retain the log.
            self.require_trusted_functions(tables)
            with self._server.translating():
                if row is None:
                    self._create_schema(connection)
                # Wait for locks on the tables without a limit.
                run(connection, "limit_waiting", wait="0")
                if is_incomplete:
                    run(connection, "drop_slot", slot=self._slot.name)
                if row is not None:
                    _drop(connection, row.tables)
                run(connection, "begin_snapshot", slot=self._slot.name)
                self._copy_all(connection, tables, check)
            self._is_logged = False

    def _exists(self, row: Row | None) -> bool:
        """Whether the slot exists, and its snapshot is not incomplete."""
        state = self._slot.find()
        return state is not None and state.ready and (row is None or row.state != "copying")

    def recreate_slot(self) -> int:
        """Recreate the slot without a snapshot; drop the earlier slot and its snapshot.

        Return the position at which the slot starts, minus one: less than the version of every later commit.
        """
        with self._locked() as connection:
            row = self._row()
            self._require_own_slot()
            with self._server.translating():
                run(connection, "limit_waiting", wait="0")
                run(connection, "drop_slot", slot=self._slot.name)
                if row is not None:
                    _drop(connection, row.tables)
                    run(connection, "snapshot_read", slot=self._slot.name)
                with self._created_slot(exported=False) as (point, _):
                    self._is_logged = row is not None
                    return point - 1

    def _require_own_slot(self) -> None:
        """Refuse a slot of another kind; a slot whose log was removed is accepted."""
        with suppress(DataLostError):
            self._slot.find()

    def drop(self) -> None:
        """Drop the copies after they have been logged."""
        with self._locked() as connection, self._server.translating(), connection.transaction():
            row = self._row()
            if row is not None and row.state == "complete":
                _drop(connection, row.tables)
                run(connection, "snapshot_read", slot=self._slot.name)
        self._is_logged = True

    def messages(self, piece: SnapshotPiece) -> Generator[list[bytes], None, None]:
        """Read the rows of a piece as messages."""
        table = f"{SNAPSHOT_SCHEMA}.{quoted(piece.copy.place)}"
        exists = self._server.on_connection(
            lambda connection: connection.execute("SELECT to_regclass(%s) IS NOT NULL", [table]).fetchone()
        )
        self._server.on_connection(
            lambda connection: self._require_trusted_owner(connection, piece.copy.place)
        )
        if not exists or not exists[0]:
            raise DataLostError(
                f"the initial copy of {piece.copy.relation.name} of slot {self._slot.name!r} was dropped, "
                "because it had been logged and the slot has advanced. Start with a new slot and a new "
                "checkpoint",
                condition="DATA_LOST.SLOT",
            )
        return self._server.chunks(
            f"SELECT change FROM {table} WHERE n > {piece.first} AND n <= {piece.last} ORDER BY n"
        )

    def _row(self) -> Row | None:
        (table,) = self._server.fetch("snapshots_table")
        if not table.exists or not (table.visible or self._required):
            return None
        self._server.on_connection(self._require_trusted_owner)
        return next(iter(self._server.fetch("snapshot", slot=self._slot.name)), None)

    @contextmanager
    def _locked(self) -> Iterator[Connection]:
        connection = self._server.with_retries(self._server.connect)
        try:
            with self._server.translating():
                run(connection, "limit_waiting", wait=f"{_LOCK_WAIT * 1000:.0f}ms")
            self._lock(connection)
            yield connection
        finally:
            # This also releases the lock.
            connection.close()

    def _lock(self, connection: Connection) -> None:
        try:
            with self._server.translating():
                run(connection, "lock", slot=self._slot.name)
        except SlotInUse as error:
            holders = self._server.fetch("lock_holder", slot=self._slot.name)
            pid = next((row.pid for row in holders), "unknown")
            raise SlotInUse(
                f"{self._server.name}: server process {pid} has been creating the snapshot of slot "
                f"{self._slot.name!r} for over {_LOCK_WAIT:.0f} s: wait for it, or end it with select "
                f"pg_terminate_backend({pid})",
                condition="FEED_UNAVAILABLE.SNAPSHOT_LOCKED",
                pid=str(pid),
            ) from error

    def _create_schema(self, connection: Connection) -> None:
        for tries_left in reversed(range(_TRIES)):
            try:
                with connection.transaction():
                    run(connection, "create_schema")
                    self._require_trusted_owner(connection)
                    run(connection, "create_slots")
                    # Another session may have created the table meanwhile.
                    self._require_trusted_owner(connection)
                return
            except Exception as error:
                # Two queries with different slots may start at the same time. An advisory lock is not used
                # for this, because every role that can connect could hold it.
                if not tries_left or getattr(error, "sqlstate", None) not in CREATED_CONCURRENTLY:
                    raise

    def _require_trusted_owner(self, connection: Connection, *copies: str) -> None:
        """Refuse the schema, its table of slots or copies if an untrusted role owns them."""

        def first_row(text: str, **parameters: object) -> Row | None:
            return connection.execute(bind(text, "postgres").encode(), parameters).fetchone()

        foreign = find_foreign_owner(first_row, SNAPSHOT_SCHEMA, [_SLOTS, *copies], trusted=self._trusted)
        if foreign is not None:
            raise self._server.unavailable(
                "SCHEMA_OWNER",
                f"{foreign}: change the owner of the schema (alter schema {SNAPSHOT_SCHEMA} owner to …) and "
                f"of its tables, or drop it; or trust the role with trusted_owners={[foreign.owner]}",
                owner=foreign.owner,
            )

    def _copy_all(
        self, connection: Connection, tables: Sequence[Table], check: Callable[[Session], Json]
    ) -> None:
        with self._created_slot() as (point, exported), connection.transaction():
            connection.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
            connection.execute("SET TRANSACTION SNAPSHOT '" + exported.replace("'", "''") + "'")
            publication = check(Session(self._server, connection))
            copies = [self._copy(connection, table, number) for number, table in enumerate(tables)]
            run(
                connection,
                "end_snapshot",
                slot=self._slot.name,
                point=point,
                tables=json.dumps([asdict(copy) for copy in copies]),
                publication=json.dumps(publication),
            )

    @contextmanager
    def _created_slot(self, *, exported: bool = True) -> Iterator[tuple[int, str]]:
        """Create the slot; yield its first position, and a snapshot that is valid until the block ends."""
        connection = self._server.connect(replication="database")
        try:
            snapshot = "export" if exported else "nothing"
            # A standby that synchronizes slots still has the slot when it is promoted.
            failover = ", FAILOVER" if connection.info.server_version >= FAILOVER_SINCE else ""
            name = quoted(self._slot.name)
            self._warn_of_waiting()
            cursor = connection.execute(
                f"CREATE_REPLICATION_SLOT {name} LOGICAL pgoutput (SNAPSHOT '{snapshot}'{failover})".encode()
            )
            row = cursor.fetchone()
            assert row is not None
            high, _, low = row.consistent_point.partition("/")
            yield (int(high, 16) << 32) + int(low, 16), row.snapshot_name
        finally:
            with suppress(Exception):
                connection.close()

    def _warn_of_waiting(self) -> None:
        oldest = self._oldest_transaction()
        if oldest is None:
            return
        log.warning(
            "the slot %s is created when all transactions that have written have ended. The oldest: %s. %s",
            self._slot.name,
            oldest.describe(),
            oldest.ended_by,
            extra={
                "action": "slot_waits",
                "slot": self._slot.name,
                "pid": oldest.pid,
                "seconds": oldest.seconds,
            },
        )

    def _copy(self, connection: Connection, table: Table, number: int) -> Copy:
        digest = hashlib.sha256(self._slot.name.encode()).hexdigest()[:16]
        place = f"rows_{digest}_{number}"
        target = f"{SNAPSHOT_SCHEMA}.{quoted(place)}"
        lock_table(self._server, connection, table)
        self.require_trusted_functions([table])
        connection.execute(f"CREATE TABLE {target} AS {_numbered_messages(table)}".encode())
        connection.execute(f"ALTER TABLE {target} ADD PRIMARY KEY (n)".encode())
        row = connection.execute(f"SELECT count(*) FROM {target}".encode()).fetchone()
        assert row is not None
        return Copy(place, table.relation, row[0])

    def require_trusted_functions(self, tables: Sequence[Table]) -> None:
        """Refuse tables whose indexes, statistics or partition keys use objects of an untrusted role."""
        require_trusted_functions(self._server, tables, self._trusted)


def _numbered_messages(table: Table) -> str:
    """Return a query for the rows of a table as numbered messages."""
    condition = f" WHERE {table.filter}" if table.filter else ""
    return row_messages(table, condition, first="row_number() OVER () AS n, ")


def _drop(connection: Connection, tables: Sequence[Json]) -> None:
    for table in tables:
        connection.execute(f"DROP TABLE IF EXISTS {SNAPSHOT_SCHEMA}.{quoted(table['place'])}".encode())
