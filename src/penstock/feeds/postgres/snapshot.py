"""The rows that were there when the slot was made: its first commit.

A slot is made together with a snapshot of the database, in which everything that the slot will not bring can be seen. The rows
are copied inside the server, as the messages that the slot would have brought for their inserts: a micro-batch that is repeated
reads the same rows again, however the tables have changed. The copy goes when Spark has logged it.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from penstock.arguments import in_quotes
from penstock.errors import DataLost
from penstock.feeds.postgres.catalog import Table, relation_from_json, relation_to_json
from penstock.feeds.postgres.pgoutput import INSERT, NEW, NULL, TEXT, Relation
from penstock.feeds.postgres.server import Server, Session, SlotInUse, run
from penstock.feeds.postgres.slot import FAILOVER_SINCE, Slot

if TYPE_CHECKING:
    import psycopg

_SYNTAX_15 = 150_000
_LOCK_WAIT = 60.0
"""For how many seconds to wait for another process that makes or drops the snapshot, or reads from it."""


@dataclass(frozen=True)
class Copy:
    """The rows of one table."""

    place: str
    """The table in penstock_snapshots that holds them."""
    relation: Relation
    rows: int


@dataclass(frozen=True)
class Snapshot:
    """The rows of all tables, copied."""

    version: int
    """Below every later commit's: the position at which the slot begins, less one."""
    timestamp: int
    copies: tuple[Copy, ...]
    publication: Mapping[str, Any]
    """The state of the publication at that moment."""

    @property
    def rows(self) -> int:
        return sum(copy.rows for copy in self.copies)


@dataclass(frozen=True)
class SnapshotPiece:
    """Rows ``(first, last]`` of a copy, counted from 1."""

    version: int
    timestamp: int
    copy: Copy
    first: int
    last: int
    sequence: int
    """The position of the first of them in the commit."""


class Snapshots:
    """The copies of a slot.

    Parameters
    ----------
    server, slot
        Where.
    required
        Whether a role that may not see them is refused; else it does without.
    """

    def __init__(self, server: Server, slot: Slot, *, required: bool) -> None:
        self._server, self._slot, self._required = server, slot, required
        self._none = False

    def find(self) -> Snapshot | None:
        """The snapshot of the slot, when it has one that is not logged yet."""
        if self._none:
            return None
        found = self._row()
        if found is None or found.state != "complete":
            self._none = found is not None and found.state == "read"
            return None
        copies = tuple(_copy(each) for each in found.tables)
        return Snapshot(found.consistent_point - 1, found.copied_at, copies, found.publication)

    def make(self, tables: Sequence[Table], check: Callable[[Session], dict[str, Any]]) -> None:
        """Make the slot and its snapshot, unless the slot is there; one process at a time.

        What a process left half done that died is swept away first.

        Parameters
        ----------
        check
            Called in the snapshot: refuses tables that are not as they are planned, and gives the state of the publication.
        """
        if self._made(self._row()):
            return
        with self._locked() as connection:
            row = self._row()
            if self._made(row):
                return
            there = self._slot.find() is not None
            with self._server.translating():
                # A table that is copied may be locked for as long as its users like.
                run(connection, "limit_waiting", wait="0")
                if there:
                    run(connection, "drop_slot", slot=self._slot.name)
                if row is None:
                    self._make_schema(connection)
                else:
                    _drop(connection, row.tables)
                run(connection, "begin_snapshot", slot=self._slot.name)
                self._copy_all(connection, tables, check)
            self._none = False

    def _made(self, row: Any) -> bool:
        state = self._slot.find()
        return state is not None and state.ready and (row is None or row.state != "copying")

    def forget(self) -> None:
        """Drop the copies: they are logged."""
        with self._locked() as connection, self._server.translating(), connection.transaction():
            row = self._row()
            if row is not None and row.state == "complete":
                _drop(connection, row.tables)
                run(connection, "snapshot_read", slot=self._slot.name)
        self._none = True

    def pieces(self, snapshot: Snapshot, rows_per_task: int) -> list[SnapshotPiece]:
        """The copies in pieces of so many rows."""
        found, before = [], 0
        for copy in snapshot.copies:
            for first in range(0, copy.rows, max(1, rows_per_task)):
                last = min(copy.rows, first + max(1, rows_per_task))
                found.append(
                    SnapshotPiece(snapshot.version, snapshot.timestamp, copy, first, last, before + first)
                )
            before += copy.rows
        return found

    def messages(self, piece: SnapshotPiece) -> Generator[list[bytes], None, None]:
        """The rows of a piece as messages.

        Raises
        ------
        DataLost
            When the copy is gone.
        """
        text = (
            f"SELECT change FROM penstock_snapshots.{_identifier(piece.copy.place)}"
            f" WHERE n > {piece.first} AND n <= {piece.last} ORDER BY n"
        )
        there = self._server.retried(
            lambda connection: connection.execute(
                "SELECT to_regclass(%s) IS NOT NULL", [f"penstock_snapshots.{_identifier(piece.copy.place)}"]
            ).fetchone()
        )
        if not there or not there[0]:
            raise DataLost(
                f"the copy of {piece.copy.relation.name} that the slot {self._slot.name!r} began with is gone: it had been "
                "logged, and the slot goes on behind it. Start with a new slot and a new checkpoint"
            )
        return self._server.chunks_of(text)

    def _row(self) -> Any:
        (there,) = self._server.all("snapshots_there")
        if not there.there or not (there.visible or self._required):
            return None
        self._require_trusted_owner(self._server.all("foreign_owner"))
        return next(iter(self._server.all("snapshot", slot=self._slot.name)), None)

    @contextmanager
    def _locked(self) -> Iterator[psycopg.Connection[Any]]:
        connection = self._server.patiently(self._server.connect)
        try:
            with self._server.translating():
                run(connection, "limit_waiting", wait=f"{_LOCK_WAIT * 1000:.0f}ms")
            self._lock(connection)
            yield connection
        finally:
            # Ends the lock too.
            connection.close()

    def _lock(self, connection: psycopg.Connection[Any]) -> None:
        try:
            with self._server.translating():
                run(connection, "lock", slot=self._slot.name)
        except SlotInUse as error:
            pid = next((row.pid for row in self._server.all("lock_holder", slot=self._slot.name)), "unknown")
            raise SlotInUse(
                f"{self._server.name}: another process makes the snapshot of slot {self._slot.name!r} (server process {pid}), and "
                f"was not done within {_LOCK_WAIT:.0f} s: wait for it, or select pg_terminate_backend({pid}) ends it",
                pid=str(pid),
            ) from error

    def _make_schema(self, connection: psycopg.Connection[Any]) -> None:
        with connection.transaction():
            # Two queries with slots of their own may come at the same moment.
            run(connection, "lock_schema")
            run(connection, "make_schema")
            self._require_trusted_owner(run(connection, "foreign_owner"))
            run(connection, "make_slots")

    def _require_trusted_owner(self, foreign: Sequence[Any]) -> None:
        for row in foreign:
            raise self._server.unavailable(
                "SCHEMA_OWNER",
                f"the schema penstock_snapshots belongs to the role {in_quotes(row.owner)}, which could run code with the rights of this "
                "feed's: give it to this one, alter schema penstock_snapshots owner to …, and its tables too, or drop it",
                owner=row.owner,
            )

    def _copy_all(
        self,
        connection: psycopg.Connection[Any],
        tables: Sequence[Table],
        check: Callable[[Session], dict[str, Any]],
    ) -> None:
        with self._made_slot() as (point, exported), connection.transaction():
            connection.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
            connection.execute("SET TRANSACTION SNAPSHOT '" + exported.replace("'", "''") + "'")
            publication = check(Session(self._server, connection))
            copies = [self._copied(connection, table, place) for place, table in enumerate(tables)]
            run(
                connection,
                "end_snapshot",
                slot=self._slot.name,
                point=point,
                tables=json.dumps([_described(copy) for copy in copies]),
                publication=json.dumps(publication),
            )

    @contextmanager
    def _made_slot(self) -> Iterator[tuple[int, str]]:
        """The position at which the new slot begins, and the name of the snapshot, which lives as long as the connection."""
        connection = self._server.connect(replication="database")
        try:
            version = connection.info.server_version
            options = "(SNAPSHOT 'export')" if version >= _SYNTAX_15 else "EXPORT_SNAPSHOT"
            if version >= FAILOVER_SINCE:
                # A standby that takes over has the slot then, where it synchronizes slots.
                options = "(SNAPSHOT 'export', FAILOVER)"
            name = _identifier(self._slot.name)
            cursor = connection.execute(f"CREATE_REPLICATION_SLOT {name} LOGICAL pgoutput {options}".encode())
            row = cursor.fetchone()
            assert row is not None
            high, _, low = row.consistent_point.partition("/")
            yield (int(high, 16) << 32) + int(low, 16), row.snapshot_name
        finally:
            with suppress(Exception):
                connection.close()

    def _copied(self, connection: psycopg.Connection[Any], table: Table, number: int) -> Copy:
        digest = hashlib.sha256(self._slot.name.encode()).hexdigest()[:16]
        place = f"rows_{digest}_{number}"
        target = f"penstock_snapshots.{_identifier(place)}"
        connection.execute(f"CREATE TABLE {target} AS {_select(table)}".encode())
        connection.execute(f"ALTER TABLE {target} ADD PRIMARY KEY (n)".encode())
        row = connection.execute(f"SELECT count(*) FROM {target}".encode()).fetchone()
        assert row is not None
        return Copy(place, table.relation, row[0])


def _select(table: Table) -> str:
    """A query for the rows of a table as Insert messages, numbered.

    concat() gives what a type's output function does, which a cast to text does not always.
    """
    columns = table.relation.columns
    head = struct.pack(">BIBh", INSERT, table.relation.oid, NEW, len(columns))
    texts = [
        f"CASE WHEN {name} IS NULL THEN NULL ELSE convert_to(concat({name}), 'UTF8') END AS c{place}"
        for place, name in enumerate(_identifier(column.name) for column in columns)
    ]
    values = [
        f"coalesce('\\x{TEXT:02x}'::bytea || int4send(octet_length(c{place})) || c{place}, '\\x{NULL:02x}')"
        for place in range(len(columns))
    ]
    source = f"{_identifier(table.relation.schema)}.{_identifier(table.relation.table)}"
    only = "" if table.partitioned else "ONLY "
    condition = f" WHERE {table.filter}" if table.filter else ""
    # Without OFFSET each text would be made twice.
    inner = f"SELECT {', '.join(texts) or 'NULL'} FROM {only}{source}{condition} OFFSET 0"
    change = " || ".join([f"'\\x{head.hex()}'::bytea", *values])
    return f"SELECT row_number() OVER () AS n, {change} AS change FROM ({inner}) AS rows"


def _drop(connection: psycopg.Connection[Any], tables: Sequence[Any]) -> None:
    for each in tables:
        connection.execute(f"DROP TABLE IF EXISTS penstock_snapshots.{_identifier(each['place'])}".encode())


def _described(copy: Copy) -> dict[str, Any]:
    return {"place": copy.place, "rows": copy.rows, "relation": relation_to_json(copy.relation)}


def _copy(found: dict[str, Any]) -> Copy:
    return Copy(str(found["place"]), relation_from_json(found["relation"]), int(found["rows"]))


def _identifier(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'
