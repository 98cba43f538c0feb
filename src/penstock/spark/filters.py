"""Filters that Spark pushes down to a batch read, as Arrow expressions.

Only those are taken whose meaning is the same in Spark and Arrow. Floating-point columns are not: to Spark NaN equals NaN
and is the largest value (SQL reference, "NaN Semantics"), to Arrow it is neither. Columns with a collation come with no
filter on their values (Spark 4.2 and 4.3).
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as pat
from pyspark.sql.datasource import (
    EqualNullSafe,
    EqualTo,
    Filter,
    GreaterThan,
    GreaterThanOrEqual,
    In,
    IsNotNull,
    IsNull,
    LessThan,
    LessThanOrEqual,
    Not,
    StringContains,
    StringEndsWith,
    StringStartsWith,
)

_COMPARISONS: dict[type[Filter], Callable[[Any, Any], Any]] = {
    EqualTo: operator.eq,
    GreaterThan: operator.gt,
    GreaterThanOrEqual: operator.ge,
    LessThan: operator.lt,
    LessThanOrEqual: operator.le,
}
_TEXT: dict[type[Filter], Callable[[Any, str], Any]] = {
    StringStartsWith: pc.starts_with,
    StringEndsWith: pc.ends_with,
    StringContains: pc.match_substring,
}
_EXACT = (
    pat.is_integer,
    pat.is_string,
    pat.is_binary,
    pat.is_boolean,
    pat.is_date,
    pat.is_timestamp,
    pat.is_decimal,
)
NO_ROW = 1 << 62


def expression(found: Filter, schema: pa.Schema) -> pc.Expression | None:
    """The Arrow expression of a filter, null where SQL's is; None when the filter is left to Spark."""
    if isinstance(found, Not):
        inner = expression(found.child, schema)
        return None if inner is None else ~inner
    path: Sequence[str] = getattr(found, "attribute", ())
    if len(path) != 1 or schema.get_field_index(path[0]) < 0:
        return None
    column, kind = pc.field(path[0]), schema.field(path[0]).type
    if isinstance(found, IsNull):
        return column.is_null()
    if isinstance(found, IsNotNull):
        return column.is_valid()
    if not any(is_kind(kind) for is_kind in _EXACT):
        return None
    try:
        return _valued(found, column, kind)
    except (pa.ArrowInvalid, pa.ArrowTypeError, pa.ArrowNotImplementedError, TypeError):
        # A value that the column's type cannot hold.
        return None


def _valued(found: Any, column: pc.Expression, kind: pa.DataType) -> pc.Expression | None:
    if isinstance(found, In):
        return _in(found.value, column, kind)
    value = found.value
    if value is None:
        return None
    if isinstance(found, EqualNullSafe):
        return pc.if_else(column.is_valid(), column == pa.scalar(value, kind), False)
    if compare := _COMPARISONS.get(type(found)):
        return compare(column, pa.scalar(value, kind))
    if (test := _TEXT.get(type(found))) and pat.is_string(kind):
        return test(column, value)
    return None


def _in(values: Sequence[Any], column: pc.Expression, kind: pa.DataType) -> pc.Expression:
    """SQL's IN: null for a null, and for what is not found in a list that has a null."""
    known = [value for value in values if value is not None]
    null = pa.scalar(None, pa.bool_())
    found = column.isin(pa.array(known, kind))
    if len(known) < len(values):
        found = pc.if_else(found, True, null)
    return pc.if_else(column.is_valid(), found, null)


def row_bounds(found: Sequence[Filter]) -> tuple[int | None, int, int]:
    """What the filters say of ``_partition`` and ``_row_index``: the partition, and the range [low, high) of rows."""
    partition, low, high = None, 0, NO_ROW
    for each in found:
        value = getattr(each, "value", None)
        if not isinstance(value, int):
            continue
        if isinstance(each, EqualTo) and each.attribute == ("_partition",):
            partition = value
        if getattr(each, "attribute", ()) != ("_row_index",):
            continue
        if isinstance(each, EqualTo | GreaterThanOrEqual):
            low = max(low, value)
        if isinstance(each, EqualTo | LessThanOrEqual):
            high = min(high, value + 1)
        if isinstance(each, GreaterThan):
            low = max(low, value + 1)
        if isinstance(each, LessThan):
            high = min(high, value)
    return partition, low, high
