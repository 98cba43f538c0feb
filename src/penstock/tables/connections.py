"""Connections that a caller brings, of three kinds of drivers, as far as a ledger row needs them."""

from __future__ import annotations

import sqlite3
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from penstock.arguments import refusal
from penstock.errors import InvalidInput
from penstock.store.postgres.session import SEARCH_PATH
from penstock.store.statements import bind

_LOOK_UP = "select pg_catalog.set_config('search_path', :path, true)"
_KINDS = "an open connection of psycopg 3, of sqlite3, or of SQLAlchemy to PostgreSQL or SQLite"


class Borrowed(ABC):
    """A caller's connection; statements have parameters of the form ``:name``."""

    dialect: str

    @abstractmethod
    def change(self, text: str, **parameters: Any) -> int:
        """Execute a statement; the number of rows it touched."""

    @abstractmethod
    def row(self, text: str, **parameters: Any) -> Sequence[Any] | None:
        """The first row of a statement; None where it has none."""

    @abstractmethod
    def transaction(self) -> AbstractContextManager[Any]:
        """A transaction that is committed when the block ends; where one is open, a part of it, which the caller commits."""

    @contextmanager
    def looking_up_safely(self) -> Iterator[None]:
        """A part of a transaction in which names are looked up as in a session of a store's; rolled back, it has left nothing behind."""
        if self.dialect != "postgres":
            yield
            return
        row = self.row("select pg_catalog.current_setting('search_path')")
        assert row is not None
        self.row(_LOOK_UP, path=SEARCH_PATH)
        yield
        self.row(_LOOK_UP, path=row[0])


def borrowed(connection: object) -> Borrowed:
    """What the connection can do.

    Raises
    ------
    InvalidInput
        When it is of no kind that is known here.
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


class _Sqlite(Borrowed):
    dialect = "sqlite"

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection

    def change(self, text: str, **parameters: Any) -> int:
        return self._cursor().execute(text, parameters).rowcount

    def row(self, text: str, **parameters: Any) -> Sequence[Any] | None:
        cursor = self._cursor()
        row: Sequence[Any] | None = cursor.execute(text, parameters).fetchone()
        cursor.close()  # a statement whose rows nobody has read is in the way of the commit
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


class _Psycopg(Borrowed):
    dialect = "postgres"

    def __init__(self, connection: Any) -> None:
        from psycopg import Cursor
        from psycopg.rows import tuple_row

        self._connection = connection
        # Not the connection's own kind of cursor, which is the caller's choice.
        self._cursor: Cursor[Any] = Cursor(connection, row_factory=tuple_row)

    def change(self, text: str, **parameters: Any) -> int:
        return self._cursor.execute(bind(text, self.dialect).encode(), parameters).rowcount

    def row(self, text: str, **parameters: Any) -> Sequence[Any] | None:
        row: Sequence[Any] | None = self._cursor.execute(
            bind(text, self.dialect).encode(), parameters
        ).fetchone()
        return row

    def transaction(self) -> AbstractContextManager[Any]:
        found: AbstractContextManager[Any] = self._connection.transaction()
        return found


class _Alchemy(Borrowed):
    def __init__(self, connection: Any) -> None:
        names = {"postgresql": "postgres", "sqlite": "sqlite"}
        if connection.dialect.name not in names:
            raise InvalidInput(
                f"connection leads to {connection.dialect.name}, and a ledger row goes into PostgreSQL or SQLite",
                parameter="connection",
            )
        self.dialect = names[connection.dialect.name]
        self._connection = connection

    def change(self, text: str, **parameters: Any) -> int:
        return int(self._execute(text, parameters).rowcount)

    def row(self, text: str, **parameters: Any) -> Sequence[Any] | None:
        row: Sequence[Any] | None = self._execute(text, parameters).first()
        return row

    def _execute(self, text: str, parameters: dict[str, Any]) -> Any:
        # It is there, for the caller has a connection of its.
        return self._connection.execute(sys.modules["sqlalchemy"].text(text), parameters)

    def transaction(self) -> AbstractContextManager[Any]:
        open_already = self._connection.in_transaction()
        found: AbstractContextManager[Any] = (
            self._connection.begin_nested() if open_already else self._connection.begin()
        )
        return found
