"""SQL tables as copies: what all kinds share, and repairs while queries write to the table."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.types as pat

from penstock.queue.store import Store
from penstock.reconciliation.copies import SourceRows
from penstock.reconciliation.rows import Key, keys_of, stale_keys
from penstock.reconciliation.values import whole
from penstock.store.database import Transaction
from penstock.tables.columns import VALID_TO, Layout, layout_of
from penstock.tables.names import TableName, quoted
from penstock.tables.row_encoding import database_schema, projected_schema, to_database_types
from penstock.tables.sql import staging, upsert

_KEYS_AT_ONCE = 100
"""Repaired in one transaction, in which other writers wait."""


@dataclass(frozen=True)
class SqlCopy(ABC):
    """An open SQL table."""

    store: Store
    name: TableName
    schema: pa.Schema
    key: tuple[str, ...]
    history: bool

    @property
    def nan_as_null(self) -> bool:
        return False

    @property
    def shown(self) -> str:
        return self.name.sql

    def close(self) -> None:
        self.store.close()

    @abstractmethod
    def pages(self, rows: int) -> Iterator[pa.Table]: ...

    @abstractmethod
    def find(self, keys: Sequence[Key]) -> Iterator[pa.Table]: ...

    @abstractmethod
    def lock(self, tx: Transaction) -> None:
        """Block other writers of the table until the transaction ends."""

    @abstractmethod
    def read_keys(self, tx: Transaction, keys: Sequence[Key]) -> pa.Table: ...

    @abstractmethod
    def delete(self, tx: Transaction, keys: Sequence[Key]) -> None: ...

    @property
    def current(self) -> str:
        """The condition of the rows that are compared."""
        return f"{quoted(VALID_TO)} is null" if self.history else ""

    def repair(self, keys: Sequence[Key], source_rows: SourceRows) -> int:
        """Write the source's rows while other writers are blocked.

        They are read while the copy is locked. So they are at least as new as all that was written to it
        before, and later writes are newer.
        """
        parts = [keys[first : first + _KEYS_AT_ONCE] for first in range(0, len(keys), _KEYS_AT_ONCE)]

        def repaired(part: Sequence[Key]) -> int:
            return self.store.database.run(
                lambda tx: self._repair_part(tx, part, source_rows), idempotent=True
            )

        return sum(map(repaired, parts))

    def _repair_part(self, tx: Transaction, keys: Sequence[Key], source_rows: SourceRows) -> int:
        self.lock(tx)
        found = self.read_keys(tx, keys)
        rows = source_rows(keys)
        wrong = stale_keys(rows, found, self.key)
        wanted = set(wrong)
        present = keys_of(rows.select(list(self.key)))
        gone = sorted(wanted - set(present), key=repr)
        if gone:
            self.delete(tx, gone)
        writes = rows.filter(pa.array([key in wanted for key in present], pa.bool_()))
        if writes.num_rows:
            layout = layout_of(self.name, self.schema, self.key, tx.dialect)
            columns = staging.relation_columns(layout)
            upsert.upsert(tx, layout, staging.load(tx, columns, [_encoded(writes, layout)]))
            staging.clear(tx, columns)
        return len(wrong)


def _encoded(rows: pa.Table, layout: Layout) -> pa.RecordBatch:
    """Return rows as the tasks of a query encode them."""
    schema = projected_schema(layout)
    arrays = [_projected(column, field) for column, field in zip(rows.columns, schema, strict=True)]
    batch = pa.RecordBatch.from_arrays(arrays, schema=schema)
    return to_database_types(batch, database_schema(schema, layout.dialect))


def _projected(column: pa.ChunkedArray, field: pa.Field) -> pa.Array:
    if pat.is_binary(column.type) and pat.is_string(field.type):
        texts = [None if value is None else "\\x" + value.hex() for value in column.to_pylist()]
        return pa.array(texts, field.type)
    return whole(column).cast(field.type)
