"""Columns of integers packed into bytes: one column after another, 8 bytes per integer, little-endian."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from itertools import chain
from operator import le

_INT_BYTES = 8


def pack_columns(columns: Sequence[Sequence[int]]) -> bytes:
    """Pack columns of equal length into bytes."""
    return struct.pack(f"<{sum(map(len, columns))}q", *chain.from_iterable(columns))


def count_rows(packed: bytes, width: int) -> int:
    """Return the number of rows of ``width`` packed columns."""
    return len(packed) // _INT_BYTES // width


def unpack_columns(packed: Iterable[bytes], width: int) -> list[list[int]]:
    """Unpack several values of ``width`` columns each, and concatenate their rows; return the columns."""
    columns: list[list[int]] = [[] for _ in range(width)]
    for data in packed:
        count = count_rows(data, width)
        values = struct.unpack(f"<{count * width}q", data)
        for position, column in enumerate(columns):
            column += values[position * count : (position + 1) * count]
    return columns


def sort_by_first(columns: Sequence[Sequence[int]]) -> list[list[int]]:
    """Sort the rows of the columns by the first column, with a stable sort; return the columns."""
    first = columns[0]
    if all(map(le, first, first[1:])):
        # Already sorted, as after a shuffle by key, which gives each task a range of partitions.
        return [[*column] for column in columns]
    order = sorted(range(len(first)), key=first.__getitem__)
    return [[*map(column.__getitem__, order)] for column in columns]
