"""The shared store: a schema in a PostgreSQL database."""

from __future__ import annotations

import random
import threading
import time
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

from penstock.errors import (
    CommitOutcomeUnknown,
    InvalidInput,
    InvalidUrl,
    MissingDependency,
    PenstockError,
    StoreError,
    StoreFull,
    StoreLocked,
    StoreReadOnly,
    StoreUnavailable,
)
from penstock.store.database import Database, Transaction
from penstock.store.postgres.lock_holders import Holder, LockLook
from penstock.store.postgres.session import (
    FREE,
    LOCK_WAIT,
    SEARCH_PATH,
    STEERED,
    longest_wait,
    set_up,
    warn_in_clear,
)
from penstock.store.records.owners import AdvisoryOwnerLock, OwnerLock, advisory_halves, advisory_key
from penstock.store.statements import bind
from penstock.store.url import StoreUrl, seconds

if TYPE_CHECKING:
    import psycopg

# What libpq does when the URL says nothing else: a server that is gone without a word is noticed within a minute.
_DEFAULTS: dict[str, Any] = {
    "connect_timeout": 10,
    "application_name": "penstock",
    "client_encoding": "utf8",
    "keepalives_idle": 20,
    "keepalives_interval": 10,
    "keepalives_count": 3,
    "tcp_user_timeout": 50_000,
}
_CONDITIONS: dict[str, type[StoreError]] = {
    "53100": StoreFull,
    "25006": StoreReadOnly,
    "42501": StoreReadOnly,
    "25P04": StoreUnavailable,
    "40001": StoreUnavailable,
    "40P01": StoreUnavailable,
    "53300": StoreUnavailable,
    "55P03": StoreLocked,
    "57P01": StoreUnavailable,
    "57P02": StoreUnavailable,
    "57P03": StoreUnavailable,
    "57P05": StoreUnavailable,
}
_ADVICE = {
    StoreFull: "free some disk space on the server; nothing of this was written",
    StoreReadOnly: "the server or the role may not write here: check its grants on the store's schema",
    StoreUnavailable: "the server is away or busy",
}
# For a transaction on a connection of a caller's, and not behind it.
_LOOK_UP = b"select pg_catalog.set_config('search_path', %s, true)"
_LOOK_UP_SAFELY = (
    b"select pg_catalog.current_setting('search_path'), pg_catalog.set_config('search_path', %s, true)"
)
_NO_SUCH = ("42P01", "42704", "42883")
_TRIES, _PAUSE = 10, 0.05
_IDLE = "25P03"
_STOOD_STILL = "STORE_UNAVAILABLE.IDLE_IN_TRANSACTION"
# With these the server has said that nothing is committed.
_ROLLED_BACK = ("40001", "40P01", "55P03")
_WAY_OUT = "let it commit or roll back, or end it: select pg_terminate_backend({pid})"
# A server that refuses a connection gives no code, and these do not go away by themselves.
_WITH_MERGE = 150000
_REFUSALS = (
    "authentication failed",
    "no password supplied",
    "does not exist",
    "no pg_hba.conf entry",
    "not permitted to log in",
)


def _driver() -> Any:
    try:
        import psycopg
    except ImportError:
        raise MissingDependency(
            "a postgresql store needs psycopg 3: pip install 'penstock[postgres]'", extra="postgres"
        ) from None
    return psycopg


class PostgresTransaction(Transaction):
    dialect = "postgres"

    def __init__(
        self, connection: psycopg.Connection[Any], schema: str, *, write: bool = True, steered: bool = False
    ) -> None:
        from psycopg import Cursor
        from psycopg.rows import namedtuple_row, tuple_row

        super().__init__(schema, write=write)
        # Not the connection's own kind of cursor, which is the caller's choice where the connection is.
        self._cursor: Cursor[Any] = Cursor(connection, row_factory=namedtuple_row)
        self._plain: Cursor[Any] = Cursor(connection, row_factory=tuple_row)
        self._steered = steered
        self.merges = connection.info.server_version >= _WITH_MERGE

    def run(self, name: str, /, **parameters: Any) -> int:
        return self._cursor.execute(self._statements[name], parameters).rowcount

    def all(self, name: str, /, **parameters: Any) -> list[Any]:
        return self._cursor.execute(self._statements[name], parameters, binary=True).fetchall()

    def page(self, *, max_bytes: int, **parameters: Any) -> list[Any]:
        return self.all("read_page", max_bytes=max_bytes, **parameters)

    def many(self, name: str, rows: Iterable[Mapping[str, Any]]) -> None:
        if not isinstance(rows, Sequence):
            self._cursor.executemany(self._statements[name], rows)
        elif len(rows) == 1:
            self._cursor.execute(self._statements[name], rows[0])
        elif rows:
            columns = {each: _array([row[each] for row in rows]) for each in rows[0]}
            self._cursor.execute(self._statements[f"{name}_all"], columns)

    def execute(self, text: str) -> None:
        self._cursor.execute(text.encode())

    def change(self, text: str) -> int:
        if not self._steered:
            return self._cursor.execute(text.encode()).rowcount
        # It is about tables of users, whole ones maybe, and their joins.
        self._cursor.execute(FREE.encode())
        touched = self._cursor.execute(text.encode()).rowcount
        self._cursor.execute(STEERED.encode())
        return touched

    def query(self, text: str, /, **parameters: Any) -> list[Any]:
        if parameters:
            return self._plain.execute(bind(text, self.dialect).encode(), parameters).fetchall()
        return self._plain.execute(text.encode()).fetchall()

    def home_schema(self) -> str | None:
        # The search path that the role, the database or the URL gives the session, for as long as it takes to ask.
        self._plain.execute("set local search_path to default")
        row = self._plain.execute("select pg_catalog.current_schema()").fetchone()
        self._plain.execute(f"set local search_path to {SEARCH_PATH}".encode())
        return row[0] if row else None

    def look_up_safely(self) -> str:
        """Look names up as in a session of the store's; the search path that there was."""
        row = self._plain.execute(_LOOK_UP_SAFELY, (SEARCH_PATH,)).fetchone()
        assert row is not None
        return str(row[0])

    def look_up_in(self, path: str) -> None:
        """Look names up by a search path again."""
        self._plain.execute(_LOOK_UP, (path,))

    def load(self, text: str, data: Iterable[Any]) -> None:
        with self._cursor.copy(text.encode()) as copy:
            for buffer in data:
                copy.write(buffer)

    def now(self) -> int:
        return int(self.one("clock").now)

    def stamp(self) -> None:
        return None

    def owner_alive(self, name: str) -> bool:
        return bool(self.owners_alive([name]))

    def owners_alive(self, names: Iterable[str]) -> set[str]:
        return self.owners_but(names, None)

    def owners_but(self, names: Iterable[str], pid: int | None) -> set[str]:
        """Those of the owner locks that another session than one holds."""
        halves = {name: advisory_halves(name) for name in names}
        if not halves:
            return set()
        high, low = ([half[place] for half in halves.values()] for place in (0, 1))
        rows = self.all("advisory_holders", high=_array(high), low=_array(low), but_for=pid)
        held = {(row.high, row.low) for row in rows}
        return {name for name, half in halves.items() if half in held}


def _array(values: list[Any]) -> Any:
    """Values for a parameter that is an array; of numbers as text, since the driver would give each list a type by its largest."""
    return f"{{{','.join(map(str, values))}}}" if isinstance(values[0], int) else values


class PostgresDatabase(Database):
    dialect = "postgres"

    def __init__(self, url: StoreUrl) -> None:
        self._psycopg = _driver()
        self._patience = seconds(url.options["lock_wait"]) if "lock_wait" in url.options else LOCK_WAIT
        self._longest_wait = longest_wait(self._patience)
        """The seconds of ``lock_timeout``; 0 when the user has chosen none."""
        self._waiting = threading.local()
        self._idled_out: weakref.WeakSet[psycopg.Connection[Any]] = weakref.WeakSet()
        """Connections whose server has said that it ends them, since they stood still in a transaction."""
        super().__init__(url)

    def exists(self) -> bool:
        return True

    def _connect(self) -> psycopg.Connection[Any]:
        return self._made()

    def _made(self, *, lasting: bool = False) -> psycopg.Connection[Any]:
        from psycopg.conninfo import conninfo_to_dict
        from psycopg.types.numeric import Int8BinaryDumper

        try:
            given = conninfo_to_dict(self.url.target)
        except self._psycopg.ProgrammingError as error:
            raise InvalidUrl(
                f"{self.url} is not a valid PostgreSQL URL: {self.url.scrubbed(str(error))}"
            ) from None
        connection: psycopg.Connection[Any] = self._psycopg.connect(**(_DEFAULTS | given), autocommit=True)
        warn_in_clear(connection, str(self.url))
        connection.add_notice_handler(partial(self._noticed, weakref.ref(connection)))
        try:
            self._set_up(connection, set_up(self._patience, lasting=lasting))
            connection.autocommit = lasting
        except BaseException:
            connection.close()
            raise
        # By default the size of a number chooses its type, and each combination of types is a statement to prepare.
        connection.adapters.register_dumper(int, Int8BinaryDumper)
        return connection

    def _set_up(self, connection: psycopg.Connection[Any], statements: str) -> None:
        cursor = connection.execute(statements.encode())
        while cursor.nextset():
            pass
        row = cursor.fetchone()
        assert row is not None
        self._longest_wait = row[0]

    def _noticed(self, connection: weakref.ref[psycopg.Connection[Any]], notice: Any) -> None:
        # What a server says while no statement runs is a notice to the driver, also when it is its last word.
        found = connection()
        if found is not None and notice.sqlstate == _IDLE:
            self._idled_out.add(found)

    def disconnect(self, connection: psycopg.Connection[Any]) -> None:
        connection.close()

    def _begin(self, connection: psycopg.Connection[Any], *, write: bool) -> Transaction:
        levels = self._psycopg.IsolationLevel
        # Whatever the server's default is: a write sees, under a lock, what the lock's last holder committed; a read sees
        # one moment, as it does in SQLite.
        connection.isolation_level = levels.READ_COMMITTED if write else levels.REPEATABLE_READ
        connection.read_only = not write
        look: LockLook | None = getattr(self._waiting, "look", None)
        if look is not None:
            look.begin(connection.info.backend_pid)
        return PostgresTransaction(connection, self.url.schema, write=write, steered=True)

    def _commit(self, connection: psycopg.Connection[Any]) -> None:
        if connection.info.transaction_status == self._psycopg.pq.TransactionStatus.INERROR:
            # PostgreSQL would answer a commit with a rollback, and no error.
            raise StoreError(f"{self.url}: a statement of the transaction failed, so it cannot be committed")
        try:
            connection.commit()
        except self._psycopg.OperationalError as error:
            if connection in self._idled_out:
                raise self._idled() from error
            raise

    def _rollback(self, connection: psycopg.Connection[Any]) -> None:
        if not connection.closed:
            connection.rollback()

    def _notified(self, connection: psycopg.Connection[Any], channels: Iterable[str]) -> bool:
        # Not in the transaction: its commit would hold up all others of the database that notify. Should this one not arrive,
        # the rows are found all the same, only later.
        ok = self._psycopg.pq.ExecStatus.TUPLES_OK
        return all(
            connection.pgconn.exec_params(b"select pg_notify($1, '')", [channel.encode()]).status == ok
            for channel in channels
        )

    def _commit_error(self, error: PenstockError) -> PenstockError:
        rolled_back = (
            error.condition == _STOOD_STILL or getattr(error.__cause__, "sqlstate", None) in _ROLLED_BACK
        )
        if rolled_back or not isinstance(error, StoreUnavailable):
            return error
        return CommitOutcomeUnknown(
            f"the connection to {self.url} broke while a transaction was committing; "
            "look whether it happened before trying again, or use a producer session, which knows"
        )

    def _translated(self, error: Exception) -> PenstockError | None:
        if not isinstance(error, self._psycopg.Error):
            return None
        state = error.sqlstate or ""
        text = self.url.scrubbed(str(error))
        if state.startswith("28") or "authentication failed" in text or "no password supplied" in text:
            return StoreError(f"{self.url} refused the login: check user and password")
        if state == _IDLE:
            return self._idled()
        if state in _NO_SUCH and error.diag.context:
            return self._unqualified(text)
        kind = _CONDITIONS.get(state)
        if kind is StoreLocked:
            return self._locked_out("in time", [])
        if kind is None:
            away = state.startswith("08") or (not state and self._lost(error, text))
            kind = StoreUnavailable if away else StoreError
        advice = _ADVICE.get(kind)
        return kind(f"{self.url}: {text}" + (f" ({advice})" if advice else ""))

    def _idled(self) -> StoreUnavailable:
        return StoreUnavailable(
            f"{self.url}: this process stood still in the middle of a transaction for longer than the server's "
            "idle_in_transaction_session_timeout, which rolled it back: run it again",
            condition=_STOOD_STILL,
        )

    def _unqualified(self, text: str) -> StoreError:
        return StoreError(
            f"{self.url}: a function of yours, such as a trigger's, did not find what it names ({text}): Penstock's sessions look names "
            "up in pg_catalog alone. Write the schema before the name, or run `alter function … set search_path = …`",
            condition="STORE_ERROR.UNQUALIFIED_NAME",
        )

    def _locked_out(self, within: str, holders: Sequence[Holder]) -> StoreLocked:
        who = " and ".join(map(str, holders)) or "another session"
        pid = holders[0].pid if holders else "pid, which pg_blocking_pids finds"
        return StoreLocked(
            f"{self.url}: a lock was not free {within}. {who} has it: {_WAY_OUT.format(pid=pid)}",
            seconds=self._longest_wait,
            holders=[holder.pid for holder in holders],
        )

    def _lock_wait(self, patience: float | None) -> float:
        return self._patience if patience is None or patience > 0 else 0.0

    @contextmanager
    def _waiting_again(self, waited: float) -> Iterator[None]:
        look = LockLook(self.lasting_connection, self.url.schema, self._longest_wait * 0.75)
        self._waiting.look = look
        try:
            yield
        except StoreLocked as error:
            look.end()
            total = waited + self._longest_wait
            within = f"within {total:.0f} s" if total >= 1 else f"within {total:.1f} s"
            raise self._locked_out(within, look.holders) from error.__cause__
        finally:
            self._waiting.look = None
            look.end()

    def _lost(self, error: Exception, text: str) -> bool:
        refused = "FATAL" in text and any(refusal in text for refusal in _REFUSALS)
        broken = isinstance(error, self._psycopg.OperationalError | self._psycopg.InterfaceError)
        return broken and not refused

    def owner_lock(self, name: str) -> OwnerLock:
        return AdvisoryOwnerLock(
            lambda: self.retried(lambda: self._locked(name)),
            lambda: self.run(lambda tx: tx.owner_alive(name), write=False),
        )

    def lasting_connection(self) -> psycopg.Connection[Any]:
        """A connection that may idle for ever, each statement a transaction."""
        with self.translating():
            return self._made(lasting=True)

    def _locked(self, name: str) -> psycopg.Connection[Any] | None:
        """A connection that holds an owner lock; None when another one does."""
        connection = self.lasting_connection()
        mine = False
        try:
            with self.translating():
                mine = self._is_taken(connection, name)
        finally:
            if not mine:
                connection.close()
        return connection if mine else None

    def _is_taken(self, connection: psycopg.Connection[Any], name: str) -> bool:
        looking = PostgresTransaction(connection, self.url.schema, write=False)
        for _ in range(_TRIES):
            if looking.owners_alive([name]):
                return False
            # Nobody else has it, or each of several sees the others behind its own and gives way.
            row = connection.execute("select pg_try_advisory_lock(%s)", (advisory_key(name),)).fetchone()
            if row and row[0] and not looking.owners_but([name], connection.info.backend_pid):
                return True
            connection.execute("select pg_advisory_unlock_all()")
            time.sleep(random.uniform(0, _PAUSE))
        return False

    def _borrowed(self, connection: Any) -> AbstractContextManager[Transaction]:
        if not isinstance(connection, self._psycopg.Connection):
            raise InvalidInput(
                f"a PostgreSQL store takes a psycopg.Connection, not {type(connection).__name__}"
            )
        return self._part(connection)

    @contextmanager
    def _part(self, connection: psycopg.Connection[Any]) -> Iterator[Transaction]:
        idle = connection.info.transaction_status == self._psycopg.pq.TransactionStatus.IDLE
        if connection.autocommit and idle:
            raise InvalidInput(
                "the connection is in autocommit mode: begin a transaction, with connection.transaction(), first"
            )
        transaction = PostgresTransaction(connection, self.url.schema)
        path = transaction.look_up_safely()
        try:
            self._check_there(transaction, connection if idle else None)
            # Inside a transaction this is a savepoint.
            with connection.transaction():
                yield transaction
                for channel in transaction.channels:
                    transaction.query("select pg_notify(:channel, '')", channel=channel)
        finally:
            if connection.info.transaction_status == self._psycopg.pq.TransactionStatus.INTRANS:
                transaction.look_up_in(path)

    def _check_there(self, transaction: Transaction, began: psycopg.Connection[Any] | None) -> None:
        """Check a caller's connection; one whose transaction began with that is left without one where it is the wrong one."""
        try:
            self._check_identity(transaction)
        except BaseException:
            if began is not None:
                began.rollback()
            raise

    def _check_identity(self, transaction: Transaction) -> None:
        found = transaction.one("store_exists", schema=self.url.options["schema"]).found
        if not found or transaction.one("read_store").uuid != self.uuid:
            raise InvalidInput(f"the connection does not lead to {self.url}: connect to the same database")
