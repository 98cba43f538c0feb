"""Opening of a copy."""

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
    """Open the table of a sink, which has to exist."""
    if is_delta(url):
        return DeltaCopy.of(url, sink.name, source.schema, source.key)
    return _open_sql_copy(url, sink.name, source)


def _open_sql_copy(url: str, name: str, source: SourceTable) -> SqlCopy:
    """Open the table with a name in the database of a store."""
    store = connect(url, create=False)
    try:
        table, existing = store.database.run(lambda tx: _look_up(tx, name), write=False)
        names = _spelled(existing.types, source.schema.names, store.database.dialect)
        require_columns(source.schema, names, table.sql)
        history = has_history(source.schema, names)
        indexes = [set(_spelled(index, names, store.database.dialect)) for index in existing.unique]
        wanted = {*source.key, *([VALID_FROM] if history else [])}
        if wanted not in indexes:
            raise _not_indexed(table, source.key)
        kind = SqliteCopy if store.database.dialect == "sqlite" else PostgresCopy
        return kind(store, table, source.schema, source.key, history)
    except BaseException:
        store.close()
        raise


def _look_up(tx: Transaction, name: str) -> tuple[TableName, ExistingTable]:
    table = resolve(tx, name)
    existing = ddl.find_table(tx, table)
    if existing is None:
        raise TableRefusedError(
            f"there is no table {table.sql}: check the name and the store's URL",
            condition="TABLE_REFUSED.NOT_FOUND",
            table=table.sql,
        )
    return table, existing


def _spelled(names: Iterable[str], wanted: Iterable[str], dialect: str) -> list[str]:
    """Return columns as the source spells them: SQLite ignores the case of ASCII letters."""
    if dialect != "sqlite":
        return list(names)
    spelling = {name.encode().lower(): name for name in wanted}
    return [spelling.get(name.encode().lower(), name) for name in names]


def _not_indexed(table: TableName, key: Iterable[str]) -> TableRefusedError:
    keys = ", ".join(map(quoted, key))
    return TableRefusedError(
        f"the copy {table.sql} has no unique index on ({keys}), the key of the source, by which its rows are "
        f"found: create unique index on {table.sql} ({keys})",
        condition="TABLE_REFUSED.NO_UNIQUE_INDEX",
        table=table.sql,
    )
