"""Errors of Iceberg catalogs in SQL databases. Connections are lost when a database restarts, or when a
firewall drops them.
"""

from __future__ import annotations

from typing import Any

from penstock.store.postgres.connection import Failure, failure_of_message

SQL_METHODS = ("load_table", "commit_table", "create_table", "create_namespace")
"""The methods of a catalog to retry. A catalog that has already applied a commit refuses it as a conflict."""
_POSTGRES_DRIVERS = ("psycopg", "psycopg2")
_CONNECTION_ERRORS = ("OperationalError", "InterfaceError", "DatabaseError")
_SQLITE_LOCKED = ("database is locked", "database table is locked")


def is_transient_sql_error(error: Exception) -> bool:
    """Whether an operation of a SQL catalog may succeed if it is retried."""
    from sqlalchemy.exc import DBAPIError

    if not isinstance(error, DBAPIError):
        return False
    if error.connection_invalidated:
        return True
    cause: Any = error.orig
    driver = type(cause).__module__.partition(".")[0]
    if driver == "sqlite3":
        return any(text in str(cause) for text in _SQLITE_LOCKED)
    if driver not in _POSTGRES_DRIVERS:
        return False
    state = getattr(cause, "sqlstate", None) or getattr(cause, "pgcode", None) or ""
    failure = failure_of_message(state, str(cause), is_broken=type(cause).__name__ in _CONNECTION_ERRORS)
    return failure in (Failure.UNAVAILABLE, Failure.LOCKED)
