"""In-memory database server with the isolation, locks and failures of SQLite or PostgreSQL.

SQLite executes the SQL. Only one transaction's changes are in the database at a time. When another
transaction runs a statement, the server saves the changes of the first as a changeset (SQLite's session
extension), rolls them back, and applies them again before the first one's next statement, on top of what was
committed meanwhile. So each statement sees the committed data and the changes of its own transaction, as in
READ COMMITTED. Row locks (``locks``) ensure that changesets never conflict. A transaction that only reads
runs without interruption and sees one snapshot.

With ``row_locks=False`` the server allows one writer at a time, like SQLite.
"""

from __future__ import annotations

import sqlite3
from collections import namedtuple
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from typing import TYPE_CHECKING, Any

import apsw
import apsw.ext

from penstock.errors import StoreLockedError
from penstock.store.statements import create_statements, statements
from penstock.store.store_schema import VERSION
from tests.simulation.locks import EXISTING_ROW, Key, conflict, required_locks
from tests.simulation.scheduler import Process, Signal, World
from tests.support.auditor import Violation

if TYPE_CHECKING:
    from tests.simulation.database import SimTransaction

FILE_LOCK_SECONDS = 60.0
"""How long a writer waits for the lock of a SQLite file."""
ROW_LOCK_SECONDS, IDLE_SECONDS = 8.0, 10.0
"""PostgreSQL's ``lock_timeout``, and its ``idle_in_transaction_session_timeout``.

See ``store/postgres/session.py``.
"""


class Server:
    """Database of one store.

    Parameters
    ----------
    row_locks
        Whether transactions lock rows, as in PostgreSQL, or the whole file, as in SQLite.
    """

    def __init__(self, world: World, name: str, uuid: str, *, row_locks: bool) -> None:
        self.world, self.name, self.uuid, self.row_locks = world, name, uuid, row_locks
        self.url = f"sqlite:////simulated/{name}.db"
        self.clock_offset = 0.0
        self.changed = Signal()
        """Notified after every commit."""
        self.commits = self.restores = 0
        self.on_ledger_commit: Callable[[Process], None] = lambda process: None
        """Called with the process of every commit that adds an entry to the ledger."""
        self.transactions: list[SimTransaction] = []
        """The open transactions."""
        self.owner_locks: dict[str, Process] = {}
        """The process that holds each lock of a consumer's owner."""
        self._connection = _spare_connections.pop() if _spare_connections else _connect(new_store())
        self._connection.execute("update main.penstock_store set uuid = ?, last_generation = 0", (uuid,))
        self._next_block = 1
        self._active: SimTransaction | None = None
        self._session: Any = None
        self._locks: dict[Key, dict[SimTransaction, str]] = {}
        self._lock_released = Signal()
        self._writer: SimTransaction | None = None
        self._unsynced: list[bytes] = []
        """Changesets that undo the last commits that did not wait for the disk, newest last."""

    # Backups.

    def backup(self) -> tuple[bytes, int]:
        """Return a copy of the committed data."""
        self._suspend_active()
        return bytes(self._connection.serialize("main")), self._next_block

    def read_committed(self, sql: str, parameters: Any = ()) -> list[Any]:
        """Return the rows of a query on the committed data."""
        self._suspend_active()
        return self._connection.execute(sql, parameters).fetchall()

    def has_open_plan(self) -> bool:
        """Return whether a consumer's owner has planned rows that no commit has moved the consumer past."""
        plans = "select exists (select 1 from main.penstock_registration where plan_epoch = epoch)"
        return bool(self.read_committed(plans)[0][0])

    def restore(self, backup: tuple[bytes, int]) -> None:
        """Replace all data with a backup, which breaks all connections."""
        self.break_connections(lambda tx: True)
        self.owner_locks.clear()
        self._suspend_active()
        self._connection = _connect(backup[0])
        self._next_block = backup[1]
        self._unsynced.clear()
        self.commits += 1
        self.restores += 1
        self.changed.notify_all()

    def close(self) -> None:
        """Delete all data and keep the connection for the next schedule, with its prepared statements."""
        self._roll_back_active()
        connection = self._connection
        tables = connection.execute("select name from main.sqlite_schema where type = 'table'").fetchall()
        for name in sorted(name for (name,) in tables if not name.startswith("sqlite_")):
            if not name.startswith("penstock_"):
                connection.execute(f"drop table main.{name}")
            elif name != "penstock_store":
                connection.execute(f"delete from main.{name}")
        connection.execute("delete from main.sqlite_sequence")
        _spare_connections.append(connection)

    # Failures.

    def crash(self) -> None:
        """Lose everything that was not synced to the disk, and all connections."""
        self.break_connections(lambda tx: True)
        self.owner_locks.clear()
        self._suspend_active()
        for inverse in reversed(self._unsynced):
            apsw.Changeset.apply(inverse, self._connection, flags=apsw.SQLITE_CHANGESETAPPLY_FKNOACTION)
        self._unsynced.clear()
        self.changed.notify_all()

    def break_connections(self, is_affected: Callable[[SimTransaction], bool]) -> None:
        """Roll back transactions whose connections break; their next statements raise."""
        for tx in [tx for tx in self.transactions if is_affected(tx)]:
            tx.broken = True
            self._end(tx)

    def on_process_exit(self, process: Process) -> None:
        """Close the connections of a process that has died."""
        self.break_connections(lambda tx: tx.process is process)
        self.release_owner_locks(process)

    def on_process_pause(self, process: Process) -> None:
        """Roll back the transactions of a paused process once they have been idle for too long."""
        if not self.row_locks:
            return
        idle = [tx for tx in self.transactions if tx.process is process]
        self.world.call_later(
            IDLE_SECONDS,
            lambda: self.break_connections(lambda tx: tx in idle and process.paused) if idle else None,
        )

    def release_owner_locks(self, process: Process) -> None:
        self.owner_locks = {
            name: holder for name, holder in self.owner_locks.items() if holder is not process
        }

    # Transactions.

    def clock(self) -> int:
        return int((self.world.now + self.clock_offset) * 1e6)

    def begin(self, tx: SimTransaction) -> None:
        if tx.write and not self.row_locks:
            self._wait_for_lock(tx, lambda: [] if self._writer is None else [self._writer], "begin immediate")
            self._writer = tx
        self.transactions.append(tx)

    def commit(self, tx: SimTransaction) -> None:
        if tx.write:
            self.activate(tx)
            if tx.durable:
                self._unsynced.clear()
            else:
                self._unsynced.append(apsw.Changeset.invert(self._session.changeset()))
            if tx.begun:
                self._connection.execute("commit")
            self._active = self._session = None
        self._end(tx)
        if tx.write:
            self.commits += 1
            self.changed.notify_all()
            if tx.writes_ledger:
                self.on_ledger_commit(tx.process)

    def rollback(self, tx: SimTransaction) -> None:
        if tx in self.transactions:
            self._end(tx)

    def _end(self, tx: SimTransaction) -> None:
        if self._active is tx:
            self._roll_back_active()
        self.transactions.remove(tx)
        if self._writer is tx:
            self._writer = None
        for key in tx.locks:
            holders = self._locks[key]
            holders.pop(tx, None)
            if not holders:
                del self._locks[key]
        tx.locks.clear()
        self._lock_released.notify_all()

    def lock(self, tx: SimTransaction, name: str, parameters: Mapping[str, Any]) -> None:
        """Take the locks of a statement in order, waiting for each.

        After a wait, check again which rows the statement locks: another transaction may have added some.
        """
        if not self.row_locks or not tx.write:
            return
        has_waited = False
        for is_second_pass in (False, True):
            if is_second_pass and not has_waited:
                return
            for key, mode in required_locks(
                name, parameters, lambda sql, values: self._read(tx, sql, values)
            ):
                if tx.locks.get(key) == mode:
                    continue
                blockers = self._blockers(tx, key, mode)
                if is_second_pass and blockers:
                    # Waiting here would break the lock order. PostgreSQL does not see rows that were added
                    # after the statement began.
                    raise StoreLockedError(f"{self.name}: {key} was added while another lock was awaited")
                has_waited |= bool(blockers)
                self._wait_for_lock(tx, lambda key=key, mode=mode: self._blockers(tx, key, mode), str(key))
                if name in EXISTING_ROW and self._read(tx, EXISTING_ROW[name], parameters):
                    continue
                self._locks.setdefault(key, {})[tx] = mode
                tx.locks[key] = mode

    def _blockers(self, tx: SimTransaction, key: Key, mode: str) -> list[SimTransaction]:
        """Return the transactions whose locks conflict with this one."""
        return [
            other
            for other, held in self._locks.get(key, {}).items()
            if other is not tx and conflict(held, mode)
        ]

    def _wait_for_lock(
        self, tx: SimTransaction, find_blockers: Callable[[], list[SimTransaction]], lock: str
    ) -> None:
        seconds = ROW_LOCK_SECONDS if self.row_locks else FILE_LOCK_SECONDS
        deadline = self.world.now + seconds
        while blockers := find_blockers():
            if not self.world.in_task or self.world.now >= deadline:
                raise StoreLockedError(f"{self.name} is locked by another writer: {lock}", seconds=seconds)
            self.world.note(f"{tx.process!r} waits for {lock}")
            tx.blockers = blockers
            if tx in _all_blockers(blockers):
                self.world.failure = Violation(
                    "deadlock", f"transactions wait for each other, one of them for {lock}"
                )
            self.world.wait(self._lock_released, seconds=deadline - self.world.now)
            tx.blockers = []
            tx.require_connection()

    def _read(self, tx: SimTransaction, sql: str, parameters: Mapping[str, Any]) -> list[Any]:
        self.activate(tx)
        return self._connection.execute(sql, parameters).fetchall()

    def run(self, tx: SimTransaction, sql: str, parameters: Any) -> tuple[list[Any], int]:
        """Run a statement; return its rows, and how many rows it changed."""
        self.activate(tx)
        try:
            rows = self._connection.execute(sql, parameters).fetchall()
        except apsw.Error as error:
            raise _as_sqlite3(error) from None
        return rows, self._connection.changes()

    def run_many(self, tx: SimTransaction, sql: str, parameters: Iterable[Any]) -> int:
        """Run a statement once for each set of parameters; return how many rows it changed."""
        self.activate(tx)
        before = self._connection.total_changes()
        try:
            self._connection.executemany(sql, parameters)
        except apsw.Error as error:
            raise _as_sqlite3(error) from None
        return int(self._connection.total_changes()) - before

    def allocate_block(self) -> int:
        self._next_block += 1
        return self._next_block - 1

    def row_type(self, sql: str) -> Any:
        return _row_type(self._connection, sql)

    # The transaction whose changes are in the database.

    def activate(self, tx: SimTransaction) -> None:
        """Put the changes of a transaction into the database, instead of those of any other."""
        if self._active is tx or (not tx.write and self._active is None):
            return
        self._suspend_active()
        if not tx.write:
            return
        self._connection.execute("begin")
        tx.begun = True
        self._active = tx
        self._session = apsw.Session(self._connection, "main")
        self._session.attach()
        if tx.changeset:
            apsw.Changeset.apply(tx.changeset, self._connection, flags=apsw.SQLITE_CHANGESETAPPLY_FKNOACTION)

    def _suspend_active(self) -> None:
        """Save the changes of the active transaction and roll them back."""
        active = self._active
        if active is None:
            return
        assert not active.pinned, "a changeset cannot hold what the transaction has done"
        active.changeset = self._session.changeset()
        self._roll_back_active()

    def _roll_back_active(self) -> None:
        if self._session is not None:
            self._session.close()
            self._session = None
        if not self._connection.get_autocommit():
            self._connection.execute("rollback")
        self._active = None


def _as_sqlite3(error: apsw.Error) -> sqlite3.Error:
    """Return the error that the ``sqlite3`` driver raises in this case."""
    is_conflict = isinstance(error, apsw.ConstraintError)
    translated = (sqlite3.IntegrityError if is_conflict else sqlite3.OperationalError)(str(error))
    translated.sqlite_errorname = "SQLITE_CONSTRAINT_PRIMARYKEY" if is_conflict else "SQLITE_ERROR"
    return translated


def _all_blockers(direct: list[SimTransaction]) -> set[SimTransaction]:
    """Return these transactions and all that they wait for, directly or not."""
    blockers: set[SimTransaction] = set()
    remaining = list(direct)
    while remaining:
        tx = remaining.pop()
        if tx not in blockers:
            blockers.add(tx)
            remaining += tx.blockers
    return blockers


_spare_connections: list[apsw.Connection] = []


def _connect(content: bytes) -> apsw.Connection:
    connection = apsw.Connection(":memory:", statementcachesize=500)
    # Without this, SQLite would plan statements again for each value of a parameter.
    connection.config(apsw.SQLITE_DBCONFIG_ENABLE_QPSG, 1)
    connection.deserialize("main", content)
    connection.execute("pragma foreign_keys = on")
    return connection


@cache
def new_store() -> bytes:
    """Return the database of an empty store."""
    connection = apsw.Connection(":memory:", statementcachesize=500)
    connection.execute("pragma page_size = 1024")
    for statement in create_statements("sqlite", "main"):
        connection.execute(statement)
    connection.execute(
        statements("sqlite", "main")["insert_store"], {"uuid": "none", "version": VERSION, "now": 0}
    )
    return bytes(connection.serialize("main"))


@cache
def _row_type_of(sql: str, columns: tuple[str, ...]) -> Any:
    return namedtuple("Row", columns, rename=True)


_row_types: dict[str, Any] = {}


def _row_type(connection: apsw.Connection, sql: str) -> Any:
    if sql not in _row_types:
        description = apsw.ext.query_info(connection, sql).description
        _row_types[sql] = _row_type_of(sql, tuple(column[0] for column in description))
    return _row_types[sql]
