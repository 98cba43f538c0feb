"""Factorization of Arrow columns: equal values get equal integer codes, exactly, for every type.

Codes are only comparable within one call, because they depend on the data. NULL equals NULL, NaN equals NaN,
and -0.0 equals 0.0, as in Spark's grouping; maps are equal regardless of the order of their entries.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as pat
from numpy.typing import NDArray

Indices = NDArray[np.int64]

_MAX_RANGE = 1 << 40
_MAX_CODES = 1 << 62
_TABLE_FACTOR = 8
"""Up to this many possible codes per row, a lookup table is faster than a hash table."""
_NO_ROWS = np.zeros(0, np.int64)


@dataclass(frozen=True)
class Codes:
    """A code from 0 to ``size - 1`` for each row."""

    values: NDArray[np.int64]
    size: int

    def dense(self) -> Codes:
        """Renumber the codes as 0, 1, 2, … without gaps."""
        if self.size <= 1:
            return self
        if self.size <= _TABLE_FACTOR * len(self.values):
            used = np.zeros(self.size, bool)
            used[self.values] = True
            dense = np.cumsum(used) - 1
            return Codes(dense[self.values], int(dense[-1]) + 1)
        encoded = pc.dictionary_encode(pa.array(self.values))
        return Codes(encoded.indices.to_numpy().astype(np.int64), len(encoded.dictionary))


def factorize(columns: Sequence[pa.Array]) -> Codes:
    """Return a code for each row of several columns of equal length."""
    combined = Codes(np.zeros(len(columns[0]) if columns else 0, np.int64), 1)
    for column in columns:
        combined = combine_codes(combined, factorize_column(column))
    return combined


def factorize_column(column: pa.Array) -> Codes:
    """Return a code for each value of a column."""
    data_type = column.type
    if len(column) == 0:
        return Codes(_NO_ROWS, 1)
    if pat.is_struct(data_type):
        codes = (
            factorize(column.flatten()) if data_type.num_fields else Codes(np.zeros(len(column), np.int64), 1)
        )
        return _with_nulls(column, codes)
    if pat.is_map(data_type):
        return _with_nulls(column, _list_codes(column, factorize([column.keys, column.items]), ordered=False))
    if pat.is_list(data_type) or pat.is_large_list(data_type):
        return _with_nulls(column, _list_codes(column, factorize_column(column.values), ordered=True))
    if pat.is_integer(data_type) or pat.is_timestamp(data_type) or pat.is_date32(data_type):
        value_codes = _value_codes(column)
        if value_codes is not None:
            return value_codes
    return _dictionary_codes(column)


def order_codes(column: pa.Array) -> NDArray[np.int64]:
    """Return a code for each value of a column, in the order of the values; nulls come last."""
    if pat.is_integer(column.type) and not column.null_count:
        return np.asarray(column.to_numpy(zero_copy_only=False), np.int64)
    encoded = pc.dictionary_encode(column, null_encoding="encode")
    order = np.empty(len(encoded.dictionary), np.int64)
    order[pc.array_sort_indices(encoded.dictionary).to_numpy()] = np.arange(len(order))
    codes: NDArray[np.int64] = order[encoded.indices.to_numpy()]
    return codes


def rows_equal(columns: Sequence[pa.Array], left: Indices, right: Indices) -> NDArray[np.bool_]:
    """Return a mask of the pairs of rows, given by index, that are equal; NaN may count as different."""
    equal = np.ones(len(left), bool)
    for column in columns:
        if pat.is_nested(column.type) or pat.is_dictionary(column.type) or pat.is_null(column.type):
            codes = factorize_column(column).values
            equal &= codes[left] == codes[right]
            continue
        left_values, right_values = column.take(pa.array(left)), column.take(pa.array(right))
        both_null = pc.and_(left_values.is_null(), right_values.is_null())
        same = pc.or_(both_null, pc.equal(left_values, right_values).fill_null(False))
        equal &= same.to_numpy(zero_copy_only=False)
    return equal


def cumcount(values: NDArray[np.integer]) -> NDArray[np.int64]:
    """Return, for each row, how many earlier rows have the same code."""
    order = np.argsort(values, kind="stable")
    ordered = values[order]
    starts = np.flatnonzero(np.r_[True, ordered[1:] != ordered[:-1]]) if len(ordered) else order
    lengths = np.diff(np.r_[starts, len(ordered)])
    counts = np.empty(len(ordered), np.int64)
    counts[order] = np.arange(len(ordered)) - np.repeat(starts, lengths)
    return counts


def combine_codes(left: Codes, right: Codes) -> Codes:
    if left.size == 1 or right.size == 1:
        return left if right.size == 1 else right
    if left.size * right.size >= _MAX_CODES:
        left, right = left.dense(), right.dense()
    return Codes(left.values * right.size + right.values, left.size * right.size)


def _with_nulls(column: pa.Array, codes: Codes) -> Codes:
    if not column.null_count:
        return codes
    is_valid = column.is_valid().to_numpy(zero_copy_only=False)
    return Codes(np.where(is_valid, codes.values + 1, 0), codes.size + 1)


def _value_codes(column: pa.Array) -> Codes | None:
    """Return codes that are the values themselves; None if the values are too far apart."""
    if pat.is_integer(column.type):
        if column.type.bit_width == 64 and pat.is_unsigned_integer(column.type):
            return None
        numbers = column.cast(pa.int64())
    else:
        numbers = column.view(pa.int64() if column.type.bit_width == 64 else pa.int32()).cast(pa.int64())
    ends = pc.min_max(numbers)
    low, high = ends["min"].as_py(), ends["max"].as_py()
    if low is None or high - low >= _MAX_RANGE:
        return None
    values = (numbers.fill_null(low) if numbers.null_count else numbers).to_numpy()
    if low == high:
        # This is common for columns with the version of a commit. The zeros cost nothing until they are read.
        codes = Codes(np.zeros(len(values), np.int64), 1)
    elif 0 <= low <= high - low:
        # Subtracting the minimum would cost a copy and at most halve the codes.
        codes = Codes(values, high + 1)
    else:
        codes = Codes(values - low, high - low + 1)
    return _with_nulls(column, codes)


def _dictionary_codes(column: pa.Array) -> Codes:
    if pat.is_floating(column.type):
        # Adding zero turns -0.0 into 0.0; NaNs may have different bits.
        column = pc.add(column, pa.scalar(0, column.type))
        column = pc.if_else(pc.is_nan(column), pa.scalar(float("nan"), column.type), column)
    elif pat.is_null(column.type):
        return Codes(np.zeros(len(column), np.int64), 1)
    elif pat.is_dictionary(column.type):
        column = column.dictionary_decode()
    encoded = pc.dictionary_encode(column, null_encoding="encode")
    return Codes(encoded.indices.to_numpy().astype(np.int64), max(len(encoded.dictionary), 1))


def _list_codes(column: pa.Array, elements: Codes, *, ordered: bool) -> Codes:
    """Return codes of lists, which are compared by the bytes of their elements' codes."""
    offsets = np.asarray(column.offsets).astype(np.int64)
    values = elements.values
    if not ordered:
        list_indices = np.repeat(np.arange(len(column)), np.diff(offsets))
        element_codes = values[offsets[0] : offsets[-1]]
        values = values.copy()
        values[offsets[0] : offsets[-1]] = element_codes[np.lexsort((element_codes, list_indices))]
    buffers = [None, pa.py_buffer(offsets * 8), pa.py_buffer(np.ascontiguousarray(values, np.int64))]
    return _dictionary_codes(pa.Array.from_buffers(pa.large_binary(), len(column), buffers))
