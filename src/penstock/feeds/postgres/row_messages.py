"""Queries that return the rows of a table as Insert messages, like those that a slot sends."""

from __future__ import annotations

import struct
from collections.abc import Collection

from penstock.feeds.postgres.catalog import Table
from penstock.feeds.postgres.pgoutput import INSERT, NEW, NULL, TEXT
from penstock.feeds.postgres.server import quoted


def source_of(table: Table) -> str:
    """Return the table for a FROM clause, without rows of tables that inherit from it."""
    return qualified(table) if table.partitioned else f"ONLY {qualified(table)}"


def qualified(table: Table) -> str:
    return f"{quoted(table.relation.schema)}.{quoted(table.relation.table)}"


def row_messages(table: Table, clauses: str, *, first: str = "", without: Collection[str] = ()) -> str:
    """Return a query for rows of a table as messages.

    The query uses concat(), which always calls the type's output function; a cast to text does not always do
    so.

    Parameters
    ----------
    clauses
        The SQL clauses after FROM, which select and order the rows.
    first
        SQL of columns to put before the column ``change`` with the message.
    without
        Columns that the table no longer has, which are read as NULL.
    """
    columns = table.relation.columns
    head = struct.pack(">BIBh", INSERT, table.relation.oid, NEW, len(columns))
    texts = [f"{_text(column.name, without)} AS c{place}" for place, column in enumerate(columns)]
    values = [
        f"coalesce('\\x{TEXT:02x}'::bytea || int4send(octet_length(c{place})) || c{place}, '\\x{NULL:02x}')"
        for place in range(len(columns))
    ]
    # OFFSET 0 prevents PostgreSQL from computing each text twice.
    inner = f"SELECT {', '.join(texts) or 'NULL'} FROM {source_of(table)}{clauses} OFFSET 0"
    change = " || ".join([f"'\\x{head.hex()}'::bytea", *values])
    return f"SELECT {first}{change} AS change FROM ({inner}) AS rows"


def _text(column: str, without: Collection[str]) -> str:
    if column in without:
        return "NULL::bytea"
    name = quoted(column)
    # IS NULL is not used, because it is also true for a composite value whose fields are all NULL.
    return f"CASE WHEN {name} IS NOT DISTINCT FROM NULL THEN NULL ELSE convert_to(concat({name}), 'UTF8') END"
