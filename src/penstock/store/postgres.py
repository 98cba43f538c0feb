"""The shared store: a schema in a PostgreSQL database."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any

from penstock.errors import (
    CommitOutcomeUnknown,
    InvalidInput,
    InvalidUrl,
    MissingDependency,
    PenstockError,
    StoreError,
    StoreFull,
    StoreReadOnly,
    StoreUnavailable,
)
from penstock.store.database import Database, Transaction
from penstock.store.owners import AdvisoryOwnerLock, OwnerLock, advisory_halves, advisory_key
from penstock.store.statements import bind
from penstock.store.url import StoreUrl

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
# Every statement is a walk along an index, and a log's newest rows are past what the planner's statistics know of: where it
# expects a handful, it would collect and sort them, and meet millions.
_WAYS = ("enable_seqscan", "enable_bitmapscan", "enable_hashjoin", "enable_mergejoin")
_PLANNING = "; ".join(f"set {way} = off" for way in _WAYS)
_FREE = "; ".join(f"set local {way} = on" for way in _WAYS)
_STEERED = "; ".join(f"set local {way} = off" for way in _WAYS)
_CONDITIONS: dict[str, type[StoreError]] = {
    "53100": StoreFull,
    "25006": StoreReadOnly,
    "42501": StoreReadOnly,
    "25P03": StoreUnavailable,
    "25P04": StoreUnavailable,
    "40001": StoreUnavailable,
    "40P01": StoreUnavailable,
    "53300": StoreUnavailable,
    "55P03": StoreUnavailable,
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
# An owner's session may idle for ever; a server learns of a machine that died without a word from these keepalives
# alone, and its own defaults take hours.
_SESSION = {
    "tcp_keepalives_idle": "15",
    "tcp_keepalives_interval": "5",
    "tcp_keepalives_count": "3",
    "idle_session_timeout": "0",
}
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
            self._cursor.executemany(self._statements[name], rows)

    def execute(self, text: str) -> None:
        self._cursor.execute(text.encode())

    def change(self, text: str) -> int:
        if not self._steered:
            return self._cursor.execute(text.encode()).rowcount
        # It is about tables of users, whole ones maybe, and their joins.
        self._cursor.execute(_FREE.encode())
        touched = self._cursor.execute(text.encode()).rowcount
        self._cursor.execute(_STEERED.encode())
        return touched

    def query(self, text: str, /, **parameters: Any) -> list[Any]:
        if parameters:
            return self._plain.execute(bind(text, self.dialect).encode(), parameters).fetchall()
        return self._plain.execute(text.encode()).fetchall()

    def load(self, text: str, data: Iterable[Any]) -> None:
        with self._cursor.copy(text.encode()) as copy:
            for buffer in data:
                copy.write(buffer)

    def now(self) -> int:
        return int(self.one("clock").now)

    def stamp(self) -> None:
        return None

    def owner_alive(self, name: str) -> bool:
        return bool(self.one("advisory_holders", **advisory_halves(name)).found)

    def owners_alive(self, names: Iterable[str]) -> set[str]:
        held = {(row.high, row.low) for row in self.all("all_advisory_holders")}
        halves = {name: advisory_halves(name) for name in names}
        return {name for name, half in halves.items() if (half["high"], half["low"]) in held}


class PostgresDatabase(Database):
    dialect = "postgres"

    def __init__(self, url: StoreUrl) -> None:
        self._psycopg = _driver()
        super().__init__(url)

    def exists(self) -> bool:
        return True

    def _connect(self) -> psycopg.Connection[Any]:
        from psycopg.conninfo import conninfo_to_dict
        from psycopg.types.numeric import Int8BinaryDumper

        try:
            given = conninfo_to_dict(self.url.target)
        except self._psycopg.ProgrammingError as error:
            raise InvalidUrl(
                f"{self.url} is not a valid PostgreSQL URL: {self.url.scrubbed(str(error))}"
            ) from None
        connection: psycopg.Connection[Any] = self._psycopg.connect(**(_DEFAULTS | given), autocommit=True)
        try:
            connection.execute(_PLANNING)
            connection.autocommit = False
        except BaseException:
            connection.close()
            raise
        # By default the size of a number chooses its type, and each combination of types is a statement to prepare.
        connection.adapters.register_dumper(int, Int8BinaryDumper)
        return connection

    def disconnect(self, connection: psycopg.Connection[Any]) -> None:
        connection.close()

    def _begin(self, connection: psycopg.Connection[Any], *, write: bool) -> Transaction:
        levels = self._psycopg.IsolationLevel
        # Whatever the server's default is: a write sees, under a lock, what the lock's last holder committed; a read sees
        # one moment, as it does in SQLite.
        connection.isolation_level = levels.READ_COMMITTED if write else levels.REPEATABLE_READ
        connection.read_only = not write
        return PostgresTransaction(connection, self.url.schema, write=write, steered=True)

    def _commit(self, connection: psycopg.Connection[Any]) -> None:
        if connection.info.transaction_status == self._psycopg.pq.TransactionStatus.INERROR:
            # PostgreSQL would answer a commit with a rollback, and no error.
            raise StoreError(f"{self.url}: a statement of the transaction failed, so it cannot be committed")
        connection.commit()

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
        if not isinstance(error, StoreUnavailable):
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
        kind = _CONDITIONS.get(state)
        if kind is None:
            away = state.startswith("08") or (not state and self._lost(error, text))
            kind = StoreUnavailable if away else StoreError
        advice = _ADVICE.get(kind)
        return kind(f"{self.url}: {text}" + (f" ({advice})" if advice else ""))

    def _lost(self, error: Exception, text: str) -> bool:
        refused = "FATAL" in text and any(refusal in text for refusal in _REFUSALS)
        broken = isinstance(error, self._psycopg.OperationalError | self._psycopg.InterfaceError)
        return broken and not refused

    def owner_lock(self, name: str) -> OwnerLock:
        return AdvisoryOwnerLock(
            lambda: self.retried(lambda: self._locked(advisory_key(name))),
            lambda: self.run(lambda tx: tx.owner_alive(name), write=False),
        )

    def lasting_connection(self) -> psycopg.Connection[Any]:
        """A connection that may idle for ever, each statement a transaction."""
        connection: psycopg.Connection[Any] = self.connected()
        try:
            with self.translating():
                connection.autocommit = True
                for name, value in _SESSION.items():
                    connection.execute(
                        "select set_config(name, %s, false) from pg_settings where name = %s", (value, name)
                    )
        except BaseException:
            connection.close()
            raise
        return connection

    def _locked(self, key: int) -> psycopg.Connection[Any] | None:
        """A connection that holds an advisory lock; None when another one does."""
        connection = self.lasting_connection()
        mine = False
        try:
            with self.translating():
                row = connection.execute("select pg_try_advisory_lock(%s)", (key,)).fetchone()
                mine = bool(row and row[0])
        finally:
            if not mine:
                connection.close()
        return connection if mine else None

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
        try:
            self._check_identity(transaction)
        except BaseException:
            if idle:
                connection.rollback()
            raise
        # Inside a transaction this is a savepoint.
        with connection.transaction():
            yield transaction
            for channel in transaction.channels:
                transaction.query("select pg_notify(:channel, '')", channel=channel)

    def _check_identity(self, transaction: Transaction) -> None:
        found = transaction.one("store_exists", schema=self.url.options["schema"]).found
        if not found or transaction.one("read_store").uuid != self.uuid:
            raise InvalidInput(f"the connection does not lead to {self.url}: connect to the same database")
