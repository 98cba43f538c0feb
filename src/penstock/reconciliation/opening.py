"""Opening a copy."""

from __future__ import annotations

from collections.abc import Iterable

from penstock.errors import TableRefusedError
from penstock.lake.storage import is_delta
from penstock.queue.store import connect
from penstock.reconciliation.copies import Copy, has_history, require_columns
from penstock.reconciliation.delta_copy import DeltaCopy
from penstock.reconciliation.postgres_copy import PostgresCopy
from penstock.reconciliation.source import SourceTable
from penstock.reconciliation.sql_copy import SqlCopy
from penstock.reconciliation.sqlite_copy import SqliteCopy
from penstock.store.database import Transaction
from penstock.tables.columns import VALID_FROM
from penstock.tables.names import TableName, quoted, resolve
from penstock.tables.sink import TableSink
from penstock.tables.sql import ddl
from penstock.tables.sql.ddl import ExistingTable


def open_copy(sink: TableSink, url: str, source: SourceTable) -> Copy:
    """Open the table of a sink; it must exist."""
    if is_delta(url):
        return DeltaCopy.of(url, sink.name, source.schema, source.key)
    return _open_sql_copy(url, sink.name, source)


def _open_sql_copy(url: str, name: str, source: SourceTable) -> SqlCopy:
    """Open a table in the database of a store."""
    store = connect(url, create=False)
    try:
        table, existing = store.database.run(lambda tx: _find_table(tx, name), write=False)
        names = _with_source_case(existing.types, source.schema.names, store.database.dialect)
        require_columns(source.schema, names, table.sql)
        history = has_history(source.schema, names)
        indexes = [set(_with_source_case(index, names, store.database.dialect)) for index in existing.unique]
        required = {*source.key, *([VALID_FROM] if history else [])}
        if required not in indexes:
            raise _no_unique_index(table, source.key)
        kind = SqliteCopy if store.database.dialect == "sqlite" else PostgresCopy
        return kind(store, table, source.schema, source.key, history)
    except BaseException:
        store.close()
        raise


def _find_table(tx: Transaction, name: str) -> tuple[TableName, ExistingTable]:
    table = resolve(tx, name)
    existing = ddl.find_table(tx, table)
    if existing is None:
        raise TableRefusedError(
            f"there is no table {table.sql}: check the name and the store's URL",
            condition="TABLE_REFUSED.NOT_FOUND",
            table=table.sql,
        )
    return table, existing


def _with_source_case(names: Iterable[str], source_names: Iterable[str], dialect: str) -> list[str]:
    """Return column names with the case that the source uses; SQLite ignores the case of ASCII letters."""
    if dialect != "sqlite":
        return list(names)
    spelling = {name.encode().lower(): name for name in source_names}
    return [spelling.get(name.encode().lower(), name) for name in names]


def _no_unique_index(table: TableName, key: Iterable[str]) -> TableRefusedError:
    keys = ", ".join(map(quoted, key))
    return TableRefusedError(
        f"the copy {table.sql} has no unique index on ({keys}), the key of the source, which is required to "
        f"find its rows: create unique index on {table.sql} ({keys})",
        condition="TABLE_REFUSED.NO_UNIQUE_INDEX",
        table=table.sql,
    )
