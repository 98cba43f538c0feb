"""Segments that tasks write without using the database, and the transaction that makes them visible.

There may be thousands of tasks and of segments, so they are kept column by column.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, compress, repeat
from typing import NamedTuple

import pyarrow as pa

from penstock.objects.bundle import Place
from penstock.objects.storage import ObjectStorage
from penstock.store.database import Transaction
from penstock.store.int_columns import count_rows, pack_columns, sort_by_first, unpack_columns
from penstock.store.log.payloads import (
    Places,
    allocate_payloads,
    are_small,
    insert_objects,
    insert_payloads,
    insert_places,
    put_into_objects,
)
from penstock.store.log.segmenting import NewObject, Segment

_NO_OBJECT = -1
_COLUMNS = 7
"""The number of columns of ``Index``, except for the last one."""


@dataclass(frozen=True)
class Written:
    """The segments of a task."""

    objects: tuple[NewObject, ...]
    index: bytes
    """The columns of ``Index``, except for the last one, packed."""
    data: bytes
    """The payloads that are not in objects, one after the other."""

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
            [segment.columns_id for segment in segments],
            [each.object.object_id for each in stored] or [_NO_OBJECT] * len(data),
            [place.offset for place in places],
            [place.length for place in places],
            [place.checksum for place in places],
        )
        return cls(tuple(objects.values()), pack_columns(columns), b"".join(data))


class Index(NamedTuple):
    """The segments of tasks, column by column."""

    partition: list[int]
    rows: list[int]
    columns_id: list[int]
    object_id: list[int]
    """``_NO_OBJECT`` if the payload is in the task's data."""
    offset: list[int]
    length: list[int]
    checksum: list[int]
    task: list[int]

    @classmethod
    def of(cls, written: Sequence[Written]) -> Index:
        """Return the segments, ordered by partition and then by task."""
        columns = unpack_columns((each.index for each in written), _COLUMNS)
        tasks = (repeat(task, count_rows(each.index, _COLUMNS)) for task, each in enumerate(written))
        return cls(*sort_by_first([*columns, [*chain.from_iterable(tasks)]]))

    @property
    def is_in_task(self) -> list[bool]:
        """For each segment, whether its payload is in the task's data."""
        return [number == _NO_OBJECT for number in self.object_id]

    def where(self, chosen: Sequence[bool]) -> Index:
        """Return the segments for which ``chosen`` is true."""
        return self if all(chosen) else Index(*([*compress(column, chosen)] for column in self))

    def segments(self, written: Sequence[Written]) -> list[Segment]:
        """Return the segments; all payloads must be in the tasks' data."""
        data = [pa.py_buffer(each.data) for each in written]
        return [
            Segment.written(partition, size, columns_id, data[task].slice(offset, length), None)
            for partition, size, columns_id, _, offset, length, _, task in zip(*self, strict=True)
        ]


def store_written(tx: Transaction, written: Sequence[Written], index: Index) -> list[int]:
    """Store the payloads of all segments, or where they are; return their ids in the order of the index."""
    ids = allocate_payloads(tx, len(index.partition))
    in_task = index.is_in_task
    kept = index.where(in_task).segments(written)
    insert_payloads(tx, list(zip(compress(ids, in_task), kept, strict=True)))
    insert_objects(tx, [made for each in written for made in each.objects])
    in_object = [not each for each in in_task]
    there = index.where(in_object)
    placed_ids = [*compress(ids, in_object)]
    insert_places(
        tx, Places(placed_ids, there.columns_id, there.object_id, there.offset, there.length, there.checksum)
    )
    return ids
