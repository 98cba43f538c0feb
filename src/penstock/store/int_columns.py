"""Columns of integers, one after the other in a string of bytes: little-endian, 8 bytes each."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from itertools import chain

_SIZE = 8


def pack_columns(columns: Sequence[Sequence[int]]) -> bytes:
    """Return the bytes of equally long columns."""
    return struct.pack(f"<{sum(map(len, columns))}q", *chain.from_iterable(columns))


def count_rows(packed: bytes, width: int) -> int:
    """Return how many rows ``width`` packed columns have."""
    return len(packed) // _SIZE // width


def unpack_columns(packed: Iterable[bytes], width: int) -> list[list[int]]:
    """Return the ``width`` columns of several strings, whose rows follow one another."""
    found: list[list[int]] = [[] for _ in range(width)]
    for each in packed:
        count = count_rows(each, width)
        values = struct.unpack(f"<{count * width}q", each)
        for place, column in enumerate(found):
            column += values[place * count : (place + 1) * count]
    return found


def sort_by_first(columns: Sequence[Sequence[int]]) -> list[list[int]]:
    """Return the columns in the order of the first one; equal rows keep theirs."""
    order = sorted(range(len(columns[0])), key=columns[0].__getitem__)
    return [[*map(column.__getitem__, order)] for column in columns]
