"""Temporary stores for tests."""

from __future__ import annotations

import tempfile
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from urllib.parse import urlsplit, urlunsplit

from penstock.errors import InvalidUrlError
from penstock.queue.store import Store, connect
from penstock.store.url import parse_url


@contextmanager
def temporary_store_url(database: str | None = None) -> Iterator[str]:
    """Yield the URL of a store that does not exist yet. Remove the store after the block.

    Parameters
    ----------
    database
        The URL of a PostgreSQL database, in which the store gets its own schema. By default, the store is a
        SQLite file in a temporary directory.

    Raises
    ------
    InvalidUrlError
        When the URL is not that of a PostgreSQL database.
    MissingDependencyError
        When psycopg is not installed.
    """
    if database is None:
        with tempfile.TemporaryDirectory(prefix="penstock-store-", ignore_cleanup_errors=True) as folder:
            yield f"sqlite:///{folder}/penstock.db"
        return
    schema = f"penstock_{uuid.uuid4().hex}"
    url = with_schema(database, schema)
    try:
        yield url
    finally:
        drop_schema(database, schema)


@contextmanager
def temporary_store(database: str | None = None) -> Iterator[Store]:
    """Yield a new, open store. Remove it after the block. The parameters are those of
    `temporary_store_url`.
    """
    with temporary_store_url(database) as url, connect(url, create=True) as store:
        yield store


def with_schema(database: str, schema: str) -> str:
    """Return the URL of a store in a schema of a PostgreSQL database."""
    if parse_url(database).dialect != "postgres":
        raise InvalidUrlError(
            f"{parse_url(database)} is not a PostgreSQL database: pass the URL of one, or None for a SQLite "
            "file",
            condition="INVALID_URL.UNKNOWN_KIND",
        )
    parts = urlsplit(database)
    query = "&".join(filter(None, [parts.query, f"schema={schema}"]))
    return urlunsplit(parts._replace(query=query))


def drop_schema(database: str, schema: str) -> None:
    """Drop a schema, and terminate sessions that lock it: a test may have left a transaction open or a thread
    running.
    """
    from psycopg import errors, sql

    from penstock.store.postgres.connection import connect as connect_to_server

    drop = sql.SQL("DROP SCHEMA IF EXISTS {} CASCADE").format(sql.Identifier(schema))
    url = parse_url(database)
    with connect_to_server(url, str(url)) as connection:
        connection.execute("SET lock_timeout = '3s'")
        try:
            connection.execute(drop)
        except (errors.LockNotAvailable, errors.DeadlockDetected):
            connection.execute(
                "SELECT pg_terminate_backend(l.pid) FROM pg_locks l JOIN pg_class c ON c.oid = l.relation"
                " WHERE c.relnamespace = %s::regnamespace AND l.pid <> pg_backend_pid()",
                [schema],
            )
            connection.execute(drop)
