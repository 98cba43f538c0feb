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
DEFAULT_LOCK_WAIT = 60.0
"""How many seconds to wait for locks in all, unless the store's URL has ``lock_wait``."""
_MIN_LOCK_TRIES = 5
_MAX_STATEMENT_WAIT = 8.0
"""Shorter than a transaction may be idle. Otherwise the waiting writers of a suspended machine would get the
lock one after the other, and each would hold it for that time."""

# Every statement walks along an index. The planner's statistics do not include a log's newest rows: where it
# expects a few rows, it would collect and sort what turn out to be millions.
_PLANNER_OPTIONS = ("enable_seqscan", "enable_bitmapscan", "enable_hashjoin", "enable_mergejoin")
FORCE_INDEX_PLANS = "; ".join(f"set {plan} = off" for plan in _PLANNER_OPTIONS)
ALLOW_ALL_PLANS = "; ".join(f"set local {plan} = on" for plan in _PLANNER_OPTIONS)
FORCE_INDEX_PLANS_LOCALLY = "; ".join(f"set local {plan} = off" for plan in _PLANNER_OPTIONS)

SESSION_LIMITS = {
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
_NO_IDLE_LIMIT = {"idle_session_timeout": "0"}
# Settings that the server does not have are left out. Values that were chosen for this connection, the role
# or the database stay.
_SET_UNLESS_CHOSEN = """
select set_config(s.name, v.value, false)
from (values {values}) as v (name, value)
join pg_settings as s on s.name = v.name
where s.source not in ({chosen})
    and (s.name <> 'client_connection_check_interval' or version() like '%linux%')
"""
_CHOSEN_SOURCES = "'client', 'user', 'database', 'database user'"
_SESSION_STATE = (
    "select extract(epoch from current_setting('lock_timeout')::interval)::float8, pg_backend_pid()"
)
# The limits to set for each transaction behind a pooler, where there is no session of one's own.
_TRANSACTION_LIMITS = ("lock_timeout", "idle_in_transaction_session_timeout")
UNSET_TRANSACTION_LIMITS = f"""
select s.name from pg_settings as s
where s.name in ({", ".join(map(repr, _TRANSACTION_LIMITS))}) and s.source not in ({_CHOSEN_SOURCES})
"""
"""Selects those of ``_TRANSACTION_LIMITS`` for which no value was chosen."""


def statement_lock_wait(lock_wait: float) -> float:
    """Return how many seconds one statement waits for one lock."""
    return min(_MAX_STATEMENT_WAIT, lock_wait / _MIN_LOCK_TRIES)


def session_setup(lock_wait: float, *, long_lived: bool = False) -> str:
    """Return statements that set up a new session; the last one returns the seconds of ``lock_timeout`` and
    the server process.

    A transaction waits for locks for ``lock_wait`` seconds in all its attempts together. A ``long_lived``
    session may idle for ever outside a transaction, whatever limits are set.
    """
    statements = [
        f"set search_path to {SEARCH_PATH}",
        FORCE_INDEX_PLANS,
        _setting_statement(_limits(lock_wait), _CHOSEN_SOURCES),
    ]
    if long_lived:
        statements.append(_setting_statement(_NO_IDLE_LIMIT, "''"))
    return "; ".join([*statements, _SESSION_STATE])


def transaction_setup(lock_wait: float, names: Collection[str]) -> str:
    """Return statements that set up a transaction instead of its session, with the limits in ``names``."""
    limits = [f"set local {name} = '{value}'" for name, value in _limits(lock_wait).items() if name in names]
    return "; ".join([f"set local search_path to {SEARCH_PATH}", FORCE_INDEX_PLANS_LOCALLY, *limits])


def _limits(lock_wait: float) -> dict[str, str]:
    return SESSION_LIMITS | {"lock_timeout": f"{max(1, round(statement_lock_wait(lock_wait) * 1000))}ms"}


def _setting_statement(settings: Mapping[str, str], chosen_sources: str) -> str:
    values = ", ".join(f"('{name}', '{value}')" for name, value in settings.items())
    return _SET_UNLESS_CHOSEN.format(values=values, chosen=chosen_sources)
