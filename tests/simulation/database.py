"""Replacement for the store's database classes, connected to a simulated server."""

from __future__ import annotations

import sqlite3
from collections import namedtuple
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from greenlet import GreenletExit

from penstock.errors import CommitOutcomeUnknownError, StoreError, StoreUnavailableError
from penstock.objects.opened import OpenedStorages
from penstock.store.database import Columns, Database, OwnerLock, Transaction, parameter_rows
from penstock.store.url import parse_url
from tests.simulation.locks import Key
from tests.simulation.scheduler import Process
from tests.simulation.server import Server

LOCK_WAIT_SECONDS = 60.0
"""How long all attempts of a transaction together wait for locks."""
_TEMPORARY = ("drop table if exists temp.", "create temporary table ", "insert into temp.")


class SimTransaction(Transaction):
    """Transaction in which each statement is a step; the connection may break there."""

    dialect = "sqlite"

    def __init__(self, database: SimDatabase, *, write: bool, durable: bool) -> None:
        super().__init__("main", write=write)
        self.durable = durable
        self.database, self.server = database, database.server
        self.process = database.process
        self.task = database.server.world.current_task if database.server.world.in_task else None
        self.locks: dict[Key, str] = {}
        self.blockers: list[SimTransaction] = []
        """The transactions whose locks this one waits for."""
        self.changeset: bytes | None = None
        self.begun = self.broken = self.lose_reply = self.writes_ledger = False
        self.pinned = False
        """Whether it has changes that a changeset cannot hold, so that no other task runs until it ends."""
        self._deferred: list[tuple[str, list[Any] | None]] = []
        """Statements about temporary tables, which no other transaction sees. They run before the first
        statement that may need them.
        """

    def require_connection(self) -> None:
        if self.broken:
            raise StoreUnavailableError(f"{self.server.name}: the connection is lost")

    def _step(self, label: str) -> None:
        if self.write and not self.pinned:
            self.server.world.step(label)
        self.require_connection()

    def _run_named(self, name: str, parameters: dict[str, Any]) -> tuple[list[Any], int]:
        self._step(name)
        self.writes_ledger = self.writes_ledger or name == "insert_ledger"
        self.server.lock(self, name, parameters)
        return self.server.run(self, self._statements[name], parameters)

    def run(self, name: str, /, **parameters: Any) -> int:
        return self._run_named(name, parameters)[1]

    def all(self, name: str, /, **parameters: Any) -> list[Any]:
        rows = self._run_named(name, parameters)[0]
        if not rows:
            return []
        make = self.server.row_type(self._statements[name])._make
        return [make(row) for row in rows]

    def tuples(self, name: str, /, **parameters: Any) -> list[tuple[Any, ...]]:
        return self._run_named(name, parameters)[0]

    def page(self, *, max_bytes: int, **parameters: Any) -> list[Any]:
        page, size = [], 0
        for row in self.all("read_page", **parameters):
            page.append(row)
            size += row.bytes
            if size >= max_bytes:
                break
        return page

    def run_many(self, name: str, rows: Columns, /, **common: Any) -> int:
        parameters = parameter_rows(rows, common)
        if not parameters:
            return 0
        self._step(name)
        for row in parameters:
            self.server.lock(self, name, row)
        return self.server.run_many(self, self._statements[name], parameters)

    def all_for_many(self, name: str, rows: Columns, /, **common: Any) -> list[Any]:
        parameters = parameter_rows(rows, common)
        if not parameters:
            return []
        if name == "allocate_block":
            return [_Block(self.server.allocate_block()) for _ in parameters]
        self._step(name)
        for row in parameters:
            self.server.lock(self, name, row)
        sql = self._statements[name]
        results = [result for row in parameters for result in self.server.run(self, sql, row)[0]]
        make = self.server.row_type(sql)._make if results else tuple
        return [make(result) for result in results]

    # SQL that is not a named statement: about tables of users.

    def _pin(self) -> None:
        """Run the deferred statements and keep all other tasks from running until the transaction ends."""
        self._step("statement")
        if self.write and not self.pinned:
            self.server.activate(self)
            self.pinned = True
            for sql, rows in self._deferred:
                if rows is None:
                    self.server.run(self, sql, ())
                else:
                    self.server.run_many(self, sql, rows)

    def _defer(self, text: str, rows: list[Any] | None = None) -> bool:
        """Defer a statement about a temporary table; return whether it was deferred."""
        if self.pinned or not self.write or not text.startswith(_TEMPORARY):
            return False
        self._step("statement about a temporary table")
        self._deferred.append((text, rows))
        return True

    def execute(self, text: str) -> None:
        if not self._defer(text):
            self._pin()
            self.server.run(self, text, ())

    def change(self, text: str) -> int:
        self._pin()
        return self.server.run(self, text, ())[1]

    def query(self, text: str, /, **parameters: Any) -> list[Any]:
        self._pin()
        return self.server.run(self, text, parameters)[0]

    def load(self, text: str, data: Iterable[Any]) -> None:
        rows = list(data)
        if not self._defer(text, rows):
            self._pin()
            self.server.run_many(self, text, rows)

    # Clocks and owners.

    def now(self) -> int:
        # SQLite runs inside the process and uses its clock.
        offset = 0.0 if self.server.row_locks else self.process.clock_offset
        return self.server.clock() + int(offset * 1e6)

    def instance(self) -> str:
        return self.server.name

    def write_time(self) -> int:
        return self.now()

    def owner_alive(self, name: str) -> bool:
        return name in self.server.owner_locks


_Block = namedtuple("_Block", "block")


class SimDatabase(Database):
    """Connection of a process to a server."""

    dialect = "sqlite"

    def __init__(self, server: Server, process: Process) -> None:
        self.server, self.process = server, process
        self.url = parse_url(server.url)
        self.uuid = server.uuid
        self.may_create = False
        self.storages = OpenedStorages()
        process.on_exit.append(lambda: server.on_process_exit(process))

    @contextmanager
    def transaction(
        self, *, write: bool = True, single: bool = False, durable: bool = True
    ) -> Iterator[Transaction]:
        server, world = self.server, self.server.world
        world.step(f"begin {'' if write else 'read '}on {server.name}")
        tx = SimTransaction(self, write=write, durable=durable)
        server.begin(tx)
        try:
            yield tx
            if write:
                tx._step("commit")
            self._commit(tx)
        except BaseException as error:
            if not (isinstance(error, GreenletExit) and world.closed):
                server.rollback(tx)
            if isinstance(error, sqlite3.Error):
                raise StoreError(f"{server.name}: {error}") from error
            raise
        if write:
            world.step(f"committed on {server.name}")

    def _commit(self, tx: SimTransaction) -> None:
        lose_reply = tx.lose_reply
        self.server.commit(tx)
        if lose_reply:
            raise CommitOutcomeUnknownError(f"{self.server.name}: the connection broke during a commit")

    def _lock_wait(self, timeout: float | None) -> float:
        return LOCK_WAIT_SECONDS if timeout is None else timeout

    def owner_lock(self, name: str) -> OwnerLock:
        return SimOwnerLock(self.server, self.process, name)

    def close(self) -> None:
        """Do nothing: a connection lasts as long as its transaction."""

    def checkpoint_wal(self) -> None: ...

    # Methods of real connections, which the simulation never calls.

    def exists(self) -> bool:
        return True

    def _connect(self) -> Any:
        raise NotImplementedError

    def disconnect(self, connection: Any) -> None:
        raise NotImplementedError

    def _begin(self, connection: Any, *, write: bool, durable: bool = True) -> Transaction:
        raise NotImplementedError

    def _rollback(self, connection: Any) -> None:
        raise NotImplementedError

    def _store_error(self, error: Exception) -> Any:
        return None

    def _commit_error(self, error: Any) -> Any:
        return error

    def caller_transaction(self, connection: Any) -> Any:
        raise NotImplementedError


class SimOwnerLock(OwnerLock):
    """Lock that is released when its process dies or its connection breaks."""

    def __init__(self, server: Server, process: Process, name: str) -> None:
        self._server, self._process, self._name = server, process, name

    def acquire(self) -> bool:
        self._server.world.step("acquire owner lock")
        return self._server.owner_locks.setdefault(self._name, self._process) is self._process

    def release(self) -> None:
        if self._server.owner_locks.get(self._name) is self._process:
            del self._server.owner_locks[self._name]

    def held_elsewhere(self) -> bool:
        return self._server.owner_locks.get(self._name, self._process) is not self._process

    def after_fork_in_child(self) -> None: ...
