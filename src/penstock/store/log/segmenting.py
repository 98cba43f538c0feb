"""Segments: divide rows into pieces that suit both databases and a reader's memory, and record which appends
a compacted segment contains.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

import pyarrow as pa
import pyarrow.compute as pc

from penstock.arrow.segments import (
    MAX_DECOMPRESSED,
    MAX_VALUES_WITHOUT_BYTES,
    decode,
    encode,
    values_without_bytes,
)
from penstock.errors import InvalidInputError, StoreError
from penstock.objects.bundle import PayloadRange
from penstock.store.records.queue_columns import FIRST_COLUMNS

T = TypeVar("T")

_RUNS_SCHEMA = pa.schema([("end", pa.int64()), ("append", pa.int64()), ("timestamp", pa.int64())])


@dataclass(frozen=True)
class SegmentRuns:
    """The runs of a segment that will be joined with others: one append with one timestamp, or encoded
    runs.
    """

    rows: int
    append: int
    timestamp: int
    runs: bytes | None


@dataclass(frozen=True)
class Runs:
    """The appends in a compacted segment, in order. Each has an end, relative to the segment's start, an id
    and a timestamp.
    """

    batch: pa.RecordBatch
    """Columns ``end``, ``append`` and ``timestamp`` (microseconds since 1970), all int64."""

    @classmethod
    def from_bytes(cls, data: bytes, rows: int | None) -> Runs:
        """Decode the runs of a segment with ``rows`` rows; None accepts any number of rows."""
        runs = cls(decode(data, _RUNS_SCHEMA))
        if not runs._covers(rows):
            raise _mismatched_runs()
        return runs

    def _covers(self, rows: int | None) -> bool:
        """Return whether these runs cover exactly ``rows`` rows. If not, their timestamps could take any
        amount of memory.
        """
        ends = self.batch.column("end")
        if not len(ends) or any(column.null_count for column in self.batch.columns):
            return False
        ascending = pc.all(pc.greater(ends[1:], ends[:-1])).as_py()
        return ascending is not False and ends[0].as_py() > 0 and rows in (None, ends[-1].as_py())

    @classmethod
    def of(cls, ends: Sequence[int], appends: Sequence[int], timestamps: Sequence[int]) -> Runs:
        return cls(pa.RecordBatch.from_arrays([ends, appends, timestamps], schema=_RUNS_SCHEMA))

    @classmethod
    def concat(cls, parts: Sequence[SegmentRuns]) -> Runs:
        """Concatenate the runs of adjacent segments."""
        batches: list[pa.RecordBatch] = []
        pending: tuple[list[int], list[int], list[int]] = ([], [], [])
        offset = 0
        for segment in parts:
            if segment.runs is None:
                pending[0].append(offset + segment.rows)
                pending[1].append(segment.append)
                pending[2].append(segment.timestamp)
            else:
                batches += [
                    cls.of(*pending).batch,
                    cls.from_bytes(segment.runs, segment.rows)._shift_ends(offset),
                ]
                pending = ([], [], [])
            offset += segment.rows
        return cls(pa.concat_batches([*batches, cls.of(*pending).batch]))._merge_adjacent()

    def _shift_ends(self, offset: int) -> pa.RecordBatch:
        ends = pc.add(self.batch.column("end"), offset)
        return pa.RecordBatch.from_arrays([ends, *self.batch.columns[1:]], schema=_RUNS_SCHEMA)

    def _merge_adjacent(self) -> Runs:
        """Merge adjacent runs of the same append."""
        appends = self.batch.column("append")
        is_last = [*pc.not_equal(appends[:-1], appends[1:]).to_pylist(), True]
        return Runs(self.batch.filter(pa.array(is_last)))

    def to_buffer(self) -> pa.Buffer:
        return encode(self.batch)

    def slice(self, offset: int, length: int) -> Runs:
        """Return the runs of ``length`` rows starting at ``offset``, with ends relative to ``offset``."""
        ends = pc.subtract(self.batch.column("end"), offset)
        starts = pa.concat_arrays([pa.array([-offset], pa.int64()), ends[:-1]])
        within = pc.and_(pc.greater(ends, 0), pc.less(starts, length))
        batch = pa.RecordBatch.from_arrays(
            [pc.min_element_wise(ends, pa.scalar(length, pa.int64())), *self.batch.columns[1:]],
            schema=_RUNS_SCHEMA,
        )
        return Runs(batch.filter(within))

    def timestamps(self) -> pa.Array:
        """Return the timestamp of every row, as int64 microseconds."""
        ends = self.batch.column("end")
        runs = pa.RunEndEncodedArray.from_arrays(ends.cast(pa.int32()), self.batch.column("timestamp"))
        return pc.run_end_decode(runs)

    def end_of(self, append: int) -> int:
        """Return the number of rows up to the last append whose id is at most ``append``."""
        return self._rows_in_runs(pc.less_equal(self.batch.column("append"), append))

    def rows_before(self, timestamp: int) -> int:
        """Return the number of rows older than ``timestamp``."""
        return self._rows_in_runs(pc.less(self.batch.column("timestamp"), timestamp))

    def append_at(self, row: int) -> int:
        """Return the id of the append that wrote a row."""
        return self._value_at("append", row)

    def timestamp_at(self, row: int) -> int:
        """Return the timestamp of a row."""
        return self._value_at("timestamp", row)

    def _rows_in_runs(self, first_runs: pa.BooleanArray) -> int:
        runs = _count_true(first_runs)
        return int(self.batch.column("end")[runs - 1].as_py()) if runs else 0

    def _value_at(self, column: str, row: int) -> int:
        run = _count_true(pc.less_equal(self.batch.column("end"), row))
        if run == len(self.batch.column(column)):
            raise _mismatched_runs()
        return int(self.batch.column(column)[run].as_py())


def _mismatched_runs() -> StoreError:
    return StoreError(
        "the stored timestamps do not match the segment's rows: the store is damaged; restore a backup",
        condition="SEGMENT_UNREADABLE",
    )


def _count_true(condition: pa.BooleanArray) -> int:
    return int(pc.sum(condition).as_py() or 0)


SEGMENT_ROWS = 65_536
SEGMENT_RAW_BYTES = 32 << 20
MAX_PAYLOAD_BYTES = 900_000_000
"""The largest segment that both databases accept, in bytes. Only a single huge row comes close to it."""
_MAX_ROW_BYTES = MAX_DECOMPRESSED - (1 << 20)
"""This is less than a reader decompresses, since buffers are padded to whole words."""


@dataclass(frozen=True)
class NewObject:
    """An object that has been written but not recorded by a transaction yet."""

    object_id: int
    suffix: int
    store: str
    """The UUID of the store that it belongs to."""
    queue_id: int
    size: int
    begun_at: int
    """The time just before it was written, in microseconds since 1970 by the database's clock."""


@dataclass(frozen=True)
class StoredPayload:
    """A payload in an object, and its byte range there."""

    object: NewObject
    place: PayloadRange


class Segment:
    """Consecutive rows of one partition that are about to be stored."""

    def __init__(self, partition: int, batch: pa.RecordBatch, columns_id: int = FIRST_COLUMNS) -> None:
        self.partition = partition
        self.rows = int(batch.num_rows)
        self.columns_id = columns_id
        """The id of the queue's columns that the rows have (`QueueColumns`)."""
        self.stored: StoredPayload | None = None
        """The place of the rows in object storage, if they have been written there."""
        self._batch: pa.RecordBatch | None = batch
        self._encode_payload: pa.Buffer | None = None

    def __repr__(self) -> str:
        return f"Segment(partition={self.partition}, rows={self.rows})"

    @property
    def payload(self) -> pa.Buffer:
        """The encoded rows, as the store keeps them."""
        if self._batch is not None:
            self._encode_payload = _encode_payload(self._batch)
            self._batch = None
        return self._encode_payload

    @property
    def bytes(self) -> int:
        return int(self.payload.size) if self.stored is None else self.stored.place.length

    @classmethod
    def written(
        cls,
        partition: int,
        rows: int,
        columns_id: int,
        payload: pa.Buffer | None,
        stored: StoredPayload | None,
    ) -> Segment:
        """Return a segment that another process has encoded, with its payload or the payload's place in an
        object.
        """
        segment = cls.__new__(cls)
        segment.partition, segment.rows, segment.columns_id = partition, rows, columns_id
        segment.stored, segment._batch, segment._encode_payload = stored, None, payload
        return segment

    def move_to_object(self, stored: StoredPayload) -> None:
        """Record where the rows are in object storage, and release their memory."""
        self.stored, self._encode_payload = stored, None


def by_size(items: Iterable[T], size_of: Callable[[T], int], max_bytes: int) -> Iterator[list[T]]:
    """Divide items in their order into groups of at most ``max_bytes``. A larger item gets its own group."""
    group: list[T] = []
    size = 0
    for item in items:
        item_size = size_of(item)
        if group and size + item_size > max_bytes:
            yield group
            group, size = [], 0
        group.append(item)
        size += item_size
    if group:
        yield group


def to_segments(
    table: pa.Table | pa.RecordBatch,
    partition: int,
    *,
    columns_id: int = FIRST_COLUMNS,
    max_rows: int = SEGMENT_ROWS,
    lazy: bool = False,
) -> list[Segment]:
    """Divide rows into segments of at most ``max_rows`` rows and about 32 MiB of Arrow data.

    ``columns_id`` is the id of the queue's columns that the rows have. ``lazy`` segments are not compressed
    until they are sent.
    """
    if isinstance(table, pa.RecordBatch):
        batches = [table.slice(start, max_rows) for start in range(0, table.num_rows, max_rows)]
    else:
        combined = table.combine_chunks() if table.num_rows > 0 else table
        batches = [batch for batch in combined.to_batches(max_chunksize=max_rows) if batch.num_rows]
    segments = [Segment(partition, part, columns_id) for batch in batches for part in _split_in_halves(batch)]
    if not lazy:
        for segment in segments:
            _ = segment.payload
    return segments


def _split_in_halves(batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
    if batch.num_rows < 2 or batch.nbytes <= SEGMENT_RAW_BYTES:
        yield batch
        return
    middle = batch.num_rows // 2
    yield from _split_in_halves(batch.slice(0, middle))
    yield from _split_in_halves(batch.slice(middle))


def _encode_payload(batch: pa.RecordBatch) -> pa.Buffer:
    # The size of the whole buffers is an upper bound that is faster to compute.
    if batch.get_total_buffer_size() > _MAX_ROW_BYTES and batch.nbytes > _MAX_ROW_BYTES:
        raise _too_large(batch.nbytes, _MAX_ROW_BYTES, "a reader decompresses")
    if (count := values_without_bytes(batch)) > MAX_VALUES_WITHOUT_BYTES:
        raise InvalidInputError(
            f"the lists of these rows have {count} values without any bytes, more than a reader accepts: "
            "append fewer rows at a time, or give the values a type",
            condition="INVALID_INPUT.ROW_TOO_LARGE",
            size=count,
            limit=MAX_VALUES_WITHOUT_BYTES,
        )
    payload = encode(batch)
    if payload.size > MAX_PAYLOAD_BYTES:
        raise _too_large(payload.size, MAX_PAYLOAD_BYTES, "a database holds in one value")
    return payload


def _too_large(size: int, limit: int, limited_by: str) -> InvalidInputError:
    return InvalidInputError(
        f"a row takes {size} bytes, more than {limited_by}: keep large objects in files and append their "
        "paths",
        condition="INVALID_INPUT.ROW_TOO_LARGE",
        size=size,
        limit=limit,
    )
