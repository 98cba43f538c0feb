"""The shared store: a schema in a PostgreSQL database."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from penstock.errors import (
    InvalidInput,
    MissingDependency,
    PenstockError,
    StoreError,
    StoreFull,
    StoreReadOnly,
    StoreUnavailable,
)
from penstock.store.database import Database, Transaction
from penstock.store.owners import AdvisoryOwnerLock, OwnerLock
from penstock.store.statements import statements
from penstock.store.url import StoreUrl

if TYPE_CHECKING:
    import psycopg

_CONNECT_SECONDS = 10
_CONDITIONS: dict[str, type[StoreError]] = {
    "53100": StoreFull,
    "25006": StoreReadOnly,
    "42501": StoreReadOnly,
    "40001": StoreUnavailable,
    "40P01": StoreUnavailable,
    "55P03": StoreUnavailable,
    "57P01": StoreUnavailable,
    "57P02": StoreUnavailable,
    "57P03": StoreUnavailable,
    "53300": StoreUnavailable,
}
_ADVICE = {
    StoreFull: "free some disk space on the server; nothing of this was written",
    StoreReadOnly: "the server or the role may not write here: check its grants on the store's schema",
    StoreUnavailable: "the server is away or busy",
}


def _driver() -> Any:
    try:
        import psycopg
    except ImportError as error:
        raise MissingDependency(
            "a postgresql store needs psycopg 3: pip install 'penstock[postgres]'", extra="postgres"
        ) from error
    return psycopg


class PostgresTransaction(Transaction):
    dialect = "postgres"

    def __init__(self, connection: psycopg.Connection[Any], schema: str) -> None:
        from psycopg.rows import namedtuple_row

        self.schema = schema
        self._cursor = connection.cursor(row_factory=namedtuple_row)
        self._statements = statements(self.dialect, schema)

    def run(self, name: str, /, **parameters: Any) -> int:
        return self._cursor.execute(self._statements[name], parameters).rowcount

    def all(self, name: str, /, **parameters: Any) -> list[Any]:
        return self._cursor.execute(self._statements[name], parameters, binary=True).fetchall()

    def many(self, name: str, rows: Sequence[Mapping[str, Any]]) -> None:
        if len(rows) == 1:
            self._cursor.execute(self._statements[name], rows[0])
        elif rows:
            self._cursor.executemany(self._statements[name], rows)

    def execute(self, text: str) -> None:
        self._cursor.execute(text.encode())


class PostgresDatabase(Database):
    dialect = "postgres"

    def __init__(self, url: StoreUrl) -> None:
        super().__init__(url)
        self._psycopg = _driver()

    def exists(self) -> bool:
        return True

    def _connect(self) -> psycopg.Connection[Any]:
        from psycopg.conninfo import conninfo_to_dict

        try:
            given = conninfo_to_dict(self.url.target)
        except self._psycopg.ProgrammingError as error:
            raise InvalidInput(f"{self.url} is not a valid PostgreSQL URL: {self._scrubbed(error)}") from None
        defaults = {"connect_timeout": _CONNECT_SECONDS, "application_name": "penstock"}
        connection: psycopg.Connection[Any] = self._psycopg.connect(**(defaults | given))
        return connection

    def _disconnect(self, connection: psycopg.Connection[Any]) -> None:
        connection.close()

    def _begin(self, connection: psycopg.Connection[Any], *, write: bool) -> Transaction:
        return PostgresTransaction(connection, self.url.schema)

    def _commit(self, connection: psycopg.Connection[Any]) -> None:
        connection.commit()

    def _rollback(self, connection: psycopg.Connection[Any]) -> None:
        if not connection.closed:
            try:
                connection.rollback()
            except self._psycopg.Error:
                connection.close()

    def _translated(self, error: Exception) -> PenstockError | None:
        if not isinstance(error, self._psycopg.Error):
            return None
        state = error.sqlstate or ""
        kind = _CONDITIONS.get(state)
        if kind is None and (state.startswith("08") or (not state and self._lost(error))):
            kind = StoreUnavailable
        if state.startswith("28") or "authentication failed" in str(error):
            return StoreError(f"{self.url} refused the login: check user and password")
        kind = kind or StoreError
        advice = _ADVICE.get(kind)
        return kind(f"{self.url}: {self._scrubbed(error)}" + (f" ({advice})" if advice else ""))

    def _lost(self, error: Exception) -> bool:
        return isinstance(error, self._psycopg.OperationalError | self._psycopg.InterfaceError)

    def _scrubbed(self, error: Exception) -> str:
        from urllib.parse import unquote, urlsplit

        password = urlsplit(self.url.target).password
        text = " ".join(str(error).split())
        return text.replace(unquote(password), "***").replace(password, "***") if password else text

    def owner_lock(self, name: str) -> OwnerLock:
        return AdvisoryOwnerLock(self._connect, name)

    def borrowed(self, connection: Any) -> Transaction:
        if not isinstance(connection, self._psycopg.Connection):
            raise InvalidInput(f"a PostgreSQL store takes a psycopg.Connection, not {type(connection).__name__}")
        return PostgresTransaction(connection, self.url.schema)
