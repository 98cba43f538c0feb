"""Decode segments into the columns of a read, whichever columns they were written with.

Columns are only added at the end, so the columns of any segment are the first ones of the queue's, and their
number (the width) is all there is to know about them. Arrow leaves the other columns of a wider segment
undecoded; a narrower segment gets nulls.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import pyarrow as pa

from penstock.arrow.segments import decode, decode_each
from penstock.errors import InvalidInputError, PenstockError, StoreError
from penstock.store.database import Row
from penstock.store.records.catalog import QueueRecord

MOST_ROWS = 1 << 20
"""The most rows of a batch. A segment of a few bytes may claim any number of rows, and what a reader adds to
them, such as their times, takes memory.
"""
_MOST_NULLS = 32 << 20
"""The most bytes of nulls in a batch."""
_SAMPLE = 1024
_OF_ROWS = (
    "SEGMENT_UNREADABLE", "SEGMENT_MISSING", "STORE_ERROR.OBJECT_MISSING", "STORE_ERROR.OBJECT_DAMAGED",
)  # fmt: skip


class _NullFiller:
    """Adds the columns that rows lack, as nulls."""

    def __init__(self, present: Sequence[str], schema: pa.Schema) -> None:
        self._schema = schema
        self._columns = [
            (present.index(field.name) if field.name in present else None, field.type) for field in schema
        ]
        self._nulls: dict[pa.DataType, pa.Array] = {}
        self._rows = -1
        added = [pa.nulls(_SAMPLE, kind) for index, kind in self._columns if index is None]
        size = sum(nulls.nbytes for nulls in added)
        self.most_rows = max(_MOST_NULLS * _SAMPLE // max(size, 1), 1)
        """How many rows may be filled at once."""

    def filled(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        if batch.num_rows != self._rows:
            # Adjacent small appends often have the same length, so the arrays are kept.
            self._rows = int(batch.num_rows)
            self._nulls = {kind: pa.nulls(self._rows, kind) for index, kind in self._columns if index is None}
        columns = [
            self._nulls[kind] if index is None else batch.column(index) for index, kind in self._columns
        ]
        return pa.RecordBatch.from_arrays(columns, schema=self._schema)


@dataclass(frozen=True)
class _Plan:
    """How to decode segments of one width."""

    schema: pa.Schema
    columns: Sequence[str] | None
    """The columns to decode; all of the schema when None."""
    filler: _NullFiller | None


class Decoder:
    """Decodes segments into the columns of one read, in their order; all columns when None.

    Columns that were added after the reader looked the queue up are left out.
    """

    def __init__(self, queue: QueueRecord, columns: Sequence[str] | None = None) -> None:
        schema = queue.schema
        if columns and list(columns) == schema.names[: len(columns)]:
            # The first columns need no selection.
            schema, columns = queue.first_columns(len(columns)), None
        self._queue, self._schema, self._columns = queue, schema, columns
        self._plans: dict[int, _Plan] = {}

    def rows(self, row: Row, start: int, end: int) -> Iterator[pa.RecordBatch]:
        """Yield rows [start, end) of a segment of a page, in pieces if they are many."""
        _require_width(self._queue, row.width)
        width = min(row.width, len(self._schema))
        plan = self._plans.get(width)
        if plan is None:
            plan = self._plans[width] = self._plan(width)
        batch = decode(row.data, plan.schema, plan.columns)
        require_rows(row, batch)
        most = MOST_ROWS if plan.filler is None else min(plan.filler.most_rows, MOST_ROWS)
        for place in range(start, end, most):
            piece = batch.slice(place - row.start_index, min(most, end - place))
            # After the slice: a reader of few rows does not wait for the nulls of all.
            yield piece if plan.filler is None else plan.filler.filled(piece)

    def _plan(self, width: int) -> _Plan:
        if width == len(self._schema):
            return _Plan(self._schema, self._columns, None)
        schema = self._queue.first_columns(width)
        if self._columns is None:
            return _Plan(schema, None, _NullFiller(schema.names, self._schema))
        wanted = pa.schema([self._schema.field(name) for name in self._columns])
        present = [name for name in wanted.names if name in schema.names]
        return _Plan(schema, present, None if len(present) == len(wanted) else _NullFiller(present, wanted))


def decode_together(queue: QueueRecord, rows: Sequence[Row]) -> Iterator[pa.RecordBatch]:
    """Decode several segments lazily, a batch for each, all with the columns of the widest one; ``queue`` has
    all of these columns.
    """
    widths = [int(row.width) for row in rows]
    for width in set(widths):
        _require_width(queue, width)
    widest = queue.first_columns(max(widths))
    # One decoder for all segments of a width: single ones cost several times as much.
    batches = {
        width: decode_each(
            [row.data for row, own in zip(rows, widths, strict=True) if own == width],
            queue.first_columns(width),
        )
        for width in set(widths)
    }
    fillers = {width: _NullFiller(queue.first_columns(width).names, widest) for width in batches}
    for row, width in zip(rows, widths, strict=True):
        batch = next(batches[width])
        # Compacted with its neighbours, a segment of other rows would make theirs unreadable too.
        require_rows(row, batch)
        yield batch if width == len(widest) else fillers[width].filled(batch)


def _require_width(queue: QueueRecord, width: int) -> None:
    """Refuse a segment with fewer columns than the queue was created with, which nobody has written.

    A segment without columns has no bytes for its rows, and could claim any number of them.
    """
    if width < queue.first_width:
        raise StoreError(
            f"the segment has {width} columns, and the queue was created with {queue.first_width}: the store "
            "is damaged; restore a backup",
            condition="SEGMENT_UNREADABLE",
            columns=width,
        )


def require_rows(row: Row, batch: pa.RecordBatch) -> None:
    """Refuse a segment with more or fewer rows than the log says."""
    if batch.num_rows != row.end_index - row.start_index:
        raise StoreError(
            f"the segment has {batch.num_rows} rows: the store is damaged; restore a backup",
            condition="SEGMENT_UNREADABLE",
            rows=batch.num_rows,
        )


def concerns_rows(error: PenstockError) -> bool:
    """Whether an error is about some rows that cannot be read, or not be written in one piece: others can."""
    return error.condition in _OF_ROWS or isinstance(error, InvalidInputError)


def unreadable(queue: QueueRecord, partition: int, start: int, end: int, error: StoreError) -> StoreError:
    """The error of a segment among rows [start, end), with its place."""
    return StoreError(
        f"queue {queue.name!r}, partition {partition}, rows [{start}, {end}): {error.message}",
        condition=error.condition,
        **{
            **error.parameters,
            "queue": queue.name,
            "partition": partition,
            "start": start,
            "end": end,
        },
    )
