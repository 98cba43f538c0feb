"""A stable hash of one or several key columns: which partition a row belongs to must never change.

The hash is a function of the values alone. It does not depend on how rows are batched, chunked or sliced, on Arrow's version,
on the platform, or on the width of an integer or float column.

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
    string, binary           the sum over its 8-byte windows, the last filled up with zeros, read little-endian, of
                             mix(window ^ left * 0x9E3779B97F4A7C15), where left counts the bytes from the window's start
                             to the value's end; strings count as UTF-8, and an empty value is 0

``mix`` is the finaliser of SplitMix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number generators", 2014, with
Stafford's constants). It spreads keys well and is no defence against chosen ones.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as pat

from penstock.arrow import bytehash, smallhash
from penstock.arrow.bytehash import mix
from penstock.arrow.casts import kind_of
from penstock.arrow.constants import f64, u32_array, u64
from penstock.arrow.types import canonical_type
from penstock.errors import SchemaMismatch, UnsupportedType
from penstock.names import did_you_mean, in_quotes

# Arrays of this many rows stay in the processor's cache from one kernel to the next.
_BLOCK_ROWS = 65_536

_SEED = u64(0x243F6A8885A308D3)
_NULL = u64(0x452821E638D01377)
_ZERO = u64(0)
_ZERO_DOUBLE = f64(0.0)
_NAN = u64(0x7FF8000000000000)
_HIGH_HALF = u64(32)


def key_hash(table: pa.Table | pa.RecordBatch, key: Sequence[str]) -> pa.Array:
    """Return a hash of the key columns for each row.

    Parameters
    ----------
    table
        Rows in a queue's canonical schema.
    key
        The names of the key columns, in the queue's order; the order counts.

    Returns
    -------
    pa.Array
        ``uint32``, one for each row, no nulls. The module's docstring defines it.

    Raises
    ------
    SchemaMismatch
        A key column is missing.
    UnsupportedType
        A key column's type has no hash, such as a struct.
    """
    if sys.byteorder != "little":
        raise UnsupportedType(
            "Key hashes are worked out on little-endian machines alone; leave the queue's key out."
        )
    few = smallhash.hashes(table, key) if 0 < table.num_rows <= smallhash.MAX_ROWS else None
    if few is not None:
        return u32_array(few)
    check_key(table.schema, key)
    columns = table.select(list(key))
    if isinstance(columns, pa.RecordBatch):
        columns = pa.Table.from_batches([columns])
    blocks = [_hash_block(block) for block in _blocks(columns)]
    return pa.concat_arrays(blocks) if blocks else u32_array([])


def check_key(schema: pa.Schema, key: Sequence[str]) -> None:
    """Refuse a key that no queue of the schema can have.

    Parameters
    ----------
    schema
        The queue's schema.
    key
        The names of the key columns.

    Raises
    ------
    SchemaMismatch
        The key is empty, or names a column that does not exist or one twice.
    UnsupportedType
        A column's type has no hash.
    """
    if isinstance(key, str) or not key:
        raise SchemaMismatch(
            f"A key is a list of one or more column names, not {in_quotes(key)}.", found=repr(key)
        )
    for place, name in enumerate(key):
        index = schema.get_field_index(name)
        if index < 0:
            known = ", ".join(schema.names[:20])
            hint = did_you_mean(name, schema.names)
            raise SchemaMismatch(
                f"There is no key column {in_quotes(name)}; the columns are {known}.{hint}", column=name
            )
        if name in key[:place]:
            raise SchemaMismatch(
                f"The key names the column {in_quotes(name)} twice; name it once.", column=name
            )
        _check_type(schema.field(index).type, name)


def _check_type(arrow_type: pa.DataType, name: str) -> None:
    if kind_of(arrow_type) == "dictionary":
        arrow_type = arrow_type.value_type
    if kind_of(arrow_type) not in _WORDS:
        raise UnsupportedType(
            f"The column {in_quotes(name)} cannot be a key, because {arrow_type} values are not hashed; use a number, "
            "string, binary, boolean, date or time column.",
            column=name,
            found=str(arrow_type),
        )


def _blocks(table: pa.Table) -> list[pa.RecordBatch]:
    if table.column(0).num_chunks > 1 + table.num_rows // _BLOCK_ROWS and table.nbytes < 1 << 30:
        table = table.combine_chunks()  # each block has a fixed price
    blocks: list[pa.RecordBatch] = table.to_batches(max_chunksize=_BLOCK_ROWS)
    return blocks


def _hash_block(block: pa.RecordBatch) -> pa.Array:
    accumulated: Any = _SEED
    for name, column in zip(block.schema.names, block.columns, strict=True):
        accumulated = mix(pc.bit_wise_xor(_words(column, name), accumulated))
    return pc.shift_right(accumulated, _HIGH_HALF).cast(pa.uint32())


def _words(column: pa.Array, name: str) -> pa.Array:
    if pat.is_dictionary(column.type):
        column = column.dictionary_decode()
    column = column.cast(canonical_type(column.type, name))
    words = _WORDS[kind_of(column.type)](column)
    if not column.null_count:
        return words
    return pc.if_else(column.is_valid(), words, _NULL)


def _integer_words(column: pa.Array) -> pa.Array:
    return column.cast(pa.int64()).view(pa.uint64())


def _boolean_words(column: pa.Array) -> pa.Array:
    return column.cast(pa.uint8()).cast(pa.uint64())


def _date_words(column: pa.Array) -> pa.Array:
    return _integer_words(column.view(pa.int32()))


def _count_words(column: pa.Array) -> pa.Array:
    return column.view(pa.uint64())


def _float_words(column: pa.Array) -> pa.Array:
    doubles = column.cast(pa.float64())
    without_sign = pc.if_else(pc.equal(doubles, _ZERO_DOUBLE), _ZERO, doubles.view(pa.uint64()))
    return pc.if_else(pc.is_nan(doubles), _NAN, without_sign)


def _decimal_words(column: pa.Array) -> pa.Array:
    halves = pa.Array.from_buffers(
        pa.uint64(), 2 * len(column), [None, column.buffers()[1]], offset=2 * column.offset
    )
    pairs = pa.FixedSizeListArray.from_arrays(halves, 2)
    return pc.bit_wise_xor(mix(pc.list_element(pairs, 0)), pc.list_element(pairs, 1))


_WORDS: dict[str, Callable[[Any], Any]] = {
    "integer": _integer_words,
    "boolean": _boolean_words,
    "date": _date_words,
    "timestamp": _count_words,
    "timestamp without time zone": _count_words,
    "time": _count_words,
    "duration": _count_words,
    "float": _float_words,
    "decimal": _decimal_words,
    "string": bytehash.words,
    "binary": bytehash.words,
}
