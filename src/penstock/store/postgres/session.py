"""Connections to PostgreSQL that others on the network could read."""

from __future__ import annotations

import ipaddress
import logging
from collections.abc import Mapping
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


# ---- postgres_session: What every session of a PostgreSQL store is set to, in one round trip when its connection is made.
#
# Names that are not qualified are looked up in ``pg_catalog`` alone: PostgreSQL takes an operator or a function of another schema on the
# search path wherever that fits the types better than its own, and others may be allowed to make some there. The store's schema is not on
# the path either, since some role may have a right to make things in it; all that is in it is named with it.
#
# A server frees a lock when the transaction that has it ends, and by default waits for ever for a client that was stopped, or whose
# machine is gone. With these settings it ends such a session, and whoever waits for a lock waits for a time.

SEARCH_PATH = "pg_catalog, pg_temp"
"""Temporary relations are looked for last, rather than before all others."""
LOCK_WAIT = 60.0
"""For how many seconds to wait for a lock in all, unless the store's URL says ``lock_wait``."""
_WAITS = 5
_LONGEST_WAIT = 8.0
"""Shorter than a transaction may be idle: the writers of a machine that stopped as a whole wait for each other, and would else be given the
lock one after the other, and stop there for that time each."""

# Every statement is a walk along an index, and a log's newest rows are past what the planner's statistics know of: where it
# expects a handful, it would collect and sort them, and meet millions.
_WAYS = ("enable_seqscan", "enable_bitmapscan", "enable_hashjoin", "enable_mergejoin")
PLANNING = "; ".join(f"set {way} = off" for way in _WAYS)
FREE = "; ".join(f"set local {way} = on" for way in _WAYS)
STEERED = "; ".join(f"set local {way} = off" for way in _WAYS)

DEFAULTS = {
    # A client that was stopped, or whose machine is gone, in the middle of a transaction.
    "idle_in_transaction_session_timeout": "10s",
    # A machine that is gone while the server waits for the rest of a message, or sends rows.
    "tcp_keepalives_idle": "10s",
    "tcp_keepalives_interval": "5s",
    "tcp_keepalives_count": "3",
    "tcp_user_timeout": "25s",
    # A client that is gone while a statement runs.
    "client_connection_check_interval": "5s",
}
_LASTING = {"idle_session_timeout": "0"}
# A setting that an older server does not have, or its system does not know, is left out. What somebody has chosen for this
# connection, the role or the database stays.
_SET = """
select set_config(s.name, v.value, false)
from (values {values}) as v (name, value)
join pg_settings as s on s.name = v.name
where s.source not in ({chosen})
    and (s.name <> 'client_connection_check_interval' or version() like '%linux%')
"""
_CHOSEN = "'client', 'user', 'database', 'database user'"
_LOCK_TIMEOUT = "select extract(epoch from current_setting('lock_timeout')::interval)::float8"


def longest_wait(lock_wait: float) -> float:
    """For how many seconds one statement waits for one lock."""
    return min(_LONGEST_WAIT, lock_wait / _WAITS)


def set_up(lock_wait: float, *, lasting: bool = False) -> str:
    """Statements that set a new session up; the last one gives the seconds of ``lock_timeout``.

    Parameters
    ----------
    lock_wait
        For how many seconds a transaction may wait for locks in all its tries.
    lasting
        Whether the session may idle for ever outside of a transaction, whoever has set a limit.
    """
    settings = DEFAULTS | {"lock_timeout": f"{max(1, round(longest_wait(lock_wait) * 1000))}ms"}
    statements = [f"set search_path to {SEARCH_PATH}", PLANNING, _setting(settings, _CHOSEN)]
    if lasting:
        statements.append(_setting(_LASTING, "''"))
    return "; ".join([*statements, _LOCK_TIMEOUT])


def _setting(settings: Mapping[str, str], chosen: str) -> str:
    values = ", ".join(f"('{name}', '{value}')" for name, value in settings.items())
    return _SET.format(values=values, chosen=chosen)
