"""Table and column names: any Unicode text, always quoted, never interpolated as SQL."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass

from penstock.arguments import in_quotes
from penstock.errors import InvalidNameError
from penstock.queue.checks import check_name
from penstock.store.database import Transaction
from penstock.store.postgres.staging_relations import NAME_PREFIX
from penstock.store.statements import store_relations

_NAME_PART = r'"(?:[^"]|"")+"|[^".][^.]*'
_QUALIFIED = re.compile(rf"(?:({_NAME_PART})\.)?({_NAME_PART})", re.DOTALL)
POSTGRES_BYTES = 63
"""The maximum length of a name in PostgreSQL, which truncates longer ones."""


def quoted(name: str) -> str:
    """Quote an identifier for PostgreSQL and SQLite."""
    escaped = name.replace('"', '""')
    return f'"{escaped}"'


def digest(text: str) -> str:
    """Return a digest of 32 hexadecimal digits, for names that are derived from a text of any length."""
    return hashlib.sha256(text.encode()).hexdigest()[:32]


@dataclass(frozen=True)
class TableName:
    """A table name with its schema, which in SQLite is ``main``."""

    schema: str
    table: str

    @property
    def sql(self) -> str:
        return f"{quoted(self.schema)}.{quoted(self.table)}"

    @property
    def ledger_name(self) -> str:
        """The sink's name in the ledger; a recreated table has the same name as the dropped one."""
        return f"table:{self.sql}"


def resolve(tx: Transaction, name: str) -> TableName:
    """Resolve the table name that a user wrote.

    In PostgreSQL it is ``schema.table``, or a table in the first schema of the search path that the role, the
    database or the URL sets; a part with a dot is written in double quotes. In SQLite the name is used
    unchanged.
    """
    check_name("table", name)
    return _sqlite(name) if tx.dialect == "sqlite" else _postgres(tx, name)


def _sqlite(name: str) -> TableName:
    for prefix, owner in (("sqlite_", "SQLite"), ("penstock_", "the store")):
        if name.lower().startswith(prefix):
            raise InvalidNameError(
                f"the table name {in_quotes(name)} has the prefix {prefix}, which {owner} reserves for its "
                "own tables: choose another name"
            )
    return TableName("main", name)


def _postgres(tx: Transaction, name: str) -> TableName:
    match = _QUALIFIED.fullmatch(name)
    if match is None:
        raise InvalidNameError(
            f"{in_quotes(name)} is not a table name: write table or schema.table, with double quotes around "
            "a part that has a dot or begins with a double quote"
        )
    schema, table = (None if part is None else _unquoted(part) for part in match.groups())
    if schema is None:
        schema = tx.default_schema()
        if schema is None:
            raise InvalidNameError(
                f"the connection's search path has no schema for the table {in_quotes(name)}: write "
                "schema.table",
                condition="INVALID_NAME.NO_SCHEMA",
            )
    for part in (schema, table):
        if len(str(part).encode()) > POSTGRES_BYTES:
            raise InvalidNameError(
                f"the name {in_quotes(part)} is longer than PostgreSQL's 63 bytes: choose a shorter one"
            )
    resolved = TableName(str(schema), str(table))
    is_reserved = resolved.table in store_relations() or resolved.table.startswith((NAME_PREFIX, "applied_"))
    if quoted(resolved.schema) == tx.schema and is_reserved:
        raise InvalidNameError(f"{in_quotes(name)} is one of the store's own tables: choose another name")
    return resolved


def _unquoted(part: str) -> str:
    return part[1:-1].replace('""', '"') if part.startswith('"') else part
