"""Join ranges of an object that are read in one request."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

_SMALL_GAP = 4096
"""A gap of up to this many bytes is always read, since a separate request costs more."""


@dataclass
class Span:
    """Ranges that are close together."""

    start: int
    length: int
    places: list[int]
    """The indexes of the ranges."""
    wanted: int
    """The number of bytes in the ranges."""
    unwanted: int = 0
    """The number of bytes in gaps that are not small."""


def joined(ranges: Sequence[tuple[int, int]]) -> list[Span]:
    """Join ranges, pairs of a first byte and a length, into spans.

    A gap is read if it is small, or if the gaps in the span then have no more bytes than the ranges before
    it. So at most twice the wanted bytes are read, plus 4 KiB per range.
    """
    spans: list[Span] = []
    for place in sorted(range(len(ranges)), key=lambda place: ranges[place]):
        start, length = ranges[place]
        last = spans[-1] if spans else None
        gap = 0 if last is None else max(start - last.start - last.length, 0)
        if gap <= _SMALL_GAP:
            gap = 0
        if last is None or last.unwanted + gap > last.wanted:
            spans.append(Span(start, length, [place], length))
            continue
        last.unwanted += gap
        last.length = max(last.length, start + length - last.start)
        last.places.append(place)
        last.wanted += length
    return spans
