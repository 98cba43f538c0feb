"""Schema evolution of a SQL table for rows with new columns or wider types."""

from __future__ import annotations

import logging

from penstock.errors import TableRefusedError
from penstock.store.database import Transaction
from penstock.tables.columns import Column, Layout
from penstock.tables.sql import ddl

log = logging.getLogger("penstock.tables")
_DEPENDENT_OBJECT_STATES = ("0A000", "2BP01")
"""SQL states for a column that a view, a rule or a policy uses."""


def evolve(tx: Transaction, layout: Layout) -> None:
    """Add the columns that the table lacks, and widen those whose type is too narrow for the rows.

    A key is never added. Existing rows have NULL in new columns.
    """
    types = _column_types(tx, layout)
    if types is None:
        return
    # In PostgreSQL, another query may add the column at the same time; SQLite has one writer at a time.
    add_column = "add column if not exists" if tx.dialect == "postgres" else "add column"
    alterations = []
    for column in layout.stored_layout.columns:
        kind = types.get(column.name)
        if kind is None and not column.key:
            alterations.append(_alter(tx, layout, column, f"{add_column} {column.sql} {column.ddl_type}"))
        elif kind is not None and ddl.needs_widening(column, kind, tx.dialect):
            alterations.append(
                _alter(tx, layout, column, f"alter column {column.sql} type {column.ddl_type}")
            )
    if alterations:
        log.info(
            "the table %s is changed to take new rows: %s",
            layout.name.sql,
            ", ".join(alterations),
            extra={"action": "table_evolves", "table": layout.name.sql, "columns": alterations},
        )


def new_columns(tx: Transaction, layout: Layout) -> list[str]:
    """Return the columns of the rows that the table lacks; an empty list if the table does not exist."""
    types = _column_types(tx, layout)
    if types is None:
        return []
    return [
        column.name for column in layout.stored_layout.columns if not column.key and column.name not in types
    ]


def _column_types(tx: Transaction, layout: Layout) -> dict[str, str] | None:
    """Return the types of the table's columns, named as in the rows; None if the table does not exist."""
    existing = ddl.find_table(tx, layout.name)
    return None if existing is None else ddl.with_spelling_of(existing, layout).types


def _alter(tx: Transaction, layout: Layout, column: Column, change: str) -> str:
    """Run ALTER TABLE with a change, and return the change."""
    statement = f"alter table {layout.name.sql} {change}"
    try:
        tx.execute(statement)
    except Exception as error:
        if getattr(error, "sqlstate", None) not in _DEPENDENT_OBJECT_STATES:
            raise
        raise TableRefusedError(
            f"the column {column.sql} of {layout.name.sql} needs another type for the rows, and a view or a "
            f"policy uses it: drop that, run {statement}, and create it again",
            condition="TABLE_REFUSED.DEPENDED_ON",
        ) from error
    return change
