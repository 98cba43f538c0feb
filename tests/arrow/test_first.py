"""The first rows of data that arrives in pieces."""

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
def test_first_rows_returns_the_requested_number_or_all_there_are(rows: int) -> None:
    found = [
        number for piece in first_rows(pieces(3, 0, 4, 1), rows) for number in piece["number"].to_pylist()
    ]
    assert found == list(range(min(rows, 8)))


@pytest.mark.parametrize(("rows", "asked"), [(0, 0), (3, 1), (4, 2)])
def test_no_piece_after_the_last_row_is_requested(rows: int, asked: int) -> None:
    there = pieces(3, 3, 3)
    list(first_rows(there, rows))
    assert len(list(there)) == 3 - asked
