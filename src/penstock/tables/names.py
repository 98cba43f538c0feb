"""Names of tables and columns: any Unicode text, quoted, never SQL."""

from __future__ import annotations

import re
from dataclasses import dataclass

from penstock.arguments import in_quotes
from penstock.errors import InvalidName
from penstock.queue.checks import check_name
from penstock.store.database import Transaction
from penstock.store.postgres.staging_relations import PREFIX
from penstock.store.statements import own_relations

_PART = r'"(?:[^"]|"")+"|[^".][^.]*'
_QUALIFIED = re.compile(rf"(?:({_PART})\.)?({_PART})", re.DOTALL)
_POSTGRES_BYTES = 63


def quoted(name: str) -> str:
    """An identifier as both databases take it."""
    escaped = name.replace('"', '""')
    return f'"{escaped}"'


@dataclass(frozen=True)
class TableName:
    """A table, and the schema that it is in; a SQLite table is in ``main``."""

    schema: str
    table: str

    @property
    def sql(self) -> str:
        return f"{quoted(self.schema)}.{quoted(self.table)}"

    @property
    def ledger_name(self) -> str:
        """The table in the ledger; one that is made anew is the same sink."""
        return f"table:{self.sql}"


def resolve(tx: Transaction, name: str) -> TableName:
    """The table that a user means.

    Parameters
    ----------
    name
        In PostgreSQL ``schema.table``, or a table in the first schema of the search path that the role, the database or the URL gives
        the connection; a part with a dot in
        it stands in double quotes. In SQLite the name as it is.

    Raises
    ------
    InvalidName
        When the database does not take it, or it is one of the store's own.
    """
    check_name("table", name)
    return _sqlite(name) if tx.dialect == "sqlite" else _postgres(tx, name)


def _sqlite(name: str) -> TableName:
    for prefix, whose in (("sqlite_", "SQLite's own tables"), ("penstock_", "the store's own tables")):
        if name.lower().startswith(prefix):
            raise InvalidName(f"the table name {in_quotes(name)} begins like {whose}: choose another one")
    return TableName("main", name)


def _postgres(tx: Transaction, name: str) -> TableName:
    found = _QUALIFIED.fullmatch(name)
    if found is None:
        raise InvalidName(
            f"a table's name is table or schema.table, and a part with a dot or a double quote at its beginning stands in "
            f"double quotes, not {in_quotes(name)}"
        )
    schema, table = (None if part is None else _plain(part) for part in found.groups())
    if schema is None:
        schema = tx.home_schema()
        if schema is None:
            raise InvalidName(
                f"the connection's search path has no schema for the table {in_quotes(name)}: write schema.table"
            )
    for part in (schema, table):
        if len(str(part).encode()) > _POSTGRES_BYTES:
            raise InvalidName(f"a name in PostgreSQL has at most 63 bytes, and {in_quotes(part)} has more")
    named = TableName(str(schema), str(table))
    if quoted(named.schema) == tx.schema and _is_own(named.table):
        raise InvalidName(f"{in_quotes(name)} is one of the store's own tables: choose another name")
    return named


def _plain(part: str) -> str:
    return part[1:-1].replace('""', '"') if part.startswith('"') else part


def _is_own(table: str) -> bool:
    return table in own_relations("postgres") or table.startswith((PREFIX, "applied_"))
