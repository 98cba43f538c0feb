"""The types of rows that a queue accepts, and the result of an append."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

import pyarrow as pa

from penstock.errors import InvalidInputError

Rows: TypeAlias = pa.Table | pa.RecordBatch | Iterable[Mapping[str, object]]


@dataclass(frozen=True)
class AppendResult:
    """The row indexes of appended rows."""

    ranges: dict[int, tuple[int, int]]
    """For each partition with appended rows, the index of the first of them and the index after the last."""
    skipped: bool = False
    """Whether the rows were skipped because a producer session had already appended this sequence number."""

    @property
    def rows(self) -> int:
        """The number of rows appended."""
        return sum(end - first for first, end in self.ranges.values())


def check_sequence(number: object) -> None:
    """Refuse a value that is not a valid sequence number of a producer session."""
    if type(number) is not int or not 0 <= number < 2**62:
        raise InvalidInputError(f"a sequence number is a whole number from 0 to 2**62 - 1, not {number!r}")
