"""``SqliteCopy``: a SQLite table as a copy."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.types as pat

from penstock.feeds.postgres.values import from_text
from penstock.reconciliation.paging import PageSize
from penstock.reconciliation.rows import Key, key_table
from penstock.reconciliation.sql_copy import SqlCopy
from penstock.reconciliation.values import convert_columns
from penstock.store.database import Transaction
from penstock.tables.names import quoted
from penstock.tables.row_encoding import database_schema, to_database_types

_MAX_KEYS = 500


@dataclass(frozen=True)
class SqliteCopy(SqlCopy):
    """An open SQLite table."""

    @property
    def nan_as_null(self) -> bool:
        return True

    @property
    def _columns(self) -> str:
        return ", ".join(quoted(name) for name in self.schema.names)

    @property
    def _keys(self) -> str:
        return ", ".join(quoted(name) for name in self.key)

    def pages(self, rows: int) -> Iterator[pa.Table]:
        after: tuple[Any, ...] | None = None
        size = PageSize(rows)
        key_indexes = [self.schema.names.index(name) for name in self.key]
        while True:
            conditions = [self.current] if self.current else []
            if after is not None:
                conditions.append(f"({self._keys}) > ({_literals(after)})")
            where = f" where {' and '.join(conditions)}" if conditions else ""
            limit = size.rows
            rows_of_page = self._read(
                f"select {self._columns} from {self.name.sql}{where} order by {self._keys} limit {limit}"
            )
            if rows_of_page:
                after = tuple(rows_of_page[-1][key_index] for key_index in key_indexes)
                table = self._typed(rows_of_page)
                size.record_bytes(table.nbytes)
                yield table
            if len(rows_of_page) < limit:
                return

    def _read(self, text: str) -> list[tuple[Any, ...]]:
        return self.store.database.run(lambda tx: tx.query(text), write=False)

    def _typed(self, rows: Sequence[tuple[Any, ...]]) -> pa.Table:
        values = zip(*rows, strict=True) if rows else ((),) * len(self.schema)
        columns = {
            name: _to_array(column_values)
            for name, column_values in zip(self.schema.names, values, strict=True)
        }
        return convert_columns(columns, self.schema, _convert, self.key, self.label)

    def find(self, keys: Sequence[Key]) -> Iterator[pa.Table]:
        size = PageSize(_MAX_KEYS)
        for part in size.parts(keys):
            rows = self._typed(self._read(self._with_keys(part)))
            size.record_bytes(rows.nbytes)
            yield rows

    def _with_keys(self, keys: Sequence[Key]) -> str:
        where = f" and {self.current}" if self.current else ""
        return f"select {self._columns} from {self.name.sql} where {self._key_condition(keys)}{where}"

    def _key_condition(self, keys: Sequence[Key]) -> str:
        return f"({self._keys}) in (values {', '.join(f'({_literals(key)})' for key in self._encoded(keys))})"

    def _encoded(self, keys: Sequence[Key]) -> list[tuple[Any, ...]]:
        """Convert keys to the values that the table stores for them."""
        table = key_table(pa.schema([self.schema.field(name) for name in self.key]), keys)
        numbered = table.rename_columns([str(number) for number in range(len(self.key))])
        batch = numbered.combine_chunks().to_batches()[0]
        database_batch = to_database_types(batch, database_schema(batch.schema, "sqlite"))
        return list(zip(*(column.to_pylist() for column in database_batch.columns), strict=True))

    def lock(self, tx: Transaction) -> None:
        """Do nothing, because a writing transaction locks the whole database."""

    def read_keys(self, tx: Transaction, keys: Sequence[Key]) -> pa.Table:
        return self._typed(tx.query(self._with_keys(keys)))

    def delete(self, tx: Transaction, keys: Sequence[Key]) -> None:
        tx.change(f"delete from {self.name.sql} where {self._key_condition(keys)}")


def _to_array(values: Sequence[Any]) -> pa.Array:
    """Convert values to an array; to text if they have different types."""
    try:
        return pa.array(values)
    except (pa.ArrowInvalid, pa.ArrowTypeError, OverflowError):
        texts = [None if value is None else _as_text(value) for value in values]
        return pa.array(texts, pa.string())


def _as_text(value: Any) -> str:
    return "\\x" + value.hex() if isinstance(value, bytes) else str(value)


def _convert(values: pa.Array, kind: pa.DataType) -> pa.Array:
    if pat.is_null(values.type):
        return pa.nulls(len(values), kind)
    if pat.is_boolean(kind) and pat.is_integer(values.type):
        flags = values.cast(pa.bool_())
        if not flags.cast(values.type).equals(values):
            raise pa.ArrowInvalid("a boolean is 0 or 1")
        return flags
    if pat.is_string(values.type) and not pat.is_boolean(kind):
        return from_text(values, kind)
    if pat.is_string(kind) or (pat.is_binary(values.type) != pat.is_binary(kind)) or pat.is_temporal(kind):
        raise pa.ArrowInvalid(f"{values.type} is no {kind}")
    return values.cast(kind)


def _literals(values: Sequence[Any]) -> str:
    return ", ".join(map(_literal, values))


def _literal(value: Any) -> str:
    if isinstance(value, bytes):
        return f"X'{value.hex()}'"
    if isinstance(value, str):
        # Text may contain the NUL character.
        return f"cast(X'{value.encode().hex()}' as text)"
    return repr(value)
