"""The initial snapshot: the rows that existed when the slot was created, as its first commit.

A slot is created together with a snapshot of the database, which shows all rows that the slot will not
deliver. They are copied inside the server, as the messages that the slot would have sent for their inserts: a
repeated micro-batch reads the same rows again, however the tables have changed. The copy is dropped when
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
from penstock.feeds.postgres.table_rows import hold, require_trusted_functions
from penstock.json_text import Json
from penstock.store.postgres.connection import CREATED_MEANWHILE
from penstock.store.postgres.trusted_owners import find_foreign_owner
from penstock.store.statements import bind

log = logging.getLogger("penstock.feeds")
_SLOTS = "slots"
_LOCK_WAIT = 60.0
_TRIES = 5
"""Seconds to wait for another process that creates, drops or reads the snapshot."""


@dataclass(frozen=True)
class Copy:
    """The copied rows of one table."""

    place: str
    """The table in penstock_snapshots that holds them."""
    relation: Relation
    rows: int

    @classmethod
    def from_json(cls, value: Json) -> Copy:
        return cls(value["place"], Relation.from_json(value["relation"]), value["rows"])


@dataclass(frozen=True)
class Snapshot:
    """The copies of all tables."""

    version: int
    """The position at which the slot begins, less one: below the version of every later commit."""
    timestamp: int
    copies: tuple[Copy, ...]
    publication: Json
    """The state of the publication at that moment."""

    @property
    def rows(self) -> int:
        return sum(copy.rows for copy in self.copies)

    def pieces(self, rows_per_task: int) -> list[SnapshotPiece]:
        """Divide the copies into pieces of that many rows."""
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

    A role that may not see it is refused if it is ``required``; otherwise the snapshot is ignored.
    ``oldest_transaction`` finds what the creation of a slot waits for. The ``trusted`` roles may own the
    schema, and functions that run when the tables are copied.
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
        self._is_read = False

    def find(self) -> Snapshot | None:
        """Return the slot's snapshot; None if it has none, or it is logged already."""
        if self._is_read:
            return None
        row = self._row()
        if row is None or row.state != "complete":
            self._is_read = row is not None and row.state == "read"
            return None
        copies = tuple(map(Copy.from_json, row.tables))
        return Snapshot(row.consistent_point - 1, row.copied_at, copies, row.publication)

    def create(self, tables: Sequence[Table], check: Callable[[Session], Json]) -> None:
        """Create the slot and its snapshot, unless the slot exists; one process at a time.

        What a killed process left half done is cleaned up first.

        Parameters
        ----------
        check
            Called in the snapshot's transaction: refuses tables that are not as planned, and returns the
            state of the publication.
        """
        if self._exists(self._row()):
            return
        with self._locked() as connection:
            row = self._row()
            if self._exists(row):
                return
            half_done = self._slot.find() is not None
            # A slot that is left behind by a refusal would keep the log.
            self.require_trusted_functions(tables)
            with self._server.translating():
                if row is None:
                    self._create_schema(connection)
                # A table that is copied may be locked for as long as its users like.
                run(connection, "limit_waiting", wait="0")
                if half_done:
                    run(connection, "drop_slot", slot=self._slot.name)
                if row is not None:
                    _drop(connection, row.tables)
                run(connection, "begin_snapshot", slot=self._slot.name)
                self._copy_all(connection, tables, check)
            self._is_read = False

    def _exists(self, row: Row | None) -> bool:
        """Whether the slot exists, without a half-done snapshot."""
        state = self._slot.find()
        return state is not None and state.ready and (row is None or row.state != "copying")

    def recreate_slot(self) -> int:
        """Create the slot again, without a snapshot; drop the earlier one and what is left of its snapshot.

        Return the position at which it begins, less one: below the version of every later commit.
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
                    self._is_read = row is not None
                    return point - 1

    def _require_own_slot(self) -> None:
        """Refuse a slot of another kind; one whose log is lost is dropped like any other."""
        with suppress(DataLostError):
            self._slot.find()

    def drop(self) -> None:
        """Drop the copies, which are logged."""
        with self._locked() as connection, self._server.translating(), connection.transaction():
            row = self._row()
            if row is not None and row.state == "complete":
                _drop(connection, row.tables)
                run(connection, "snapshot_read", slot=self._slot.name)
        self._is_read = True

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
                "since it had been logged and the slot has advanced. Start with a new slot and a new "
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
            # Releases the lock too.
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
        for left in reversed(range(_TRIES)):
            try:
                with connection.transaction():
                    run(connection, "create_schema")
                    self._require_trusted_owner(connection)
                    run(connection, "create_slots")
                    # Somebody else may have created the table meanwhile.
                    self._require_trusted_owner(connection)
                return
            except Exception as error:
                # Two queries with different slots may start at the same moment. A lock against that could be
                # held by anybody who may connect.
                if not left or getattr(error, "sqlstate", None) not in CREATED_MEANWHILE:
                    raise

    def _require_trusted_owner(self, connection: Connection, *copies: str) -> None:
        """Refuse the schema, its table of slots or some copies if they are another role's."""

        def first_row(text: str, **parameters: object) -> Row | None:
            return connection.execute(bind(text, "postgres").encode(), parameters).fetchone()

        foreign = find_foreign_owner(first_row, SNAPSHOT_SCHEMA, [_SLOTS, *copies], trusted=self._trusted)
        if foreign is not None:
            raise self._server.unavailable(
                "SCHEMA_OWNER",
                f"{foreign}: alter schema {SNAPSHOT_SCHEMA} owner to …, and its tables too, or drop it; or "
                f"trust the role with trusted_owners={[foreign.owner]}",
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
        """Create the slot: its first position, and the snapshot, which lives as long as the connection."""
        connection = self._server.connect(replication="database")
        try:
            snapshot = "export" if exported else "nothing"
            # A standby that synchronizes slots has it when it takes over.
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
            "the slot %s is created once all transactions that have written have ended. The oldest: %s. %s",
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
        hold(self._server, connection, table)
        self.require_trusted_functions([table])
        connection.execute(f"CREATE TABLE {target} AS {_numbered(table)}".encode())
        connection.execute(f"ALTER TABLE {target} ADD PRIMARY KEY (n)".encode())
        row = connection.execute(f"SELECT count(*) FROM {target}".encode()).fetchone()
        assert row is not None
        return Copy(place, table.relation, row[0])

    def require_trusted_functions(self, tables: Sequence[Table]) -> None:
        """Refuse tables whose indexes, statistics or partition keys use what an untrusted role owns."""
        require_trusted_functions(self._server, tables, self._trusted)


def _numbered(table: Table) -> str:
    """Return a query for the rows of a table as numbered messages."""
    condition = f" WHERE {table.filter}" if table.filter else ""
    return row_messages(table, condition, first="row_number() OVER () AS n, ")


def _drop(connection: Connection, tables: Sequence[Json]) -> None:
    for table in tables:
        connection.execute(f"DROP TABLE IF EXISTS {SNAPSHOT_SCHEMA}.{quoted(table['place'])}".encode())
