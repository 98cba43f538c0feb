"""Arrow constants that do not need pandas, and helpers for nested types, maps and batches.

``pyarrow.scalar`` and ``pyarrow.array`` import pandas, if it is installed, when they first convert a Python
value. This takes a third of a second, which a Spark worker that only moves batches can avoid. So these
constants are built from bytes.
"""

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
    """Cache of values that are derived from schemas, by object identity.

    A queue has one schema object, and hashing a schema takes longer than appending a row.
    """

    def __init__(self, derive: Callable[[pa.Schema], T]) -> None:
        self._derive = derive
        self._values: dict[int, tuple[weakref.ref[pa.Schema], T]] = {}

    def __call__(self, schema: pa.Schema) -> T:
        key = id(schema)
        cached = self._values.get(key)
        if cached is not None and cached[0]() is schema:
            return cached[1]
        value = self._derive(schema)
        self._values[key] = (weakref.ref(schema, lambda _: self._values.pop(key, None)), value)
        return value


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


def _array(arrow_type: pa.DataType, struct_format: str, *values: float) -> pa.Array:
    buffer = pa.py_buffer(struct.pack(struct_format, *values))
    return pa.Array.from_buffers(arrow_type, len(values), [None, buffer])


def nested_fields(arrow_type: pa.DataType) -> list[pa.Field]:
    """Return the fields directly below a canonical type; for a map, its key and value fields."""
    if pat.is_map(arrow_type):
        return [arrow_type.key_field, arrow_type.item_field]
    if pat.is_list(arrow_type):
        return [arrow_type.value_field]
    return list(arrow_type) if pat.is_struct(arrow_type) else []


def map_entries(array: pa.Array) -> pa.Array:
    """Return a map array as a list array of key and value structs, which can be flattened even if it is a
    slice.
    """
    map_type = array.type
    # Build it from its parts, because a cast would also check, and refuse, values below nulls.
    entries = pa.StructArray.from_arrays(
        [array.keys, array.items], fields=[map_type.key_field, map_type.item_field.with_nullable(True)]
    )
    own_buffers = array.buffers()[:2]
    return pa.Array.from_buffers(
        pa.list_(entries.type), len(array), own_buffers, offset=array.offset, children=[entries]
    )


def first_rows(batches: Iterable[Rows], count: int) -> Iterator[Rows]:
    """Yield the first ``count`` rows of a stream of tables or batches, without reading further."""
    if count < 1:
        return
    remaining = count
    for batch in batches:
        yield batch.slice(0, remaining)
        remaining -= batch.num_rows
        if remaining <= 0:
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
    single_list = pa.ListArray.from_arrays(pa.array([0, len(text)], pa.int32()), text.fill_null(""))
    try:
        data = binascii.unhexlify(pc.binary_join(single_list, "")[0].as_py())
    except ValueError:
        raise pa.ArrowInvalid("an invalid hex digit") from None
    return binary_array(text, pa.py_buffer(data), pc.divide(sizes, 2))


def binary_array(like: pa.Array, data: pa.Buffer, sizes: pa.Array) -> pa.BinaryArray:
    """Return values of the given sizes, which are consecutive in ``data``; null where ``like`` is null."""
    valid = pc.is_valid(like).buffers()[1]
    return pa.Array.from_buffers(pa.binary(), len(like), [valid, _ends(sizes).buffers()[1], data])


def _ends(sizes: pa.Array) -> pa.Array:
    """Return the start of each value, followed by the end of the last value."""
    return pa.concat_arrays([zeros(pa.int32()), pc.cumulative_sum(sizes).cast(pa.int32())])
