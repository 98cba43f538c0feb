"""Joining ranges of an object that are read in one request."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

_SMALL_GAP = 4096
"""A gap of up to this many bytes is always read, because a separate request costs more."""


@dataclass
class Span:
    """A byte range that covers requested ranges which are close together."""

    start: int
    length: int
    indexes: list[int]
    """The indexes of the ranges."""
    requested: int
    """The number of bytes in the ranges."""
    gap_bytes: int = 0
    """The number of bytes in gaps that are not small."""


def join_ranges(ranges: Sequence[tuple[int, int]]) -> list[Span]:
    """Join ranges, pairs of a first byte and a length, into spans.

    A gap is read if it is small, or if the gaps in the span then have no more bytes than the ranges before
    it. So at most twice the requested bytes are read, plus 4 KiB per range.
    """
    spans: list[Span] = []
    for index in sorted(range(len(ranges)), key=lambda index: ranges[index]):
        start, length = ranges[index]
        last = spans[-1] if spans else None
        gap = 0 if last is None else max(start - last.start - last.length, 0)
        if gap <= _SMALL_GAP:
            gap = 0
        if last is None or last.gap_bytes + gap > last.requested:
            spans.append(Span(start, length, [index], length))
            continue
        last.gap_bytes += gap
        last.length = max(last.length, start + length - last.start)
        last.indexes.append(index)
        last.requested += length
    return spans
