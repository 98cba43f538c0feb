"""The first rows of something that comes in pieces."""

from __future__ import annotations

from collections.abc import Iterator

import pyarrow as pa
import pytest

from penstock.arrow.arrays import first_rows


def pieces(*sizes: int) -> Iterator[pa.Table]:
    start = 0
    for size in sizes:
        yield pa.table({"number": list(range(start, start + size))})
        start += size


@pytest.mark.parametrize("rows", [0, 1, 3, 4, 7, 8, 100])
def test_they_are_as_many_as_wanted_or_as_there_are(rows: int) -> None:
    found = [
        number for piece in first_rows(pieces(3, 0, 4, 1), rows) for number in piece["number"].to_pylist()
    ]
    assert found == list(range(min(rows, 8)))


@pytest.mark.parametrize(("rows", "asked"), [(0, 0), (3, 1), (4, 2)])
def test_no_piece_is_asked_for_behind_the_last_row(rows: int, asked: int) -> None:
    there = pieces(3, 3, 3)
    list(first_rows(there, rows))
    assert len(list(there)) == 3 - asked
