"""Stable hash of one or more key columns, which determines the partition of each row.

The hash is stored permanently, so it depends only on the values. It does not depend on how rows are batched,
chunked or sliced, on Arrow's version, on the platform, or on the width of an integer or float column.

Definition, all arithmetic modulo 2**64::

    mix(x)      x ^= x >> 30; x *= 0xBF58476D1CE4E5B9; x ^= x >> 27; x *= 0x94D049BB133111EB; x ^= x >> 31
    acc         starts at 0x243F6A8885A308D3; for each key column in order: acc = mix(acc ^ word)
    hash        acc >> 32

The word of a value is

    null                     0x452821E638D01377
    integer, boolean         the value in two's complement
    date                     days since 1970-01-01
    timestamp, duration      microseconds; a timestamp with a zone counts from the epoch in UTC
    time                     nanoseconds since midnight
    float                    the bits of the double, with -0.0 as 0.0 and every NaN as 0x7FF8000000000000
    decimal                  mix(low) ^ high, the two halves of the unscaled value in 128-bit two's complement
    string, binary           the sum over its 8-byte windows, the last padded with zeros, read little-endian,
                             of mix(window ^ left * 0x9E3779B97F4A7C15), where left counts the bytes from the
                             window's start to the value's end; strings count as UTF-8; an empty value is 0

``mix`` is the finaliser of SplitMix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number
generators", 2014, with Stafford's constants). It distributes keys well, but does not protect against chosen
keys.

There are two implementations, and a test checks that they agree: one with Arrow kernels, and one in plain
Python for up to 64 rows, where dozens of kernel calls would take longer.
"""

from __future__ import annotations

import struct
import sys
from collections.abc import Callable, Sequence
from functools import cache

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as pat

from penstock.arguments import did_you_mean, in_quotes
from penstock.arrow.arrays import f64, i64, u32_array, u64, zeros
from penstock.arrow.coerce import kind_of
from penstock.arrow.schema import canonical_type
from penstock.errors import SchemaMismatchError, UnsupportedTypeError

MAX_PYTHON_ROWS = 64
"""The largest number of rows that are hashed in plain Python."""
_MAX_PYTHON_BYTES = 4096
# The flat arrays take about a dozen times 8 bytes per window; blocks of this size bound their memory.
_BLOCK_BYTES = 1 << 20
# Arrays of this many rows stay in the processor's cache from one kernel to the next.
_BLOCK_ROWS = 65_536

_MASK = 0xFFFFFFFFFFFFFFFF
_SEED = 0x243F6A8885A308D3
_NULL = 0x452821E638D01377
_NAN = 0x7FF8000000000000
_REMAINING_FACTOR = 0x9E3779B97F4A7C15
_FACTOR_1, _FACTOR_2 = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


def key_hash(table: pa.Table | pa.RecordBatch, key: Sequence[str]) -> pa.Array:
    """Return the hash of the key columns for each row, as defined in the docstring of the module.

    The result is ``uint32`` without nulls. The rows have the queue's canonical schema. The order of the key
    columns matters.
    """
    if sys.byteorder != "little":
        raise UnsupportedTypeError(
            "key hashes need a little-endian machine: create the queue without a key",
            condition="UNSUPPORTED_TYPE.BYTE_ORDER",
        )
    python_hashes = _python_hashes(table, key) if 0 < table.num_rows <= MAX_PYTHON_ROWS else None
    if python_hashes is not None:
        return u32_array(python_hashes)
    columns = table.select(list(key))
    if isinstance(columns, pa.RecordBatch):
        columns = pa.Table.from_batches([columns])
    blocks = [_hash_block(block) for block in _blocks(columns)]
    return pa.concat_arrays(blocks) if blocks else u32_array([])


def row_hashes(rows: pa.Table) -> pa.Array:
    """Return a 64-bit hash of all columns for each row: ``uint64``, no nulls. It is not stored anywhere."""
    blocks = [_mixed_columns(block) for block in _blocks(rows)] if rows.num_rows else []
    return pa.concat_arrays(blocks) if blocks else zeros(pa.uint64(), 0)


def check_key(schema: pa.Schema, key: Sequence[str]) -> None:
    """Refuse a key that a queue with this schema cannot have."""
    if isinstance(key, str) or not key:
        raise SchemaMismatchError(
            f"a key is a list of one or more column names, not {in_quotes(key)}", found=repr(key)
        )
    for position, name in enumerate(key):
        index = schema.get_field_index(name)
        if index < 0:
            known = ", ".join(schema.names[:20])
            hint = did_you_mean(name, schema.names)
            raise SchemaMismatchError(
                f"there is no key column {in_quotes(name)}; the columns are {known}.{hint}",
                condition="SCHEMA_MISMATCH.UNKNOWN_COLUMN",
                column=name,
            )
        if name in key[:position]:
            raise SchemaMismatchError(
                f"the key names the column {in_quotes(name)} twice: name it once",
                condition="SCHEMA_MISMATCH.DUPLICATE_COLUMN",
                column=name,
            )
        _check_type(schema.field(index).type, name)


def _check_type(arrow_type: pa.DataType, name: str) -> None:
    if kind_of(arrow_type) == "dictionary":
        arrow_type = arrow_type.value_type
    if kind_of(arrow_type) not in _WORDS:
        raise UnsupportedTypeError(
            f"the column {in_quotes(name)} cannot be a key, because {arrow_type} values are not hashed: "
            "use a number, string, binary, boolean, date or time column",
            column=name,
            found=str(arrow_type),
        )


def _blocks(table: pa.Table) -> list[pa.RecordBatch]:
    if table.column(0).num_chunks > 1 + table.num_rows // _BLOCK_ROWS and table.nbytes < 1 << 30:
        table = table.combine_chunks()  # each block costs a fixed amount
    blocks: list[pa.RecordBatch] = table.to_batches(max_chunksize=_BLOCK_ROWS)
    return blocks


def _hash_block(block: pa.RecordBatch) -> pa.Array:
    return pc.shift_right(_mixed_columns(block), u64(32)).cast(pa.uint32())


def _mixed_columns(block: pa.RecordBatch) -> pa.Array:
    accumulated: pa.Array | pa.Scalar = u64(_SEED)
    for name, column in zip(block.schema.names, block.columns, strict=True):
        accumulated = _mix(pc.bit_wise_xor(_words(column, name), accumulated))
    return accumulated


def _mix(words: pa.Array) -> pa.Array:
    words = pc.multiply(pc.bit_wise_xor(words, pc.shift_right(words, u64(30))), u64(_FACTOR_1))
    words = pc.multiply(pc.bit_wise_xor(words, pc.shift_right(words, u64(27))), u64(_FACTOR_2))
    return pc.bit_wise_xor(words, pc.shift_right(words, u64(31)))


def _words(column: pa.Array, name: str) -> pa.Array:
    if pat.is_dictionary(column.type):
        column = column.dictionary_decode()
    column = column.cast(canonical_type(column.type, name))
    words = _WORDS[kind_of(column.type)](column)
    return pc.if_else(column.is_valid(), words, u64(_NULL)) if column.null_count else words


def _integer_words(column: pa.Array) -> pa.Array:
    return column.cast(pa.int64()).view(pa.uint64())


def _boolean_words(column: pa.Array) -> pa.Array:
    return column.cast(pa.uint8()).cast(pa.uint64())


def _date_words(column: pa.Array) -> pa.Array:
    return _integer_words(column.view(pa.int32()))


def _time_words(column: pa.Array) -> pa.Array:
    return column.view(pa.uint64())


def _float_words(column: pa.Array) -> pa.Array:
    doubles = column.cast(pa.float64())
    without_sign = pc.if_else(pc.equal(doubles, f64(0.0)), u64(0), doubles.view(pa.uint64()))
    return pc.if_else(pc.is_nan(doubles), u64(_NAN), without_sign)


def _decimal_words(column: pa.Array) -> pa.Array:
    halves = pa.Array.from_buffers(
        pa.uint64(), 2 * len(column), [None, column.buffers()[1]], offset=2 * column.offset
    )
    pairs = pa.FixedSizeListArray.from_arrays(halves, 2)
    return pc.bit_wise_xor(_mix(pc.list_element(pairs, 0)), pc.list_element(pairs, 1))


def _bytes_words(column: pa.Array) -> pa.Array:
    """Return the word of each string or binary value; the word of a null is arbitrary.

    The windows of all values of a block are laid out in one flat array and mixed together, so the time
    depends only on the number of bytes, and not on how they are distributed over the values.
    """
    offsets = _offsets(column)
    first, last = offsets[0].as_py(), offsets[len(column)].as_py()
    if last - first <= _BLOCK_BYTES:
        data = column.buffers()[2]
        return _words_of_block(offsets, first, b"" if data is None else data.slice(first, last - first))
    if len(column) == 1:
        return pa.repeat(u64(_word_of_long_value(column.buffers()[2].slice(first, last - first))), 1)
    half = len(column) // 2
    return pa.concat_arrays([_bytes_words(column.slice(0, half)), _bytes_words(column.slice(half))])


def _offsets(column: pa.Array) -> pa.Array:
    buffer = column.buffers()[1]
    if buffer is None or not len(column):
        return zeros(pa.int32())
    return pa.Array.from_buffers(pa.int32(), len(column) + 1, [None, buffer], offset=column.offset)


def _little_endian_words(data: pa.Buffer | bytes) -> pa.Array:
    size = len(data)
    count = size // 8 + 2  # a window that starts in the last word reads the one after it
    buffer = pa.py_buffer(b"".join((data, bytes(8 * count - size))))
    return pa.Array.from_buffers(pa.uint64(), count, [None, buffer])


def _words_of_block(offsets: pa.Array, first: int, data: pa.Buffer | bytes) -> pa.Array:
    rows = len(offsets) - 1
    positions = pc.subtract(offsets.cast(pa.int64()), i64(first))
    starts, ends = positions.slice(0, rows), positions.slice(1)
    counts = pc.shift_right(pc.add(pc.subtract(ends, starts), i64(7)), i64(3))
    bounds = pa.concat_arrays([zeros(pa.int64()), pc.cumulative_sum(counts)])
    total = bounds[rows].as_py()
    if not total:
        return zeros(pa.uint64(), rows)
    row_of_window = pc.list_parent_indices(pa.LargeListArray.from_arrays(bounds, pa.nulls(total)))
    # The first byte of flat window j is start(row) + 8 * (j - bound(row)).
    shift = pc.subtract(starts, pc.multiply(bounds.slice(0, rows), i64(8)))
    window_positions = pc.add(_take(shift, row_of_window), _multiples_of_eight().slice(0, total))
    remaining = pc.subtract(_take(ends, row_of_window), window_positions)
    mixed = _mix_windows(
        _mask_windows(_read_unaligned(_little_endian_words(data), window_positions), remaining), remaining
    )
    sums = pa.concat_arrays([zeros(pa.uint64()), pc.cumulative_sum(mixed)])
    sums_at_bounds = _take(sums, bounds)
    return pc.subtract(sums_at_bounds.slice(1), sums_at_bounds.slice(0, rows))


def _take(values: pa.Array, indexes: pa.Array) -> pa.Array:
    return pc.take(values, indexes, boundscheck=False)


@cache
def _multiples_of_eight() -> pa.Array:
    # Each value adds at most one partial window, and blocks have at most 65,536 values.
    max_windows = _BLOCK_BYTES // 8 + _BLOCK_ROWS
    return pc.subtract(pc.cumulative_sum(pa.repeat(i64(8), max_windows)), i64(8))


def _read_unaligned(aligned: pa.Array, positions: pa.Array) -> pa.Array:
    """Return the eight bytes at each position, assembled from the two aligned words that contain them."""
    word_indexes = pc.shift_right(positions, i64(3))
    bits = pc.shift_left(pc.bit_wise_and(positions, i64(7)), i64(3)).view(pa.uint64())
    low = pc.shift_right(_take(aligned, word_indexes), bits)
    # In two steps, because a shift by 64 would change nothing.
    high = pc.shift_left(_take(aligned, pc.add(word_indexes, i64(1))), u64(1))
    return pc.bit_wise_or(low, pc.shift_left(high, pc.subtract(u64(63), bits)))


def _mask_windows(windows: pa.Array, remaining: pa.Array) -> pa.Array:
    used_bytes = pc.min_element_wise(remaining, i64(8)).view(pa.uint64())
    unused_bits = pc.subtract(u64(64), pc.shift_left(used_bytes, u64(3)))
    return pc.bit_wise_and(windows, pc.shift_right(u64(_MASK), unused_bits))


def _mix_windows(windows: pa.Array, remaining: pa.Array) -> pa.Array:
    return _mix(pc.bit_wise_xor(windows, pc.multiply(remaining.view(pa.uint64()), u64(_REMAINING_FACTOR))))


def _word_of_long_value(data: pa.Buffer) -> int:
    total = 0
    for start in range(0, data.size, _BLOCK_BYTES):
        piece = data.slice(start, min(_BLOCK_BYTES, data.size - start))
        count = (piece.size + 7) // 8
        remaining = pc.subtract(i64(data.size - start), _multiples_of_eight().slice(0, count))
        mixed = _mix_windows(_little_endian_words(piece).slice(0, count), remaining)
        total += pc.sum(mixed).as_py()
    return total & _MASK


_WORDS: dict[str, Callable[[pa.Array], pa.Array]] = {
    "integer": _integer_words,
    "boolean": _boolean_words,
    "date": _date_words,
    "timestamp": _time_words,
    "timestamp without time zone": _time_words,
    "time": _time_words,
    "duration": _time_words,
    "float": _float_words,
    "decimal": _decimal_words,
    "string": _bytes_words,
    "binary": _bytes_words,
}


def _python_hashes(table: pa.Table | pa.RecordBatch, key: Sequence[str]) -> list[int] | None:
    """Return the hashes of a few rows; None if a type or long values require Arrow's kernels."""
    schema = table.schema
    hashes = [_SEED] * table.num_rows
    for name in key:
        index = schema.get_field_index(name)
        word_of = _PYTHON_WORDS.get(schema.field(index).type.id) if index >= 0 else None
        if word_of is None:
            return None
        column = table.column(index)
        if word_of in (_python_string, _python_bytes) and column.nbytes > _MAX_PYTHON_BYTES:
            return None
        words = [_NULL if value is None else word_of(value) for value in column.to_pylist()]
        hashes = [_python_mix(accumulated ^ word) for accumulated, word in zip(hashes, words, strict=True)]
    return [row_hash >> 32 for row_hash in hashes]


def _python_mix(word: int) -> int:
    word = ((word ^ (word >> 30)) * _FACTOR_1) & _MASK
    word = ((word ^ (word >> 27)) * _FACTOR_2) & _MASK
    return word ^ (word >> 31)


def _python_integer(value: int) -> int:
    return value & _MASK


def _python_float(value: float) -> int:
    if value != value:
        return _NAN
    return int.from_bytes(struct.pack("<d", value + 0.0), "little")


def _python_bytes(value: bytes) -> int:
    size = len(value)
    total = 0
    for start in range(0, size, 8):
        window = int.from_bytes(value[start : start + 8], "little")
        total += _python_mix(window ^ ((size - start) * _REMAINING_FACTOR & _MASK))
    return total & _MASK


def _python_string(value: str) -> int:
    return _python_bytes(value.encode())


_PYTHON_WORDS: dict[int, Callable[..., int]] = {
    pa.bool_().id: _python_integer,
    pa.int8().id: _python_integer,
    pa.int16().id: _python_integer,
    pa.int32().id: _python_integer,
    pa.int64().id: _python_integer,
    pa.float32().id: _python_float,
    pa.float64().id: _python_float,
    pa.string().id: _python_string,
    pa.binary().id: _python_bytes,
}
