"""Decode segments into the columns of a read, whatever columns they were written with (`QueueColumns`).

Arrow decodes only the columns that are read. Columns that a segment lacks are filled with nulls, and values
are converted to the types of the read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import pyarrow as pa

from penstock.arguments import in_quotes
from penstock.arrow.coerce import Misfit, conform_array, same_type
from penstock.arrow.segments import decode, decode_each
from penstock.errors import InvalidInputError, PenstockError, SchemaMismatchError, StoreError
from penstock.objects.storage import Buffer
from penstock.store.database import Row
from penstock.store.records.catalog import QueueRecord

MAX_BATCH_ROWS = 1 << 20
"""The largest number of rows in a batch. A segment of a few bytes may claim to have any number of rows, and a
reader needs memory for what it adds to each row, such as its timestamp.
"""
_MAX_NULL_BYTES = 32 << 20
"""The most bytes that nulls take in a batch."""
_SAMPLE_ROWS = 1024
_ROW_CONDITIONS = (
    "SEGMENT_UNREADABLE", "SEGMENT_MISSING", "STORE_ERROR.OBJECT_MISSING", "STORE_ERROR.OBJECT_DAMAGED",
)  # fmt: skip


class _ColumnAdapter:
    """Adapts batches to the columns of a read: fills missing columns with nulls, and casts the others."""

    def __init__(self, queue: QueueRecord, present: Sequence[str], schema: pa.Schema) -> None:
        self._queue, self._schema = queue, schema
        self._columns = [
            (present.index(field.name) if field.name in present else None, field.type) for field in schema
        ]
        self._nulls: dict[pa.DataType, pa.Array] = {}
        self._rows = -1
        sample_nulls = [
            pa.nulls(_SAMPLE_ROWS, data_type) for index, data_type in self._columns if index is None
        ]
        null_bytes = sum(nulls.nbytes for nulls in sample_nulls)
        self.max_batch_rows = max(_MAX_NULL_BYTES * _SAMPLE_ROWS // max(null_bytes, 1), 1)
        """The largest number of rows in one adapted batch."""

    def adapt(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        if batch.num_rows != self._rows:
            # Adjacent small appends often have the same length, so keep the arrays.
            self._rows = int(batch.num_rows)
            self._nulls = {
                data_type: pa.nulls(self._rows, data_type)
                for index, data_type in self._columns
                if index is None
            }
        columns = [
            self._nulls[data_type]
            if index is None
            else self._converted(batch.column(index), data_type, position)
            for position, (index, data_type) in enumerate(self._columns)
        ]
        return pa.RecordBatch.from_arrays(columns, schema=self._schema)

    def _converted(self, column: pa.Array, data_type: pa.DataType, position: int) -> pa.Array:
        try:
            return conform_array(column, data_type, "")
        except Misfit:
            name = self._schema.names[position]
            raise SchemaMismatchError(
                f"column {in_quotes(name)} of queue {in_quotes(self._queue.name)} is now {column.type}, and "
                f"has a value that does not fit into {data_type}, its type when this reader started: open "
                "the queue again; a restarted query resumes where it stopped",
                condition="SCHEMA_MISMATCH.COLUMN_WIDENED",
                column=name,
                expected=str(data_type),
                found=str(column.type),
            ) from None


@dataclass(frozen=True)
class _Plan:
    """How to decode the segments that have the same columns."""

    schema: pa.Schema
    columns: Sequence[str] | None
    """The columns to decode; all columns of the schema if None."""
    adapter: _ColumnAdapter | None


class Decoder:
    """Decodes segments into the columns of one read.

    Columns that were added after the reader looked up the queue are left out. Columns that were widened after
    that are read as the earlier type, as long as their values fit.

    Parameters
    ----------
    queue
        The queue as the reader looked it up.
    columns
        The columns of the read, in order; all columns if None. Columns given by name have their types in
        ``queue``.
    reread
        Reads the queue again from the store and returns it.
    """

    def __init__(
        self,
        queue: QueueRecord,
        columns: Sequence[str] | pa.Schema | None,
        reread: Callable[[], QueueRecord],
    ) -> None:
        self._queue, self._reread = queue, reread
        self._read_schema: pa.Schema = columns
        if columns is None:
            self._read_schema = queue.schema
        elif not isinstance(columns, pa.Schema):
            self._read_schema = pa.schema([queue.schema.field(name) for name in columns])
        self._plans: dict[int, _Plan] = {}

    def decode_rows(self, row: Row, start: int, end: int) -> Iterator[pa.RecordBatch]:
        """Yield rows [start, end) of a page's segment, in several batches if there are many rows."""
        plan = self._plans.get(row.columns_id)
        if plan is None:
            plan = self._plans[row.columns_id] = self._plan(row.columns_id)
        batch = decode(_rows_of(row), plan.schema, plan.columns)
        require_rows(row, batch)
        max_rows = (
            MAX_BATCH_ROWS if plan.adapter is None else min(plan.adapter.max_batch_rows, MAX_BATCH_ROWS)
        )
        for row_index in range(start, end, max_rows):
            part = batch.slice(row_index - row.start_index, min(max_rows, end - row_index))
            # Adapt the slice, not the segment, so that reading a few rows does not fill in nulls for all of
            # them.
            yield part if plan.adapter is None else plan.adapter.adapt(part)

    def _plan(self, columns_id: int) -> _Plan:
        if columns_id not in self._queue.columns.ids:
            self._queue = self._reread()
        _require_columns(self._queue, columns_id)
        read_schema, schema = self._read_schema, self._queue.columns.of(columns_id)
        present = [name for name in read_schema.names if name in schema.names]
        present_schema = pa.schema([schema.field(name) for name in present])
        matches = len(present_schema) == len(read_schema) and all(
            map(same_type, present_schema.types, read_schema.types)
        )
        adapter = None if matches else _ColumnAdapter(self._queue, present, read_schema)
        if present and present == schema.names[: len(present)]:
            # Segments with these columns need no selection.
            return _Plan(present_schema, None, adapter)
        return _Plan(schema, present, adapter)


def decode_together(queue: QueueRecord, rows: Sequence[Row]) -> Iterator[pa.RecordBatch]:
    """Decode several segments lazily, into one batch each, with the latest columns that any of them has.
    ``queue`` must have all of these columns.
    """
    ids = [int(row.columns_id) for row in rows]
    for columns_id in set(ids):
        _require_columns(queue, columns_id)
    latest = queue.columns.latest(set(ids))
    # All segments with the same columns share a decoder, since a decoder for each one takes several times as
    # long.
    batches = {
        columns_id: decode_each(
            [_rows_of(row) for row, row_columns in zip(rows, ids, strict=True) if row_columns == columns_id],
            queue.columns.of(columns_id),
        )
        for columns_id in set(ids)
    }
    schema = queue.columns.of(latest)
    adapters = {
        columns_id: _ColumnAdapter(queue, queue.columns.of(columns_id).names, schema)
        for columns_id in batches
    }
    for row, columns_id in zip(rows, ids, strict=True):
        batch = next(batches[columns_id])
        # If a segment with the wrong number of rows were compacted, its neighbours would become unreadable
        # too.
        require_rows(row, batch)
        yield batch if columns_id == latest else adapters[columns_id].adapt(batch)


def _require_columns(queue: QueueRecord, columns_id: int) -> None:
    """Refuse a segment that has columns the queue does not have."""
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


def is_about_rows(error: PenstockError) -> bool:
    """Return whether an error concerns only particular rows that cannot be read or written."""
    return error.condition in _ROW_CONDITIONS or isinstance(error, InvalidInputError)


def _rows_of(row: Row) -> Buffer:
    """Return the encoded rows of a page's segment."""
    if row.data is None:
        raise StoreError(
            "these rows are missing: the store is damaged; restore a backup", condition="SEGMENT_MISSING"
        )
    data: Buffer = row.data
    return data


def unreadable(queue: QueueRecord, partition: int, start: int, end: int, error: StoreError) -> StoreError:
    """Add the queue, the partition and the rows [start, end) to the error of a segment.

    The error keeps its class, since the storage of the rows may only be unavailable.
    """
    return type(error)(
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
