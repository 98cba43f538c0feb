"""For how long a transaction that failed is tried again."""

from __future__ import annotations

import logging
import random
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from typing import Any, TypeVar

from penstock.errors import (
    CommitOutcomeUnknown,
    PenstockError,
    StoreError,
    StoreLocked,
    StoreUnavailable,
    condition_of,
)
from penstock.store.pool import Pool
from penstock.store.records.owners import OwnerLock
from penstock.store.statements import statements
from penstock.store.url import StoreUrl


class Retries:
    """The tries of one piece of work, whose pauses grow.

    A store that is away is tried again for so many seconds after the first failure: what that try did before does not count, nor
    does a time for which the process was stopped. Where a lock was not free only the waiting counts, so that work of minutes is
    repeated too.

    Parameters
    ----------
    away, locked
        For how many seconds.
    """

    def __init__(self, away: float, locked: float) -> None:
        self._away, self._locked = away, locked
        self._pause = 0.02
        self._deadline: float | None = None
        self._began = time.monotonic()
        self.waited = 0.0
        """Seconds of waiting for locks."""

    def begin(self) -> None:
        """A try begins."""
        self._began = time.monotonic()

    def left(self, error: Exception) -> bool:
        """Whether there is time for another try after this error."""
        now = time.monotonic()
        if isinstance(error, StoreLocked):
            # Where several wait, each waits first for its place at the head of the line, and then for the lock.
            self.waited += min(now - self._began, 2 * error.parameters.get("seconds", self._locked))
            left = self.waited + self._pause < self._locked * 0.99
            self.waited += self._pause
            return left
        if self._deadline is None:
            self._deadline = now + self._away
        return now + self._pause <= self._deadline

    def rest(self) -> None:
        """Pause before the next try."""
        time.sleep(self._pause * (0.5 + random.random()))
        self._pause = min(self._pause * 2, 2.0)


# ---- database: What the store asks of a database: short transactions of named statements, retried where that is safe.

log = logging.getLogger("penstock.store")

T = TypeVar("T")
RETRY_SECONDS = 20.0
"""For how long a store that is away is tried again."""
AHEAD = 60_000_000
"""What is dated by more microseconds ahead of the clock was written under a clock that was wrong, or is read under one; clocks differ
a little."""


class Transaction(ABC):
    """One transaction, given by :meth:`Database.transaction`; rows come as named tuples."""

    dialect: str
    merges = False
    """Whether it has SQL's MERGE."""

    def __init__(self, schema: str, *, write: bool) -> None:
        self.schema = schema
        self.write = write
        """False where it only reads: then it takes no locks either."""
        self.channels: set[str] = set()
        """Where somebody waits for what this transaction has appended."""
        self._statements = statements(self.dialect, schema)

    @abstractmethod
    def run(self, name: str, /, **parameters: Any) -> int:
        """Execute a statement; the number of rows it touched."""

    @abstractmethod
    def all(self, name: str, /, **parameters: Any) -> list[Any]:
        """The rows of a statement."""

    @abstractmethod
    def page(self, *, max_bytes: int, **parameters: Any) -> list[Any]:
        """The segments of ``read_page`` with their payloads, until these have ``max_bytes`` or more; one at the least."""

    @abstractmethod
    def many(self, name: str, rows: Iterable[Mapping[str, Any]]) -> None:
        """Execute a statement once for each mapping; rows that are made as they are sent come as an iterator."""

    def close(self) -> None:  # noqa: B027 - most have nothing
        """Give up what is held of the connection beside the transaction itself, which its owner ends."""

    @abstractmethod
    def execute(self, text: str) -> None:
        """Execute SQL that is not named: migrations, and what is about tables of users."""

    @abstractmethod
    def change(self, text: str) -> int:
        """Execute SQL that is not named and has no parameters; the number of rows it touched."""

    @abstractmethod
    def query(self, text: str, /, **parameters: Any) -> list[Any]:
        """The rows of SQL that is not named, as tuples.

        Where it has parameters, it has no names of users in it: those could look like one.
        """

    def home_schema(self) -> str | None:
        """The schema of a user's table whose name is not qualified; None where there is none."""
        return None

    @abstractmethod
    def load(self, text: str, data: Iterable[Any]) -> None:
        """Send rows in bulk: buffers for the ``copy … from stdin`` of PostgreSQL, rows for the ``insert`` of SQLite."""

    @abstractmethod
    def now(self) -> int:
        """Microseconds since 1970, by the clock of the database where it has one."""

    @abstractmethod
    def stamp(self) -> int | None:
        """The time for a row that is written now; None where the statement puts in the database's clock."""

    @abstractmethod
    def owner_alive(self, name: str) -> bool:
        """Whether anybody holds the owner lock of that name; looks without touching it."""

    def owners_alive(self, names: Iterable[str]) -> set[str]:
        """Those of the owner locks that somebody holds."""
        return {name for name in names if self.owner_alive(name)}

    def notify(self, channel: str) -> None:
        """Wake those who listen to a channel as soon as this transaction is committed."""
        self.channels.add(channel)

    def one(self, name: str, /, **parameters: Any) -> Any:
        """The first row of a statement, or None."""
        rows = self.all(name, **parameters)
        return rows[0] if rows else None

    def text(self, name: str) -> str:
        return self._statements[name]


class Database(ABC):
    """A store's database with a small pool of connections, safe to use from several threads."""

    dialect: str

    def __init__(self, url: StoreUrl) -> None:
        self.url = url
        self.may_create = False
        """Whether connecting may make the database's file."""
        self.uuid: str | None = None
        """The store's identity, once it is known."""
        self._pool = Pool(self.connected, self.disconnect, str(url))

    # What a dialect provides.

    @abstractmethod
    def exists(self) -> bool:
        """Whether there is anything to connect to, as far as can be told without connecting."""

    @abstractmethod
    def _connect(self) -> Any: ...

    @abstractmethod
    def disconnect(self, connection: Any) -> None: ...

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
    def _commit_error(self, error: PenstockError) -> PenstockError:
        """What it means that a commit failed with that error."""

    def _notified(self, connection: Any, channels: Iterable[str]) -> bool:
        """Wake those who listen, after a commit; False when the connection is of no use any more."""
        return True

    def tidy(self) -> None:  # noqa: B027 - there may be nothing to do
        """Do what a commit would have to do now and then otherwise; for a thread that nobody waits for."""

    @abstractmethod
    def owner_lock(self, name: str) -> OwnerLock:
        """A lock that this process holds until it releases it or dies."""

    @abstractmethod
    def _borrowed(self, connection: Any) -> AbstractContextManager[Transaction]: ...

    # What they share.

    def borrowed(self, connection: Any) -> AbstractContextManager[Transaction]:
        """A part of a transaction on the caller's own connection, which the caller commits.

        All of the block takes effect or, when it raises, none of it; the caller's transaction goes on.

        Raises
        ------
        InvalidInput
            When the connection is another driver's, leads elsewhere, or commits each statement by itself.
        """
        return self._translating_block(self._borrowed(connection))

    @contextmanager
    def _translating_block(self, block: AbstractContextManager[Transaction]) -> Iterator[Transaction]:
        with self.translating(), block as transaction:
            yield transaction

    @contextmanager
    def transaction(self, *, write: bool = True) -> Iterator[Transaction]:
        """One transaction, committed when the block ends, rolled back when it raises.

        One that only reads sees the store as it was at one moment.

        Raises
        ------
        StoreUnavailable
            When the database does not answer.
        CommitOutcomeUnknown
            When the connection broke while it was committing.
        """
        with self._pool.lease() as lease:
            connection = lease.connection
            try:
                with self.translating(), closing(self._begin(connection, write=write)) as transaction:
                    yield transaction
            except BaseException as error:
                undone = self._undone(connection)
                # After an error of the database's, or an interrupt, nobody knows what the connection is up to.
                lease.sound = undone and isinstance(error, Exception) and not isinstance(error, StoreError)
                raise
            try:
                with self.translating():
                    self._commit(connection)
            except PenstockError as error:
                self._undone(connection)
                raise self._commit_error(error) from error.__cause__
            lease.sound = not transaction.channels or self._notified(connection, transaction.channels)

    def _undone(self, connection: Any) -> bool:
        try:
            self._rollback(connection)
        except Exception as error:
            if self._translated(error) is None:
                raise
            return False
        return True

    def run(
        self,
        work: Callable[[Transaction], T],
        *,
        write: bool = True,
        idempotent: bool = False,
        patience: float | None = None,
    ) -> T:
        """Run ``work`` in a transaction, and again with back-off while the database is unavailable.

        Parameters
        ----------
        work
            Gets the transaction; may be called several times, only the last of which is committed.
        write
            False for work that only reads.
        idempotent
            Whether the work may also be repeated when it is unknown whether its commit happened.
        patience
            For how many seconds to try again while the database does not answer; 20 by default. With 0 a lock that is not
            free is not waited for a second time either.
        """

        def once() -> T:
            with self.transaction(write=write) as transaction:
                return work(transaction)

        return self.retried(once, idempotent=idempotent or not write, patience=patience)

    def retried(self, once: Callable[[], T], *, idempotent: bool = True, patience: float | None = None) -> T:
        """Call ``once``, and again with back-off while the database is unavailable; the rest as in :meth:`run`."""
        retries = Retries(RETRY_SECONDS if patience is None else patience, self._lock_wait(patience))
        while True:
            try:
                with self._waiting_again(retries.waited) if retries.waited else nullcontext():
                    retries.begin()
                    return once()
            except (StoreUnavailable, CommitOutcomeUnknown) as error:
                unknown = isinstance(error, CommitOutcomeUnknown) and not idempotent
                if unknown or not retries.left(error):
                    raise
                log.warning(
                    "store unavailable, trying again: %s",
                    error,
                    extra={"action": "store_retry", "store": str(self.url), "error": condition_of(error)},
                )
            retries.rest()

    def _lock_wait(self, patience: float | None) -> float:
        """For how many seconds to wait for locks, in all tries together."""
        return RETRY_SECONDS if patience is None else patience

    def _waiting_again(self, waited: float) -> AbstractContextManager[None]:
        """A block in which a transaction is tried again that has waited so many seconds for a lock: its error says who has it."""
        return nullcontext()

    def close(self) -> None:
        """Close the idle connections; those in use are closed when they come back."""
        self._pool.close()

    def connected(self) -> Any:
        """A new connection; the caller closes it with :meth:`disconnect`."""
        with self.translating():
            return self._connect()

    @contextmanager
    def translating(self) -> Iterator[None]:
        """A block in which the driver's errors become the store's."""
        try:
            yield
        except PenstockError:
            raise
        except Exception as error:
            translated = self._translated(error)
            if translated is None:
                raise
            raise translated from error
