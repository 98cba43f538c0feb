"""Arrow constants made without pandas, and helpers for nested types, maps and batches.

``pyarrow.scalar`` and ``pyarrow.array`` import pandas, if it is installed, the first time that they convert a
Python value. That takes a third of a second, which a Spark worker that only moves batches need not spend. So
these constants are built from bytes."""

from __future__ import annotations

import binascii
import struct
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache
from typing import Generic, TypeVar

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as pat

T = TypeVar("T")
Rows = TypeVar("Rows", pa.Table, pa.RecordBatch)


class PerSchema(Generic[T]):
    """Cache of values that are derived from schemas, by the schemas' identity.

    A queue keeps one schema object, and hashing a schema takes longer than appending a row.
    """

    def __init__(self, make: Callable[[pa.Schema], T]) -> None:
        self._make = make
        self._made: dict[int, tuple[weakref.ref[pa.Schema], T]] = {}

    def __call__(self, schema: pa.Schema) -> T:
        key = id(schema)
        known = self._made.get(key)
        if known is not None and known[0]() is schema:
            return known[1]
        made = self._make(schema)
        self._made[key] = (weakref.ref(schema, lambda _: self._made.pop(key, None)), made)
        return made


def u32_array(values: Sequence[int]) -> pa.Array:
    return _array(pa.uint32(), f"={len(values)}I", *values)


def u32(value: int) -> pa.Scalar:
    return u32_array([value])[0]


@lru_cache(maxsize=64)
def u64(value: int) -> pa.Scalar:
    return _array(pa.uint64(), "=Q", value)[0]


def i64(value: int) -> pa.Scalar:
    return _array(pa.int64(), "=q", value)[0]


def f64(value: float) -> pa.Scalar:
    return _array(pa.float64(), "=d", value)[0]


def zeros(arrow_type: pa.DataType, length: int = 1) -> pa.Array:
    """Return an array of zeros of an integer type."""
    size = length * arrow_type.bit_width // 8
    return pa.Array.from_buffers(arrow_type, length, [None, pa.py_buffer(bytes(size))])


def _array(arrow_type: pa.DataType, form: str, *values: float) -> pa.Array:
    buffer = pa.py_buffer(struct.pack(form, *values))
    return pa.Array.from_buffers(arrow_type, len(values), [None, buffer])


def nested_fields(arrow_type: pa.DataType) -> list[pa.Field]:
    """Return the fields directly below a canonical type; of a map, the key's and the value's."""
    if pat.is_map(arrow_type):
        return [arrow_type.key_field, arrow_type.item_field]
    if pat.is_list(arrow_type):
        return [arrow_type.value_field]
    return list(arrow_type) if pat.is_struct(arrow_type) else []


def map_entries(array: pa.Array) -> pa.Array:
    """Return a map array as a list array of key and value structs, which can be flattened even if it is a
    slice.
    """
    kind = array.type
    # Built from its parts: a cast would also check, and refuse, values below nulls.
    entries = pa.StructArray.from_arrays(
        [array.keys, array.items], fields=[kind.key_field, kind.item_field.with_nullable(True)]
    )
    parts = array.buffers()[:2]
    return pa.Array.from_buffers(
        pa.list_(entries.type), len(array), parts, offset=array.offset, children=[entries]
    )


def first_rows(batches: Iterable[Rows], count: int) -> Iterator[Rows]:
    """Yield the first ``count`` rows of a stream of tables or batches, without reading further."""
    if count < 1:
        return
    left = count
    for batch in batches:
        yield batch.slice(0, left)
        left -= batch.num_rows
        if left <= 0:
            return


def grouped(batches: Iterable[pa.RecordBatch], rows: int, size: int) -> Iterator[list[pa.RecordBatch]]:
    """Group non-empty batches until a group has ``rows`` rows or ``size`` bytes."""
    group: list[pa.RecordBatch] = []
    group_rows = group_bytes = 0
    for batch in batches:
        if not batch.num_rows:
            continue
        group.append(batch)
        group_rows, group_bytes = group_rows + batch.num_rows, group_bytes + batch.nbytes
        if group_rows >= rows or group_bytes >= size:
            yield group
            group, group_rows, group_bytes = [], 0, 0
    if group:
        yield group


def lists_of(values: pa.Array, sizes: pa.Array) -> pa.ListArray:
    """Return values as lists of the given sizes, one for each row; null instead of an empty list."""
    empty = pa.concat_arrays([pc.equal(sizes, zeros(sizes.type)[0]), pc.is_null(zeros(pa.int8()))])
    ends = pc.if_else(empty, pa.nulls(len(empty), pa.int32()), _ends(sizes))
    return pa.ListArray.from_arrays(ends, values)


def bytes_from_hex(text: pa.StringArray) -> pa.BinaryArray:
    """Decode pairs of hex digits; raise ``pa.ArrowInvalid`` for other text."""
    sizes = pc.binary_length(text).fill_null(0)
    if pc.max(pc.bit_wise_and(sizes, 1)).as_py():
        raise pa.ArrowInvalid("an odd number of hex digits")
    whole = pa.ListArray.from_arrays(pa.array([0, len(text)], pa.int32()), text.fill_null(""))
    try:
        data = binascii.unhexlify(pc.binary_join(whole, "")[0].as_py())
    except ValueError:
        raise pa.ArrowInvalid("an invalid hex digit") from None
    return binary_array(text, pa.py_buffer(data), pc.divide(sizes, 2))


def binary_array(like: pa.Array, data: pa.Buffer, sizes: pa.Array) -> pa.BinaryArray:
    """Return values of the given sizes, which are consecutive in ``data``; null where ``like`` is null."""
    valid = pc.is_valid(like).buffers()[1]
    return pa.Array.from_buffers(pa.binary(), len(like), [valid, _ends(sizes).buffers()[1], data])


def _ends(sizes: pa.Array) -> pa.Array:
    """Return the start of each value, and the end of the last one."""
    return pa.concat_arrays([zeros(pa.int32()), pc.cumulative_sum(sizes).cast(pa.int32())])
