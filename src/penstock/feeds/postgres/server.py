"""The connections of a feed to its server, and the server's errors in the feed's words."""

from __future__ import annotations

import random
import re
import threading
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from importlib import resources
from itertools import chain
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from penstock.errors import DataLost, FeedUnavailable, InvalidUrl, PenstockError
from penstock.feeds.postgres.address import driver
from penstock.store.postgres.session import warn_in_clear
from penstock.store.statements import bind, parse
from penstock.store.url import StoreUrl

if TYPE_CHECKING:
    import psycopg

T = TypeVar("T")
# A server that is gone without a word is noticed within a minute.
_DEFAULTS: dict[str, Any] = {
    "connect_timeout": 10,
    "application_name": "penstock",
    "keepalives_idle": 20,
    "keepalives_interval": 10,
    "keepalives_count": 3,
    "tcp_user_timeout": 50_000,
}
_ATTEMPTS = 6
_CHUNK_BYTES, _CHUNK_ROWS = 8 << 20, 20_000
_FETCH_ROWS = 2_000
"""Rows may be larger than those before them: few at a time, so that no surprise fills the memory."""
_PID = re.compile(r"PID (\d+)")
# These do not go away by themselves, and the server gives no code to a connection that it refuses.
_REFUSALS = ("does not exist", "no pg_hba.conf entry", "not permitted to log in")
_LOGIN = ("authentication failed", "no password supplied", "no pg_hba.conf entry", "not permitted to log in")


@cache
def statements() -> dict[str, str]:
    """The feed's SQL by name."""
    text = resources.files(__package__).joinpath("statements.sql").read_text(encoding="utf-8")
    return {name: bind(body, "postgres") for name, body in parse(text).items()}


class SlotInUse(FeedUnavailable):
    """Another reader has the slot."""

    condition = "FEED_UNAVAILABLE.SLOT_IN_USE"


class ServerGone(FeedUnavailable):
    """The server does not answer, or went away; retried with back-off before it is raised."""

    condition = "FEED_UNAVAILABLE.SERVER"


class Statements(Protocol):
    """What runs the feed's statements."""

    def all(self, statement: str, /, **parameters: Any) -> list[Any]: ...

    def unavailable(self, condition: str, message: str, **parameters: Any) -> FeedUnavailable: ...


class Session:
    """The feed's statements on one connection, in the transaction that it is in."""

    def __init__(self, server: Server, connection: psycopg.Connection[Any]) -> None:
        self._server, self._connection = server, connection

    def all(self, statement: str, /, **parameters: Any) -> list[Any]:
        """The rows of a named statement."""
        return run(self._connection, statement, **parameters)

    def unavailable(self, condition: str, message: str, **parameters: Any) -> FeedUnavailable:
        """An error of the feed."""
        return self._server.unavailable(condition, message, **parameters)


class Server:
    """One process's way to the server of a feed.

    Parameters
    ----------
    url
        The server.
    name
        The feed, for messages.
    wait
        Seconds to wait for another reader to leave the slot.
    """

    def __init__(self, url: StoreUrl, name: str, wait: float) -> None:
        self._url, self.name, self._wait = url, name, wait
        self._psycopg = driver()
        self._connection: psycopg.Connection[Any] | None = None
        self._lock = threading.RLock()

    def connect(self, **options: Any) -> psycopg.Connection[Any]:
        """A new connection, each statement a transaction of its own."""
        from psycopg.conninfo import conninfo_to_dict
        from psycopg.rows import namedtuple_row

        try:
            given = conninfo_to_dict(self._url.target)
        except self._psycopg.ProgrammingError as error:
            raise InvalidUrl(
                f"{self.name}: not a valid PostgreSQL URL: {self._url.scrubbed(str(error))}"
            ) from None
        connection: psycopg.Connection[Any] = self._psycopg.connect(
            **(_DEFAULTS | given | {"client_encoding": "utf8"} | options),
            autocommit=True,
            row_factory=namedtuple_row,
        )
        warn_in_clear(connection, str(self._url))
        try:
            connection.prepare_threshold = None
            # A replication connection has no prepared statements.
            done = connection.pgconn.exec_(statements()["settings"].replace("%%", "%").encode())
            if done.status != self._psycopg.pq.ExecStatus.TUPLES_OK:
                raise self._psycopg.OperationalError(done.get_error_message())
        except BaseException:
            connection.close()
            raise
        return connection

    def all(self, statement: str, /, **parameters: Any) -> list[Any]:
        """The rows of a named statement, retried."""
        return self.retried(lambda connection: run(connection, statement, **parameters))

    def retried(self, work: Callable[[psycopg.Connection[Any]], T]) -> T:
        """Work on the connection that is kept, again on a new one where it broke, and again where the slot is in use."""
        with self._lock:
            return self.patiently(lambda: work(self._kept()))

    def patiently(self, work: Callable[[], T]) -> T:
        """Work, again after a pause where the server is away or the slot is in use."""
        deadline = time.monotonic() + self._wait
        attempt = 0
        while True:
            try:
                with self.translating():
                    return work()
            except ServerGone:
                attempt += 1
                self.close()
                if attempt == _ATTEMPTS:
                    raise
                pause = 0.1 * 2**attempt
            except SlotInUse:
                if time.monotonic() > deadline:
                    raise
                pause = 0.1
            time.sleep(pause * random.uniform(0.8, 1.2))

    def chunks(self, statement: str, /, **parameters: Any) -> Generator[list[bytes], None, None]:
        """The one column of a named statement in chunks of some megabytes, through a connection of its own."""
        return self.chunks_of(statements()[statement], parameters)

    def chunks_of(
        self, text: str, parameters: dict[str, Any] | None = None
    ) -> Generator[list[bytes], None, None]:
        """The same of a query's text."""
        connection, cursor, found = self._opened(text, parameters, min(100, _FETCH_ROWS), binary=True)
        chunk: list[bytes] = []
        size = 0
        try:
            with self.translating():
                while found:
                    fetched = list(chain.from_iterable(found))
                    bytes_fetched = sum(map(len, fetched))
                    chunk, size = chunk + fetched, size + bytes_fetched
                    if size >= _CHUNK_BYTES or len(chunk) >= _CHUNK_ROWS:
                        yield from _halved(chunk, size)
                        chunk, size = [], 0
                    rows = _CHUNK_BYTES * len(fetched) // (bytes_fetched + 1)
                    found = cursor.fetchmany(max(1, min(_FETCH_ROWS, rows)))
                yield from _halved(chunk, size)
        finally:
            connection.close()

    def rows(self, statement: str, /, **parameters: Any) -> Generator[Any, None, None]:
        """The rows of a named statement as they are asked for, through a connection of its own."""
        connection, cursor, found = self._opened(statements()[statement], parameters, 5_000)
        try:
            with self.translating():
                while found:
                    yield from found
                    found = cursor.fetchmany(5_000)
        finally:
            connection.close()

    def _opened(
        self, text: str, parameters: dict[str, Any] | None, rows: int, *, binary: bool = False
    ) -> tuple[Any, Any, list[Any]]:
        """A connection, a cursor of the server's, and its first rows: with them the slot has been read, and is free again."""

        def first() -> tuple[Any, Any, list[Any]]:
            connection = self.connect()
            try:
                connection.autocommit = False
                factory = self._psycopg.rows.tuple_row if binary else connection.row_factory
                cursor = connection.cursor("penstock", row_factory=factory)
                cursor.execute(text.encode(), parameters, binary=binary)
                return connection, cursor, cursor.fetchmany(rows)
            except BaseException:
                connection.close()
                raise

        return self.patiently(first)

    def close(self) -> None:
        with self._lock:
            if self._connection is not None:
                with suppress(self._psycopg.Error):
                    self._connection.close()
            self._connection = None

    def _kept(self) -> psycopg.Connection[Any]:
        if self._connection is None or self._connection.closed:
            self._connection = self.connect()
        return self._connection

    @contextmanager
    def translating(self) -> Iterator[None]:
        """The driver's errors become the feed's."""
        try:
            yield
        except self._psycopg.Error as error:
            raise self._translated(error) from None

    def _translated(self, error: Any) -> PenstockError:
        state = error.sqlstate or ""
        text = self._url.scrubbed(str(error))
        if state.startswith("28") or (not state and any(each in text for each in _LOGIN)):
            return self.unavailable(
                "LOGIN", "the server refused the login: check user, password and pg_hba.conf"
            )
        if state == "55006" and "is active" in text:
            found = _PID.search(text)
            pid = found[1] if found else "unknown"
            return SlotInUse(
                f"{self.name}: another reader has the slot (server process {pid}): a slot has one at a time. Stop the other "
                f"query, or give each a slot; select pg_terminate_backend({pid}) ends it",
                pid=pid,
            )
        if state == "42501":
            return self.unavailable(
                "PRIVILEGE",
                f"the role may not do it ({text}): it needs REPLICATION (alter role … replication), SELECT on the tables, and "
                'for snapshot="initial" CREATE on the database; with snapshot="none" it reads from the slot alone',
            )
        return self._by_state(error, state, text)

    def _by_state(self, error: Any, state: str, text: str) -> PenstockError:
        if "wal_level" in text:
            return self.unavailable("WAL_LEVEL", WAL_LEVEL)
        if "no longer get changes" in text or "can no longer access replication slot" in text:
            return self.lost_slot(text)
        if state == "53400" and "replication slots" in text:
            return self.unavailable(
                "SLOTS", f"{text}: drop a slot that nobody reads, or raise max_replication_slots"
            )
        if state == "3D000" or (not state and "does not exist" in text):
            return self.unavailable("DATABASE", text)
        refused = not state and any(each in text for each in _REFUSALS)
        broken = isinstance(error, self._psycopg.OperationalError | self._psycopg.InterfaceError)
        if state == "55P03":
            return SlotInUse(
                f"{self.name}: another session has had a lock of the slot's snapshot for too long ({text}): find it with "
                "pg_blocking_pids and end it, or wait"
            )
        if state.startswith(("08", "25P03", "57P", "53300", "40")) or (not state and broken and not refused):
            return ServerGone(f"{self.name}: the server is away or busy ({text}); a restarted query goes on")
        return self.unavailable("QUERY", text)

    def unavailable(self, condition: str, message: str, **parameters: Any) -> FeedUnavailable:
        """An error of this feed."""
        return FeedUnavailable(
            f"{self.name}: {message}", condition=f"FEED_UNAVAILABLE.{condition}", **parameters
        )

    def lost_slot(self, why: str) -> DataLost:
        return DataLost(
            f"{self.name}: the server has let go of the log that the slot was to keep ({why}); see max_slot_wal_keep_size. Drop "
            "the slot with pg_drop_replication_slot and start with a new checkpoint",
            condition="DATA_LOST.SLOT_INVALIDATED",
        )


WAL_LEVEL = (
    "the server's wal_level is not logical: alter system set wal_level = 'logical', then restart the server (on Amazon RDS: "
    "rds.logical_replication = 1)"
)


def _halved(chunk: list[bytes], size: int) -> Iterator[list[bytes]]:
    """A chunk in parts that are not much larger than one should be, or of one message."""
    if size <= 4 * _CHUNK_BYTES or len(chunk) <= 1:
        if chunk:
            yield chunk
        return
    for part in (chunk[: len(chunk) // 2], chunk[len(chunk) // 2 :]):
        yield from _halved(part, sum(map(len, part)))


def run(connection: psycopg.Connection[Any], statement: str, /, **parameters: Any) -> list[Any]:
    """The rows of a named statement."""
    cursor = connection.execute(statements()[statement], parameters)
    return cursor.fetchall() if cursor.description else []


def lsn(position: int) -> str:
    """A position in the log as PostgreSQL writes it."""
    return f"{position >> 32:X}/{position & 0xFFFFFFFF:X}"


def quoted(names: Sequence[str]) -> str:
    """Names as the list that pgoutput takes."""
    return ",".join('"' + name.replace('"', '""') + '"' for name in names)
