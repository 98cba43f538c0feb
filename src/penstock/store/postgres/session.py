"""Settings of a PostgreSQL store's sessions, sent in one round trip.

Sessions look up unqualified names only in ``pg_catalog``. If other schemas were on the search path,
PostgreSQL would prefer an operator or function there whose types match better, and other roles may be allowed
to create one. For the same reason the store's schema is not on the path either, and statements qualify all
names in it.

A server releases a lock when the transaction that holds it ends. By default it waits for ever for a client
that was suspended or whose machine is gone. With these settings the server ends such a session, and limits
how long a statement waits for a lock. Statements and transactions may take as long as they need, because
copying, merging into or replacing a large table may take hours.

Behind a pooler that shares connections between transactions, there is no session to set up. There, each
transaction begins with the same settings for itself alone.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

SEARCH_PATH = "pg_catalog, pg_temp"
"""The search path. With ``pg_temp`` last, temporary relations are looked up last instead of first."""
DEFAULT_LOCK_WAIT = 60.0
"""How long a transaction waits for locks in all, in seconds, unless the store's URL has ``lock_wait``."""
_MIN_LOCK_TRIES = 5
_MAX_STATEMENT_WAIT = 8.0
"""The longest wait of one statement for a lock, in seconds. It is shorter than a transaction may be idle.
Otherwise the waiting writers of a suspended machine would get the lock one after another, and each would
hold it for the idle time.
"""

# Every statement of the store can use an index. The planner's statistics do not cover the newest rows of a
# log, so it may expect a few rows where there are millions, and collect and sort them all.
_PLANNER_OPTIONS = ("enable_seqscan", "enable_bitmapscan", "enable_hashjoin", "enable_mergejoin")
FORCE_INDEX_PLANS = "; ".join(f"set {plan} = off" for plan in _PLANNER_OPTIONS)
ALLOW_ALL_PLANS = "; ".join(f"set local {plan} = on" for plan in _PLANNER_OPTIONS)
FORCE_INDEX_PLANS_LOCALLY = "; ".join(f"set local {plan} = off" for plan in _PLANNER_OPTIONS)

SESSION_LIMITS = {
    # For clients that were suspended in a transaction, or whose machine is gone.
    "idle_in_transaction_session_timeout": "10s",
    "statement_timeout": "0",
    "transaction_timeout": "0",
    # For machines that are gone while the server waits for the rest of a message or sends rows.
    "tcp_keepalives_idle": "10s",
    "tcp_keepalives_interval": "5s",
    "tcp_keepalives_count": "3",
    "tcp_user_timeout": "25s",
    # For clients that are gone while a statement runs.
    "client_connection_check_interval": "5s",
}
_NO_IDLE_LIMIT = {"idle_session_timeout": "0"}
# Skip settings that the server does not have, and keep values that were chosen for this connection, the role
# or the database.
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
# The limits to set for each transaction behind a pooler, where clients have no sessions of their own.
_TRANSACTION_LIMITS = (
    "lock_timeout",
    "idle_in_transaction_session_timeout",
    "statement_timeout",
    "transaction_timeout",
)
UNSET_TRANSACTION_LIMITS = f"""
select s.name from pg_settings as s
where s.name in ({", ".join(map(repr, _TRANSACTION_LIMITS))}) and s.source not in ({_CHOSEN_SOURCES})
"""
"""Selects those of ``_TRANSACTION_LIMITS`` for which nobody has chosen a value."""


def statement_lock_wait(lock_wait: float) -> float:
    """Return how long one statement waits for one lock, in seconds."""
    return min(_MAX_STATEMENT_WAIT, lock_wait / _MIN_LOCK_TRIES)


def session_setup(lock_wait: float, *, long_lived: bool = False) -> str:
    """Return statements that set up a new session. The last one returns ``lock_timeout`` in seconds and the
    id of the server process.

    All attempts of a transaction together wait for locks for ``lock_wait`` seconds. A ``long_lived`` session
    may idle outside a transaction for ever, whatever limits the server has.
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
    """Return statements that set up a transaction instead of its session. ``names`` are the limits to set."""
    limits = [f"set local {name} = '{value}'" for name, value in _limits(lock_wait).items() if name in names]
    return "; ".join([f"set local search_path to {SEARCH_PATH}", FORCE_INDEX_PLANS_LOCALLY, *limits])


def _limits(lock_wait: float) -> dict[str, str]:
    return SESSION_LIMITS | {"lock_timeout": f"{max(1, round(statement_lock_wait(lock_wait) * 1000))}ms"}


def _setting_statement(settings: Mapping[str, str], chosen_sources: str) -> str:
    values = ", ".join(f"('{name}', '{value}')" for name, value in settings.items())
    return _SET_UNLESS_CHOSEN.format(values=values, chosen=chosen_sources)
