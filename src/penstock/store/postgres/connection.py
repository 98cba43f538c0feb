"""Connections to a PostgreSQL server and the classification of its errors, for the store and for change
feeds.
"""

from __future__ import annotations

import ipaddress
import logging
import re
import select
from collections.abc import Iterator
from enum import Enum, auto
from types import ModuleType
from typing import TYPE_CHECKING, Any, TypeAlias

from penstock.errors import InvalidUrlError
from penstock.extras import missing
from penstock.json_text import Json

if TYPE_CHECKING:
    import psycopg
    from psycopg import pq

    from penstock.store.url import StoreUrl

    PgConnection: TypeAlias = psycopg.Connection[Any]

log = logging.getLogger("penstock.store")

warned_urls: set[str] = set()
"""The URLs, without passwords, that this process has warned about."""
# These settings detect within a minute that a server is gone. The URL may override them.
_CONNECTION_DEFAULTS: Json = {
    "connect_timeout": 10,
    "application_name": "penstock",
    "keepalives_idle": 20,
    "keepalives_interval": 10,
    "keepalives_count": 3,
    "tcp_user_timeout": 50_000,
}
# A server that refuses a connection sends no SQLSTATE.
_LOGIN_REFUSED = (
    "authentication failed",
    "no password supplied",
    "no pg_hba.conf entry",
    "not permitted to log in",
)
_ROLE_MISSING = re.compile(r'FATAL:\s+role "[^"]*" does not exist')
_DATABASE_MISSING = re.compile(r'FATAL:\s+database "[^"]*" does not exist')
CREATED_CONCURRENTLY = ("23505", "42710", "42P06", "42P07")
"""The SQLSTATEs of errors because another program created the same schema, table, type or index
concurrently.
"""
# The connection broke, the session was idle in a transaction for too long, the transaction conflicts with
# another one, there are too many connections, or the server is shutting down or starting.
_UNAVAILABLE = ("08", "25P03", "25P04", "40", "53300", "57P")


class Failure(Enum):
    """The kinds of failures that errors of the driver report."""

    LOGIN = auto()
    """The server refused the login."""
    NO_DATABASE = auto()
    LOCKED = auto()
    """A lock was not free in time."""
    UNAVAILABLE = auto()
    """The server is down, busy or starting, or closed the connection. A retry may succeed."""
    OTHER = auto()


def driver(what: str) -> ModuleType:
    """Import the driver; ``what`` names the feature that needs it, for the error."""
    try:
        import psycopg
    except ImportError:
        raise missing("psycopg", what) from None
    return psycopg


def connect(url: StoreUrl, name: str, *, through_pooler: bool = False, **options: Any) -> PgConnection:
    """Open a connection in autocommit mode, directly to the server unless ``through_pooler`` is set.

    Parameters
    ----------
    url
        The URL of the server. Its parameters override the defaults.
    name
        The name to show in an error about the URL.
    through_pooler
        Whether to connect through the pooler, if the URL names one.
    options
        Connection parameters that override the URL's parameters and the defaults.
    """
    import psycopg
    from psycopg.conninfo import conninfo_to_dict

    try:
        parameters = conninfo_to_dict(url.target)
    except psycopg.ProgrammingError as error:
        raise InvalidUrlError(
            f"{name}: not a valid PostgreSQL URL: {url.without_secrets(str(error))}"
        ) from None
    direct = {} if through_pooler else url.direct()
    arguments = (
        _CONNECTION_DEFAULTS | parameters | direct | url.password() | {"client_encoding": "utf8"} | options
    )
    connection: PgConnection = psycopg.connect(**arguments, autocommit=True)
    _warn_if_unencrypted(connection, str(url))
    return connection


def copy_rows(connection: PgConnection, text: str) -> Iterator[memoryview | bytes]:
    """Yield the rows that a ``copy … to stdout`` sends. The caller must read all of them.

    psycopg's own copy calls several Python functions for each row, which takes longer than receiving the row.
    """
    from psycopg import pq
    from psycopg.errors import error_from_result

    server = connection.pgconn
    copy_result = server.exec_(text.encode())
    if copy_result.status != pq.ExecStatus.COPY_OUT:
        raise error_from_result(copy_result)
    size, row = _next_copied_row(server)
    while size > 0:
        yield row
        size, row = _next_copied_row(server)
    failed_result = None
    # The connection accepts the next command only after all results have been read.
    while (result := server.get_result()) is not None:
        failed_result = failed_result if result.status == pq.ExecStatus.COMMAND_OK else result
    if failed_result is not None:
        raise error_from_result(failed_result)


def _next_copied_row(server: pq.abc.PGconn) -> tuple[int, memoryview]:
    """Return the size of the next row and the row; the size is negative after the last row.

    Waiting in libpq would hold Python's lock, so no other thread would run until the server sends a row.
    """
    size, row = server.get_copy_data(1)
    while size == 0:
        poller = select.poll()
        poller.register(server.socket, select.POLLIN)
        poller.poll()
        server.consume_input()
        size, row = server.get_copy_data(1)
    return size, row


def failure_of(error: psycopg.Error) -> Failure:
    """Return the kind of failure that an error reports."""
    import psycopg

    # If the connection is lost during a statement, libpq returns a result without an SQLSTATE, for which
    # psycopg has no special class.
    is_broken = isinstance(error, psycopg.OperationalError | psycopg.InterfaceError) or (
        type(error) is psycopg.DatabaseError
    )
    return failure_of_message(error.sqlstate or "", str(error), is_broken=is_broken)


def failure_of_message(state: str, text: str, *, is_broken: bool) -> Failure:
    """Return the kind of failure that a SQLSTATE reports, or a message of libpq if there is none.

    ``is_broken`` says whether the driver's error may be about the connection.
    """
    if state == "55P03":
        return Failure.LOCKED
    if state:
        return _failure_of_state(state)
    if any(phrase in text for phrase in _LOGIN_REFUSED) or _ROLE_MISSING.search(text):
        return Failure.LOGIN
    if _DATABASE_MISSING.search(text):
        return Failure.NO_DATABASE
    return Failure.UNAVAILABLE if is_broken else Failure.OTHER


def _failure_of_state(state: str) -> Failure:
    if state.startswith("28"):
        return Failure.LOGIN
    if state in ("3D000", "57P04"):
        return Failure.NO_DATABASE
    return Failure.UNAVAILABLE if state.startswith(_UNAVAILABLE) else Failure.OTHER


def _warn_if_unencrypted(connection: PgConnection, redacted_url: str) -> None:
    """Warn once if a password was sent over a network without TLS. The warning shows ``redacted_url``.

    libpq tries TLS first. It continues without TLS if the server, or an attacker on the network path, says
    that the server does not support it.
    """
    is_password_exposed = connection.pgconn.used_password and not connection.pgconn.ssl_in_use
    if not is_password_exposed or redacted_url in warned_urls or is_local(connection):
        return
    warned_urls.add(redacted_url)
    log.warning(
        "the connection to %s is not encrypted: anyone on the network path can read and change the rows, "
        "and may learn the password. Set sslmode=verify-full in its URL, and sslrootcert=… for a private "
        "certificate authority",
        redacted_url,
        extra={"action": "not_encrypted", "store": redacted_url},
    )


def is_local(connection: PgConnection) -> bool:
    """Return whether a connection stays on this machine."""
    info = connection.info
    if info.host.startswith(("/", "@")):
        return True
    try:
        return ipaddress.ip_address(info.hostaddr).is_loopback
    except ValueError:
        return False
