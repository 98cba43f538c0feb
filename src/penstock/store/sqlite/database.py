"""A store in a SQLite file in WAL mode, for one machine."""

from __future__ import annotations

import logging
import os
import sqlite3
import time
from collections.abc import Iterable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote

from penstock.errors import (
    InvalidInputError,
    PenstockError,
    StoreError,
    StoreFullError,
    StoreLockedError,
    StoreNotFoundError,
    StoreReadOnlyError,
)
from penstock.json_text import unreadable_record
from penstock.store.database import (
    Columns,
    Database,
    OwnerLock,
    Row,
    Transaction,
    parameter_rows,
    row_constructor,
    stored_bytes,
)
from penstock.store.sqlite import locks, wakeups
from penstock.store.sqlite.files import StoreFiles
from penstock.store.sqlite.locks import SLOW_SECONDS, FileOwnerLock, WriteLock
from penstock.store.url import StoreUrl, file_mode, trusts_folder

log = logging.getLogger("penstock.store")

# Small appends are faster with small pages, since each writes about six pages to the log. Large appends are
# faster with large pages.
_PAGE_SIZE = 16384
# A commit checkpoints the log when it has this many pages, unless a background thread has done so earlier.
_WAL_PAGES = 8192
_BUSY_MS = 60_000
_INTEGER_TOO_LARGE = "SQLite INTEGER"
"""A part of sqlite3's message about a number of more than 64 bits."""
_BUSY_CODES = {sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED, sqlite3.SQLITE_PROTOCOL}


class SqliteTransaction(Transaction):
    dialect = "sqlite"

    def __init__(
        self, connection: sqlite3.Connection, path: str, *, schema: str = "main", write: bool = True
    ) -> None:
        super().__init__(schema, write=write)
        self._path = path
        self._connection = connection
        self._cursor = _cursor(connection)

    def run(self, name: str, /, **parameters: object) -> int:
        cursor = self._cursor.execute(self._statements[name], parameters)
        if cursor.description is not None:
            cursor.fetchall()  # unread rows would block the commit
        return cursor.rowcount

    def all(self, name: str, /, **parameters: object) -> list[Row]:
        rows = self._cursor.execute(self._statements[name], parameters).fetchall()
        if not rows:
            return []
        to_row = row_constructor(tuple(column[0] for column in self._cursor.description))
        return [to_row(row) for row in rows]

    def tuples(self, name: str, /, **parameters: object) -> list[tuple[Any, ...]]:
        return self._cursor.execute(self._statements[name], parameters).fetchall()

    def page(self, *, max_bytes: int, **parameters: object) -> list[Row]:
        # Fetch row by row, since SQLite reads a payload together with its row. A limit on bytes in the
        # statement would copy all payloads.
        with closing(_cursor(self._connection)) as cursor:
            cursor.execute(self._statements["read_page"], parameters)
            to_row = row_constructor(tuple(column[0] for column in cursor.description))
            rows: list[Row] = []
            size = 0
            for values in cursor:
                rows.append(to_row(values))
                size += stored_bytes(rows[-1])
                if size >= max_bytes:
                    break
        return rows

    def run_many(self, name: str, rows: Columns, /, **common: object) -> int:
        return self._cursor.executemany(self._statements[name], parameter_rows(rows, common)).rowcount

    def all_for_many(self, name: str, rows: Columns, /, **common: object) -> list[Row]:
        return [row for parameters in parameter_rows(rows, common) for row in self.all(name, **parameters)]

    def execute(self, text: str) -> None:
        self._cursor.execute(text)

    def change(self, text: str) -> int:
        return self._cursor.execute(text).rowcount

    def query(self, text: str, /, **parameters: object) -> list[tuple[Any, ...]]:
        return self._cursor.execute(text, parameters).fetchall()

    def load(self, text: str, data: Iterable[Any]) -> None:
        self._cursor.executemany(text, data)

    def close(self) -> None:
        # An open cursor would keep a closed connection alive, and with it the file locks.
        self._cursor.close()

    def now(self) -> int:
        return time.time_ns() // 1000

    def instance(self) -> str:
        # The inode differs in each copy on the same disk, and stays the same if the file is renamed.
        return str(os.stat(self._path).st_ino)

    def write_time(self) -> int:
        return self.now()

    def owner_alive(self, name: str) -> bool:
        return locks.is_file_locked(locks.lock_path(_owner_lock_folder(self._path), name))


def _cursor(connection: sqlite3.Connection) -> sqlite3.Cursor:
    cursor = connection.cursor()
    cursor.row_factory = None  # a caller's connection may have one
    return cursor


def _decode_text(data: bytes) -> str:
    """Decode text with escapes for invalid UTF-8, so that one damaged name does not make all others
    unreadable.
    """
    return data.decode(errors="backslashreplace")


def _owner_lock_folder(path: str) -> Path:
    return Path(f"{path}-owners")


class _Connection(sqlite3.Connection):
    """A connection with its own write lock."""

    write_lock: WriteLock
    durable = True
    """Whether the next commit waits for the disk, as the store's ``synchronous`` option says."""


def file_identity(path: str) -> tuple[int, int] | None:
    """Return the device and inode of a file, which do not depend on its name; None if there is no file."""
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_dev, status.st_ino


class SqliteDatabase(Database):
    dialect = "sqlite"

    def __init__(self, url: StoreUrl) -> None:
        # Resolve links, so that the files next to the store have the same names whichever link leads to it.
        self.path = os.path.realpath(url.target)
        self.files = StoreFiles(self.path, file_mode(url), trusts_folder(url))
        self._file: tuple[int, int] | None = None
        super().__init__(url)

    @property
    def _lock_timeout(self) -> float:
        return int(self.url.options.get("busy_timeout", _BUSY_MS)) / 1000

    @property
    def _synchronous(self) -> str:
        return self.url.options.get("synchronous", "full")

    @property
    def _busy_timeout(self) -> float:
        """How long SQLite itself waits for a lock, in seconds."""
        return min(self._lock_timeout, SLOW_SECONDS)

    def exists(self) -> bool:
        return os.path.exists(self.path)

    def _connect(self) -> _Connection:
        self.require_same_file()
        self.files.check(self.url.target)
        if self.may_create:
            self.files.create_if_missing()
            # In a folder such as /tmp, another user may have created the file first.
            self.files.check(self.url.target)
        # Do not create a file again that was removed while the store was open.
        mode = "rwc" if self.may_create else "rw"
        connection = sqlite3.connect(
            f"file:{quote(self.path)}?mode={mode}",
            uri=True,
            timeout=self._busy_timeout,
            isolation_level=None,
            check_same_thread=False,
            cached_statements=256,
            factory=_Connection,
        )
        connection.write_lock = WriteLock(f"{self.path}-lock", self.files)
        self._file = self._file or file_identity(self.path)
        connection.text_factory = _decode_text
        try:
            connection.execute(f"pragma page_size = {_PAGE_SIZE}")
            connection.execute(f"pragma synchronous = {self._synchronous}")
            connection.execute("pragma foreign_keys = on")
            connection.execute("pragma secure_delete = off")
            # Views and triggers in another user's file may call only functions that SQLite marks as harmless.
            connection.execute("pragma trusted_schema = off")
            connection.execute("pragma cell_size_check = on")
            connection.execute("pragma cache_size = -16384")
            connection.execute(f"pragma wal_autocheckpoint = {_WAL_PAGES}")
            connection.execute(f"pragma journal_size_limit = {_WAL_PAGES * _PAGE_SIZE}")
        except BaseException:
            connection.close()
            raise
        return connection

    def require_same_file(self) -> None:
        """Raise an error if the file was removed or replaced while it was open."""
        # SQLite keeps using a file that was removed, whose data are lost when the last process closes it.
        if self._file not in (None, file_identity(self.path)):
            raise StoreNotFoundError(
                f"{self.url} was removed or replaced while it was open: restore it from a backup or create "
                "a new store, and open it again",
                condition="STORE_NOT_FOUND.REPLACED",
            )

    def use_wal(self) -> None:
        """Switch the file to write-ahead logging, so that readers and the writer do not block each other."""
        with self.pool.lease() as lease, self.translating():
            if lease.connection.execute("pragma journal_mode").fetchone()[0] != "wal":
                lease.connection.execute(f"pragma busy_timeout = {int(self._lock_timeout * 1000)}")
                lease.connection.execute("pragma journal_mode = wal")
                lease.connection.execute(f"pragma busy_timeout = {int(self._busy_timeout * 1000)}")
            lease.reusable = True

    def checkpoint_wal(self) -> None:
        """Copy the write-ahead log into the file, except what readers still use. Appends continue in the
        meantime.
        """
        with self.pool.lease() as lease, self.translating():
            lease.connection.execute("pragma wal_checkpoint(passive)").fetchall()
            lease.reusable = True

    def disconnect(self, connection: _Connection) -> None:
        connection.close()
        connection.write_lock.close()

    def _begin(self, connection: _Connection, *, write: bool, durable: bool = True) -> Transaction:
        self.require_same_file()
        if write:
            if connection.durable is not durable:
                connection.execute(f"pragma synchronous = {self._synchronous if durable else 'normal'}")
                connection.durable = durable
            self._begin_write(connection)
        else:
            connection.execute("begin")
        return SqliteTransaction(connection, self.path, write=write)

    def _begin_write(self, connection: _Connection) -> None:
        if not connection.write_lock.acquire(self._lock_timeout, self._log_wait):
            raise self._locked_error(f"this writer waited {self._lock_timeout} s for other writers")
        deadline, logged = time.monotonic() + self._lock_timeout, False
        while not self._try_begin(connection, deadline):
            if not logged:
                self._log_wait()
            logged = True

    def _try_begin(self, connection: _Connection, deadline: float) -> bool:
        """Begin a write transaction; return False if a writer that does not use the write lock did not finish
        in time.
        """
        try:
            # Begin as a writer: SQLite does not upgrade a read transaction with a stale snapshot, so such a
            # transaction could not wait for another writer.
            connection.execute("begin immediate")
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode != sqlite3.SQLITE_BUSY or time.monotonic() >= deadline:
                raise
            return False
        return True

    def _log_wait(self) -> None:
        error = self._locked_error("the write lock is not free yet")
        log.warning(
            "waiting for a lock: %s",
            error,
            extra={"action": "store_retry", "store": str(self.url), "error": error.condition},
        )

    def _commit(self, connection: _Connection) -> None:
        connection.execute("commit")
        connection.write_lock.release()

    def _notify_listeners(self, connection: _Connection, channels: Iterable[str]) -> bool:
        wakeups.wake(self.path, map(int, channels))
        return True

    def _rollback(self, connection: _Connection) -> None:
        try:
            if connection.in_transaction:
                connection.execute("rollback")
        finally:
            connection.write_lock.release()

    def _commit_error(self, error: PenstockError) -> PenstockError:
        # SQLite reports an error only if nothing was committed.
        return error

    def _store_error(self, error: Exception) -> PenstockError | None:
        if isinstance(error, OverflowError) and _INTEGER_TOO_LARGE in str(error):
            # Penstock itself never writes such numbers.
            return unreadable_record("a number", error)
        if not isinstance(error, sqlite3.Error):
            return None
        code = getattr(error, "sqlite_errorcode", 0) & 0xFF
        if code in _BUSY_CODES:
            return self._locked_error(str(error))
        if code == sqlite3.SQLITE_FULL:
            return StoreFullError(
                f"no space left for {self.url}: free some disk space; none of this was written"
            )
        if code in (sqlite3.SQLITE_READONLY, sqlite3.SQLITE_PERM):
            return StoreReadOnlyError(
                f"{self.url} cannot be written: check the permissions on the file and its folder"
            )
        if code == sqlite3.SQLITE_IOERR:
            return StoreError(
                f"{self.url} could not be read or written: the disk is full, over its quota or failing; "
                "none of this was written",
                condition="STORE_ERROR.READ_OR_WRITE",
            )
        if code == sqlite3.SQLITE_CANTOPEN:
            return StoreError(
                f"{self.url} cannot be opened: check that its folder exists, and that this user may write "
                "there",
                condition="STORE_ERROR.CANNOT_OPEN",
            )
        if code in (sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_CORRUPT):
            return StoreError(
                f"{self.url} is not a SQLite file, or is damaged: {error}", condition="STORE_ERROR.DAMAGED"
            )
        return StoreError(f"{self.url}: {error}")

    def _locked_error(self, why: str) -> StoreLockedError:
        writer = locks.writing_process(self.path)
        return StoreLockedError(
            f"{self.url} is locked by another writer: {why}. That writer is {locks.describe_holder(writer)}",
            seconds=self._lock_timeout,
            holders=[] if writer is None else [writer],
        )

    def owner_lock(self, name: str) -> OwnerLock:
        return FileOwnerLock(_owner_lock_folder(self.path), name, self.files)

    @contextmanager
    def caller_transaction(self, connection: object) -> Iterator[Transaction]:
        if not isinstance(connection, sqlite3.Connection):
            raise InvalidInputError(
                f"a SQLite store takes a sqlite3.Connection, not {type(connection).__name__}"
            )
        with self.translating(), self._savepoint(connection) as transaction:
            yield transaction

    @contextmanager
    def _savepoint(self, connection: sqlite3.Connection) -> Iterator[Transaction]:
        transaction = SqliteTransaction(connection, self.path, schema=self._schema_of_file(connection))
        if not connection.in_transaction:
            if connection.isolation_level is None or getattr(connection, "autocommit", None) is True:
                raise InvalidInputError(
                    "the connection has no open transaction: execute BEGIN IMMEDIATE first",
                    condition="INVALID_INPUT.NO_TRANSACTION",
                )
            self._begin_for_caller(connection)
        connection.execute("savepoint penstock")
        try:
            yield transaction
        except BaseException:
            # The error may have rolled back the whole transaction already.
            if connection.in_transaction:
                connection.execute("rollback to penstock")
                connection.execute("release penstock")
            raise
        connection.execute("release penstock")

    def _begin_for_caller(self, connection: sqlite3.Connection) -> None:
        """Wait for the write lock and begin a write transaction. The next writer waits for the caller's
        commit.
        """
        write_lock = WriteLock(f"{self.path}-lock", self.files)
        write_lock.acquire(self._lock_timeout, self._log_wait)
        try:
            connection.execute("begin immediate")
        finally:
            write_lock.close()

    def _schema_of_file(self, connection: sqlite3.Connection) -> str:
        for _, schema, file in _cursor(connection).execute("pragma database_list").fetchall():
            if file and os.path.realpath(file) == self.path:
                quoted: str = schema.replace('"', '""')
                return f'"{quoted}"'
        raise InvalidInputError(
            f"the connection does not have {self.url} open: connect to that file, or ATTACH it first",
            condition="INVALID_INPUT.OTHER_DATABASE",
        )
