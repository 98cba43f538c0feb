"""``PostgresCopy``: a PostgreSQL table as a copy."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from penstock.feeds.postgres.table_rows import texts_of
from penstock.feeds.postgres.values import from_text
from penstock.reconciliation.paging import PageSize, pages
from penstock.reconciliation.postgres_sql import (
    COLUMN_TYPES_QUERY,
    SESSION_SETTINGS,
    Bound,
    Checksum,
    PostgresTable,
)
from penstock.reconciliation.rows import Key
from penstock.reconciliation.sql_copy import SqlCopy
from penstock.reconciliation.values import convert_columns, single_array
from penstock.store.database import Transaction

if TYPE_CHECKING:
    from penstock.store.postgres.transaction import PostgresTransaction

_MAX_KEYS = 500


@dataclass(frozen=True)
class PostgresCopy(SqlCopy):
    """An open PostgreSQL table."""

    @cached_property
    def column_types(self) -> dict[str, tuple[str, bool]]:
        """The type of each column for a cast, and whether its text is ordered by UTF-8 bytes."""
        oid = "select c.oid::bigint from pg_class as c join pg_namespace as n on n.oid = c.relnamespace"

        def read(tx: Transaction) -> dict[str, tuple[str, bool]]:
            ((number,),) = tx.query(
                f"{oid} where n.nspname = :schema and c.relname = :name",
                schema=self.name.schema,
                name=self.name.table,
            )
            return {name: (kind, ordered) for name, kind, ordered in tx.query(COLUMN_TYPES_QUERY, oid=number)}

        return self.store.database.run(read, write=False)

    @cached_property
    def sql(self) -> PostgresTable:
        types = {name: kind for name, (kind, _) in self.column_types.items()}
        return PostgresTable(self.name.sql, self.current, tuple(self.schema.names), self.key, types)

    def _run_copy(self, text: str) -> pa.Table:
        def read(tx: Transaction) -> pa.Table:
            return self._copy_out(tx, text)

        return self.store.database.run(read, write=False)

    def _copy_out(self, tx: Transaction, text: str) -> pa.Table:
        tx.require_trusted_owner(self.name.schema, self.name.table)
        tx.execute(SESSION_SETTINGS)
        return texts_of(_postgres(tx).copy_out(text), self.schema.names)

    def _typed(self, texts: pa.Table) -> pa.Table:
        columns = {name: single_array(texts[name]) for name in self.schema.names}
        return convert_columns(columns, self.schema, from_text, self.key, self.label)

    def rows(self, after: Bound | None, upto: Bound | None) -> pa.Table:
        """Read the rows of a range."""
        return self._typed(self._run_copy(self.sql.rows(after, upto)))

    def bound(self, after: Bound | None, upto: Bound | None, count: int) -> Bound | None:
        """Return the key of the nth row of a range; None if the range has fewer rows."""
        rows = self._query(self.sql.bound(after, upto, count))
        return rows[0] if rows else None

    def checksum(self, after: Bound | None, upto: Bound | None) -> Checksum:
        (row,) = self._query(self.sql.checksum(after, upto))
        return Checksum(*row)

    def _query(self, text: str) -> list[tuple[Any, ...]]:
        def read(tx: Transaction) -> list[tuple[Any, ...]]:
            tx.execute(SESSION_SETTINGS)
            return tx.query(text)

        return self.store.database.run(read, write=False)

    def pages(self, rows: int) -> Iterator[pa.Table]:
        def read(after: Bound | None, count: int) -> pa.Table:
            return self._run_copy(self.sql.rows(after, None, count))

        return map(self._typed, pages(read, self.key, rows))

    def find(self, keys: Sequence[Key]) -> Iterator[pa.Table]:
        size = PageSize(_MAX_KEYS)
        for part in size.parts(keys):
            texts = self._run_copy(self.sql.with_keys(part))
            size.record_bytes(texts.nbytes)
            yield self._typed(texts)

    def lock(self, tx: Transaction) -> None:
        # This mode does not block readers.
        tx.execute(f"lock table {self.name.sql} in share row exclusive mode")
        tx.require_trusted_owner(self.name.schema, self.name.table)

    def read_keys(self, tx: Transaction, keys: Sequence[Key]) -> pa.Table:
        return self._typed(self._copy_out(tx, self.sql.with_keys(keys)))

    def delete(self, tx: Transaction, keys: Sequence[Key]) -> None:
        relation, _, condition = self.sql.keys_join(keys).rpartition(" ON ")
        tx.change(f"delete from {self.name.sql} as own using {relation} where {condition}")


def _postgres(tx: Transaction) -> PostgresTransaction:
    from penstock.store.postgres.transaction import PostgresTransaction

    assert isinstance(tx, PostgresTransaction)
    return tx
