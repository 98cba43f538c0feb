"""Queries that return rows of a table as the Insert messages that a slot would have sent for them."""

from __future__ import annotations

import struct
from collections.abc import Collection

from penstock.feeds.postgres.catalog import Table
from penstock.feeds.postgres.pgoutput import INSERT, NEW, NULL, TEXT
from penstock.feeds.postgres.server import quoted


def source_of(table: Table) -> str:
    """Return the table as a query's FROM names it: without the rows of tables that inherit from it."""
    return qualified(table) if table.partitioned else f"ONLY {qualified(table)}"


def qualified(table: Table) -> str:
    return f"{quoted(table.relation.schema)}.{quoted(table.relation.table)}"


def row_messages(table: Table, clauses: str, *, first: str = "", without: Collection[str] = ()) -> str:
    """Return a query for rows of a table as messages.

    concat() uses a type's output function, which a cast to text does not always do.

    Parameters
    ----------
    clauses
        What follows the query's FROM: which rows, and in which order.
    first
        What each row begins with, before the message in the column ``change``.
    without
        Columns that the table does not have any more, which are NULL.
    """
    columns = table.relation.columns
    head = struct.pack(">BIBh", INSERT, table.relation.oid, NEW, len(columns))
    texts = [f"{_text(column.name, without)} AS c{place}" for place, column in enumerate(columns)]
    values = [
        f"coalesce('\\x{TEXT:02x}'::bytea || int4send(octet_length(c{place})) || c{place}, '\\x{NULL:02x}')"
        for place in range(len(columns))
    ]
    # Without OFFSET each text would be computed twice.
    inner = f"SELECT {', '.join(texts) or 'NULL'} FROM {source_of(table)}{clauses} OFFSET 0"
    change = " || ".join([f"'\\x{head.hex()}'::bytea", *values])
    return f"SELECT {first}{change} AS change FROM ({inner}) AS rows"


def _text(column: str, without: Collection[str]) -> str:
    if column in without:
        return "NULL::bytea"
    name = quoted(column)
    # A composite value IS NULL, too, if all its fields are.
    return f"CASE WHEN {name} IS NOT DISTINCT FROM NULL THEN NULL ELSE convert_to(concat({name}), 'UTF8') END"
