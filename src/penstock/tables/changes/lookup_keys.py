"""Lookup of keys in stored rows, and the Arrow streams in which tasks return the results to the driver."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as pat
from numpy.typing import NDArray

from penstock.tables.changes.merge_plan import with_row_numbers

_ROW = "_penstock_row"
Positions = NDArray[np.int64]


@dataclass
class LookupKeys:
    """Keys to look up in batches of stored rows."""

    keys: pa.Table = field(repr=False)
    _values_by_type: dict[pa.DataType, pa.ChunkedArray] = field(default_factory=dict, repr=False)
    """The keys of a single column, by the type of the stored column they are cast to."""
    _numbers_by_type: dict[pa.DataType, NDArray[np.int64]] = field(default_factory=dict, repr=False)
    """The same keys as sorted integers."""

    def positions_in(self, stored: pa.Table) -> Positions:
        """Return the sorted positions of the rows that have one of the keys; null is never a key.

        ``stored`` has the key columns in the same order, possibly with other names.
        """
        column = stored.column(0)
        if stored.num_columns > 1 or isinstance(column.type, pa.BaseExtensionType):
            return self._positions_by_join(stored)
        if column.null_count or not (pat.is_signed_integer(column.type) or pat.is_timestamp(column.type)):
            return self._positions_by_hash(column)
        return self._positions_by_bisection(column)

    def rows_in(self, batches: Iterable[pa.RecordBatch]) -> Iterator[tuple[Positions, pa.RecordBatch]]:
        """Yield the rows that have one of the keys, and their positions; the keys are the first columns."""
        key_columns = list(range(self.keys.num_columns))
        offset = 0
        for batch in batches:
            positions = self.positions_in(pa.Table.from_batches([batch]).select(key_columns))
            if len(positions):
                yield offset + positions, batch.take(pa.array(positions))
            offset += batch.num_rows

    def any_between(self, low: object, high: object) -> bool:
        """Whether a key may lie between bounds of the first key column; always true except for integers."""
        kind = self.keys.column(0).type
        if not (pat.is_signed_integer(kind) and type(low) is int and type(high) is int):
            return True
        numbers = self._sorted_numbers(kind)
        return bool(np.searchsorted(numbers, low) < np.searchsorted(numbers, high, "right"))

    def _positions_by_join(self, stored: pa.Table) -> Positions:
        names = [f"k{number}" for number in range(stored.num_columns)]
        stored_keys = stored.rename_columns(names)
        keys = self.keys.rename_columns(names).cast(stored_keys.schema)
        matched = with_row_numbers(stored_keys, _ROW).join(keys, keys=names, join_type="left semi")
        return np.sort(matched[_ROW].to_numpy())

    def _positions_by_hash(self, column: pa.ChunkedArray) -> Positions:
        if column.type not in self._values_by_type:
            self._values_by_type[column.type] = self.keys.column(0).drop_null().cast(column.type)
        values = self._values_by_type[column.type]
        if len(values) > len(column):
            # Build the hash table on the smaller side.
            values = values.filter(pc.is_in(values, value_set=column))
        return np.flatnonzero(pc.is_in(column, value_set=values))

    def _positions_by_bisection(self, column: pa.ChunkedArray) -> Positions:
        """Find integers or timestamps by binary search.

        They are sorted among the applied events, and often in tables with sequential keys.
        """
        values, numbers = column.cast(pa.int64()).to_numpy(), self._sorted_numbers(column.type)
        if (values[1:] < values[:-1]).any():
            if len(numbers) <= len(values):
                return self._positions_by_hash(column)
            nearest = np.minimum(np.searchsorted(numbers, values), len(numbers) - 1)
            return np.flatnonzero(numbers[nearest] == values)
        if len(values):
            start, stop = np.searchsorted(numbers, values[0]), np.searchsorted(numbers, values[-1], "right")
            numbers = numbers[start:stop]
        starts, ends = (np.searchsorted(values, numbers, side) for side in ("left", "right"))
        counts = ends - starts
        # The positions start, start + 1, … of each key.
        within_key = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
        positions: Positions = np.repeat(starts, counts) + within_key
        return positions

    def _sorted_numbers(self, kind: pa.DataType) -> NDArray[np.int64]:
        if kind not in self._numbers_by_type:
            keys = self.keys.column(0).drop_null().cast(kind).cast(pa.int64())
            self._numbers_by_type[kind] = np.unique(keys.to_numpy())
        return self._numbers_by_type[kind]


def to_arrow_stream(rows: pa.Table) -> bytes:
    """Return rows as an Arrow stream."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, rows.schema) as stream:
        stream.write_table(rows)
    return bytes(sink.getvalue())


def from_arrow_stream(stream: bytes) -> pa.Table:
    """Return the rows of an Arrow stream."""
    return pa.ipc.open_stream(stream).read_all()
