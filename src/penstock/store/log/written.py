"""Segments that tasks write without using the database, and the transaction that makes them visible.

There may be thousands of tasks and segments, so the segments are kept as columns.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, compress, repeat
from typing import NamedTuple

import pyarrow as pa

from penstock.objects.bundle import PayloadRange
from penstock.objects.storage import ObjectStorage
from penstock.store.database import Transaction
from penstock.store.int_columns import count_rows, pack_columns, sort_by_first, unpack_columns
from penstock.store.log.payloads import (
    fit_inline,
    insert_objects,
    insert_payloads,
    write_segments_to_objects,
)
from penstock.store.log.segmenting import NewObject, Segment
from penstock.store.records.staged import NONE, StoredSegments

_INDEX_COLUMNS = 7
"""The number of columns of ``SegmentIndex``, without ``task``."""


@dataclass(frozen=True)
class TaskSegments:
    """The segments that a task has written."""

    objects: tuple[NewObject, ...]
    index: bytes
    """The packed columns of ``SegmentIndex``, without ``task``."""
    data: bytes
    """The payloads that are not in objects, concatenated."""

    @classmethod
    def of(
        cls,
        storage: ObjectStorage,
        store_uuid: str,
        queue_id: int,
        segments: Sequence[Segment],
        write_time: int,
    ) -> TaskSegments:
        """Write segments into objects if they are large enough, and return their description."""
        if not fit_inline(segments):
            write_segments_to_objects(storage, store_uuid, queue_id, segments, write_time)
        stored = [segment.stored for segment in segments if segment.stored is not None]
        objects = {payload.object.object_id: payload.object for payload in stored}
        data = [] if stored else [memoryview(segment.payload) for segment in segments]
        ends = accumulate(map(len, data), initial=0)
        places = [payload.place for payload in stored] or [
            PayloadRange(offset, len(payload_bytes), 0)
            for offset, payload_bytes in zip(ends, data, strict=False)
        ]
        columns = (
            [segment.partition for segment in segments],
            [segment.rows for segment in segments],
            [segment.columns_id for segment in segments],
            [payload.object.object_id for payload in stored] or [NONE] * len(data),
            [place.offset for place in places],
            [place.length for place in places],
            [place.checksum for place in places],
        )
        return cls(tuple(objects.values()), pack_columns(columns), b"".join(data))


class SegmentIndex(NamedTuple):
    """The segments of tasks, as columns."""

    partition: list[int]
    rows: list[int]
    columns_id: list[int]
    object_id: list[int]
    """``NONE`` if the payload is in its task's ``data``."""
    offset: list[int]
    length: list[int]
    checksum: list[int]
    task: list[int]

    @classmethod
    def of(cls, tasks: Sequence[TaskSegments]) -> SegmentIndex:
        """Return the segments, ordered by partition and then by task."""
        columns = unpack_columns((task_segments.index for task_segments in tasks), _INDEX_COLUMNS)
        task_numbers = (
            repeat(task, count_rows(task_segments.index, _INDEX_COLUMNS))
            for task, task_segments in enumerate(tasks)
        )
        return cls(*sort_by_first([*columns, [*chain.from_iterable(task_numbers)]]))

    @property
    def is_in_task_data(self) -> list[bool]:
        """For each segment, whether its payload is in its task's ``data``."""
        return [object_id == NONE for object_id in self.object_id]

    def select(self, chosen: Sequence[bool]) -> SegmentIndex:
        """Return the segments for which ``chosen`` is true."""
        return self if all(chosen) else SegmentIndex(*([*compress(column, chosen)] for column in self))

    def segments(self, tasks: Sequence[TaskSegments]) -> list[Segment]:
        """Return the segments. All payloads must be in the tasks' ``data``."""
        data = [pa.py_buffer(task_segments.data) for task_segments in tasks]
        return [
            Segment.written(partition, row_count, columns_id, data[task].slice(offset, length), None)
            for partition, row_count, columns_id, _, offset, length, _, task in zip(*self, strict=True)
        ]


def store_task_segments(
    tx: Transaction, tasks: Sequence[TaskSegments], index: SegmentIndex
) -> StoredSegments:
    """Store the payloads that are in the tasks' ``data``, and record the objects of the others. Return the
    segments in the order of the index.
    """
    in_task_data = index.is_in_task_data
    payload_ids = insert_payloads(tx, index.select(in_task_data).segments(tasks))
    insert_objects(tx, [new_object for task_segments in tasks for new_object in task_segments.objects])
    start_bytes, checksums = index.offset, index.checksum
    if payload_ids:
        start_bytes, checksums = (
            [NONE if is_inline else number for is_inline, number in zip(in_task_data, column, strict=True)]
            for column in (index.offset, index.checksum)
        )
    next_id = iter(payload_ids)
    return StoredSegments(
        index.partition,
        index.rows,
        index.length,
        index.columns_id,
        [next(next_id) if is_inline else NONE for is_inline in in_task_data],
        index.object_id,
        start_bytes,
        checksums,
    )
