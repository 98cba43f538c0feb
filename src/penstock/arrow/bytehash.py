"""The vectorised part of the key hash that is about bytes; ``keys`` defines the hash itself.

The windows of all values of a block are laid out in one flat array and mixed together, so that the price depends on the bytes
alone: one long value among many short ones costs what its bytes cost.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from penstock.arrow.constants import i64, u64, zeros

# A block of this many bytes bounds the memory of the flat arrays, a dozen of 8 bytes for each window.
_BLOCK_BYTES = 1 << 20


_LEFT_FACTOR = u64(0x9E3779B97F4A7C15)
_ONES = u64(0xFFFFFFFFFFFFFFFF)
_STEPS = ((u64(30), u64(0xBF58476D1CE4E5B9)), (u64(27), u64(0x94D049BB133111EB)))
_LAST_SHIFT = u64(31)


def mix(words: pa.Array) -> pa.Array:
    """Return SplitMix64's finaliser of each word."""
    for shift, factor in _STEPS:
        words = pc.multiply(pc.bit_wise_xor(words, pc.shift_right(words, shift)), factor)
    return pc.bit_wise_xor(words, pc.shift_right(words, _LAST_SHIFT))


def words(column: pa.Array) -> pa.Array:
    """Return the word of each string or binary value; of a null, anything."""
    offsets = _offsets(column)
    first, last = offsets[0].as_py(), offsets[len(column)].as_py()
    if last - first <= _BLOCK_BYTES:
        data = column.buffers()[2]
        return _words_of_block(offsets, first, b"" if data is None else data.slice(first, last - first))
    if len(column) == 1:
        return pa.repeat(u64(_word_of_long(column.buffers()[2].slice(first, last - first))), 1)
    half = len(column) // 2
    return pa.concat_arrays([words(column.slice(0, half)), words(column.slice(half))])


def _offsets(column: pa.Array) -> pa.Array:
    buffer = column.buffers()[1]
    if buffer is None or not len(column):
        return zeros(pa.int32())
    return pa.Array.from_buffers(pa.int32(), len(column) + 1, [None, buffer], offset=column.offset)


def _little_endian_words(data: Any) -> pa.Array:
    size = len(data)
    count = size // 8 + 2  # a window that starts in the last word reads the one behind it
    buffer = pa.py_buffer(b"".join((data, bytes(8 * count - size))))
    return pa.Array.from_buffers(pa.uint64(), count, [None, buffer])


def _words_of_block(offsets: pa.Array, first: int, data: Any) -> pa.Array:
    rows = len(offsets) - 1
    places = pc.subtract(offsets.cast(pa.int64()), i64(first))
    starts, ends = places.slice(0, rows), places.slice(1)
    counts = pc.shift_right(pc.add(pc.subtract(ends, starts), i64(7)), i64(3))
    bounds = pa.concat_arrays([zeros(pa.int64()), pc.cumulative_sum(counts)])
    total = bounds[rows].as_py()
    if not total:
        return zeros(pa.uint64(), rows)
    row = pc.list_parent_indices(pa.LargeListArray.from_arrays(bounds, pa.nulls(total)))
    # The first byte of flat window j is start(row) + 8 * (j - bound(row)).
    shift = pc.subtract(starts, pc.multiply(bounds.slice(0, rows), i64(8)))
    at = pc.add(_take(shift, row), _multiples_of_eight().slice(0, total))
    left = pc.subtract(_take(ends, row), at)
    mixed = _mixed_windows(_masked(_unaligned(_little_endian_words(data), at), left), left)
    sums = pa.concat_arrays([zeros(pa.uint64()), pc.cumulative_sum(mixed)])
    ahead = _take(sums, bounds)
    return pc.subtract(ahead.slice(1), ahead.slice(0, rows))


def _take(values: pa.Array, places: pa.Array) -> pa.Array:
    return pc.take(values, places, boundscheck=False)


@cache
def _multiples_of_eight() -> pa.Array:
    # Each value adds at most one window that is not full, and blocks have at most 65,536 values.
    most = _BLOCK_BYTES // 8 + 65_536
    return pc.subtract(pc.cumulative_sum(pa.repeat(i64(8), most)), i64(8))


def _unaligned(aligned: pa.Array, at: pa.Array) -> pa.Array:
    # Eight bytes from any place, out of the two aligned words that hold them.
    place = pc.shift_right(at, i64(3))
    bits = pc.shift_left(pc.bit_wise_and(at, i64(7)), i64(3)).view(pa.uint64())
    low = pc.shift_right(_take(aligned, place), bits)
    # In two steps, because a shift by 64 would change nothing.
    high = pc.shift_left(_take(aligned, pc.add(place, i64(1))), u64(1))
    return pc.bit_wise_or(low, pc.shift_left(high, pc.subtract(u64(63), bits)))


def _masked(windows: pa.Array, left: pa.Array) -> pa.Array:
    inside = pc.min_element_wise(left, i64(8)).view(pa.uint64())
    unused = pc.subtract(u64(64), pc.shift_left(inside, u64(3)))
    return pc.bit_wise_and(windows, pc.shift_right(_ONES, unused))


def _mixed_windows(windows: pa.Array, left: pa.Array) -> pa.Array:
    return mix(pc.bit_wise_xor(windows, pc.multiply(left.view(pa.uint64()), _LEFT_FACTOR)))


def _word_of_long(data: pa.Buffer) -> int:
    total = 0
    for start in range(0, data.size, _BLOCK_BYTES):
        piece = data.slice(start, min(_BLOCK_BYTES, data.size - start))
        count = (piece.size + 7) // 8
        left = pc.subtract(i64(data.size - start), _multiples_of_eight().slice(0, count))
        mixed = _mixed_windows(_little_endian_words(piece).slice(0, count), left)
        total += pc.sum(mixed).as_py()
    return total & 0xFFFFFFFFFFFFFFFF
