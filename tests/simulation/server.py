"""A database server in memory.

SQL is by SQLite itself; isolation, locks and failures are as SQLite or PostgreSQL have them.

Only one transaction's changes are in the database at a time. When another one takes its turn, those of the
first are kept aside (as a changeset of SQLite's session extension) and undone, and brought back with its next
statement, on what has been committed meanwhile. So each statement sees what is committed and its own
transaction's changes, as READ COMMITTED says, and locks on rows (``locks``) make sure that changesets never
meet. A transaction that only reads runs without a break: it sees one moment.

With ``rows=False`` there is one writer at a time, as in SQLite.
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
from tests.simulation.locks import THERE, Key, conflict, wanted
from tests.simulation.scheduler import Gate, Process, World
from tests.support.auditor import Violation

if TYPE_CHECKING:
    from tests.simulation.database import SimTransaction

FILE_SECONDS = 60.0
"""For how long a writer waits for its turn at a file."""
ROW_SECONDS, IDLE_SECONDS = 8.0, 10.0
"""For how long a statement waits for a lock, and a server for a transaction's next statement.

See ``store/postgres/session.py``.
"""


class Server:
    """One database.

    Parameters
    ----------
    rows
        Whether transactions lock rows, as in PostgreSQL, or the whole file, as in SQLite.
    """

    def __init__(self, world: World, name: str, uuid: str, *, rows: bool) -> None:
        self.world, self.name, self.uuid, self.rows = world, name, uuid, rows
        self.url = f"sqlite:////simulated/{name}.db"
        self.clock_offset = 0.0
        self.changed = Gate()
        """Opened by every commit."""
        self.commits = self.restores = 0
        self.committed: Callable[[Process], None] = lambda process: None
        """Told whose it is, of every commit that enters something in the ledger."""
        self.open: list[SimTransaction] = []
        self.owners: dict[str, Process] = {}
        self._connection = _spare.pop() if _spare else _fresh(template())
        self._connection.execute("update main.penstock_store set uuid = ?, last_generation = 0", (uuid,))
        self._block = 1
        self._active: SimTransaction | None = None
        self._session: Any = None
        self._locks: dict[Key, dict[SimTransaction, str]] = {}
        self._released = Gate()
        self._writer: SimTransaction | None = None
        self._volatile: list[bytes] = []
        """What undoes each of the last commits that have not waited for the disk, the newest last."""

    # Backups.

    def backup(self) -> tuple[bytes, int]:
        """What is committed."""
        self._leave()
        return bytes(self._connection.serialize("main")), self._block

    def planned(self) -> bool:
        """Whether a consumer's owner has planned rows that no commit has moved the consumer over."""
        self._leave()
        plans = "select exists (select 1 from main.penstock_registration where plan_epoch = epoch)"
        return bool(next(self._connection.execute(plans))[0])

    def restore(self, backup: tuple[bytes, int]) -> None:
        """Put a backup in the place of everything; all connections are broken by it."""
        self.break_all(lambda tx: True)
        self.owners.clear()
        self._leave()
        self._connection = _fresh(backup[0])
        self._block = backup[1]
        self._volatile.clear()
        self.commits += 1
        self.restores += 1
        self.changed.open()

    def close(self) -> None:
        """Empty it for the next schedule: its statements are prepared already."""
        self._undo()
        connection = self._connection
        found = connection.execute("select name from main.sqlite_schema where type = 'table'").fetchall()
        for name in sorted(each for (each,) in found if not each.startswith("sqlite_")):
            if not name.startswith("penstock_"):
                connection.execute(f"drop table main.{name}")
            elif name != "penstock_store":
                connection.execute(f"delete from main.{name}")
        connection.execute("delete from main.sqlite_sequence")
        _spare.append(connection)

    # Failures.

    def crash(self) -> None:
        """The machine fails: what is not on its disk is gone, and all connections are broken."""
        self.break_all(lambda tx: True)
        self.owners.clear()
        self._leave()
        for undoing in reversed(self._volatile):
            apsw.Changeset.apply(undoing, self._connection, flags=apsw.SQLITE_CHANGESETAPPLY_FKNOACTION)
        self._volatile.clear()
        self.changed.open()

    def break_all(self, which: Callable[[SimTransaction], bool]) -> None:
        """Break connections: their transactions are undone, and their next statements tell it."""
        for tx in [tx for tx in self.open if which(tx)]:
            tx.broken = True
            self._end(tx)

    def gone(self, process: Process) -> None:
        """A process has died: the server sees its sockets closed."""
        self.break_all(lambda tx: tx.process is process)
        self.forget_owners(process)

    def stands_still(self, process: Process) -> None:
        """A process is stopped: its transactions end when they have waited too long for a statement."""
        if not self.rows:
            return
        idle = [tx for tx in self.open if tx.process is process]
        self.world.later(
            IDLE_SECONDS, lambda: self.break_all(lambda tx: tx in idle and process.paused) if idle else None
        )

    def forget_owners(self, process: Process) -> None:
        self.owners = {name: holder for name, holder in self.owners.items() if holder is not process}

    # What transactions ask.

    def clock(self) -> int:
        return int((self.world.now + self.clock_offset) * 1e6)

    def begin(self, tx: SimTransaction) -> None:
        if tx.write and not self.rows:
            self._wait_until(tx, lambda: [] if self._writer is None else [self._writer], "begin immediate")
            self._writer = tx
        self.open.append(tx)

    def commit(self, tx: SimTransaction) -> None:
        if tx.write:
            self.enter(tx)
            if tx.durable:
                self._volatile.clear()
            else:
                self._volatile.append(apsw.Changeset.invert(self._session.changeset()))
            if tx.began:
                self._connection.execute("commit")
            self._active = self._session = None
        self._end(tx)
        if tx.write:
            self.commits += 1
            self.changed.open()
            if tx.enters:
                self.committed(tx.process)

    def rollback(self, tx: SimTransaction) -> None:
        if tx in self.open:
            self._end(tx)

    def _end(self, tx: SimTransaction) -> None:
        if self._active is tx:
            self._undo()
        self.open.remove(tx)
        if self._writer is tx:
            self._writer = None
        for key in tx.locked:
            holders = self._locks[key]
            holders.pop(tx, None)
            if not holders:
                del self._locks[key]
        tx.locked.clear()
        self._released.open()

    def lock(self, tx: SimTransaction, name: str, given: Mapping[str, Any]) -> None:
        """Take the locks of a statement, in its order, and wait for each."""
        if not self.rows or not tx.write:
            return
        waited = False
        for again in (False, True):
            if again and not waited:
                return
            for key, mode in wanted(name, given, lambda text, values: self._found(tx, text, values)):
                if tx.locked.get(key) == mode:
                    continue
                others = self._in_the_way(tx, key, mode)
                if again and others:
                    # It would wait out of order: PostgreSQL does not see a row that came after it began.
                    raise StoreLockedError(f"{self.name}: {key} came while another lock was awaited")
                waited |= bool(others)
                self._wait_until(tx, lambda key=key, mode=mode: self._in_the_way(tx, key, mode), str(key))
                if name in THERE and self._found(tx, THERE[name], given):
                    continue
                self._locks.setdefault(key, {})[tx] = mode
                tx.locked[key] = mode

    def _in_the_way(self, tx: SimTransaction, key: Key, mode: str) -> list[SimTransaction]:
        return [
            other
            for other, held in self._locks.get(key, {}).items()
            if other is not tx and conflict(held, mode)
        ]

    def _wait_until(self, tx: SimTransaction, others: Callable[[], list[SimTransaction]], what: str) -> None:
        """Wait until no other transaction is in the way."""
        seconds = ROW_SECONDS if self.rows else FILE_SECONDS
        deadline = self.world.now + seconds
        while waits_for := others():
            if not self.world.running or self.world.now >= deadline:
                raise StoreLockedError(f"{self.name} is locked by another writer: {what}", seconds=seconds)
            self.world.note(f"{tx.process!r} waits for {what}")
            tx.waits_for = waits_for
            if tx in _reached(waits_for):
                self.world.failure = Violation(
                    "deadlock", f"transactions wait for each other, one of them for {what}"
                )
            self.world.wait(self._released, seconds=deadline - self.world.now)
            tx.waits_for = []
            tx.require_sound()

    def _found(self, tx: SimTransaction, text: str, given: Mapping[str, Any]) -> list[Any]:
        self.enter(tx)
        return self._connection.execute(text, given).fetchall()

    def run(self, tx: SimTransaction, text: str, given: Any) -> tuple[list[Any], int]:
        """The rows of a statement, and how many it touched."""
        self.enter(tx)
        try:
            rows = self._connection.execute(text, given).fetchall()
        except apsw.Error as error:
            raise _as_sqlite3(error) from None
        return rows, self._connection.changes()

    def many(self, tx: SimTransaction, text: str, given: Iterable[Any]) -> int:
        """How many rows a statement touched for all of these parameters."""
        self.enter(tx)
        before = self._connection.total_changes()
        try:
            self._connection.executemany(text, given)
        except apsw.Error as error:
            raise _as_sqlite3(error) from None
        return int(self._connection.total_changes()) - before

    def next_block(self) -> int:
        self._block += 1
        return self._block - 1

    def columns(self, text: str) -> Any:
        return _row_type(self._connection, text)

    # Whose changes are in the database.

    def enter(self, tx: SimTransaction) -> None:
        if self._active is tx or (not tx.write and self._active is None):
            return
        self._leave()
        if not tx.write:
            return
        self._connection.execute("begin")
        tx.began = True
        self._active = tx
        self._session = apsw.Session(self._connection, "main")
        self._session.attach()
        if tx.changes:
            apsw.Changeset.apply(tx.changes, self._connection, flags=apsw.SQLITE_CHANGESETAPPLY_FKNOACTION)

    def _leave(self) -> None:
        active = self._active
        if active is None:
            return
        assert not active.pinned, "it has done what a changeset does not have"
        active.changes = self._session.changeset()
        self._undo()

    def _undo(self) -> None:
        if self._session is not None:
            self._session.close()
            self._session = None
        if not self._connection.get_autocommit():
            self._connection.execute("rollback")
        self._active = None


def _as_sqlite3(error: apsw.Error) -> sqlite3.Error:
    """The driver's error as the code knows it."""
    clash = isinstance(error, apsw.ConstraintError)
    raised = (sqlite3.IntegrityError if clash else sqlite3.OperationalError)(str(error))
    raised.sqlite_errorname = "SQLITE_CONSTRAINT_PRIMARYKEY" if clash else "SQLITE_ERROR"
    return raised


def _reached(waits_for: list[SimTransaction]) -> set[SimTransaction]:
    """Whom one waits for, whom those wait for, and so on."""
    found: set[SimTransaction] = set()
    left = list(waits_for)
    while left:
        each = left.pop()
        if each not in found:
            found.add(each)
            left += each.waits_for
    return found


_spare: list[apsw.Connection] = []


def _fresh(content: bytes) -> apsw.Connection:
    connection = apsw.Connection(":memory:", statementcachesize=500)
    # Else it would plan statements anew for each value of a parameter.
    connection.config(apsw.SQLITE_DBCONFIG_ENABLE_QPSG, 1)
    connection.deserialize("main", content)
    connection.execute("pragma foreign_keys = on")
    return connection


@cache
def template() -> bytes:
    """A new store."""

    connection = apsw.Connection(":memory:", statementcachesize=500)
    connection.execute("pragma page_size = 1024")
    for statement in create_statements("sqlite", "main"):
        connection.execute(statement)
    connection.execute(
        statements("sqlite", "main")["insert_store"], {"uuid": "none", "version": VERSION, "now": 0}
    )
    return bytes(connection.serialize("main"))


@cache
def _row_type_of(text: str, names: tuple[str, ...]) -> Any:
    return namedtuple("Row", names, rename=True)


_types: dict[str, Any] = {}


def _row_type(connection: apsw.Connection, text: str) -> Any:
    if text not in _types:
        described = apsw.ext.query_info(connection, text).description
        _types[text] = _row_type_of(text, tuple(column[0] for column in described))
    return _types[text]
