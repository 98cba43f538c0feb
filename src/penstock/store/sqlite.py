"""The embedded store: one SQLite file in WAL mode, for one machine."""

from __future__ import annotations

import os
import sqlite3
from collections import namedtuple
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from penstock.errors import InvalidInput, PenstockError, StoreError, StoreFull, StoreReadOnly, StoreUnavailable
from penstock.store.database import Database, Transaction
from penstock.store.owners import FileOwnerLock, OwnerLock
from penstock.store.statements import statements

_PAGE_SIZE = 32768
_BUSY_MS = 30_000
_UNAVAILABLE = {sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED, sqlite3.SQLITE_PROTOCOL}


@lru_cache(maxsize=256)
def _row_type(columns: tuple[str, ...]) -> Any:
    return namedtuple("Row", columns, rename=True)  # type: ignore[misc]  # the columns are known when it runs


def _named(cursor: sqlite3.Cursor, values: tuple[Any, ...]) -> Any:
    return _row_type(tuple(column[0] for column in cursor.description))._make(values)


class SqliteTransaction(Transaction):
    dialect = "sqlite"

    def __init__(self, connection: sqlite3.Connection, schema: str = "main") -> None:
        self.schema = schema
        self._cursor = connection.cursor()
        self._cursor.row_factory = _named
        self._statements = statements(self.dialect, schema)

    def run(self, name: str, /, **parameters: Any) -> int:
        return self._cursor.execute(self._statements[name], parameters).rowcount

    def all(self, name: str, /, **parameters: Any) -> list[Any]:
        return self._cursor.execute(self._statements[name], parameters).fetchall()

    def many(self, name: str, rows: Sequence[Mapping[str, Any]]) -> None:
        self._cursor.executemany(self._statements[name], rows)

    def execute(self, text: str) -> None:
        self._cursor.execute(text)


class SqliteDatabase(Database):
    dialect = "sqlite"

    @property
    def path(self) -> str:
        return self.url.target

    def exists(self) -> bool:
        return os.path.exists(self.path)

    def _connect(self) -> sqlite3.Connection:
        busy = int(self.url.options.get("busy_timeout", _BUSY_MS))
        connection = sqlite3.connect(
            self.path, timeout=busy / 1000, isolation_level=None, check_same_thread=False, cached_statements=256
        )
        connection.execute(f"pragma page_size = {_PAGE_SIZE}")
        if connection.execute("pragma journal_mode").fetchone()[0] != "wal" and os.access(self.path, os.W_OK):
            connection.execute("pragma journal_mode = wal")
        connection.execute(f"pragma synchronous = {self.url.options.get('synchronous', 'full')}")
        connection.execute("pragma foreign_keys = on")
        connection.execute("pragma secure_delete = off")
        connection.execute("pragma cache_size = -16384")
        connection.execute("pragma journal_size_limit = 67108864")
        return connection

    def _disconnect(self, connection: sqlite3.Connection) -> None:
        connection.close()

    def _begin(self, connection: sqlite3.Connection, *, write: bool) -> Transaction:
        # A write that began as a read could not wait for another writer: SQLite refuses to upgrade a stale snapshot.
        connection.execute("begin immediate" if write else "begin")
        return SqliteTransaction(connection)

    def _commit(self, connection: sqlite3.Connection) -> None:
        connection.execute("commit")

    def _rollback(self, connection: sqlite3.Connection) -> None:
        if connection.in_transaction:
            connection.execute("rollback")

    def _commit_error(self, error: Exception) -> Exception:
        # A failed SQLite commit has not happened.
        return self._translated(error) or error

    def _translated(self, error: Exception) -> PenstockError | None:
        if not isinstance(error, sqlite3.Error):
            return None
        code = getattr(error, "sqlite_errorcode", 0) & 0xFF
        if code in _UNAVAILABLE:
            return StoreUnavailable(f"{self.url} is locked by another writer: {error}")
        if code == sqlite3.SQLITE_FULL:
            return StoreFull(f"no space left for {self.url}: free some disk space; nothing of this was written")
        if code in (sqlite3.SQLITE_READONLY, sqlite3.SQLITE_PERM):
            return StoreReadOnly(f"{self.url} cannot be written: check the rights on the file and its folder")
        if code == sqlite3.SQLITE_CANTOPEN:
            return StoreError(f"{self.url} cannot be opened: does its folder exist, and may this user write there?")
        if code in (sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_CORRUPT):
            return StoreError(f"{self.url} is not a SQLite file, or a damaged one: {error}")
        return StoreError(f"{self.url}: {error}")

    def owner_lock(self, name: str) -> OwnerLock:
        return FileOwnerLock(Path(f"{self.path}-owners"), name)

    def borrowed(self, connection: Any) -> Transaction:
        if not isinstance(connection, sqlite3.Connection):
            raise InvalidInput(f"a SQLite store takes a sqlite3.Connection, not {type(connection).__name__}")
        for _, schema, file in connection.execute("pragma database_list").fetchall():
            if file and os.path.realpath(file) == os.path.realpath(self.path):
                return SqliteTransaction(connection, f'"{schema}"')
        raise InvalidInput(f"the connection has not opened {self.url}: connect to that file, or ATTACH it first")
