"""Rows of staged segments: one for all segments that an attempt of a task has staged at once, which may be
thousands.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from penstock.json_text import unreadable_record
from penstock.store.database import Row, Transaction
from penstock.store.int_columns import pack_columns, sort_by_first, unpack_columns


class Stored(NamedTuple):
    """Segments whose payloads are in the store, before they have their row indexes: column by column, since
    there may be thousands, in the order of their partitions.
    """

    partition: Sequence[int]
    row_count: Sequence[int]
    bytes: Sequence[int]
    payload_id: Sequence[int]


_WIDTH = len(Stored._fields)
_SEGMENT_BYTES = 8 * _WIDTH


def insert_staged(tx: Transaction, stored: Stored, **attempt: object) -> None:
    """Enter segments of an attempt, in any order of their partitions."""
    if stored.partition:
        tx.run(
            "insert_staged",
            segments=len(stored.partition),
            bytes=sum(stored.bytes),
            segment_list=pack_columns(stored),
            now=tx.stamp(),
            **attempt,
        )


def segments_of(rows: Iterable[Row]) -> Stored:
    """Return the segments of rows, in the order of their partitions, and in each one in that of the rows."""
    return Stored(*sort_by_first(_columns(rows)))


def payloads_of(rows: Iterable[Row]) -> list[int]:
    """Return the payload ids of the segments of rows, in order."""
    return _columns(rows)[-1]


def delete_staged_payloads(tx: Transaction, rows: Iterable[Row]) -> int:
    """Delete the payloads of rows that are deleted, and return how many they were.

    What a damaged row had staged is left: nobody knows where it is.
    """
    found = sorted(payloads_of(filter(_is_whole, rows)))
    tx.many("delete_payload", {"payload_id": found})
    return len(found)


def _columns(rows: Iterable[Row]) -> list[list[int]]:
    lists = []
    for row in rows:
        if not _is_whole(row):
            raise unreadable_record(
                "a list of staged segments",
                ValueError(f"it has {len(row.segment_list)} bytes for {row.segments} segments"),
            )
        lists.append(row.segment_list)
    return unpack_columns(lists, _WIDTH)


def _is_whole(row: Row) -> bool:
    return len(row.segment_list) == _SEGMENT_BYTES * int(row.segments)
