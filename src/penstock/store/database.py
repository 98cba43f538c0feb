"""Interface to a store's database: short transactions of named statements, retried when that is safe."""

from __future__ import annotations

import logging
import random
import time
from abc import ABC, abstractmethod
from collections import namedtuple
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from functools import lru_cache, partial
from typing import Any, Protocol, TypeVar, cast

from penstock.errors import (
    CommitOutcomeUnknownError,
    PenstockError,
    StoreError,
    StoreLockedError,
    StoreUnavailableError,
    condition_of,
)
from penstock.objects.opened import OpenedStorages
from penstock.store import forks
from penstock.store.forks import Forkable
from penstock.store.pool import Connection, Pool
from penstock.store.statements import statements
from penstock.store.url import StoreUrl

log = logging.getLogger("penstock.store")

T = TypeVar("T")
RETRY_SECONDS = 20.0
"""How long to retry when the store is unavailable, in seconds."""
MAX_CLOCK_SKEW = 60_000_000
"""The largest accepted difference between clocks, in microseconds. A time further ahead comes from a wrong
clock.
"""


class Row(Protocol):
    """A row that a statement returns: a named tuple of its columns."""

    def __getattr__(self, name: str, /) -> Any: ...


@lru_cache(maxsize=1024)
def row_constructor(columns: tuple[str, ...]) -> Callable[[Sequence[Any]], Row]:
    """Return a function that converts a tuple to a row, twice as fast as the named tuple's ``_make``."""
    return cast(
        "Callable[[Sequence[Any]], Row]", partial(tuple.__new__, namedtuple("Row", columns, rename=True))
    )


class OwnerLock(Forkable, ABC):
    """A lock that one process at a time can hold, among all that use the store. It is released when its
    holder dies.
    """

    def __init__(self) -> None:
        forks.register(self)

    @abstractmethod
    def acquire(self) -> bool:
        """Take the lock if it is free; return whether this object holds it now."""

    @abstractmethod
    def release(self) -> None:
        """Release the lock; does nothing when it is not held."""

    @abstractmethod
    def held_elsewhere(self) -> bool:
        """Return whether another process or object holds the lock."""

    @abstractmethod
    def after_fork_in_child(self) -> None:
        """Drop, in the forked child, whatever must be released when the parent dies."""


Columns = Mapping[str, Sequence[Any]]
"""Rows of statement parameters, stored by column. All columns have the same length."""


def parameter_rows(columns: Columns, common: Mapping[str, object]) -> list[dict[str, object]]:
    """Return one dictionary of statement parameters per row, each with the common parameters added."""
    names = [*columns, *common]
    common_values = tuple(common.values())
    return [
        dict(zip(names, (*values, *common_values), strict=True))
        for values in zip(*columns.values(), strict=True)
    ]


def stored_bytes(segment: Row) -> int:
    """Return the size of a segment's rows and timestamps in bytes, from a row of a page.

    The size of a payload in the database is measured, since another program may have written a wrong value
    into the column ``bytes``.
    """
    rows = segment.bytes if segment.data is None else len(segment.data)
    return int(rows) + len(segment.runs or b"")


class Transaction(ABC):
    """One transaction of a :class:`Database`."""

    dialect: str
    has_merge = False
    """Whether the database has the SQL statement MERGE."""

    def __init__(self, schema: str, *, write: bool) -> None:
        self.schema = schema
        self.write = write
        """Whether the transaction may write. A read-only transaction takes no locks."""
        self.channels: set[str] = set()
        """The channels to notify after the commit."""
        self._statements = statements(self.dialect, schema)

    @abstractmethod
    def run(self, name: str, /, **parameters: object) -> int:
        """Execute a named statement; return the number of rows that it changed."""

    @abstractmethod
    def all(self, name: str, /, **parameters: object) -> list[Row]:
        """Return the rows of a named statement."""

    @abstractmethod
    def tuples(self, name: str, /, **parameters: object) -> list[tuple[Any, ...]]:
        """Return the rows of a named statement as tuples. Use it for statements that return thousands of
        rows.

        The garbage collector does not track plain tuples of numbers, but scans :class:`Row` objects
        repeatedly.
        """

    def one(self, name: str, /, **parameters: object) -> Any:
        """Return the first row of a named statement, or None."""
        rows = self.all(name, **parameters)
        return rows[0] if rows else None

    @abstractmethod
    def page(self, *, max_bytes: int, **parameters: object) -> list[Row]:
        """Return the segments of ``read_page`` with their payloads: up to ``max_bytes``, but at least one
        segment.
        """

    @abstractmethod
    def run_many(self, name: str, rows: Columns, /, **common: object) -> int:
        """Execute a named statement for many rows of parameters in one message to the server. Return the
        number of rows that it changed.

        ``rows`` has the parameters that differ between rows, and ``common`` has the others.
        """

    @abstractmethod
    def all_for_many(self, name: str, rows: Columns, /, **common: object) -> list[Row]:
        """Run a named statement for many rows of parameters, and return all result rows in any order."""

    def close(self) -> None:  # noqa: B027 - most have nothing to close
        """Close the transaction's resources; the caller commits or rolls back."""

    @abstractmethod
    def execute(self, text: str) -> None:
        """Execute SQL text, such as the creation of tables."""

    @abstractmethod
    def change(self, text: str) -> int:
        """Execute SQL text without parameters on users' tables; return the number of changed rows."""

    @abstractmethod
    def query(self, text: str, /, **parameters: object) -> list[tuple[Any, ...]]:
        """Execute a SQL query and return its rows. A query with parameters must not contain names chosen by
        users, since such a name could look like a parameter.
        """

    def require_trusted_owner(self, schema: str, relation: str) -> None:  # noqa: B027
        """Refuse an existing table whose owner could run code with the rights of this session's role.

        SQLite has no roles.
        """

    def lock_table(self, schema: str, table: str) -> None:  # noqa: B027
        """Lock a table so that nobody replaces it before the transaction ends, and require a trusted owner.

        A SQLite write transaction locks the whole database anyway.
        """

    def default_schema(self) -> str | None:
        """Return the schema in which the database looks up unqualified names of users' tables; None if there
        is none.
        """
        return None

    @abstractmethod
    def instance(self) -> str:
        """Return an identifier that, as far as possible, distinguishes this database from copies of it. Its
        parts are separated by slashes. A part is empty if it is unknown.
        """

    @abstractmethod
    def load(self, text: str, data: Iterable[Any]) -> None:
        """Send rows in bulk. ``data`` has buffers for ``copy`` in PostgreSQL, or rows for ``insert`` in
        SQLite.
        """

    @abstractmethod
    def now(self) -> int:
        """Return the current time in microseconds since 1970, by the database's clock if it has one."""

    @abstractmethod
    def write_time(self) -> int | None:
        """Return the timestamp for rows that are written now; None if the statements read the database's
        clock.
        """

    @abstractmethod
    def owner_alive(self, name: str) -> bool:
        """Return whether any process holds the owner lock with this name. This does not take the lock."""

    def owners_alive(self, names: Iterable[str]) -> set[str]:
        """Return those owner locks among ``names`` that some process holds."""
        return {name for name in names if self.owner_alive(name)}

    def text(self, name: str) -> str:
        """Return the SQL text of a named statement."""
        return self._statements[name]


class Database(ABC):
    """A store's database with a small pool of connections, safe to use from several threads."""

    dialect: str

    def __init__(self, url: StoreUrl) -> None:
        self.url = url
        self.may_create = False
        """Whether connecting may create the database's file."""
        self.uuid = ""
        """The store's UUID, which is the same for every URL of the store. Empty until it has been read."""
        self.pool = Pool(self.open_connection, self.disconnect, str(url))
        self.storages = OpenedStorages()

    # What a dialect implements.

    @abstractmethod
    def exists(self) -> bool:
        """Return whether the database exists; True if only a connection could show that."""

    @abstractmethod
    def _connect(self) -> Connection: ...

    @abstractmethod
    def disconnect(self, connection: Connection) -> None: ...

    @abstractmethod
    def _begin(self, connection: Connection, *, write: bool, durable: bool = True) -> Transaction: ...

    def _begin_single(self, connection: Connection, *, write: bool) -> Transaction:
        """Begin a transaction for a single statement."""
        return self._begin(connection, write=write)

    @abstractmethod
    def _commit(self, connection: Connection) -> None: ...

    @abstractmethod
    def _rollback(self, connection: Connection) -> None: ...

    @abstractmethod
    def _store_error(self, error: Exception) -> PenstockError | None:
        """Convert a driver's error to the store's error; return None for any other exception."""

    @abstractmethod
    def _commit_error(self, error: PenstockError) -> PenstockError:
        """Return the error to raise when a commit failed with ``error``."""

    def _notify_listeners(self, connection: Connection, channels: Iterable[str]) -> bool:
        """Wake listeners after a commit; return False if the connection is no longer usable."""
        return True

    def require_trusted_owner(self, tx: Transaction) -> None:  # noqa: B027
        """Refuse a store whose tables belong to a role that this session's role does not trust.

        A SQLite store checks its files when it opens them.
        """

    def checkpoint_wal(self) -> None:  # noqa: B027 - there may be nothing to do
        """Checkpoint the write-ahead log in the background, so that commits have to do it less often."""

    @abstractmethod
    def owner_lock(self, name: str) -> OwnerLock:
        """Return the lock with this name, not yet acquired. A process that acquires it holds it until it
        releases it or dies.
        """

    @abstractmethod
    def caller_transaction(self, connection: Connection) -> AbstractContextManager[Transaction]:
        """Run the block in the open transaction of the caller's own connection. The caller commits it.

        If the block raises, its changes are undone, and the caller's transaction stays open.
        """

    # What all dialects share.

    @contextmanager
    def transaction(
        self, *, write: bool = True, single: bool = False, durable: bool = True
    ) -> Iterator[Transaction]:
        """Run the block in a transaction. Commit it when the block ends, and roll it back if the block
        raises.

        A read-only transaction sees one consistent snapshot of the store. Pass ``single`` if the block runs a
        single statement that only reads or may be repeated: a server commits it immediately, even if the
        block raises afterwards. The commit of a transaction that is not ``durable`` does not wait for the
        disk. The transaction may be lost if the database's machine fails before a later durable transaction
        is committed.
        """
        with self.pool.lease() as lease:
            connection = lease.connection
            begin = self._begin_single if single else partial(self._begin, durable=durable)
            try:
                with self.translating(), closing(begin(connection, write=write)) as transaction:
                    yield transaction
            except BaseException as error:
                rolled_back = self._try_rollback(connection)
                # After a database error or an interrupt, the state of the connection is unknown.
                lease.reusable = (
                    rolled_back and isinstance(error, Exception) and not isinstance(error, StoreError)
                )
                raise
            try:
                with self.translating():
                    self._commit(connection)
            except PenstockError as error:
                self._try_rollback(connection)
                raise self._commit_error(error) from error.__cause__
            lease.reusable = not transaction.channels or self._notify_listeners(
                connection, transaction.channels
            )

    def _try_rollback(self, connection: Connection) -> bool:
        try:
            self._rollback(connection)
        except Exception as error:
            if self._store_error(error) is None:
                raise
            return False
        return True

    def run(
        self,
        work: Callable[[Transaction], T],
        *,
        write: bool = True,
        single: bool = False,
        durable: bool = True,
        idempotent: bool = False,
        timeout: float | None = None,
    ) -> T:
        """Run ``work`` in a transaction, and retry it with back-off while the database is unavailable.

        ``work`` may be called several times, but only the last call is committed. ``idempotent`` work is also
        retried when it is unknown whether a commit took effect. ``timeout`` is in seconds, 20 by default.
        With a timeout of 0, there is no second wait for a lock either. ``single`` and ``durable`` are as for
        :meth:`transaction`.
        """

        def attempt() -> T:
            with self.transaction(write=write, single=single, durable=durable) as transaction:
                return work(transaction)

        return self.retry(attempt, idempotent=idempotent or not write, timeout=timeout)

    def retry(self, attempt: Callable[[], T], *, idempotent: bool = True, timeout: float | None = None) -> T:
        """Call ``attempt``, and retry it with back-off while the database is unavailable, as :meth:`run`
        does.
        """
        retries = _Retries(RETRY_SECONDS if timeout is None else timeout, self._lock_wait(timeout))
        while True:
            try:
                with (
                    self._retrying_lock_wait(retries.seconds_waited)
                    if retries.seconds_waited
                    else nullcontext()
                ):
                    retries.start_attempt()
                    return attempt()
            except (StoreUnavailableError, CommitOutcomeUnknownError) as error:
                outcome_unknown = isinstance(error, CommitOutcomeUnknownError) and not idempotent
                if outcome_unknown or not retries.may_retry(error):
                    raise
                log.warning(
                    "store unavailable, trying again: %s",
                    error,
                    extra={"action": "store_retry", "store": str(self.url), "error": condition_of(error)},
                )
            retries.sleep()

    def _lock_wait(self, timeout: float | None) -> float:
        """Return how many seconds all attempts together may wait for locks."""
        return RETRY_SECONDS if timeout is None else timeout

    def _retrying_lock_wait(self, seconds_waited: float) -> AbstractContextManager[None]:
        """Wrap the next attempt of a transaction that has waited ``seconds_waited`` seconds for locks."""
        return nullcontext()

    def close(self) -> None:
        """Close the idle connections. Connections in use are closed when they are returned."""
        self.pool.close()

    def open_connection(self) -> Connection:
        """Open a new connection. The caller closes it with :meth:`disconnect`."""
        with self.translating():
            return self._connect()

    @contextmanager
    def translating(self) -> Iterator[None]:
        """Translate errors of the driver in the block into the store's errors."""
        try:
            yield
        except PenstockError:
            raise
        except Exception as error:
            translated = self._store_error(error)
            if translated is None:
                raise
            raise translated from error


class _Retries:
    """The attempts of a transaction, with exponential back-off.

    An unavailable store is retried for ``unavailable_seconds`` after the first failure. A transaction that
    fails because of locks is retried until it has waited for locks for ``lock_seconds``. Only the wait itself
    counts, without the time during which the process was suspended. So transactions that take minutes are
    retried too.
    """

    def __init__(self, unavailable_seconds: float, lock_seconds: float) -> None:
        self._unavailable_seconds, self._lock_seconds = unavailable_seconds, lock_seconds
        self._pause = 0.02
        self._deadline: float | None = None
        self._attempt_started = time.monotonic()
        self.seconds_waited = 0.0
        """Seconds spent waiting for locks."""

    def start_attempt(self) -> None:
        self._attempt_started = time.monotonic()

    def may_retry(self, error: Exception) -> bool:
        """Return whether there is time for another attempt after this error."""
        now = time.monotonic()
        if isinstance(error, StoreLockedError):
            # If several transactions wait, each waits twice: first for its turn, then for the lock.
            self.seconds_waited += min(
                now - self._attempt_started, 2 * error.parameters.get("seconds", self._lock_seconds)
            )
            has_time = self.seconds_waited + self._pause < self._lock_seconds * 0.99
            self.seconds_waited += self._pause
            return has_time
        if self._deadline is None:
            self._deadline = now + self._unavailable_seconds
        return now + self._pause <= self._deadline

    def sleep(self) -> None:
        time.sleep(self._pause * (0.5 + random.random()))
        self._pause = min(self._pause * 2, 2.0)
