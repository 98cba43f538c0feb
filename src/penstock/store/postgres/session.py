"""Settings of the sessions of a PostgreSQL store, made in one round trip.

Unqualified names are looked up only in ``pg_catalog``. If other schemas were on the search path, PostgreSQL
would prefer an operator or function in one of them that fits the types better, and other roles may be allowed
to create some there. The store's schema is not on the path either, for the same reason; everything in it is
named with the schema.

A server frees a lock when the transaction that holds it ends, and by default waits for ever for a client that
was suspended or whose machine is gone. With these settings it ends such a session, and limits the time that a
statement waits for a lock.

Behind a pooler that shares connections between transactions, there is no session to set up: the same settings
are made at the beginning of each transaction, for that transaction only.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

SEARCH_PATH = "pg_catalog, pg_temp"
"""Temporary relations are looked up last instead of first."""
LOCK_WAIT = 60.0
"""How many seconds to wait for locks in all, unless the store's URL has ``lock_wait``."""
_WAITS = 5
_LONGEST_WAIT = 8.0
"""Shorter than a transaction may be idle. Otherwise the waiting writers of a suspended machine would get the
lock one after the other, and each would hold it for that time."""

# Every statement walks along an index. The planner's statistics do not include a log's newest rows: where it
# expects a few rows, it would collect and sort what turn out to be millions.
_PLANS = ("enable_seqscan", "enable_bitmapscan", "enable_hashjoin", "enable_mergejoin")
PLANNING = "; ".join(f"set {plan} = off" for plan in _PLANS)
FREE = "; ".join(f"set local {plan} = on" for plan in _PLANS)
STEERED = "; ".join(f"set local {plan} = off" for plan in _PLANS)

DEFAULTS = {
    # A client that was suspended in a transaction, or whose machine is gone.
    "idle_in_transaction_session_timeout": "10s",
    # A machine that is gone while the server waits for the rest of a message or sends rows.
    "tcp_keepalives_idle": "10s",
    "tcp_keepalives_interval": "5s",
    "tcp_keepalives_count": "3",
    "tcp_user_timeout": "25s",
    # A client that is gone while a statement runs.
    "client_connection_check_interval": "5s",
}
_LASTING = {"idle_session_timeout": "0"}
# Settings that the server does not have are left out. Values that were chosen for this connection, the role
# or the database stay.
_SET = """
select set_config(s.name, v.value, false)
from (values {values}) as v (name, value)
join pg_settings as s on s.name = v.name
where s.source not in ({chosen})
    and (s.name <> 'client_connection_check_interval' or version() like '%linux%')
"""
_CHOSEN = "'client', 'user', 'database', 'database user'"
_FOUND = "select extract(epoch from current_setting('lock_timeout')::interval)::float8, pg_backend_pid()"
# The limits to set for each transaction behind a pooler, where there is no session of one's own.
_OF_TRANSACTIONS = ("lock_timeout", "idle_in_transaction_session_timeout")
UNCHOSEN = f"""
select s.name from pg_settings as s
where s.name in ({", ".join(map(repr, _OF_TRANSACTIONS))}) and s.source not in ({_CHOSEN})
"""
"""Selects those of ``_OF_TRANSACTIONS`` for which no value was chosen."""


def longest_wait(lock_wait: float) -> float:
    """Return how many seconds one statement waits for one lock."""
    return min(_LONGEST_WAIT, lock_wait / _WAITS)


def set_up(lock_wait: float, *, lasting: bool = False) -> str:
    """Return statements that set up a new session; the last one returns the seconds of ``lock_timeout`` and
    the server process.

    A transaction waits for locks for ``lock_wait`` seconds in all its tries together. A ``lasting`` session
    may idle for ever outside a transaction, whatever limits are set.
    """
    statements = [f"set search_path to {SEARCH_PATH}", PLANNING, _setting(_limits(lock_wait), _CHOSEN)]
    if lasting:
        statements.append(_setting(_LASTING, "''"))
    return "; ".join([*statements, _FOUND])


def set_up_transaction(lock_wait: float, names: Collection[str]) -> str:
    """Return statements that set up a transaction instead of its session, with the limits in ``names``."""
    limits = [f"set local {name} = '{value}'" for name, value in _limits(lock_wait).items() if name in names]
    return "; ".join([f"set local search_path to {SEARCH_PATH}", STEERED, *limits])


def _limits(lock_wait: float) -> dict[str, str]:
    return DEFAULTS | {"lock_timeout": f"{max(1, round(longest_wait(lock_wait) * 1000))}ms"}


def _setting(settings: Mapping[str, str], chosen: str) -> str:
    values = ", ".join(f"('{name}', '{value}')" for name, value in settings.items())
    return _SET.format(values=values, chosen=chosen)
