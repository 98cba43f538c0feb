"""A process's way to a simulated server: what the store's code takes for its database."""

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

WAIT_SECONDS = 60.0
"""For how long all tries together wait for locks."""
_TEMPORARY = ("drop table if exists temp.", "create temporary table ", "insert into temp.")


class SimTransaction(Transaction):
    """A transaction; each statement is a step, in which it may be broken."""

    dialect = "sqlite"

    def __init__(self, database: SimDatabase, *, write: bool, durable: bool) -> None:
        super().__init__("main", write=write)
        self.durable = durable
        self.database, self.server = database, database.server
        self.process = database.process
        self.task = database.server.world.task if database.server.world.running else None
        self.locked: dict[Key, str] = {}
        self.changes: bytes | None = None
        self.began = self.broken = self.lose_reply = self.enters = False
        self.pinned = False
        """Whether it has done what cannot be kept aside: then nobody else takes a turn until it ends."""
        self._temporary: list[tuple[str, list[Any] | None]] = []
        """Statements about temporary tables, which nobody else sees: they are done when the first other one
        needs them.
        """
        self.waits_for: list[SimTransaction] = []

    def require_sound(self) -> None:
        if self.broken:
            raise StoreUnavailableError(f"{self.server.name}: the connection is lost")

    def _step(self, what: str) -> None:
        if self.write and not self.pinned:
            self.server.world.step(what)
        self.require_sound()

    def _named(self, name: str, given: dict[str, Any]) -> tuple[list[Any], int]:
        self._step(name)
        self.enters = self.enters or name == "insert_ledger"
        self.server.lock(self, name, given)
        return self.server.run(self, self._statements[name], given)

    def run(self, name: str, /, **parameters: Any) -> int:
        return self._named(name, parameters)[1]

    def all(self, name: str, /, **parameters: Any) -> list[Any]:
        rows = self._named(name, parameters)[0]
        if not rows:
            return []
        make = self.server.columns(self._statements[name])._make
        return [make(row) for row in rows]

    def tuples(self, name: str, /, **parameters: Any) -> list[tuple[Any, ...]]:
        return self._named(name, parameters)[0]

    def page(self, *, max_bytes: int, **parameters: Any) -> list[Any]:
        found, size = [], 0
        for row in self.all("read_page", **parameters):
            found.append(row)
            size += row.bytes
            if size >= max_bytes:
                break
        return found

    def run_many(self, name: str, rows: Columns, /, **common: Any) -> int:
        given = parameter_rows(rows, common)
        if not given:
            return 0
        self._step(name)
        for each in given:
            self.server.lock(self, name, each)
        return self.server.many(self, self._statements[name], given)

    def all_for_many(self, name: str, rows: Columns, /, **common: Any) -> list[Any]:
        given = parameter_rows(rows, common)
        if not given:
            return []
        if name == "allocate_block":
            return [_Block(self.server.next_block()) for _ in given]
        self._step(name)
        for each in given:
            self.server.lock(self, name, each)
        text = self._statements[name]
        found = [row for each in given for row in self.server.run(self, text, each)[0]]
        make = self.server.columns(text)._make if found else tuple
        return [make(row) for row in found]

    # SQL that is not named: about tables of users.

    def _pin(self) -> None:
        self._step("statement")
        if self.write and not self.pinned:
            self.server.enter(self)
            self.pinned = True
            for text, rows in self._temporary:
                if rows is None:
                    self.server.run(self, text, ())
                else:
                    self.server.many(self, text, rows)

    def _is_put_off(self, text: str, rows: list[Any] | None = None) -> bool:
        if self.pinned or not self.write or not text.startswith(_TEMPORARY):
            return False
        self._step("statement about a temporary table")
        self._temporary.append((text, rows))
        return True

    def execute(self, text: str) -> None:
        if not self._is_put_off(text):
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
        if not self._is_put_off(text, rows):
            self._pin()
            self.server.many(self, text, rows)

    # Clocks and owners.

    def now(self) -> int:
        own = 0.0 if self.server.rows else self.process.clock_offset
        return self.server.clock() + int(own * 1e6)

    def instance(self) -> str:
        return self.server.name

    def write_time(self) -> int:
        return self.now()

    def owner_alive(self, name: str) -> bool:
        return name in self.server.owners


_Block = namedtuple("_Block", "block")


class SimDatabase(Database):
    """One process's way to a server."""

    dialect = "sqlite"

    def __init__(self, server: Server, process: Process) -> None:
        self.server, self.process = server, process
        self.url = parse_url(server.url)
        self.uuid = server.uuid
        self.may_create = False
        self.storages = OpenedStorages()
        process.at_death.append(lambda: server.gone(process))

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
            if not (isinstance(error, GreenletExit) and world.over):
                server.rollback(tx)
            if isinstance(error, sqlite3.Error):
                raise StoreError(f"{server.name}: {error}") from error
            raise
        if write:
            world.step(f"committed on {server.name}")

    def _commit(self, tx: SimTransaction) -> None:
        lost = tx.lose_reply
        self.server.commit(tx)
        if lost:
            raise CommitOutcomeUnknownError(f"{self.server.name}: the connection broke during a commit")

    def _lock_wait(self, timeout: float | None) -> float:
        return WAIT_SECONDS if timeout is None else timeout

    def owner_lock(self, name: str) -> OwnerLock:
        return SimOwnerLock(self.server, self.process, name)

    def close(self) -> None:
        """Nothing is held between transactions."""

    def checkpoint_wal(self) -> None: ...

    # What only a driver's connection has.

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
    """Released by the death of its process, or when its connection is lost."""

    def __init__(self, server: Server, process: Process, name: str) -> None:
        self._server, self._process, self._name = server, process, name

    def acquire(self) -> bool:
        self._server.world.step("own")
        return self._server.owners.setdefault(self._name, self._process) is self._process

    def release(self) -> None:
        if self._server.owners.get(self._name) is self._process:
            del self._server.owners[self._name]

    def held_elsewhere(self) -> bool:
        return self._server.owners.get(self._name, self._process) is not self._process

    def after_fork_in_child(self) -> None: ...
