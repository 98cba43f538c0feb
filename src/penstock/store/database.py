"""What the store asks of a database: short transactions of named statements, retried where that is safe."""

from __future__ import annotations

import logging
import random
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, TypeVar

from penstock.errors import CommitOutcomeUnknown, PenstockError, StoreUnavailable
from penstock.store.owners import OwnerLock
from penstock.store.statements import statements
from penstock.store.url import StoreUrl

log = logging.getLogger("penstock.store")

T = TypeVar("T")
RETRY_SECONDS = 20.0
POOL_SIZE = 16


class Transaction(ABC):
    """One transaction, given by :meth:`Database.transaction`; rows come as named tuples."""

    dialect: str
    schema: str

    @abstractmethod
    def run(self, name: str, /, **parameters: Any) -> int:
        """Execute a statement; the number of rows it touched."""

    @abstractmethod
    def all(self, name: str, /, **parameters: Any) -> list[Any]:
        """The rows of a statement."""

    @abstractmethod
    def many(self, name: str, rows: Sequence[Mapping[str, Any]]) -> None:
        """Execute a statement once for each mapping."""

    @abstractmethod
    def execute(self, text: str) -> None:
        """Execute SQL that is not named: migrations only."""

    def one(self, name: str, /, **parameters: Any) -> Any:
        """The first row of a statement, or None."""
        rows = self.all(name, **parameters)
        return rows[0] if rows else None

    def now(self) -> int:
        """Microseconds since 1970, by the clock of the database where it has one."""
        return int(self.one("clock", now=time.time_ns() // 1000).now)

    def text(self, name: str) -> str:
        return statements(self.dialect, self.schema)[name]


class Database(ABC):
    """A store's database with a small pool of connections, safe to use from several threads."""

    dialect: str

    def __init__(self, url: StoreUrl) -> None:
        self.url = url
        self._idle: list[Any] = []
        self._guard = threading.Lock()
        self._slots = threading.BoundedSemaphore(POOL_SIZE)
        self._closed = False

    # What a dialect provides.

    @abstractmethod
    def _connect(self) -> Any: ...

    @abstractmethod
    def _disconnect(self, connection: Any) -> None: ...

    @abstractmethod
    def _begin(self, connection: Any, *, write: bool) -> Transaction: ...

    @abstractmethod
    def _commit(self, connection: Any) -> None: ...

    @abstractmethod
    def _rollback(self, connection: Any) -> None: ...

    @abstractmethod
    def _translated(self, error: Exception) -> PenstockError | None:
        """The store error for a driver's error; None for an error that is not the driver's."""

    @abstractmethod
    def owner_lock(self, name: str) -> OwnerLock:
        """A lock that this process holds until it releases it or dies."""

    @abstractmethod
    def borrowed(self, connection: Any) -> Transaction:
        """A transaction on the caller's own connection, which the caller commits."""

    # What they share.

    @contextmanager
    def transaction(self, *, write: bool = True) -> Iterator[Transaction]:
        """One transaction, committed when the block ends, rolled back when it raises.

        Raises
        ------
        StoreUnavailable
            When the database does not answer.
        CommitOutcomeUnknown
            When the connection broke while it was committing.
        """
        with self._connection() as connection:
            try:
                with self._translating():
                    transaction = self._begin(connection, write=write)
                    yield transaction
            except BaseException:
                self._rollback(connection)
                raise
            try:
                self._commit(connection)
            except Exception as error:
                self._rollback(connection)
                raise self._commit_error(error) from error

    def run(self, work: Callable[[Transaction], T], *, write: bool = True, idempotent: bool = False) -> T:
        """Run ``work`` in a transaction, and again with back-off while the database is unavailable.

        Parameters
        ----------
        work
            Gets the transaction; may be called several times, only the last of which is committed.
        write
            False for work that only reads.
        idempotent
            Whether the work may also be repeated when it is unknown whether its commit happened.
        """
        deadline = time.monotonic() + RETRY_SECONDS
        pause = 0.02
        while True:
            try:
                with self.transaction(write=write) as transaction:
                    return work(transaction)
            except (StoreUnavailable, CommitOutcomeUnknown) as error:
                unknown = isinstance(error, CommitOutcomeUnknown) and not (idempotent or not write)
                if unknown or time.monotonic() > deadline:
                    raise
                log.warning("store unavailable, trying again: %s", error, extra={"action": "store_retry"})
            time.sleep(pause * (0.5 + random.random()))
            pause = min(pause * 2, 2.0)

    def close(self) -> None:
        """Close the idle connections; those in use are closed when they come back."""
        with self._guard:
            self._closed = True
            idle, self._idle = self._idle, []
        for connection in idle:
            self._disconnect(connection)

    @contextmanager
    def _connection(self) -> Iterator[Any]:
        with self._slots:
            connection = self._checkout()
            healthy = False
            try:
                yield connection
                healthy = True
            except PenstockError as error:
                healthy = not isinstance(error, StoreUnavailable | CommitOutcomeUnknown)
                raise
            finally:
                self._checkin(connection, healthy)

    def _checkout(self) -> Any:
        with self._guard:
            if self._closed:
                raise StoreUnavailable(f"the store {self.url} has been closed; connect again")
            if self._idle:
                return self._idle.pop()
        with self._translating():
            return self._connect()

    def _checkin(self, connection: Any, healthy: bool) -> None:
        with self._guard:
            if healthy and not self._closed:
                self._idle.append(connection)
                return
        self._disconnect(connection)

    @contextmanager
    def _translating(self) -> Iterator[None]:
        try:
            yield
        except PenstockError:
            raise
        except Exception as error:
            translated = self._translated(error)
            if translated is None:
                raise
            raise translated from error

    def _commit_error(self, error: Exception) -> Exception:
        translated = self._translated(error)
        if isinstance(translated, StoreUnavailable):
            return CommitOutcomeUnknown(
                f"the connection to {self.url} broke while a transaction was committing; "
                "look whether it happened before trying again, or use a producer session, which knows"
            )
        return translated or error


TransactionContext = AbstractContextManager[Transaction]
