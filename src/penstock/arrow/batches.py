"""Arrow constants, made from bytes.

``pyarrow.scalar`` and ``pyarrow.array`` import pandas, where it is installed, the first time that they see a Python value:
a third of a second that a Spark worker which only moves batches must not pay.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Sequence
from typing import TypeVar

import pyarrow as pa


def u32_array(values: Sequence[int]) -> pa.Array:
    """Return unsigned 32-bit integers."""
    return _array(pa.uint32(), f"={len(values)}I", *values)


def u32(value: int) -> pa.Scalar:
    """Return an unsigned 32-bit constant."""
    return u32_array([value])[0]


def u64(value: int) -> pa.Scalar:
    """Return an unsigned 64-bit constant."""
    return _array(pa.uint64(), "=Q", value)[0]


def i64(value: int) -> pa.Scalar:
    """Return a signed 64-bit constant."""
    return _array(pa.int64(), "=q", value)[0]


def f64(value: float) -> pa.Scalar:
    """Return a double constant."""
    return _array(pa.float64(), "=d", value)[0]


def zeros(arrow_type: pa.DataType, length: int = 1) -> pa.Array:
    """Return an array of zeros of an integer type."""
    size = length * arrow_type.bit_width // 8
    return pa.Array.from_buffers(arrow_type, length, [None, pa.py_buffer(bytes(size))])


def _array(arrow_type: pa.DataType, form: str, *values: float) -> pa.Array:
    buffer = pa.py_buffer(struct.pack(form, *values))
    return pa.Array.from_buffers(arrow_type, len(values), [None, buffer])


# ---- first: The first rows of something that comes in pieces.

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
