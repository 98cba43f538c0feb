"""The first rows of something that comes in pieces."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TypeVar

import pyarrow as pa

Piece = TypeVar("Piece", pa.Table, pa.RecordBatch)


def first_rows(pieces: Iterable[Piece], rows: int) -> Iterator[Piece]:
    """The pieces up to the one that has the last of so many rows, and of that one its first rows; no piece behind it is asked for.

    Parameters
    ----------
    rows
        How many, all pieces together.
    """
    if rows < 1:
        return
    left = rows
    for piece in pieces:
        yield piece.slice(0, left)
        left -= piece.num_rows
        if left <= 0:
            return
