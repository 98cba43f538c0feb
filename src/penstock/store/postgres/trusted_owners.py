"""Checks that a session's role trusts the owners of PostgreSQL schemas and tables.

The owner of a table can add a trigger to it or replace it with a view, and the owner of a schema can replace
its tables. The functions of such triggers and views run with the rights of the role that uses the table.

A role trusts itself, superusers, the database's owner, and the roles that the user names. It does not trust
the roles that it is a member of. A member has the rights of the role, but the role does not have the rights
of its members. Besides, an administrator of a role can make any other role a member of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeAlias
from urllib.parse import quote

from penstock.arguments import in_quotes
from penstock.store.statements import parse, read_resource

FirstRow: TypeAlias = Callable[..., Sequence[Any] | None]
"""Runs a query whose ``:name`` parameters are passed as keyword arguments, and returns its first row."""
ALWAYS_TRUSTED = ("pg_database_owner",)
"""The role that owns the schema ``public``. Its only member is the database's owner."""


@dataclass(frozen=True)
class ForeignOwner:
    """An owner of a schema or relation whom the session's role does not trust."""

    owner: str
    what: str
    """The schema or relation that it owns, such as ``the schema orders`` or ``public.counts``."""
    role: str
    """The session's role."""

    def __str__(self) -> str:
        return (
            f"{self.what} belongs to the role {in_quotes(self.owner)}, which could run code with the rights "
            f"of the role {in_quotes(self.role)}"
        )

    @property
    def option(self) -> str:
        """The option for a store's URL that makes Penstock trust the owner."""
        return f"owner={quote(self.owner, safe='')}"


def find_foreign_owner(
    first_row: FirstRow,
    schema: str,
    relations: Sequence[str],
    *,
    trusted: Sequence[str] = (),
    with_schema: bool = True,
) -> ForeignOwner | None:
    """Return an owner of a schema, or of relations in it, whom the session's role does not trust; None if
    there is none.

    Parameters
    ----------
    first_row
        Runs the query in the session, whose search path must be ``pg_catalog`` alone.
    relations
        The names of the relations. Those that do not exist are ignored.
    trusted
        The roles that the user trusts.
    with_schema
        Whether to check the schema's owner as well.
    """
    row = first_row(
        _statement(),
        schema=schema,
        relations=list(relations),
        trusted=[*ALWAYS_TRUSTED, *trusted],
        with_schema=with_schema,
    )
    if row is None:
        return None
    owner, what, role = row
    return ForeignOwner(owner, f"the schema {schema}" if what is None else what, role)


@cache
def _statement() -> str:
    return parse(read_resource("sql", "postgres.sql"))["foreign_owner"]
