"""Records of staged segments. One row holds all segments that a task attempt stages in one transaction, which
may be thousands.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from penstock.json_text import unreadable_record
from penstock.store.database import Row, Transaction
from penstock.store.int_columns import pack_columns, sort_by_first, unpack_columns

NONE = -1
"""Stands for a missing number in the columns of ``StoredSegments``."""


class StoredSegments(NamedTuple):
    """Segments whose rows are stored, but which have no row indexes yet.

    They are kept as columns, since there may be thousands, and ordered by partition.
    """

    partition: Sequence[int]
    row_count: Sequence[int]
    bytes: Sequence[int]
    columns_id: Sequence[int]
    payload_id: Sequence[int]
    """``NONE`` for a segment whose rows are in an object."""
    object_id: Sequence[int]
    """``NONE``, like the other numbers of a place in an object, for a segment whose rows are in a payload."""
    start_byte: Sequence[int]
    checksum: Sequence[int]

    @property
    def objects(self) -> set[int]:
        """The ids of the objects that have rows of these segments."""
        return set(self.object_id) - {NONE}


_SEGMENT_COLUMNS = len(StoredSegments._fields)
_SEGMENT_BYTES = 8 * _SEGMENT_COLUMNS


def insert_staged(
    tx: Transaction, stored: StoredSegments, *, task: int, queue_id: int, **key: object
) -> None:
    """Insert an attempt's segments; their partitions may be in any order. ``key`` has the key's columns."""
    if not stored.partition:
        return
    tx.run(
        "insert_staged",
        task=task,
        queue_id=queue_id,
        segments=len(stored.partition),
        bytes=sum(stored.bytes),
        segment_list=pack_columns(stored),
        now=tx.write_time(),
        **key,
    )
    tx.run_many("insert_staged_object", {"object_id": sorted(stored.objects)}, **key)


def segments_of(rows: Iterable[Row]) -> StoredSegments:
    """Return the segments in these rows, ordered by partition and then by row."""
    return StoredSegments(*sort_by_first(_columns(rows)))


def payloads_of(rows: Iterable[Row]) -> list[int]:
    """Return the payload ids of the segments in these rows, in order, without segments in objects."""
    payload_ids = StoredSegments(*_columns(rows)).payload_id
    return [payload_id for payload_id in payload_ids if payload_id != NONE]


def delete_staged_payloads(tx: Transaction, rows: Iterable[Row]) -> int:
    """Delete the payloads of deleted rows, and return the number of segments.

    The payloads of a damaged row stay, since their ids are unknown.
    """
    complete = [*filter(_is_complete, rows)]
    tx.run_many("delete_payload", {"payload_id": sorted(payloads_of(complete))})
    return sum(row.segments for row in complete)


def _columns(rows: Iterable[Row]) -> list[list[int]]:
    packed = []
    for row in rows:
        if not _is_complete(row):
            raise unreadable_record(
                "a list of staged segments",
                ValueError(f"it has {len(row.segment_list)} bytes for {row.segments} segments"),
            )
        packed.append(row.segment_list)
    return unpack_columns(packed, _SEGMENT_COLUMNS)


def _is_complete(row: Row) -> bool:
    return len(row.segment_list) == _SEGMENT_BYTES * int(row.segments)
