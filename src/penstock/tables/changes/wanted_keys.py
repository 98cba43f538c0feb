"""Lookup of keys in stored rows, and the Arrow streams in which tasks send the result to the driver."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as pat
from numpy.typing import NDArray

from penstock.tables.changes.merge_plan import numbered

_ROW = "_penstock_row"
Places = NDArray[np.int64]


@dataclass
class WantedKeys:
    """Keys that are looked up in rows, part by part."""

    keys: pa.Table = field(repr=False)
    _values: dict[pa.DataType, pa.ChunkedArray] = field(default_factory=dict, repr=False)
    """The keys of a single column, cast to the type of the rows' column."""
    _numbers: dict[pa.DataType, NDArray[np.int64]] = field(default_factory=dict, repr=False)
    """The same as sorted numbers."""

    def places_in(self, stored: pa.Table) -> Places:
        """Return the sorted positions of the rows that have one of the keys; null is never a key.

        ``stored`` has the key columns in the same order, possibly with other names.
        """
        column = stored.column(0)
        if stored.num_columns > 1 or isinstance(column.type, pa.BaseExtensionType):
            return self._joined(stored)
        if column.null_count or not (pat.is_signed_integer(column.type) or pat.is_timestamp(column.type)):
            return self._hashed(column)
        return self._bisected(column)

    def rows_in(self, batches: Iterable[pa.RecordBatch]) -> Iterator[tuple[Places, pa.RecordBatch]]:
        """Yield the rows that have one of the keys, and their positions; the keys are the first columns."""
        names = list(range(self.keys.num_columns))
        at = 0
        for batch in batches:
            places = self.places_in(pa.Table.from_batches([batch]).select(names))
            if len(places):
                yield at + places, batch.take(pa.array(places))
            at += batch.num_rows

    def any_between(self, low: object, high: object) -> bool:
        """Whether the first column of a key may be between two bounds; always true except for integers."""
        kind = self.keys.column(0).type
        if not (pat.is_signed_integer(kind) and type(low) is int and type(high) is int):
            return True
        wanted = self._sorted(kind)
        return bool(np.searchsorted(wanted, low) < np.searchsorted(wanted, high, "right"))

    def _joined(self, stored: pa.Table) -> Places:
        names = [f"k{number}" for number in range(stored.num_columns)]
        plain = stored.rename_columns(names)
        wanted = self.keys.rename_columns(names).cast(plain.schema)
        matched = numbered(plain, _ROW).join(wanted, keys=names, join_type="left semi")
        return np.sort(matched[_ROW].to_numpy())

    def _hashed(self, column: pa.ChunkedArray) -> Places:
        if column.type not in self._values:
            self._values[column.type] = self.keys.column(0).drop_null().cast(column.type)
        values = self._values[column.type]
        if len(values) > len(column):
            # Build the hash table from the smaller side.
            values = values.filter(pc.is_in(values, value_set=column))
        return np.flatnonzero(pc.is_in(column, value_set=values))

    def _bisected(self, column: pa.ChunkedArray) -> Places:
        """Find numbers or times by bisection.

        They are sorted in the record, and often in tables with sequential keys.
        """
        values, wanted = column.cast(pa.int64()).to_numpy(), self._sorted(column.type)
        if (values[1:] < values[:-1]).any():
            if len(wanted) <= len(values):
                return self._hashed(column)
            near = np.minimum(np.searchsorted(wanted, values), len(wanted) - 1)
            return np.flatnonzero(wanted[near] == values)
        if len(values):
            low, high = np.searchsorted(wanted, values[0]), np.searchsorted(wanted, values[-1], "right")
            wanted = wanted[low:high]
        first, end = (np.searchsorted(values, wanted, side) for side in ("left", "right"))
        counts = end - first
        # The places first, first + 1, … of each key.
        within = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
        found: Places = np.repeat(first, counts) + within
        return found

    def _sorted(self, kind: pa.DataType) -> NDArray[np.int64]:
        if kind not in self._numbers:
            keys = self.keys.column(0).drop_null().cast(kind).cast(pa.int64())
            self._numbers[kind] = np.unique(keys.to_numpy())
        return self._numbers[kind]


def as_stream(rows: pa.Table) -> bytes:
    """Return rows as an Arrow stream."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, rows.schema) as stream:
        stream.write_table(rows)
    return bytes(sink.getvalue())


def from_stream(stream: bytes) -> pa.Table:
    """Return the rows of an Arrow stream."""
    return pa.ipc.open_stream(stream).read_all()
