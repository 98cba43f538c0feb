"""Connections to PostgreSQL that others on the network could read."""

from __future__ import annotations

import ipaddress
import logging
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import psycopg

log = logging.getLogger("penstock.store")

_warned: set[str] = set()


def warn_in_clear(connection: psycopg.Connection[Any], shown: str) -> None:
    """Warn once of a server that a password leads to over a network without TLS.

    libpq tries TLS first and goes on without it where the server has none, or somebody on the way says so.

    Parameters
    ----------
    shown
        The server's URL without its password.
    """
    with_password = connection.pgconn.used_password and not connection.pgconn.ssl_in_use
    if not with_password or shown in _warned or is_local(connection):
        return
    _warned.add(shown)
    log.warning(
        "the connection to %s is not encrypted: whoever is on the way can read and change the rows, and may learn the password. Write "
        "sslmode=verify-full in its URL, with sslrootcert=… where the server's certificate is of an authority of your own",
        shown,
        extra={"action": "not_encrypted", "store": shown},
    )


def is_local(connection: psycopg.Connection[Any]) -> bool:
    """Whether a connection does not leave this machine."""
    info = connection.info
    if info.host.startswith(("/", "@")):
        return True
    try:
        return ipaddress.ip_address(info.hostaddr).is_loopback
    except ValueError:
        return False
