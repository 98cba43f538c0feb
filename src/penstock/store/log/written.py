"""Segments that tasks write without the database, for the transaction that makes them visible.

There may be thousands of tasks and of segments, so they are kept column by column.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, compress
from typing import NamedTuple

import pyarrow as pa

from penstock.objects.bundle import Place
from penstock.objects.storage import ObjectStorage
from penstock.store.database import Transaction
from penstock.store.log.payloads import (
    allocate_payloads,
    are_small,
    enter_objects,
    insert_payloads,
    put_into_objects,
)
from penstock.store.log.segmenting import NewObject, Segment

_NO_OBJECT = -1
_COLUMNS = 7
"""Those of ``Index``, but for the last."""


@dataclass(frozen=True)
class Written:
    """The segments of a task."""

    objects: tuple[NewObject, ...]
    index: bytes
    """The columns of ``Index``, but for the last, one after the other: little-endian integers of 8 bytes."""
    data: bytes
    """The payloads of segments that are in no object, one after the other."""

    @classmethod
    def of(
        cls,
        storage: ObjectStorage,
        store_uuid: str,
        queue_id: int,
        segments: Sequence[Segment],
        begun_at: int,
    ) -> Written:
        """Write segments into objects if they are large enough, and describe them."""
        if not are_small(segments):
            put_into_objects(storage, store_uuid, queue_id, segments, begun_at)
        stored = [segment.stored for segment in segments if segment.stored is not None]
        objects = {each.object.object_id: each.object for each in stored}
        data = [] if stored else [memoryview(segment.payload) for segment in segments]
        ends = accumulate(map(len, data), initial=0)
        places = [each.place for each in stored] or [
            Place(at, len(part), 0) for at, part in zip(ends, data, strict=False)
        ]
        columns = (
            [segment.partition for segment in segments],
            [segment.rows for segment in segments],
            [segment.width for segment in segments],
            [each.object.object_id for each in stored] or [_NO_OBJECT] * len(data),
            [place.offset for place in places],
            [place.length for place in places],
            [place.checksum for place in places],
        )
        index = struct.pack(f"<{_COLUMNS * len(segments)}q", *(value for each in columns for value in each))
        return cls(tuple(objects.values()), index, b"".join(data))


class Index(NamedTuple):
    """Segments of tasks, a place in each column for each of them."""

    partition: list[int]
    rows: list[int]
    width: list[int]
    """The number of columns."""
    object_id: list[int]
    """``_NO_OBJECT`` if the payload is in the data of the task."""
    offset: list[int]
    length: list[int]
    checksum: list[int]
    task: list[int]

    @classmethod
    def of(cls, written: Sequence[Written]) -> Index:
        """Return the segments in the order of their partitions, and in each one in that of the tasks."""
        found: list[list[int]] = [[] for _ in range(_COLUMNS + 1)]
        for task, each in enumerate(written):
            values = struct.unpack(f"<{len(each.index) // 8}q", each.index)
            count = len(values) // _COLUMNS
            for number in range(_COLUMNS):
                found[number] += values[number * count : (number + 1) * count]
            found[_COLUMNS] += [task] * count
        order = sorted(range(len(found[0])), key=found[0].__getitem__)
        return cls(*([*map(column.__getitem__, order)] for column in found))

    @property
    def is_in_task(self) -> list[bool]:
        """For each segment, whether its payload is in the data of its task."""
        return [number == _NO_OBJECT for number in self.object_id]

    def in_tasks(self, written: Sequence[Written]) -> list[Segment]:
        """Return the segments whose payloads are in the data of their tasks."""
        data = [pa.py_buffer(each.data) for each in written]
        rows = compress(zip(*self, strict=True), self.is_in_task)
        return [
            Segment.written(partition, size, width, data[task].slice(offset, length), None)
            for partition, size, width, _, offset, length, _, task in rows
        ]

    def in_objects(self) -> Index:
        """Return the segments whose payloads are in objects."""
        chosen = [not each for each in self.is_in_task]
        return self if all(chosen) else Index(*([*compress(column, chosen)] for column in self))


def store_written(tx: Transaction, written: Sequence[Written], index: Index) -> list[int]:
    """Store the payloads of all segments, or where they are; return their ids, in the order of the index."""
    ids = allocate_payloads(tx, len(index.partition))
    in_task = index.is_in_task
    insert_payloads(tx, list(zip(compress(ids, in_task), index.in_tasks(written), strict=True)))
    enter_objects(tx, [made for each in written for made in each.objects])
    placed = index.in_objects()
    if placed.partition:
        columns: dict[str, Sequence[object]] = {
            "payload_id": [number for number, inline in zip(ids, in_task, strict=True) if not inline],
            "width": placed.width,
            "object_id": placed.object_id,
            "start_byte": placed.offset,
            "length": placed.length,
            "checksum": placed.checksum,
        }
        tx.many("insert_payload_in_object", columns, runs=None)
    return ids
