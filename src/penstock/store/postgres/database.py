"""A store in a schema of a PostgreSQL database."""

from __future__ import annotations

import logging
import random
import threading
import time
import weakref
from array import array
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from functools import partial
from typing import TYPE_CHECKING

from penstock.errors import (
    CommitOutcomeUnknownError,
    InvalidInputError,
    PenstockError,
    StoreError,
    StoreFullError,
    StoreLockedError,
    StoreReadOnlyError,
    StoreUnavailableError,
    StoreUnsafeError,
)
from penstock.store.database import Database, OwnerLock, Transaction
from penstock.store.postgres.connection import Failure, connect, driver, failure_of
from penstock.store.postgres.locks import AdvisoryOwnerLock, LockHolder, LockHolderLookup, advisory_key
from penstock.store.postgres.session import (
    DEFAULT_LOCK_WAIT,
    UNSET_TRANSACTION_LIMITS,
    session_setup,
    statement_lock_wait,
    transaction_setup,
)
from penstock.store.postgres.time_limits import SESSION_END_STATES, TookTooLong, time_limit_error
from penstock.store.postgres.transaction import PostgresTransaction
from penstock.store.statements import store_relations
from penstock.store.url import StoreUrl, seconds

if TYPE_CHECKING:
    from psycopg.errors import Diagnostic

    from penstock.store.postgres.connection import PgConnection

log = logging.getLogger("penstock.store")

_warned_poolers: set[str] = set()
"""The URLs, without passwords, that this process has warned about."""
_ERRORS_BY_STATE: dict[str, type[StoreError]] = {
    "53100": StoreFullError,
    "42501": StoreReadOnlyError,
}
_ADVICE = {
    StoreFullError: "free some disk space on the server; none of this was written",
    StoreReadOnlyError: "the role lacks a privilege: check its grants",
}
_READ_ONLY_STATE = "25006"
# The names are qualified, since a session of a pooler uses the search path of its role.
_NOTIFY = b"select pg_catalog.pg_notify($1::pg_catalog.text, ''::pg_catalog.text)"
# A write transaction that gets a lock sees what the previous holder committed. A read transaction sees one
# snapshot, as in SQLite.
_BEGIN_WRITE = b"begin isolation level read committed"
_BEGIN_WRITE_ASYNC = _BEGIN_WRITE + b"; set local synchronous_commit to off"
"""All sessions share one write-ahead log, so any later commit that waits for the disk makes this one durable
too.
"""
_BEGIN_READ = b"begin isolation level repeatable read read only"
_UNDEFINED_STATES = ("42P01", "42704", "42883")
_LOCK_TRIES, _LOCK_PAUSE = 10, 0.05
# SQLSTATEs by which the server reports that nothing was committed.
_ROLLED_BACK_STATES = ("40001", "40P01", "55P03")
_LOCK_ADVICE = "let it commit or roll back, or end it: select pg_terminate_backend({pid})"


class PostgresDatabase(Database):
    dialect = "postgres"

    def __init__(self, url: StoreUrl) -> None:
        self._psycopg = driver("a postgresql store")
        self._lock_timeout = (
            seconds(url.options["lock_wait"]) if "lock_wait" in url.options else DEFAULT_LOCK_WAIT
        )
        self._statement_lock_wait = statement_lock_wait(self._lock_timeout)
        """The ``lock_timeout`` of a statement in seconds; 0 if the user has switched it off."""
        self._transaction_setup: bytes | None = None
        """The statements that set up each transaction behind a pooler. None if there is no pooler, or before
        the first transaction.
        """
        self._lock_waits = threading.local()
        self._timed_out: weakref.WeakKeyDictionary[PgConnection, str] = weakref.WeakKeyDictionary()
        """Connections that the server closed between two statements, with the SQLSTATE of its reason."""
        super().__init__(url)

    def exists(self) -> bool:
        return True

    def _connect(self, *, long_lived: bool = False) -> PgConnection:
        from psycopg.types.numeric import Int8BinaryDumper

        from penstock.store.postgres.arrays import Int8ArrayDumper

        through_pooler = self.url.pooled and not long_lived
        if through_pooler and self._transaction_setup is None:
            self._transaction_setup = self._load_transaction_setup()
        connection = connect(self.url, str(self.url), through_pooler=through_pooler)
        connection.add_notice_handler(partial(self._on_notice, weakref.ref(connection)))
        try:
            if through_pooler:
                # The next transaction may use another connection to the server.
                connection.prepare_threshold = None
            else:
                self._set_up(connection, session_setup(self._lock_timeout, long_lived=long_lived))
        except BaseException:
            connection.close()
            raise
        # By default, the driver chooses a type by the size of each number, and would prepare a statement for
        # each combination of types.
        connection.adapters.register_dumper(int, Int8BinaryDumper)
        connection.adapters.register_dumper(array, Int8ArrayDumper)
        return connection

    def _set_up(self, connection: PgConnection, statements: str) -> None:
        cursor = connection.execute(statements.encode())
        while cursor.nextset():
            pass
        row = cursor.fetchone()
        assert row is not None
        self._statement_lock_wait, server_pid = row
        if server_pid != connection.info.backend_pid:
            self._report_pooler()

    def _load_transaction_setup(self) -> bytes:
        """Return the statements that set up each transaction behind a pooler."""
        with closing(self._connect(long_lived=True)) as connection:
            names = {name for (name,) in connection.execute(UNSET_TRANSACTION_LIMITS.encode())}
        return transaction_setup(self._lock_timeout, names).encode()

    def _report_pooler(self) -> None:
        """Warn, or raise an error, if a connection does not have its own server process."""
        if self.url.pooled:
            raise StoreError(
                f"{self.url}: direct={self.url.options['direct']} is the address of a pooler, too. Locks of "
                "owners and notifications need their own sessions: use the address of the server itself",
                condition="STORE_ERROR.POOLED",
            )
        if str(self.url) not in _warned_poolers:
            _warned_poolers.add(str(self.url))
            log.warning(
                "the connection to %s goes through a pooler. Unless the pooler gives each client its own "
                "session, queries lose their locks: add direct=host:port to the URL, with the address of the "
                "server itself",
                self.url,
                extra={"action": "pooled", "store": str(self.url)},
            )

    def _on_notice(self, connection: weakref.ref[PgConnection], notice: Diagnostic) -> None:
        # While no statement runs, the driver reports errors of the server as notices.
        live_connection, state = connection(), notice.sqlstate or ""
        if live_connection is not None and state in SESSION_END_STATES:
            self._timed_out[live_connection] = state

    def disconnect(self, connection: PgConnection) -> None:
        connection.close()

    def _transaction(
        self, connection: PgConnection, *, write: bool = True, plans_forced: bool = False
    ) -> PostgresTransaction:
        return PostgresTransaction(
            connection, self.url.schema, write=write, plans_forced=plans_forced, trusted=self.url.owners
        )

    def require_trusted_owner(self, tx: Transaction) -> None:
        assert isinstance(tx, PostgresTransaction)
        schema, relations = self.url.options["schema"], sorted(store_relations())
        foreign = tx.foreign_owner(schema, relations, with_schema=True)
        if foreign is not None:
            raise StoreUnsafeError(
                f"{self.url}: {foreign}. Use another schema, or add {foreign.option} to the URL to trust "
                "that role",
                condition="STORE_UNSAFE.SCHEMA_OWNER",
                schema=schema,
                owner=foreign.owner,
            )

    def _begin(self, connection: PgConnection, *, write: bool, durable: bool = True) -> Transaction:
        begin = (_BEGIN_WRITE if durable else _BEGIN_WRITE_ASYNC) if write else _BEGIN_READ
        transaction = self._transaction(connection, write=write, plans_forced=True)
        transaction.begin(
            begin if self._transaction_setup is None else begin + b"; " + self._transaction_setup
        )
        self._start_holder_lookup(transaction)
        return transaction

    def _begin_single(self, connection: PgConnection, *, write: bool) -> Transaction:
        if self._transaction_setup is not None:
            return self._begin(connection, write=write)
        # The connection is in autocommit mode.
        transaction = self._transaction(connection, write=write, plans_forced=True)
        self._start_holder_lookup(transaction)
        return transaction

    def _start_holder_lookup(self, transaction: PostgresTransaction) -> None:
        lookup: LockHolderLookup | None = getattr(self._lock_waits, "lookup", None)
        if lookup is not None:
            lookup.start(transaction.query("select pg_catalog.pg_backend_pid()")[0][0])

    def _commit(self, connection: PgConnection) -> None:
        if connection.info.transaction_status == self._psycopg.pq.TransactionStatus.INERROR:
            # PostgreSQL would roll back without raising an error.
            raise StoreError(
                f"{self.url}: a statement of the transaction failed, so it cannot be committed",
                condition="STORE_ERROR.FAILED_TRANSACTION",
            )
        try:
            connection.commit()
        except self._psycopg.OperationalError as error:
            reason = time_limit_error(str(self.url), self._timed_out.get(connection, ""), "")
            raise (error if reason is None else reason) from error

    def _rollback(self, connection: PgConnection) -> None:
        if not connection.closed:
            connection.rollback()

    def _notify_listeners(self, connection: PgConnection, channels: Iterable[str]) -> bool:
        # Notify outside the transaction: otherwise its commit would block the commits of all other
        # transactions that notify. If this notification is lost, watches find the rows later.
        success = self._psycopg.pq.ExecStatus.TUPLES_OK
        return all(
            connection.pgconn.exec_params(_NOTIFY, [channel.encode()]).status == success
            for channel in channels
        )

    def _commit_error(self, error: PenstockError) -> PenstockError:
        state = getattr(error.__cause__, "sqlstate", None)
        rolled_back = isinstance(error, TookTooLong) or state in _ROLLED_BACK_STATES
        if rolled_back or not isinstance(error, StoreUnavailableError):
            return error
        return CommitOutcomeUnknownError(
            f"the connection to {self.url} broke during a commit, so it is unknown whether it took effect: "
            "check before you repeat it, or use a producer session, which checks this"
        )

    def _store_error(self, error: Exception) -> PenstockError | None:
        if not isinstance(error, self._psycopg.Error):
            return None
        state, failure = error.sqlstate or "", failure_of(error)
        text = self.url.without_secrets(str(error))
        if failure is Failure.LOGIN:
            return StoreError(
                f"{self.url} refused the login: check the user, its password or passfile, and pg_hba.conf",
                condition="STORE_ERROR.LOGIN_REFUSED",
            )
        if failure is Failure.NO_DATABASE:
            return StoreError(
                f"{self.url}: the server has no database with this name. Create it (createdb), or correct "
                "the URL",
                condition="STORE_ERROR.NO_DATABASE",
            )
        time_limit = time_limit_error(str(self.url), state, text)
        if time_limit is not None:
            return time_limit
        if state in _UNDEFINED_STATES and error.diag.context:
            return self._unqualified_name_error(text)
        if failure is Failure.LOCKED:
            return self._locked_error("in time", [])
        if failure is Failure.UNAVAILABLE:
            return StoreUnavailableError(f"{self.url}: {text} (the server is unavailable or busy)")
        if state == _READ_ONLY_STATE:
            return self._read_only_error(text)
        kind = _ERRORS_BY_STATE.get(state, StoreError)
        advice = _ADVICE.get(kind)
        return kind(f"{self.url}: {text}" + (f" ({advice})" if advice else ""))

    def _read_only_error(self, text: str) -> StoreReadOnlyError:
        return StoreReadOnlyError(
            f"{self.url}: {text}. The server is a standby, or default_transaction_read_only is on: connect "
            "to the primary (with target_session_attrs=read-write in the URL if it names several hosts), or "
            "switch the setting off for the role",
            condition="STORE_READ_ONLY.SERVER",
        )

    def _unqualified_name_error(self, text: str) -> StoreError:
        return StoreError(
            f"{self.url}: one of your functions, such as that of a trigger, uses a name without a schema "
            f"({text}), but Penstock's sessions look up names only in pg_catalog. Write the schema before "
            "the name, or run `alter function … set search_path = …`",
            condition="STORE_ERROR.UNQUALIFIED_NAME",
        )

    def _locked_error(self, wait: str, holders: Sequence[LockHolder]) -> StoreLockedError:
        description = " and ".join(map(str, holders)) or "another session"
        pid = holders[0].pid if holders else "pid, which pg_blocking_pids finds"
        return StoreLockedError(
            f"{self.url}: a lock was not free {wait}. {description} holds it: {_LOCK_ADVICE.format(pid=pid)}",
            seconds=self._statement_lock_wait,
            holders=[holder.pid for holder in holders],
        )

    def _lock_wait(self, timeout: float | None) -> float:
        return self._lock_timeout if timeout is None or timeout > 0 else 0.0

    @contextmanager
    def _retrying_lock_wait(self, seconds_waited: float) -> Iterator[None]:
        lookup = LockHolderLookup(
            self.long_lived_connection, self.url.schema, self._statement_lock_wait * 0.75
        )
        self._lock_waits.lookup = lookup
        started = time.monotonic()
        try:
            yield
        except StoreLockedError as error:
            lookup.cancel()
            # Do not count the time during which the process was suspended.
            total = seconds_waited + min(time.monotonic() - started, 2 * self._statement_lock_wait)
            wait = f"within {total:.0f} s" if total >= 1 else f"within {total:.1f} s"
            raise self._locked_error(wait, lookup.holders) from error.__cause__
        finally:
            self._lock_waits.lookup = None
            lookup.cancel()

    def owner_lock(self, name: str) -> OwnerLock:
        return AdvisoryOwnerLock(
            lambda: self.retry(lambda: self._open_locked_connection(name)),
            lambda: self.run(lambda tx: tx.owner_alive(name), write=False),
        )

    def long_lived_connection(self) -> PgConnection:
        """Return a connection in autocommit mode that may idle for ever. It never goes through a pooler."""
        with self.translating():
            return self._connect(long_lived=True)

    def _open_locked_connection(self, name: str) -> PgConnection | None:
        """Return a new connection that holds the owner lock; None if another connection holds it."""
        connection = self.long_lived_connection()
        is_locked = False
        try:
            with self.translating():
                is_locked = self._try_lock(connection, name)
        finally:
            if not is_locked:
                connection.close()
        return connection if is_locked else None

    def _try_lock(self, connection: PgConnection, name: str) -> bool:
        transaction = self._transaction(connection, write=False)
        for _ in range(_LOCK_TRIES):
            if transaction.owners_alive([name]):
                return False
            # If several connections take the lock at the same time, each sees the others and releases it.
            row = connection.execute("select pg_try_advisory_lock(%s)", (advisory_key(name),)).fetchone()
            if row and row[0] and not transaction.owners_held_by_others([name], connection.info.backend_pid):
                return True
            connection.execute("select pg_advisory_unlock_all()")
            time.sleep(random.uniform(0, _LOCK_PAUSE))
        return False

    @contextmanager
    def caller_transaction(self, connection: object) -> Iterator[Transaction]:
        if not isinstance(connection, self._psycopg.Connection):
            raise InvalidInputError(
                f"a PostgreSQL store takes a psycopg.Connection, not {type(connection).__name__}"
            )
        with self.translating(), self._savepoint(connection) as transaction:
            yield transaction

    @contextmanager
    def _savepoint(self, connection: PgConnection) -> Iterator[Transaction]:
        idle = connection.info.transaction_status == self._psycopg.pq.TransactionStatus.IDLE
        if connection.autocommit and idle:
            raise InvalidInputError(
                "the connection is in autocommit mode: first begin a transaction with "
                "connection.transaction()",
                condition="INVALID_INPUT.NO_TRANSACTION",
            )
        transaction = self._transaction(connection)
        search_path = transaction.set_safe_search_path()
        try:
            try:
                self._check_identity(transaction)
            except BaseException:
                if idle:
                    # End the transaction that this check began.
                    connection.rollback()
                raise
            # This is a savepoint, since the caller's transaction is open.
            with connection.transaction():
                yield transaction
                for channel in transaction.channels:
                    transaction.query("select pg_notify(:channel, '')", channel=channel)
        finally:
            if connection.info.transaction_status == self._psycopg.pq.TransactionStatus.INTRANS:
                transaction.set_search_path(search_path)

    def _check_identity(self, transaction: Transaction) -> None:
        # Check with the rights of the connection's role, which may differ from the URL's role.
        self.require_trusted_owner(transaction)
        exists = transaction.one("store_exists", schema=self.url.options["schema"]).found
        if not exists or transaction.one("read_store").uuid != self.uuid:
            raise InvalidInputError(
                f"the connection is not to {self.url}: connect to the same database",
                condition="INVALID_INPUT.OTHER_DATABASE",
            )
