"""Segments into the columns that a read wants, whichever of the queue's columns they were written with.

Columns are only ever added behind those that there are. So the rows of any two segments have the same first columns, in the same places,
and how many a segment has (its width) says all about them. Of rows with more columns than are wanted Arrow leaves the others where they
are, at the end of the message; rows with fewer get nulls.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from penstock.arrow.segments import decode, decode_each
from penstock.store.records.catalog import QueueRecord


class _Filling:
    """Puts nulls into columns that rows do not have."""

    def __init__(self, there: Sequence[str], schema: pa.Schema) -> None:
        places = {name: place for place, name in enumerate(there)}
        self._schema = schema
        self._places = [places.get(field.name) for field in schema]
        self._types = [field.type for field in schema]
        self._nulls: dict[pa.DataType, pa.Array] = {}
        self._rows = -1

    def filled(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        if batch.num_rows != self._rows:
            # The next one is often as long, as of a crowd of small appends.
            self._rows = int(batch.num_rows)
            self._nulls = {kind: pa.nulls(self._rows, kind) for kind in self._missing()}
        columns = [
            self._nulls[kind] if place is None else batch.column(place)
            for place, kind in zip(self._places, self._types, strict=True)
        ]
        return pa.RecordBatch.from_arrays(columns, schema=self._schema)

    def _missing(self) -> set[pa.DataType]:
        return {kind for place, kind in zip(self._places, self._types, strict=True) if place is None}


@dataclass(frozen=True)
class _Way:
    """How segments of one width are decoded."""

    known: pa.Schema
    """The columns that the segment has, as far as they matter."""
    there: Sequence[str] | None
    """Which of them are wanted; all when None."""
    missing: _Filling | None
    """Where a part of what is wanted is not there."""


class Decoder:
    """Decodes segments of a queue into the columns of one read.

    Parameters
    ----------
    queue
        The queue as the reader knows it; segments may have columns that were added since, which stay out of sight.
    columns
        The columns to decode, in this order; all when None.
    """

    def __init__(self, queue: QueueRecord, columns: Sequence[str] | None = None) -> None:
        known = queue.schema
        if columns and list(columns) == known.names[: len(columns)]:
            # The first ones need not be chosen from among all.
            known, columns = queue.first_columns(len(columns)), None
        self._queue, self._known, self._columns = queue, known, columns
        self._ways: dict[int, _Way] = {}

    def rows(self, row: Any) -> pa.RecordBatch:
        """The rows of a segment, which a page gave."""
        width = min(row.width, len(self._known))
        way = self._ways.get(width)
        if way is None:
            way = self._ways[width] = self._way(width)
        batch = decode(row.data, way.known, way.there)
        return batch if way.missing is None else way.missing.filled(batch)

    def _way(self, width: int) -> _Way:
        if width == len(self._known):
            return _Way(self._known, self._columns, None)
        known = self._queue.first_columns(width)
        if self._columns is None:
            return _Way(known, None, _Filling(known.names, self._known))
        wanted = pa.schema([self._known.field(name) for name in self._columns])
        there = [name for name in wanted.names if name in known.names]
        return _Way(known, there, None if len(there) == len(wanted) else _Filling(there, wanted))


def decode_together(queue: QueueRecord, rows: Sequence[Any]) -> Iterator[pa.RecordBatch]:
    """The rows of several segments, a batch for each, as they are asked for, all with the columns of the widest of them.

    Parameters
    ----------
    queue
        With all columns that any of the segments has.
    rows
        Segments with their payloads, as a page gave them.
    """
    widths = [int(row.width) for row in rows]
    widest = queue.first_columns(max(widths))
    # Those of one width go together, since single ones cost several times as much, and come out in the order of all.
    each = {
        width: decode_each(
            [row.data for row, own in zip(rows, widths, strict=True) if own == width],
            queue.first_columns(width),
        )
        for width in set(widths)
    }
    missing = {width: _Filling(queue.first_columns(width).names, widest) for width in each}
    for width in widths:
        batch = next(each[width])
        yield batch if width == len(widest) else missing[width].filled(batch)
