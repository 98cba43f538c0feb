"""PostgreSQL database that is shared by roles which do not trust each other."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from urllib.parse import urlsplit

import psycopg
from psycopg import sql

RAN = "public.ran"
"""The table in which a trap records the role that ran it."""


@dataclass(frozen=True)
class SharedDatabase:
    """Database in which several roles may create schemas."""

    url: str
    """The URL of its administrator."""

    @property
    def name(self) -> str:
        return urlsplit(self.url).path[1:]

    def role(self, role: str) -> str:
        """Return the name of a role on the server."""
        return f"{self.name}_{role}"

    def as_role(self, role: str, query: str = "") -> str:
        """Return the URL of a role, as in `as_role("app", "schema=s")`."""
        parts = urlsplit(self.url)
        login = f"{self.role(role)}:pw@{parts.hostname}:{parts.port}"
        return parts._replace(netloc=login, query=query).geturl()

    def run(self, *statements: str, role: str | None = None) -> list[tuple[object, ...]]:
        """Execute statements as a role or as the administrator, and return the rows of the last one."""
        url = self.url if role is None else self.as_role(role)
        with psycopg.connect(url, autocommit=True) as connection:
            for statement in statements:
                cursor = connection.execute(statement.encode())
            return cursor.fetchall() if cursor.description else []

    def trap(self, role: str, table: str) -> None:
        """Add a trigger that records who runs it to a role's table, and let every role write to the table."""
        self.run(f"create table if not exists {RAN} (who text); grant all on {RAN} to public")
        self.run(*trap_statements(table), role=role)

    def trapped(self) -> list[tuple[object, ...]]:
        """Return the roles that ran a trap."""
        return self.run(f"create table if not exists {RAN} (who text)", f"select who from {RAN}")


def trap_statements(table: str) -> tuple[str, ...]:
    """Return the statements that the owner runs to set a trap on a table, named with its schema."""
    function = f"{table.partition('.')[0]}.trap_{uuid.uuid4().hex[:8]}"
    body = f"begin insert into {RAN} values (current_user); return new; end"
    return (
        f"create function {function}() returns trigger language plpgsql as $trap$ {body} $trap$",
        f"create trigger trap before insert or update or delete on {table} execute function {function}()",
        f"grant all on {table} to public",
    )


@contextmanager
def shared_database(pg_url: str, *roles: str) -> Iterator[SharedDatabase]:
    """Create a database and roles, and drop them in the end."""
    name = f"shared_{uuid.uuid4().hex[:8]}"
    database = SharedDatabase(urlsplit(pg_url)._replace(path=f"/{name}").geturl())
    with psycopg.connect(pg_url, autocommit=True) as admin:
        admin.execute(sql.SQL("create database {}").format(sql.Identifier(name)))
        for role in roles:
            identifier = sql.Identifier(database.role(role))
            admin.execute(sql.SQL("create role {} login password 'pw'").format(identifier))
        admin.execute(sql.SQL("grant create on database {} to public").format(sql.Identifier(name)))
        try:
            yield database
        finally:
            admin.execute(sql.SQL("drop database {} with (force)").format(sql.Identifier(name)))
            for role in roles:
                admin.execute(sql.SQL("drop role {}").format(sql.Identifier(database.role(role))))
