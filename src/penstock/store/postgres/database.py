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
from penstock.store.postgres.locks import AdvisoryOwnerLock, Holder, HolderLookup, advisory_key
from penstock.store.postgres.session import LOCK_WAIT, UNCHOSEN, longest_wait, set_up, set_up_transaction
from penstock.store.postgres.transaction import PostgresTransaction
from penstock.store.statements import own_relations
from penstock.store.url import StoreUrl, seconds

if TYPE_CHECKING:
    from psycopg.errors import Diagnostic

    from penstock.store.postgres.connection import PgConnection

log = logging.getLogger("penstock.store")

_pooled: set[str] = set()
"""URLs without their passwords that this process has warned about."""
_CONDITIONS: dict[str, type[StoreError]] = {
    "53100": StoreFullError,
    "25006": StoreReadOnlyError,
    "42501": StoreReadOnlyError,
}
_ADVICE = {
    StoreFullError: "free some disk space on the server; nothing of this was written",
    StoreReadOnlyError: "the server or the role may not write: check its grants on the store's schema",
}
# Fully qualified, since a pooler's session has the search path of its role.
_NOTIFY = b"select pg_catalog.pg_notify($1::pg_catalog.text, ''::pg_catalog.text)"
# A write that gets a lock sees what the lock's last holder committed; a read sees one moment, as in SQLite.
_BEGIN_WRITE = b"begin isolation level read committed"
_BEGIN_LAX = _BEGIN_WRITE + b"; set local synchronous_commit to off"
"""Any later commit that waits for the disk, in any session, also makes this one durable; the log is one."""
_BEGIN_READ = b"begin isolation level repeatable read read only"
_NO_SUCH = ("42P01", "42704", "42883")
_TRIES, _PAUSE = 10, 0.05
_IDLE = "25P03"
_IDLED_OUT = "STORE_UNAVAILABLE.IDLE_IN_TRANSACTION"
# The server says that nothing is committed.
_ROLLED_BACK = ("40001", "40P01", "55P03")
_ADVICE_LOCKED = "let it commit or roll back, or end it: select pg_terminate_backend({pid})"


class PostgresDatabase(Database):
    dialect = "postgres"

    def __init__(self, url: StoreUrl) -> None:
        self._psycopg = driver("a postgresql store")
        self._lock_timeout = seconds(url.options["lock_wait"]) if "lock_wait" in url.options else LOCK_WAIT
        self._longest_wait = longest_wait(self._lock_timeout)
        """The seconds of ``lock_timeout``; 0 if the user has switched it off."""
        self._transactions: bytes | None = None
        """The statements that set up each transaction behind a pooler; None without a pooler, or before the
        first transaction.
        """
        self._waiting = threading.local()
        self._idled_out: weakref.WeakSet[PgConnection] = weakref.WeakSet()
        """Connections that the server ended because they were idle in a transaction."""
        super().__init__(url)

    def exists(self) -> bool:
        return True

    def _connect(self, *, lasting: bool = False) -> PgConnection:
        from psycopg.types.numeric import Int8BinaryDumper

        from penstock.store.postgres.arrays import Int8ArrayDumper

        through_pooler = self.url.pooled and not lasting
        if through_pooler and self._transactions is None:
            self._transactions = self._set_up_transactions()
        connection = connect(self.url, str(self.url), through_pooler=through_pooler)
        connection.add_notice_handler(partial(self._noticed, weakref.ref(connection)))
        try:
            if through_pooler:
                # The next transaction may be on another connection of the server.
                connection.prepare_threshold = None
            else:
                self._set_up(connection, set_up(self._lock_timeout, lasting=lasting))
        except BaseException:
            connection.close()
            raise
        # By default the size of a number chooses its type, and each combination of types would be prepared
        # separately.
        connection.adapters.register_dumper(int, Int8BinaryDumper)
        connection.adapters.register_dumper(array, Int8ArrayDumper)
        return connection

    def _set_up(self, connection: PgConnection, statements: str) -> None:
        cursor = connection.execute(statements.encode())
        while cursor.nextset():
            pass
        row = cursor.fetchone()
        assert row is not None
        self._longest_wait, server_process = row
        if server_process != connection.info.backend_pid:
            self._found_pooler()

    def _set_up_transactions(self) -> bytes:
        """Return the statements that set up each transaction behind a pooler."""
        with closing(self._connect(lasting=True)) as connection:
            names = {name for (name,) in connection.execute(UNCHOSEN.encode())}
        return set_up_transaction(self._lock_timeout, names).encode()

    def _found_pooler(self) -> None:
        """Warn or refuse when a connection does not have its own server process."""
        if self.url.pooled:
            raise StoreError(
                f"{self.url}: direct={self.url.options['direct']} leads to a pooler, too: owners' locks and "
                "notifications need their own sessions; give the address of the server itself",
                condition="STORE_ERROR.POOLED",
            )
        if str(self.url) not in _pooled:
            _pooled.add(str(self.url))
            log.warning(
                "the connection to %s leads to a pooler. Unless the pooler gives each client its own "
                "session, queries lose their locks: add direct=host:port to the URL, with the address of the "
                "server itself",
                self.url,
                extra={"action": "pooled", "store": str(self.url)},
            )

    def _noticed(self, connection: weakref.ref[PgConnection], notice: Diagnostic) -> None:
        # While no statement runs, the driver reports a server's error as a notice.
        alive = connection()
        if alive is not None and notice.sqlstate == _IDLE:
            self._idled_out.add(alive)

    def disconnect(self, connection: PgConnection) -> None:
        connection.close()

    def _transaction(
        self, connection: PgConnection, *, write: bool = True, steered: bool = False
    ) -> PostgresTransaction:
        return PostgresTransaction(
            connection, self.url.schema, write=write, steered=steered, trusted=self.url.owners
        )

    def require_trusted_owner(self, tx: Transaction) -> None:
        assert isinstance(tx, PostgresTransaction)
        schema, relations = self.url.options["schema"], sorted(own_relations())
        foreign = tx.foreign_owner(schema, relations, with_schema=True)
        if foreign is not None:
            raise StoreUnsafeError(
                f"{self.url}: {foreign}. Name another schema, or add {foreign.option} to the URL to trust "
                "that role",
                condition="STORE_UNSAFE.SCHEMA_OWNER",
                schema=schema,
                owner=foreign.owner,
            )

    def _begin(self, connection: PgConnection, *, write: bool, durable: bool = True) -> Transaction:
        begin = (_BEGIN_WRITE if durable else _BEGIN_LAX) if write else _BEGIN_READ
        transaction = self._transaction(connection, write=write, steered=True)
        transaction.begin(begin if self._transactions is None else begin + b"; " + self._transactions)
        self._look_for_holders(transaction)
        return transaction

    def _single(self, connection: PgConnection, *, write: bool) -> Transaction:
        if self._transactions is not None:
            return self._begin(connection, write=write)
        # The connection is in autocommit mode.
        transaction = self._transaction(connection, write=write, steered=True)
        self._look_for_holders(transaction)
        return transaction

    def _look_for_holders(self, transaction: PostgresTransaction) -> None:
        lookup: HolderLookup | None = getattr(self._waiting, "lookup", None)
        if lookup is not None:
            lookup.start(transaction.query("select pg_catalog.pg_backend_pid()")[0][0])

    def _commit(self, connection: PgConnection) -> None:
        if connection.info.transaction_status == self._psycopg.pq.TransactionStatus.INERROR:
            # PostgreSQL would roll back without an error.
            raise StoreError(
                f"{self.url}: a statement of the transaction failed, so it cannot be committed",
                condition="STORE_ERROR.FAILED_TRANSACTION",
            )
        try:
            connection.commit()
        except self._psycopg.OperationalError as error:
            if connection in self._idled_out:
                raise self._idled() from error
            raise

    def _rollback(self, connection: PgConnection) -> None:
        if not connection.closed:
            connection.rollback()

    def _notified(self, connection: PgConnection, channels: Iterable[str]) -> bool:
        # Not in the transaction, whose commit would then block all others that notify. If this notification
        # is lost, watches find the rows later.
        ok = self._psycopg.pq.ExecStatus.TUPLES_OK
        return all(
            connection.pgconn.exec_params(_NOTIFY, [channel.encode()]).status == ok for channel in channels
        )

    def _commit_error(self, error: PenstockError) -> PenstockError:
        rolled_back = (
            error.condition == _IDLED_OUT or getattr(error.__cause__, "sqlstate", None) in _ROLLED_BACK
        )
        if rolled_back or not isinstance(error, StoreUnavailableError):
            return error
        return CommitOutcomeUnknownError(
            f"the connection to {self.url} broke while a transaction was committing; "
            "check whether it was committed before trying again, or use a producer session, which checks this"
        )

    def _translated(self, error: Exception) -> PenstockError | None:
        if not isinstance(error, self._psycopg.Error):
            return None
        state, failure = error.sqlstate or "", failure_of(error)
        text = self.url.scrubbed(str(error))
        if failure is Failure.LOGIN:
            return StoreError(
                f"{self.url} refused the login: check the user, its password or passfile, and pg_hba.conf",
                condition="STORE_ERROR.LOGIN_REFUSED",
            )
        if failure is Failure.NO_DATABASE:
            return StoreError(
                f"{self.url}: the server has no database of that name. Create it (createdb), or correct the "
                "URL",
                condition="STORE_ERROR.NO_DATABASE",
            )
        if state == _IDLE:
            return self._idled()
        if state in _NO_SUCH and error.diag.context:
            return self._unqualified(text)
        if failure is Failure.LOCKED:
            return self._locked_out("in time", [])
        if failure is Failure.UNAVAILABLE:
            return StoreUnavailableError(f"{self.url}: {text} (the server is unavailable or busy)")
        kind = _CONDITIONS.get(state, StoreError)
        advice = _ADVICE.get(kind)
        return kind(f"{self.url}: {text}" + (f" ({advice})" if advice else ""))

    def _idled(self) -> StoreUnavailableError:
        return StoreUnavailableError(
            f"{self.url}: this process was idle in a transaction for longer than the server's "
            "idle_in_transaction_session_timeout, so the server rolled it back: run it again",
            condition=_IDLED_OUT,
        )

    def _unqualified(self, text: str) -> StoreError:
        return StoreError(
            f"{self.url}: one of your functions, such as a trigger's, uses a name without its schema "
            f"({text}): Penstock's sessions look up names only in pg_catalog. Write the schema before the "
            "name, or run `alter function … set search_path = …`",
            condition="STORE_ERROR.UNQUALIFIED_NAME",
        )

    def _locked_out(self, within: str, holders: Sequence[Holder]) -> StoreLockedError:
        who = " and ".join(map(str, holders)) or "another session"
        pid = holders[0].pid if holders else "pid, which pg_blocking_pids finds"
        return StoreLockedError(
            f"{self.url}: a lock was not free {within}. {who} holds it: {_ADVICE_LOCKED.format(pid=pid)}",
            seconds=self._longest_wait,
            holders=[holder.pid for holder in holders],
        )

    def _lock_wait(self, timeout: float | None) -> float:
        return self._lock_timeout if timeout is None or timeout > 0 else 0.0

    @contextmanager
    def _waiting_again(self, waited: float) -> Iterator[None]:
        lookup = HolderLookup(self.lasting_connection, self.url.schema, self._longest_wait * 0.75)
        self._waiting.lookup = lookup
        began = time.monotonic()
        try:
            yield
        except StoreLockedError as error:
            lookup.cancel()
            # Do not count time during which the process was suspended.
            total = waited + min(time.monotonic() - began, 2 * self._longest_wait)
            within = f"within {total:.0f} s" if total >= 1 else f"within {total:.1f} s"
            raise self._locked_out(within, lookup.holders) from error.__cause__
        finally:
            self._waiting.lookup = None
            lookup.cancel()

    def owner_lock(self, name: str) -> OwnerLock:
        return AdvisoryOwnerLock(
            lambda: self.retried(lambda: self._locked(name)),
            lambda: self.run(lambda tx: tx.owner_alive(name), write=False),
        )

    def lasting_connection(self) -> PgConnection:
        """Return a connection in autocommit mode that may idle for ever; never through a pooler."""
        with self.translating():
            return self._connect(lasting=True)

    def _locked(self, name: str) -> PgConnection | None:
        """Return a connection that now holds an owner lock; None if another one holds it."""
        connection = self.lasting_connection()
        mine = False
        try:
            with self.translating():
                mine = self._is_taken(connection, name)
        finally:
            if not mine:
                connection.close()
        return connection if mine else None

    def _is_taken(self, connection: PgConnection, name: str) -> bool:
        looking = self._transaction(connection, write=False)
        for _ in range(_TRIES):
            if looking.owners_alive([name]):
                return False
            # If several take it at the same time, each sees the others and gives way.
            row = connection.execute("select pg_try_advisory_lock(%s)", (advisory_key(name),)).fetchone()
            if row and row[0] and not looking.owners_but([name], connection.info.backend_pid):
                return True
            connection.execute("select pg_advisory_unlock_all()")
            time.sleep(random.uniform(0, _PAUSE))
        return False

    @contextmanager
    def borrowed(self, connection: object) -> Iterator[Transaction]:
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
                "the connection is in autocommit mode: begin a transaction, with connection.transaction(), "
                "first",
                condition="INVALID_INPUT.NO_TRANSACTION",
            )
        transaction = self._transaction(connection)
        path = transaction.look_up_safely()
        try:
            try:
                self._check_identity(transaction)
            except BaseException:
                if idle:
                    # End the transaction that this check began.
                    connection.rollback()
                raise
            # Inside a transaction this is a savepoint.
            with connection.transaction():
                yield transaction
                for channel in transaction.channels:
                    transaction.query("select pg_notify(:channel, '')", channel=channel)
        finally:
            if connection.info.transaction_status == self._psycopg.pq.TransactionStatus.INTRANS:
                transaction.look_up_in(path)

    def _check_identity(self, transaction: Transaction) -> None:
        # With the rights of the connection's role, which may differ from the URL's.
        self.require_trusted_owner(transaction)
        exists = transaction.one("store_exists", schema=self.url.options["schema"]).found
        if not exists or transaction.one("read_store").uuid != self.uuid:
            raise InvalidInputError(
                f"the connection does not lead to {self.url}: connect to the same database",
                condition="INVALID_INPUT.OTHER_DATABASE",
            )
