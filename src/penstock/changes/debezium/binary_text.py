"""Vectorized decoding of base64 and hex text, and of decimals in base64."""

from __future__ import annotations

import base64
from collections.abc import Callable
from typing import TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from penstock.arrow.arrays import binary_array, bytes_from_hex

Bytes: TypeAlias = NDArray[np.uint8]
Sizes: TypeAlias = NDArray[np.int64]
_DECIMAL_BYTES = 16
"""Size of a 128-bit decimal in bytes."""
_SIGN_BIT = 0x80
_LOWEST_DECIMAL = np.array([_SIGN_BIT, *[0] * (_DECIMAL_BYTES - 1)], np.uint8)
_INVALID = 0xFF
_PAD = ord("=")


_ALPHABET = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/"
_BASE64: Bytes = np.full(256, _INVALID, np.uint8)
_BASE64[np.frombuffer(_ALPHABET, np.uint8)] = np.arange(64)


def from_base64(column: pa.Array) -> pa.Array:
    """Decode padded base64."""
    text, sizes = _joined(column)
    if (sizes % 4).any():
        raise pa.ArrowInvalid("the length of base64 is not a multiple of four")
    pads = text == _PAD
    groups = np.where(pads, 0, _BASE64[text]).reshape(-1, 4).astype(np.uint32)
    padded = pads.reshape(-1, 4)
    last = np.zeros(len(groups), np.bool_)
    last[(np.cumsum(sizes) // 4 - 1)[sizes > 0]] = True
    at_end = ~padded[:, :2].any(axis=1) & (padded[:, 3] | ~padded[:, 2])
    if (groups == _INVALID).any() or (padded.any(axis=1) & ~(last & at_end)).any():
        raise pa.ArrowInvalid("invalid base64")
    whole = groups @ np.array([1 << 18, 1 << 12, 1 << 6, 1], np.uint32)
    count = 3 - padded.sum(axis=1)
    if (whole & (1 << 8 * (3 - count)) - 1).any():
        raise pa.ArrowInvalid("base64 ends with unused bits that are not zero")
    triples = np.stack([whole >> 16, whole >> 8, whole], axis=1).astype(np.uint8)
    data = triples[np.arange(3) < count[:, None]]
    return binary_array(column, pa.py_buffer(data), pa.array(sizes // 4 * 3 - _flags_per_value(pads, sizes)))


def binary_reader(encoding: str) -> Callable[[pa.Array], pa.Array]:
    return bytes_from_hex if encoding == "hex" else from_base64


def encoded(data: bytes, encoding: str) -> str:
    return data.hex() if encoding == "hex" else base64.b64encode(data).decode()


def decimals_from_base64(column: pa.Array, kind: pa.DataType, scale: int) -> pa.Array:
    """Decode decimals from the base64 of their unscaled values, in big-endian two's complement.

    Raise ``pa.ArrowInvalid`` if ``kind`` cannot represent one exactly.
    """
    data, sizes = _joined(from_base64(column))
    valid = column.is_valid().to_numpy(zero_copy_only=False)
    if (sizes > _DECIMAL_BYTES).any() or (sizes[valid] == 0).any():
        raise pa.ArrowInvalid(f"a decimal has more than {_DECIMAL_BYTES} bytes, or none")
    words = np.zeros((len(column), _DECIMAL_BYTES), np.uint8)
    if len(data):
        firsts = np.cumsum(sizes) - sizes
        first = data[np.minimum(firsts, len(data) - 1)]
        second = data[np.minimum(firsts + 1, len(data) - 1)]
        extended = ((first == 0) & (second < _SIGN_BIT)) | ((first == 0xFF) & (second >= _SIGN_BIT))
        if (valid & (sizes > 1) & extended).any():
            raise pa.ArrowInvalid("a decimal has more bytes than it needs")
        words[valid & (first >= _SIGN_BIT)] = 0xFF
        row = np.repeat(np.arange(len(column)), sizes)
        words[row, np.arange(len(data)) - firsts[row] + _DECIMAL_BYTES - sizes[row]] = data
    if (words == _LOWEST_DECIMAL).all(axis=1).any():
        # Arrow's validation does not detect this value, whose absolute value does not fit 16 bytes.
        raise pa.ArrowInvalid("a decimal has more than 38 digits")
    widest = pa.decimal128(38, scale)
    buffers = [pa.array(valid).buffers()[1], pa.py_buffer(np.ascontiguousarray(words[:, ::-1]))]
    decimals = pa.Array.from_buffers(widest, len(column), buffers)
    decimals.validate(full=True)
    return decimals.cast(kind)


def _joined(column: pa.Array) -> tuple[Bytes, Sizes]:
    """Return the concatenated bytes of a column, and the size of each value; a null has size 0."""
    filled = pc.fill_null(column.cast(pa.large_binary()), b"")
    offsets = np.frombuffer(filled.buffers()[1], np.int64)[filled.offset : filled.offset + len(filled) + 1]
    data = filled.buffers()[2]
    whole = np.frombuffer(data, np.uint8) if data is not None else np.empty(0, np.uint8)
    return whole[offsets[0] : offsets[-1]], np.diff(offsets)


def _flags_per_value(flags: NDArray[np.bool_], sizes: Sizes) -> Sizes:
    """Count the set flags within each value."""
    upto = np.concatenate([[0], np.cumsum(flags)])
    ends = np.cumsum(sizes)
    counts: Sizes = upto[ends] - upto[ends - sizes]
    return counts
