"""The mark of a SQL table: an index without entries, by which a table that was dropped and recreated is
recognized.

The database drops the index with its table, keeps it when rows are deleted or the table is renamed, and
includes it in a backup. Its predicate is false, so it costs nothing when rows are written.
"""

from __future__ import annotations

from penstock.store.database import Transaction
from penstock.tables.columns import Layout
from penstock.tables.sql import ddl

_PREFIX = "penstock_mark_"
_INSUFFICIENT_PRIVILEGE = "42501"
_FIND = {
    "sqlite": (
        "select 1 from main.sqlite_schema "
        "where type = 'index' and lower(tbl_name) = lower(:table) and name like :pattern"
    ),
    "postgres": (
        "select 1 from pg_index as i "
        "join pg_class as mark on mark.oid = i.indexrelid "
        "join pg_class as c on c.oid = i.indrelid "
        "join pg_namespace as n on n.oid = c.relnamespace "
        "where n.nspname = :schema and c.relname = :table and mark.relname like :pattern"
    ),
}


def has_mark(tx: Transaction, layout: Layout) -> bool:
    """Return whether a table has a mark."""
    name = {"table": layout.name.table}
    if tx.dialect == "postgres":
        name["schema"] = layout.name.schema
    return bool(tx.query(_FIND[tx.dialect], pattern=f"{_PREFIX}%", **name))


def create_mark(tx: Transaction, layout: Layout) -> bool:
    """Mark a table; return False if the role cannot, since it does not own the table."""
    tx.execute("savepoint marking")
    try:
        tx.execute(
            f"create index {ddl.new_index(layout, _PREFIX)} ({layout.keys[0].sql}) where "
            f"{'0' if tx.dialect == 'sqlite' else 'false'}"
        )
    except Exception as error:
        if getattr(error, "sqlstate", None) != _INSUFFICIENT_PRIVILEGE:
            raise
        tx.execute("rollback to savepoint marking")
        return False
    tx.execute("release savepoint marking")
    return True
