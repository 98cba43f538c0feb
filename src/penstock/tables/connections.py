"""Adapters for a caller's database connection: psycopg 3, sqlite3 and SQLAlchemy."""

from __future__ import annotations

import sqlite3
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any

from penstock.arguments import refusal
from penstock.errors import InvalidInputError
from penstock.store.postgres.session import SEARCH_PATH
from penstock.store.statements import bind

if TYPE_CHECKING:
    import psycopg
    import sqlalchemy
    from sqlalchemy import CursorResult

_LOOK_UP = "select pg_catalog.set_config('search_path', :path, true)"
_KINDS = "an open connection of psycopg 3, of sqlite3, or of SQLAlchemy to PostgreSQL or SQLite"


class CallerConnection(ABC):
    """A caller's connection, which takes statements with ``:name`` parameters."""

    dialect: str

    @abstractmethod
    def change(self, text: str, **parameters: object) -> int:
        """Execute a statement and return the number of rows that it changed."""

    @abstractmethod
    def row(self, text: str, **parameters: object) -> Sequence[Any] | None:
        """Execute a query and return its first row."""

    @abstractmethod
    def transaction(self) -> AbstractContextManager[object]:
        """Open a transaction that commits when the block ends; inside an open one a savepoint, which the
        caller commits.
        """

    @contextmanager
    def trusted_search_path(self) -> Iterator[None]:
        """Use the store's own search path inside the block; a rollback restores the caller's too."""
        if self.dialect != "postgres":
            yield
            return
        row = self.row("select pg_catalog.current_setting('search_path')")
        assert row is not None
        self.row(_LOOK_UP, path=SEARCH_PATH)
        yield
        self.row(_LOOK_UP, path=row[0])


def wrap_connection(connection: object) -> CallerConnection:
    """Wrap a caller's connection.

    Raises
    ------
    InvalidInputError
        When it is of another driver.
    """
    if isinstance(connection, sqlite3.Connection):
        return _Sqlite(connection)
    psycopg = sys.modules.get("psycopg")
    if psycopg is not None and isinstance(connection, psycopg.Connection):
        return _Psycopg(connection)
    alchemy = sys.modules.get("sqlalchemy")
    if alchemy is not None and isinstance(connection, alchemy.Connection):
        return _Alchemy(connection)
    raise refusal("connection", connection, _KINDS)


class _Sqlite(CallerConnection):
    dialect = "sqlite"

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection

    def change(self, text: str, **parameters: object) -> int:
        return self._cursor().execute(text, parameters).rowcount

    def row(self, text: str, **parameters: object) -> Sequence[Any] | None:
        cursor = self._cursor()
        row: Sequence[Any] | None = cursor.execute(text, parameters).fetchone()
        cursor.close()  # a statement with unread rows blocks the commit
        return row

    def _cursor(self) -> sqlite3.Cursor:
        cursor = self._connection.cursor()
        cursor.row_factory = None  # the caller's connection may have one
        return cursor

    @contextmanager
    def transaction(self) -> Iterator[None]:
        inner = self._connection.in_transaction
        begin, end, undo = (
            ("savepoint exactly_once", "release exactly_once", "rollback to exactly_once")
            if inner
            else ("begin immediate", "commit", "rollback")
        )
        self._connection.execute(begin)
        try:
            yield
        except BaseException:
            # An error may have ended the whole transaction already.
            if self._connection.in_transaction:
                self._connection.execute(undo)
                if inner:
                    self._connection.execute(end)
            raise
        self._connection.execute(end)


class _Psycopg(CallerConnection):
    dialect = "postgres"

    def __init__(self, connection: psycopg.Connection[Any]) -> None:
        from psycopg import Cursor
        from psycopg.rows import tuple_row

        self._connection = connection
        # Not the connection's own kind of cursor, which is the caller's choice.
        self._cursor: Cursor[Any] = Cursor(connection, row_factory=tuple_row)

    def change(self, text: str, **parameters: object) -> int:
        return self._cursor.execute(bind(text, self.dialect).encode(), parameters).rowcount

    def row(self, text: str, **parameters: object) -> Sequence[Any] | None:
        return self._cursor.execute(bind(text, self.dialect).encode(), parameters).fetchone()

    def transaction(self) -> AbstractContextManager[object]:
        return self._connection.transaction()


class _Alchemy(CallerConnection):
    def __init__(self, connection: sqlalchemy.Connection) -> None:
        names = {"postgresql": "postgres", "sqlite": "sqlite"}
        if connection.dialect.name not in names:
            raise InvalidInputError(
                f"connection leads to {connection.dialect.name}, and exactly_once supports PostgreSQL and "
                "SQLite: connect to one of them",
                parameter="connection",
            )
        self.dialect = names[connection.dialect.name]
        self._connection = connection

    def change(self, text: str, **parameters: object) -> int:
        return int(self._execute(text, parameters).rowcount)

    def row(self, text: str, **parameters: object) -> Sequence[Any] | None:
        return self._execute(text, parameters).first()

    def _execute(self, text: str, parameters: dict[str, object]) -> CursorResult[Any]:
        # The caller has imported it, to make the connection.
        return self._connection.execute(sys.modules["sqlalchemy"].text(text), parameters)

    def transaction(self) -> AbstractContextManager[object]:
        nested = self._connection.in_transaction()
        return self._connection.begin_nested() if nested else self._connection.begin()
