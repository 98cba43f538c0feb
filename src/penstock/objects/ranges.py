"""Ranges of an object that are read in one request."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

_SMALL_GAP = 4096
"""Bytes that may always be read in vain: a request costs more."""


@dataclass
class Span:
    """Ranges that lie close together."""

    start: int
    length: int
    places: list[int]
    """Which of the ranges they are."""
    wanted: int
    """The bytes that are wanted."""
    unwanted: int = 0
    """Those of gaps that are not small."""


def joined(ranges: Sequence[tuple[int, int]]) -> list[Span]:
    """Join ranges, pairs of a first byte and a length, into spans.

    A gap is read if it is small, or if the gaps that are read are then no more than what is wanted before. So
    at most twice as much is read as is wanted, and 4 KiB a range, however the ranges lie.
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
