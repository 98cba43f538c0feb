"""Equal values to equal numbers, vectorised and exact, for every type that has an Arrow form.

Codes compare rows inside one call only: they depend on the data that is there. NULL equals NULL, every NaN every other, and
-0.0 equals 0.0, as in Spark's grouping; maps are equal whatever the order of their entries.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as pat

_DENSE = 1 << 40
_LARGEST = 1 << 62
_DIRECT = 8
"""Up to so many possible numbers for each row a table of all of them is faster than a hash table."""
_NO_ROWS = np.zeros(0, np.int64)


@dataclass(frozen=True)
class Codes:
    """A number from 0 up to, not including, ``size`` for each row."""

    values: Any
    size: int

    def dense(self) -> Codes:
        """The same with the numbers 0, 1, 2, … and none left out."""
        if self.size <= 1:
            return self
        if self.size <= _DIRECT * len(self.values):
            there = np.zeros(self.size, bool)
            there[self.values] = True
            numbers = np.cumsum(there) - 1
            return Codes(numbers[self.values], int(numbers[-1]) + 1)
        encoded = pc.dictionary_encode(pa.array(self.values))
        return Codes(encoded.indices.to_numpy().astype(np.int64), len(encoded.dictionary))


def factorize(columns: Sequence[pa.Array]) -> Codes:
    """One number for the values of several columns of equal length, taken together."""
    combined = Codes(np.zeros(len(columns[0]) if columns else 0, np.int64), 1)
    for column in columns:
        combined = combine_codes(combined, factorize_column(column))
    return combined


def factorize_column(column: pa.Array) -> Codes:
    """A number for each value of a column."""
    kind = column.type
    if len(column) == 0:
        return Codes(_NO_ROWS, 1)
    if pat.is_struct(kind):
        below = factorize(column.flatten()) if kind.num_fields else Codes(np.zeros(len(column), np.int64), 1)
        return _with_nulls(column, below)
    if pat.is_map(kind):
        return _with_nulls(column, _list_codes(column, factorize([column.keys, column.items]), ordered=False))
    if pat.is_list(kind) or pat.is_large_list(kind):
        return _with_nulls(column, _list_codes(column, factorize_column(column.values), ordered=True))
    if pat.is_integer(kind) or pat.is_timestamp(kind) or pat.is_date32(kind):
        narrow = _narrow(column)
        if narrow is not None:
            return narrow
    return _encoded(column)


def order_codes(column: pa.Array) -> Any:
    """A number for each value of a column, in the order of the values; nulls come last."""
    if pat.is_integer(column.type) and not column.null_count:
        return column.to_numpy(zero_copy_only=False).astype(np.int64, copy=False)
    encoded = pc.dictionary_encode(column, null_encoding="encode")
    order = np.empty(len(encoded.dictionary), np.int64)
    order[pc.array_sort_indices(encoded.dictionary).to_numpy()] = np.arange(len(order))
    return order[encoded.indices.to_numpy()]


def rows_equal(columns: Sequence[pa.Array], left: Any, right: Any) -> Any:
    """The mask of the pairs of rows, by their places, that are equal in all columns; NaN may pass for different."""
    equal = np.ones(len(left), bool)
    for column in columns:
        if pat.is_nested(column.type) or pat.is_dictionary(column.type) or pat.is_null(column.type):
            codes = factorize_column(column).values
            equal &= codes[left] == codes[right]
            continue
        here, there = column.take(pa.array(left)), column.take(pa.array(right))
        nulls = pc.and_(here.is_null(), there.is_null())
        same = pc.or_(nulls, pc.equal(here, there).fill_null(False))
        equal &= same.to_numpy(zero_copy_only=False)
    return equal


def cumcount(values: Any) -> Any:
    """For each row how many rows before it have the same number."""
    order = np.argsort(values, kind="stable")
    ordered = values[order]
    starts = np.flatnonzero(np.r_[True, ordered[1:] != ordered[:-1]]) if len(ordered) else order
    lengths = np.diff(np.r_[starts, len(ordered)])
    found = np.empty(len(ordered), np.int64)
    found[order] = np.arange(len(ordered)) - np.repeat(starts, lengths)
    return found


def combine_codes(left: Codes, right: Codes) -> Codes:
    if left.size * right.size >= _LARGEST:
        left, right = left.dense(), right.dense()
    return Codes(left.values * right.size + right.values, left.size * right.size)


def _with_nulls(column: pa.Array, below: Codes) -> Codes:
    if not column.null_count:
        return below
    alive = column.is_valid().to_numpy(zero_copy_only=False)
    return Codes(np.where(alive, below.values + 1, 0), below.size + 1)


def _narrow(column: pa.Array) -> Codes | None:
    """The values themselves, where they lie close enough together."""
    if pat.is_integer(column.type):
        if column.type.bit_width == 64 and pat.is_unsigned_integer(column.type):
            return None
        numbers = column.cast(pa.int64())
    else:
        numbers = column.view(pa.int64() if column.type.bit_width == 64 else pa.int32()).cast(pa.int64())
    ends = pc.min_max(numbers)
    low, high = ends["min"].as_py(), ends["max"].as_py()
    if low is None or high - low >= _DENSE:
        return None
    values = (numbers.fill_null(low) if numbers.null_count else numbers).to_numpy()
    return _with_nulls(column, Codes(values - low, high - low + 1))


def _encoded(column: pa.Array) -> Codes:
    if pat.is_floating(column.type):
        # Adding zero makes the negative zero a positive one; the bits of NaN differ by how it came about.
        column = pc.add(column, pa.scalar(0, column.type))
        column = pc.if_else(pc.is_nan(column), pa.scalar(float("nan"), column.type), column)
    elif pat.is_null(column.type):
        return Codes(np.zeros(len(column), np.int64), 1)
    elif pat.is_dictionary(column.type):
        column = column.dictionary_decode()
    encoded = pc.dictionary_encode(column, null_encoding="encode")
    return Codes(encoded.indices.to_numpy().astype(np.int64), max(len(encoded.dictionary), 1))


def _list_codes(column: pa.Array, elements: Codes, *, ordered: bool) -> Codes:
    """Codes of lists, of which the codes of all elements are known: the bytes of those are a list's value."""
    offsets = np.asarray(column.offsets).astype(np.int64)
    values = elements.values
    if not ordered:
        parents = np.repeat(np.arange(len(column)), np.diff(offsets))
        inside = values[offsets[0] : offsets[-1]]
        values = values.copy()
        values[offsets[0] : offsets[-1]] = inside[np.lexsort((inside, parents))]
    buffers = [None, pa.py_buffer(offsets * 8), pa.py_buffer(np.ascontiguousarray(values, np.int64))]
    return _encoded(pa.Array.from_buffers(pa.large_binary(), len(column), buffers))
