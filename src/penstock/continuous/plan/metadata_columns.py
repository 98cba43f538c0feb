"""The metadata columns that every row of a continuous query carries: its kind, and its epoch."""

from __future__ import annotations

from functools import lru_cache

import pyarrow as pa

KIND, EPOCH = "__penstock_kind", "__penstock_epoch"
MARKER, FILLER = 1, 2
"""Kinds of rows besides the source's: the marker that ends an epoch, and a filler, which only pushes the
rows before it through the buffers between Spark and its Python workers."""

HIDDEN = pa.schema([pa.field(KIND, pa.int8(), nullable=False), pa.field(EPOCH, pa.int64(), nullable=False)])


class Labels:
    """Appender of the metadata columns to rows of one schema; not thread-safe."""

    def __init__(self, schema: pa.Schema) -> None:
        self._schema = pa.schema([*schema, *HIDDEN])
        self._epochs = pa.array([], HIDDEN.field(EPOCH).type)
        self._epoch = 0

    def beside(self, rows: pa.RecordBatch, kind: int, epoch: int) -> pa.RecordBatch:
        """Return the rows with the columns of one kind and epoch."""
        count = rows.num_rows
        # Most batches are small: the columns are made once for an epoch, and sliced.
        if epoch != self._epoch or count > len(self._epochs):
            self._epoch, self._epochs = epoch, _repeated(EPOCH, epoch, _room(count))
        columns = [*rows.columns, _kinds(kind, _room(count)).slice(0, count), self._epochs.slice(0, count)]
        return pa.RecordBatch.from_arrays(columns, schema=self._schema)


def _room(count: int) -> int:
    return max(1024, 1 << (count - 1).bit_length())


@lru_cache(maxsize=64)
def _kinds(kind: int, count: int) -> pa.Array:
    return _repeated(KIND, kind, count)


def _repeated(name: str, value: int, count: int) -> pa.Array:
    return pa.repeat(pa.scalar(value, HIDDEN.field(name).type), count)


def kinds_of(batch: pa.RecordBatch) -> bytes:
    """Return the kind of each row."""
    kinds = batch.column(KIND)
    return bytes(kinds.buffers()[1].slice(kinds.offset, len(kinds)))
