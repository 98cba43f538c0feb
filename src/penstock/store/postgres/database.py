"""The shared store: a schema in a PostgreSQL database."""

from __future__ import annotations

import logging
import random
import threading
import time
import weakref
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

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
from penstock.store.database import Columns, Database, OwnerLock, Row, Transaction, row_maker
from penstock.store.postgres.connection import Failure, connect, copied_out, driver, failure_of
from penstock.store.postgres.locks import (
    AdvisoryOwnerLock,
    Holder,
    HolderLookup,
    advisory_halves,
    advisory_key,
)
from penstock.store.postgres.session import (
    FREE,
    LOCK_WAIT,
    SEARCH_PATH,
    STEERED,
    UNCHOSEN,
    longest_wait,
    set_up,
    set_up_transaction,
)
from penstock.store.postgres.trusted_owners import ForeignOwner, find_foreign_owner
from penstock.store.statements import bind, own_relations
from penstock.store.url import StoreUrl, seconds

if TYPE_CHECKING:
    from psycopg import Cursor
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
# For the caller's transaction alone.
_LOOK_UP = b"select pg_catalog.set_config('search_path', %s, true)"
_LOOK_UP_SAFELY = (
    b"select pg_catalog.current_setting('search_path'), pg_catalog.set_config('search_path', %s, true)"
)
# A pooler's session has the search path of its role.
_NOTIFY = b"select pg_catalog.pg_notify($1::pg_catalog.text, ''::pg_catalog.text)"
# Under a lock a write sees what the lock's last holder committed; a read sees one moment, as in SQLite.
_BEGIN_WRITE = b"begin isolation level read committed"
_BEGIN_LAX = _BEGIN_WRITE + b"; set local synchronous_commit to off"
"""Any later commit that waits for the disk, in whichever session, waits for this one too: the log is one."""
_BEGIN_READ = b"begin isolation level repeatable read read only"
_NO_SUCH = ("42P01", "42704", "42883")
_TRIES, _PAUSE = 10, 0.05
_IDLE = "25P03"
_IDLED_OUT = "STORE_UNAVAILABLE.IDLE_IN_TRANSACTION"
# The server says that nothing is committed.
_ROLLED_BACK = ("40001", "40P01", "55P03")
_ADVICE_LOCKED = "let it commit or roll back, or end it: select pg_terminate_backend({pid})"
_WITH_MERGE = 150000


def _rows(cursor: Any) -> Callable[[Sequence[Any]], Row]:
    """Make rows of a cursor's result, if it has one."""
    columns = cursor.description or ()
    return row_maker(tuple(column.name for column in columns))


class PostgresTransaction(Transaction):
    dialect = "postgres"

    def __init__(
        self,
        connection: PgConnection,
        schema: str,
        *,
        write: bool = True,
        steered: bool = False,
        trusted: Sequence[str] = (),
    ) -> None:
        from psycopg import Cursor
        from psycopg.rows import tuple_row

        from penstock.store.postgres.arrays import Int8ArrayDumper

        super().__init__(schema, write=write)
        # Not connection.cursor(): a caller's connection may have another kind of cursor.
        self._cursor: Cursor[Any] = Cursor(connection, row_factory=_rows)
        self._plain: Cursor[Any] = Cursor(connection, row_factory=tuple_row)
        if not steered:
            # A caller's connection does not know arrays.
            self._cursor.adapters.register_dumper(array, Int8ArrayDumper)
        self._steered = steered
        self._trusted = trusted
        """Roles that the user trusts with the tables."""
        self.merges = connection.info.server_version >= _WITH_MERGE

    def begin(self, text: bytes) -> None:
        self._cursor.execute(text, prepare=False)

    def run(self, name: str, /, **parameters: object) -> int:
        return self._cursor.execute(self._statements[name], parameters).rowcount

    def all(self, name: str, /, **parameters: object) -> list[Row]:
        return self._cursor.execute(self._statements[name], parameters, binary=True).fetchall()

    def page(self, *, max_bytes: int, **parameters: object) -> list[Row]:
        return self.all("read_page", max_bytes=max_bytes, **parameters)

    def many(self, name: str, rows: Columns, /, **common: object) -> int:
        found = _arranged(name, rows)
        return 0 if found is None else self.run(found[0], **found[1], **common)

    def each(self, name: str, rows: Columns, /, **common: object) -> list[Row]:
        found = _arranged(name, rows)
        return [] if found is None else self.all(found[0], **found[1], **common)

    def execute(self, text: str) -> None:
        self._cursor.execute(text.encode())

    def change(self, text: str) -> int:
        if not self._steered:
            return self._cursor.execute(text.encode()).rowcount
        # Users' tables may be read as a whole, and joined.
        self._cursor.execute(FREE.encode())
        touched = self._cursor.execute(text.encode()).rowcount
        self._cursor.execute(STEERED.encode())
        return touched

    def query(self, text: str, /, **parameters: object) -> list[tuple[Any, ...]]:
        if parameters:
            return self._plain.execute(bind(text, self.dialect).encode(), parameters).fetchall()
        return self._plain.execute(text.encode()).fetchall()

    def foreign_owner(
        self, schema: str, relations: Sequence[str], *, with_schema: bool
    ) -> ForeignOwner | None:
        """The owner of a schema, or of a relation in it, who is not trusted."""
        return find_foreign_owner(
            self._first_row, schema, relations, trusted=self._trusted, with_schema=with_schema
        )

    def _first_row(self, text: str, **parameters: object) -> tuple[Any, ...] | None:
        return next(iter(self.query(text, **parameters)), None)

    def require_trusted_owner(self, schema: str, relation: str) -> None:
        foreign = self.foreign_owner(schema, [relation], with_schema=False)
        if foreign is not None:
            raise StoreUnsafeError(
                f"the table {foreign}. Drop it, use another one, or add {foreign.option} to the store's URL "
                "to trust that role",
                condition="STORE_UNSAFE.TABLE_OWNER",
                table=foreign.what,
                owner=foreign.owner,
                role=foreign.role,
            )

    def hold(self, schema: str, table: str) -> None:
        # The lock first: the schema's owner could replace the table while a statement waits for it.
        name = ".".join('"' + part.replace('"', '""') + '"' for part in (schema, table))
        self.execute(f"lock table only {name} in row exclusive mode")
        self.require_trusted_owner(schema, table)

    def home_schema(self) -> str | None:
        # By the search path of the role, the database or the URL.
        self._plain.execute("set local search_path to default")
        row = self._plain.execute("select pg_catalog.current_schema()").fetchone()
        self._plain.execute(f"set local search_path to {SEARCH_PATH}".encode())
        return row[0] if row else None

    def look_up_safely(self) -> str:
        """Set the search path of the store's sessions; return the previous one."""
        row = self._plain.execute(_LOOK_UP_SAFELY, (SEARCH_PATH,)).fetchone()
        assert row is not None
        return str(row[0])

    def look_up_in(self, path: str) -> None:
        """Set the search path."""
        self._plain.execute(_LOOK_UP, (path,))

    def load(self, text: str, data: Iterable[Any]) -> None:
        with self._cursor.copy(text.encode()) as copy:
            for buffer in data:
                copy.write(buffer)

    def unload(self, text: str) -> Iterator[bytes | memoryview]:
        """Yield what a ``copy`` to standard output sends; all of it has to be read."""
        return copied_out(self._cursor.connection, text)

    def now(self) -> int:
        return int(self.one("clock").now)

    def instance(self) -> str:
        # Another one in each copy that was made by dumping, by logical replication or from a template; a copy
        # of the server's files has the same. Not every role may know that of the server.
        system = self.one("identify_system").system if self.one("may_identify_system").may else ""
        table = self.one("identify_table")
        return f"{system}/{table.number}/{table.database}"

    def stamp(self) -> None:
        return None

    def owner_alive(self, name: str) -> bool:
        return bool(self.owners_alive([name]))

    def owners_alive(self, names: Iterable[str]) -> set[str]:
        return self.owners_but(names, None)

    def owners_but(self, names: Iterable[str], pid: int | None) -> set[str]:
        """The owner locks among ``names`` that a session other than ``pid`` holds."""
        halves = {name: advisory_halves(name) for name in names}
        if not halves:
            return set()
        high, low = ([half[place] for half in halves.values()] for place in (0, 1))
        rows = self.all("advisory_holders", high=_array(high), low=_array(low), but_for=pid)
        held = {(row.high, row.low) for row in rows}
        return {name for name, half in halves.items() if half in held}


def _arranged(name: str, rows: Columns) -> tuple[str, dict[str, Any]] | None:
    """The statement for one row, or for many, with its parameters; None for no rows."""
    count = len(next(iter(rows.values())))
    if count == 1:
        return name, {column: values[0] for column, values in rows.items()}
    return (f"{name}_all", {column: _array(values) for column, values in rows.items()}) if count else None


def _array(values: Sequence[Any]) -> Any:
    """Values of an array parameter; the driver would choose the type of numbers by the largest one."""
    if not isinstance(values[0], int):
        return values
    try:
        return array("q", values)
    except OverflowError as error:
        from psycopg.errors import NumericValueOutOfRange

        raise NumericValueOutOfRange("bigint out of range") from error


class PostgresDatabase(Database):
    dialect = "postgres"

    def __init__(self, url: StoreUrl) -> None:
        self._psycopg = driver("a postgresql store")
        self._lock_timeout = seconds(url.options["lock_wait"]) if "lock_wait" in url.options else LOCK_WAIT
        self._longest_wait = longest_wait(self._lock_timeout)
        """The seconds of ``lock_timeout``; 0 if the user has switched it off."""
        self._transactions: bytes | None = None
        """What sets up each transaction behind a pooler; None while there is none, or none has begun."""
        self._waiting = threading.local()
        self._idled_out: weakref.WeakSet[PgConnection] = weakref.WeakSet()
        """Connections that the server ends since they were idle in a transaction."""
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
        """The statements that set up each transaction behind a pooler."""
        with closing(self._connect(lasting=True)) as connection:
            names = {name for (name,) in connection.execute(UNCHOSEN.encode())}
        return set_up_transaction(self._lock_timeout, names).encode()

    def _found_pooler(self) -> None:
        """Handle a connection that does not lead to a server process of its own."""
        if self.url.pooled:
            raise StoreError(
                f"{self.url}: direct={self.url.options['direct']} leads to a pooler, too: owners' locks and "
                "notifications need sessions of their own; give the address of the server itself",
                condition="STORE_ERROR.POOLED",
            )
        if str(self.url) not in _pooled:
            _pooled.add(str(self.url))
            log.warning(
                "the connection to %s leads to a pooler. Unless that gives each client a session of its own, "
                "queries lose their locks: add direct=host:port to the URL, with the address of the server "
                "itself",
                self.url,
                extra={"action": "pooled", "store": str(self.url)},
            )

    def _noticed(self, connection: weakref.ref[PgConnection], notice: Diagnostic) -> None:
        # The driver passes a server's error on as a notice while no statement runs.
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
        schema, relations = self.url.options["schema"], sorted(own_relations("postgres"))
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
        # Not in the transaction, whose commit would then block all others that notify. If this one is lost,
        # the rows are found later.
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
            "check whether it happened before trying again, or use a producer session, which knows"
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
            f"{self.url}: a function of yours, such as a trigger's, uses a name without its schema "
            f"({text}): Penstock's sessions look names up in pg_catalog alone. Write the schema before the "
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
        try:
            yield
        except StoreLockedError as error:
            lookup.cancel()
            total = waited + self._longest_wait
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
        """A connection that may idle for ever, in autocommit mode; never through a pooler."""
        with self.translating():
            return self._connect(lasting=True)

    def _locked(self, name: str) -> PgConnection | None:
        """A connection that holds an owner lock; None if another one does."""
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
            # If several take it at once, each sees the others and gives way.
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
        # With the rights of the connection's role, which may be another one than the URL's.
        self.require_trusted_owner(transaction)
        exists = transaction.one("store_exists", schema=self.url.options["schema"]).found
        if not exists or transaction.one("read_store").uuid != self.uuid:
            raise InvalidInputError(
                f"the connection does not lead to {self.url}: connect to the same database",
                condition="INVALID_INPUT.OTHER_DATABASE",
            )
