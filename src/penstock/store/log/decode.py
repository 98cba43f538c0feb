"""Decode segments into the columns of a read, whichever columns they were written with (`QueueColumns`).

Arrow does not decode columns that are not read. Rows get nulls in columns that they lack, and values are
converted to the types of the read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import pyarrow as pa

from penstock.arguments import in_quotes
from penstock.arrow.coerce import Misfit, conform_array, same_type
from penstock.arrow.segments import decode, decode_each
from penstock.errors import InvalidInputError, PenstockError, SchemaMismatchError, StoreError
from penstock.store.database import Row
from penstock.store.records.catalog import QueueRecord

MOST_ROWS = 1 << 20
"""The largest number of rows in a batch. A segment of a few bytes may claim any number of rows, and what a
reader adds to each row, such as its time, takes memory.
"""
_MOST_NULLS = 32 << 20
"""The largest number of bytes of nulls in a batch."""
_SAMPLE = 1024
_OF_ROWS = (
    "SEGMENT_UNREADABLE", "SEGMENT_MISSING", "STORE_ERROR.OBJECT_MISSING", "STORE_ERROR.OBJECT_DAMAGED",
)  # fmt: skip


class _Fitter:
    """Fits rows to the columns of a read: fills missing columns with nulls, and converts the others."""

    def __init__(self, queue: QueueRecord, present: Sequence[str], schema: pa.Schema) -> None:
        self._queue, self._schema = queue, schema
        self._columns = [
            (present.index(field.name) if field.name in present else None, field.type) for field in schema
        ]
        self._nulls: dict[pa.DataType, pa.Array] = {}
        self._rows = -1
        added = [pa.nulls(_SAMPLE, kind) for index, kind in self._columns if index is None]
        size = sum(nulls.nbytes for nulls in added)
        self.most_rows = max(_MOST_NULLS * _SAMPLE // max(size, 1), 1)
        """The largest number of rows to fill in one batch."""

    def fitted(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        if batch.num_rows != self._rows:
            # Adjacent small appends often have the same length, so the arrays are kept.
            self._rows = int(batch.num_rows)
            self._nulls = {kind: pa.nulls(self._rows, kind) for index, kind in self._columns if index is None}
        columns = [
            self._nulls[kind] if index is None else self._typed(batch.column(index), kind, place)
            for place, (index, kind) in enumerate(self._columns)
        ]
        return pa.RecordBatch.from_arrays(columns, schema=self._schema)

    def _typed(self, column: pa.Array, kind: pa.DataType, place: int) -> pa.Array:
        try:
            return conform_array(column, kind, "")
        except Misfit:
            name = self._schema.names[place]
            raise SchemaMismatchError(
                f"column {in_quotes(name)} of queue {in_quotes(self._queue.name)} is now {column.type}, and "
                f"has a value that does not fit into {kind}, its type when this reader started: open the "
                "queue again; a restarted query resumes where it stopped",
                condition="SCHEMA_MISMATCH.COLUMN_WIDENED",
                column=name,
                expected=str(kind),
                found=str(column.type),
            ) from None


@dataclass(frozen=True)
class _Plan:
    """How to decode segments with the same columns."""

    schema: pa.Schema
    columns: Sequence[str] | None
    """The columns to decode; all of the schema when None."""
    fitter: _Fitter | None


class Decoder:
    """Decodes segments into the columns of one read.

    Columns that were added after the reader looked up the queue are left out. Columns that have since been
    widened are read as the earlier type, as long as their values fit.

    Parameters
    ----------
    queue
        The queue as the reader looked it up.
    columns
        The columns of the read, in order; all columns when None. Columns given by name have the types that
        ``queue`` says.
    reread
        Returns the queue as it is now.
    """

    def __init__(
        self,
        queue: QueueRecord,
        columns: Sequence[str] | pa.Schema | None,
        reread: Callable[[], QueueRecord],
    ) -> None:
        self._queue, self._reread = queue, reread
        self._wanted: pa.Schema = columns
        if columns is None:
            self._wanted = queue.schema
        elif not isinstance(columns, pa.Schema):
            self._wanted = pa.schema([queue.schema.field(name) for name in columns])
        self._plans: dict[int, _Plan] = {}

    def rows(self, row: Row, start: int, end: int) -> Iterator[pa.RecordBatch]:
        """Yield rows [start, end) of a segment in a page, in several batches if there are many."""
        plan = self._plans.get(row.columns_id)
        if plan is None:
            plan = self._plans[row.columns_id] = self._plan(row.columns_id)
        batch = decode(row.data, plan.schema, plan.columns)
        require_rows(row, batch)
        most = MOST_ROWS if plan.fitter is None else min(plan.fitter.most_rows, MOST_ROWS)
        for place in range(start, end, most):
            piece = batch.slice(place - row.start_index, min(most, end - place))
            # After the slice, so that reading a few rows does not fill nulls for all of them.
            yield piece if plan.fitter is None else plan.fitter.fitted(piece)

    def _plan(self, columns_id: int) -> _Plan:
        if columns_id not in self._queue.columns.ids:
            self._queue = self._reread()
        _require_columns(self._queue, columns_id)
        wanted, schema = self._wanted, self._queue.columns.of(columns_id)
        present = [name for name in wanted.names if name in schema.names]
        found = pa.schema([schema.field(name) for name in present])
        fits = len(found) == len(wanted) and all(map(same_type, found.types, wanted.types))
        fitter = None if fits else _Fitter(self._queue, present, wanted)
        if present and present == schema.names[: len(present)]:
            # The first columns need no selection.
            return _Plan(found, None, fitter)
        return _Plan(schema, present, fitter)


def decode_together(queue: QueueRecord, rows: Sequence[Row]) -> Iterator[pa.RecordBatch]:
    """Decode several segments lazily, one batch each, with the latest columns that any of them has; ``queue``
    must have all of these columns.
    """
    ids = [int(row.columns_id) for row in rows]
    for columns_id in set(ids):
        _require_columns(queue, columns_id)
    latest = queue.columns.latest(set(ids))
    # One decoder for all segments with the same columns: decoding each one separately costs several times as
    # much.
    batches = {
        columns_id: decode_each(
            [row.data for row, own in zip(rows, ids, strict=True) if own == columns_id],
            queue.columns.of(columns_id),
        )
        for columns_id in set(ids)
    }
    schema = queue.columns.of(latest)
    fitters = {each: _Fitter(queue, queue.columns.of(each).names, schema) for each in batches}
    for row, columns_id in zip(rows, ids, strict=True):
        batch = next(batches[columns_id])
        # Compacting a segment with the wrong number of rows would make its neighbours unreadable too.
        require_rows(row, batch)
        yield batch if columns_id == latest else fitters[columns_id].fitted(batch)


def _require_columns(queue: QueueRecord, columns_id: int) -> None:
    """Refuse a segment whose columns the queue does not have."""
    if columns_id not in queue.columns.ids:
        raise StoreError(
            "the segment's rows have columns or column types that the queue does not have: the store is "
            "damaged; restore a backup",
            condition="SEGMENT_UNREADABLE",
            columns=columns_id,
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
    """Whether an error is about particular rows that cannot be read or written; other rows can."""
    return error.condition in _OF_ROWS or isinstance(error, InvalidInputError)


def unreadable(queue: QueueRecord, partition: int, start: int, end: int, error: StoreError) -> StoreError:
    """Return the error of a segment in rows [start, end), with the queue, partition and rows added."""
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
