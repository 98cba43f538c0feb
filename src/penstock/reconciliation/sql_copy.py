"""``SqlCopy``: a SQL table as a copy, and its repair while queries write to the table."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.types as pat

from penstock.queue.store import Store
from penstock.reconciliation.copies import SourceRows
from penstock.reconciliation.rows import Key, keys_of, stale_keys
from penstock.reconciliation.values import single_array
from penstock.store.database import Transaction
from penstock.tables.columns import VALID_TO, Layout, layout_of
from penstock.tables.names import TableName, quoted
from penstock.tables.row_encoding import database_schema, projected_schema, to_database_types
from penstock.tables.sql import staging, upsert

_MAX_KEYS = 100
"""The number of keys repaired in one transaction, during which other writers wait."""


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
    def label(self) -> str:
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
        """The condition that selects the rows to compare."""
        return f"{quoted(VALID_TO)} is null" if self.history else ""

    def repair(self, keys: Sequence[Key], source_rows: SourceRows) -> int:
        """Write rows of the source while other writers are blocked.

        The rows are read while the copy is locked. So they are at least as new as everything that was written
        before, and later writes are newer.
        """
        parts = [keys[first : first + _MAX_KEYS] for first in range(0, len(keys), _MAX_KEYS)]

        return sum(self._repair_part(part, source_rows) for part in parts)

    def _repair_part(self, keys: Sequence[Key], source_rows: SourceRows) -> int:
        # If the reply to a commit is lost, the next attempt finds the rows repaired.
        repaired: set[Key] = set()

        def work(tx: Transaction) -> None:
            repaired.update(self._repair_keys(tx, keys, source_rows))

        self.store.database.run(work, idempotent=True)
        return len(repaired)

    def _repair_keys(self, tx: Transaction, keys: Sequence[Key], source_rows: SourceRows) -> list[Key]:
        """Repair rows in a transaction; return the keys of those that differed."""
        self.lock(tx)
        copied = self.read_keys(tx, keys)
        rows = source_rows(keys)
        stale = stale_keys(rows, copied, self.key)
        to_repair = set(stale)
        source_keys = keys_of(rows.select(list(self.key)))
        deleted = sorted(to_repair - set(source_keys), key=repr)
        if deleted:
            self.delete(tx, deleted)
        writes = rows.filter(pa.array([key in to_repair for key in source_keys], pa.bool_()))
        if writes.num_rows:
            layout = layout_of(self.name, self.schema, self.key, tx.dialect)
            columns = staging.column_definitions(layout)
            upsert.upsert(tx, layout, staging.load_chunks(tx, columns, [_encode(writes, layout)]))
            staging.drop_loaded(tx, columns)
        return stale


def _encode(rows: pa.Table, layout: Layout) -> pa.RecordBatch:
    """Encode rows in the same way as the tasks of a query."""
    schema = projected_schema(layout)
    arrays = [_project(column, field) for column, field in zip(rows.columns, schema, strict=True)]
    batch = pa.RecordBatch.from_arrays(arrays, schema=schema)
    return to_database_types(batch, database_schema(schema, layout.dialect))


def _project(column: pa.ChunkedArray, field: pa.Field) -> pa.Array:
    if pat.is_binary(column.type) and pat.is_string(field.type):
        texts = [None if value is None else "\\x" + value.hex() for value in column.to_pylist()]
        return pa.array(texts, field.type)
    return single_array(column).cast(field.type)
