"""Sessions of a PostgreSQL store: what each is set to, in one round trip.

Names that are not qualified are looked up in ``pg_catalog`` alone: PostgreSQL takes an operator or a
function of another schema on the search path if it fits the types better than its own, and others may be
allowed to create some there. The store's schema is not on the path either, since another role may have the
right to create objects in it; everything in it is named with the schema.

A server frees a lock when the transaction that holds it ends, and by default waits for ever for a client
that was suspended, or whose machine is gone. With these settings it ends such a session, and a wait for a
lock is limited.

Behind a pooler that gives a server's connection to each transaction, there is no session to set up: the same
settings are made at the beginning of each transaction, for it alone.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

SEARCH_PATH = "pg_catalog, pg_temp"
"""Temporary relations are looked up last instead of first."""
LOCK_WAIT = 60.0
"""For how many seconds to wait for locks in all, unless the store's URL has ``lock_wait``."""
_WAITS = 5
_LONGEST_WAIT = 8.0
"""Shorter than a transaction may be idle: the writers of a suspended machine wait for each other, and would
otherwise receive the lock one after the other and hold it for that time each."""

# Every statement walks along an index. The planner's statistics do not know a log's newest rows: where it
# expects a few, it would collect and sort them, and meet millions.
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
# A setting that the server does not have is left out. What was chosen for this connection, the role or the
# database stays.
_SET = """
select set_config(s.name, v.value, false)
from (values {values}) as v (name, value)
join pg_settings as s on s.name = v.name
where s.source not in ({chosen})
    and (s.name <> 'client_connection_check_interval' or version() like '%linux%')
"""
_CHOSEN = "'client', 'user', 'database', 'database user'"
_FOUND = "select extract(epoch from current_setting('lock_timeout')::interval)::float8, pg_backend_pid()"
# What a pooler's connection to the server is set to for each transaction: it has no session of its own.
_OF_TRANSACTIONS = ("lock_timeout", "idle_in_transaction_session_timeout")
UNCHOSEN = f"""
select s.name from pg_settings as s
where s.name in ({", ".join(map(repr, _OF_TRANSACTIONS))}) and s.source not in ({_CHOSEN})
"""
"""Those of them that nothing was chosen for."""


def longest_wait(lock_wait: float) -> float:
    """For how many seconds one statement waits for one lock."""
    return min(_LONGEST_WAIT, lock_wait / _WAITS)


def set_up(lock_wait: float, *, lasting: bool = False) -> str:
    """Statements that set up a new session; the last one returns the seconds of ``lock_timeout`` and the
    server process.

    A transaction waits for locks for ``lock_wait`` seconds in all its tries. A ``lasting`` session may idle
    for ever outside a transaction, whatever limits are set.
    """
    statements = [f"set search_path to {SEARCH_PATH}", PLANNING, _setting(_limits(lock_wait), _CHOSEN)]
    if lasting:
        statements.append(_setting(_LASTING, "''"))
    return "; ".join([*statements, _FOUND])


def set_up_transaction(lock_wait: float, names: Collection[str]) -> str:
    """Statements that set up a transaction instead of its session; of the limits, those in ``names``."""
    limits = [f"set local {name} = '{value}'" for name, value in _limits(lock_wait).items() if name in names]
    return "; ".join([f"set local search_path to {SEARCH_PATH}", STEERED, *limits])


def _limits(lock_wait: float) -> dict[str, str]:
    return DEFAULTS | {"lock_timeout": f"{max(1, round(longest_wait(lock_wait) * 1000))}ms"}


def _setting(settings: Mapping[str, str], chosen: str) -> str:
    values = ", ".join(f"('{name}', '{value}')" for name, value in settings.items())
    return _SET.format(values=values, chosen=chosen)
