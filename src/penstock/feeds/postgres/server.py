"""Connections of a feed to its server, with retries and error translation."""

from __future__ import annotations

import random
import re
import threading
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from importlib import resources
from itertools import chain
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, TypeVar

from penstock.errors import DataLostError, FeedUnavailableError, PenstockError
from penstock.json_text import Json
from penstock.store.postgres.connection import Failure, connect, driver, failure_of
from penstock.store.statements import bind, parse
from penstock.store.url import StoreUrl

if TYPE_CHECKING:
    import psycopg

T = TypeVar("T")
Row: TypeAlias = Any
"""A row of a statement, with its columns as attributes."""
Connection: TypeAlias = "psycopg.Connection[Row]"
_ATTEMPTS = 6
_CHUNK_BYTES, _CHUNK_ROWS = 8 << 20, 20_000
_FETCH_ROWS = 2_000
"""Rows to fetch at once; few, because later rows may be larger than the first ones."""
_FIRST_ROWS = 100
_PID = re.compile(r"PID (\d+)")
_DROPPED = re.compile(r"could not open relation with OID|cache lookup failed for")

_INVALIDATED_BY = {
    "idle_timeout": "idle_replication_slot_timeout",
    "rows_removed": "hot_standby_feedback",
    "wal_level_insufficient": "wal_level",
}
"""Settings of the server that invalidate a slot, by the reason that it shows."""


@cache
def statements() -> dict[str, str]:
    text = resources.files(__package__).joinpath("statements.sql").read_text(encoding="utf-8")
    return {name: bind(body, "postgres") for name, body in parse(text).items()}


class SlotInUse(FeedUnavailableError):
    """Another reader is using the slot."""

    condition = "FEED_UNAVAILABLE.SLOT_IN_USE"


class ServerGone(FeedUnavailableError):
    """The server does not respond, or closed the connection; raised after retries with back-off."""

    condition = "FEED_UNAVAILABLE.SERVER"


class _TableDroppedDuringQuery(FeedUnavailableError):
    """A statement used a table that was dropped while it ran; raised after retries."""

    condition = "FEED_UNAVAILABLE.QUERY"


class Statements(Protocol):
    """Executor of the feed's statements."""

    def fetch(self, statement: str, /, **parameters: object) -> list[Row]: ...

    def unavailable(self, condition: str, message: str, **parameters: object) -> FeedUnavailableError: ...


class Session:
    """Executor of the feed's statements on one connection, in its transaction."""

    def __init__(self, server: Server, connection: Connection) -> None:
        self._server, self._connection = server, connection

    def fetch(self, statement: str, /, **parameters: object) -> list[Row]:
        return run(self._connection, statement, **parameters)

    def unavailable(self, condition: str, message: str, **parameters: object) -> FeedUnavailableError:
        return self._server.unavailable(condition, message, **parameters)


class Server:
    """The connections of one process to a server; ``wait`` is the time to wait for the slot, in seconds."""

    def __init__(self, url: StoreUrl, name: str, wait: float) -> None:
        self._url, self.name, self._wait = url, name, wait
        self.psycopg = driver("a postgresql feed")
        self._connection: Connection | None = None
        self._lock = threading.RLock()

    def connect(self, **options: Any) -> Connection:
        """Open a connection in autocommit mode."""
        from psycopg.rows import namedtuple_row

        connection = connect(self._url, self.name, row_factory=namedtuple_row, **options)
        try:
            connection.prepare_threshold = None
            # Replication connections do not support the extended query protocol.
            result = connection.pgconn.exec_(statements()["settings"].replace("%%", "%").encode())
            if result.status != self.psycopg.pq.ExecStatus.TUPLES_OK:
                raise self.psycopg.OperationalError(result.get_error_message())
        except BaseException:
            connection.close()
            raise
        return connection

    def fetch(self, statement: str, /, **parameters: object) -> list[Row]:
        return self.on_connection(lambda connection: run(connection, statement, **parameters))

    def on_connection(self, work: Callable[[Connection], T]) -> T:
        """Run work on the shared connection with retries; reopen the connection if it was lost."""
        with self._lock:
            return self.with_retries(lambda: work(self._shared()))

    def with_retries(self, work: Callable[[], T]) -> T:
        """Run work; retry it with pauses if the server does not respond, the slot is in use, or a table is
        dropped at the same time.
        """
        deadline = time.monotonic() + self._wait
        attempt = 0
        while True:
            try:
                with self.translating():
                    return work()
            except (ServerGone, _TableDroppedDuringQuery) as error:
                attempt += 1
                if isinstance(error, ServerGone):
                    self.close()
                if attempt == _ATTEMPTS:
                    raise
                pause = 0.1 * 2**attempt
            except SlotInUse:
                if time.monotonic() > deadline:
                    raise
                pause = 0.1
            time.sleep(pause * random.uniform(0.8, 1.2))

    def chunks(self, query: str, parameters: Json | None = None) -> Generator[list[bytes], None, None]:
        """Fetch the only column of a query in chunks of a few megabytes, over a separate connection."""
        with self._server_cursor(query, parameters, _FIRST_ROWS, binary=True) as (cursor, rows):
            yield from chunks_of(cursor, rows)

    def rows(self, statement: str, /, **parameters: object) -> Generator[Row, None, None]:
        """Fetch the rows of a named statement lazily, over a separate connection."""
        with self._server_cursor(statements()[statement], parameters, 5_000) as (cursor, rows):
            while rows:
                yield from rows
                rows = cursor.fetchmany(5_000)

    @contextmanager
    def _server_cursor(
        self, query: str, parameters: Json | None, rows: int, *, binary: bool = False
    ) -> Iterator[tuple[psycopg.ServerCursor[Row], list[Row]]]:
        """Open a server-side cursor and fetch its first rows, after which it no longer uses the slot."""

        def open_cursor() -> tuple[Connection, psycopg.ServerCursor[Row], list[Row]]:
            connection = self.connect()
            try:
                connection.autocommit = False
                factory = self.psycopg.rows.tuple_row if binary else connection.row_factory
                cursor = connection.cursor("penstock", row_factory=factory)
                cursor.execute(query.encode(), parameters, binary=binary)
                return connection, cursor, cursor.fetchmany(rows)
            except BaseException:
                connection.close()
                raise

        connection, cursor, first_rows = self.with_retries(open_cursor)
        try:
            with self.translating():
                yield cursor, first_rows
        finally:
            connection.close()

    def close(self) -> None:
        with self._lock:
            if self._connection is not None:
                with suppress(self.psycopg.Error):
                    self._connection.close()
            self._connection = None

    def _shared(self) -> Connection:
        if self._connection is None or self._connection.closed:
            self._connection = self.connect()
        return self._connection

    @contextmanager
    def translating(self) -> Iterator[None]:
        """Translate the driver's errors into those of the feed."""
        try:
            yield
        except self.psycopg.Error as error:
            raise self._translated(error) from None

    def _translated(self, error: psycopg.Error) -> PenstockError:
        state, failure = error.sqlstate or "", failure_of(error)
        text = self._url.without_secrets(str(error))
        if failure is Failure.LOGIN:
            return self.unavailable(
                "LOGIN", "the server refused the login: check user, password and pg_hba.conf"
            )
        if state == "55006" and "is active" in text:
            match = _PID.search(text)
            pid = match[1] if match else "unknown"
            return SlotInUse(
                f"{self.name}: another reader is using the slot (server process {pid}), and a slot has only "
                "one reader at a time. Stop the other query, or use one slot for each query; select "
                f"pg_terminate_backend({pid}) ends the process",
                pid=pid,
            )
        if state == "42501":
            return self.unavailable(
                "PRIVILEGE",
                f"the role lacks a privilege ({text}): grant it REPLICATION (alter role … replication), "
                'SELECT on the tables, and for snapshot="initial" CREATE on the database; snapshot="none" '
                "only reads from the slot",
            )
        if state == "25006":
            return self.unavailable(
                "READ_ONLY",
                f"the server is a standby, or the role may only read ({text}): for the initial copy of the "
                'rows and for backfills, read from the primary. With snapshot="none", a query reads from a '
                "slot on the standby: select pg_create_logical_replication_slot('…', 'pgoutput')",
            )
        return self._failed(failure, state, text)

    def _failed(self, failure: Failure, state: str, text: str) -> PenstockError:
        if "wal_level" in text:
            return self.unavailable("WAL_LEVEL", WAL_LEVEL)
        if "no longer get changes" in text or "can no longer access replication slot" in text:
            return self.lost_slot(text)
        if state == "53400" and "replication slots" in text:
            return self.unavailable(
                "SLOTS", f"{text}: drop an unused slot, or increase max_replication_slots"
            )
        if failure is Failure.NO_DATABASE:
            return self.unavailable("DATABASE", text)
        if failure is Failure.LOCKED:
            return SlotInUse(
                f"{self.name}: another session has held a lock on the slot's snapshot for too long ({text}): "
                "find it with pg_blocking_pids and end it, or wait",
                condition="FEED_UNAVAILABLE.SNAPSHOT_LOCKED",
            )
        if failure is Failure.UNAVAILABLE:
            return ServerGone(
                f"{self.name}: the server is down or busy ({text}): restart the query later, and it resumes"
            )
        if state == "XX000" and _DROPPED.search(text):
            return _TableDroppedDuringQuery(f"{self.name}: {text}")
        return self.unavailable("QUERY", text)

    def unavailable(self, condition: str, message: str, **parameters: object) -> FeedUnavailableError:
        return FeedUnavailableError(
            f"{self.name}: {message}", condition=f"FEED_UNAVAILABLE.{condition}", **parameters
        )

    def lost_slot(self, why: str) -> DataLostError:
        """Return the error for a slot that the server has invalidated."""
        found = (setting for cause, setting in _INVALIDATED_BY.items() if cause in why)
        setting = next(found, "max_slot_wal_keep_size")
        return DataLostError(
            f"{self.name}: the server has invalidated the slot, and may have removed log that it needs "
            f"({why}), see {setting}. Drop the slot with pg_drop_replication_slot, and {START_OVER}",
            condition="DATA_LOST.SLOT_INVALIDATED",
        )


WAL_LEVEL = (
    "the server's wal_level is not logical: alter system set wal_level = 'logical', then restart the server "
    "(on Amazon RDS: rds.logical_replication = 1)"
)


def chunks_of(cursor: psycopg.ServerCursor[Row], rows: list[Row]) -> Iterator[list[bytes]]:
    """Yield the only column of a cursor in chunks of a few megabytes; ``rows`` are its first rows."""
    chunk: list[bytes] = []
    size = 0
    while rows:
        fetched = list(chain.from_iterable(rows))
        bytes_fetched = sum(map(len, fetched))
        chunk, size = chunk + fetched, size + bytes_fetched
        if size >= _CHUNK_BYTES or len(chunk) >= _CHUNK_ROWS:
            yield from _split_chunk(chunk, size)
            chunk, size = [], 0
        count = _CHUNK_BYTES * len(fetched) // (bytes_fetched + 1)
        rows = cursor.fetchmany(max(1, min(_FETCH_ROWS, count)))
    yield from _split_chunk(chunk, size)


def first_chunk(connection: Connection, query: str) -> tuple[list[bytes], bool]:
    """Return the only column of a query up to a few megabytes, and whether there are more rows.

    The connection has to be in a transaction.
    """
    from psycopg.rows import tuple_row

    with connection.cursor("penstock", row_factory=tuple_row) as cursor:
        cursor.execute(query.encode(), binary=True)
        chunks = chunks_of(cursor, cursor.fetchmany(_FIRST_ROWS))
        return next(chunks, []), next(chunks, None) is not None


START_OVER = (
    "start over with a new slot, a new checkpoint and an empty sink (a pump: `penstock pump recover`)"
)
"""What to do if rows are missing, as part of a sentence."""


def _split_chunk(chunk: list[bytes], size: int) -> Iterator[list[bytes]]:
    """Split a chunk that is much too large into halves, down to single messages."""
    if size <= 4 * _CHUNK_BYTES or len(chunk) <= 1:
        if chunk:
            yield chunk
        return
    for part in (chunk[: len(chunk) // 2], chunk[len(chunk) // 2 :]):
        yield from _split_chunk(part, sum(map(len, part)))


def run(connection: Connection, statement: str, /, **parameters: object) -> list[Row]:
    cursor = connection.execute(statements()[statement], parameters)
    return cursor.fetchall() if cursor.description else []


def lsn(position: int) -> str:
    """Format a log position as an LSN."""
    return f"{position >> 32:X}/{position & 0xFFFFFFFF:X}"


def quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'
