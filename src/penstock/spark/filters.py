"""Filters that Spark pushes down to a batch read, as Arrow expressions.

Only those are taken whose meaning is the same in Spark and Arrow. Floating-point columns are not: to Spark NaN equals NaN
and is the largest value (SQL reference, "NaN Semantics"), to Arrow it is neither.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import datasource as spark_filters
from pyspark.sql.datasource import Filter

_COMPARISONS: dict[type[Filter], Callable[[Any, Any], Any]] = {
    spark_filters.EqualTo: operator.eq,
    spark_filters.GreaterThan: operator.gt,
    spark_filters.GreaterThanOrEqual: operator.ge,
    spark_filters.LessThan: operator.lt,
    spark_filters.LessThanOrEqual: operator.le,
}


def expression(found: Filter, schema: pa.Schema) -> pc.Expression | None:
    """The Arrow expression of a filter; None when it is left to Spark."""
    if isinstance(found, spark_filters.Not):
        # SQL's NOT keeps NULL as NULL, as Arrow's does.
        inner = expression(found.child, schema)
        return None if inner is None else ~inner
    path = getattr(found, "attribute", ())
    if len(path) != 1 or schema.get_field_index(path[0]) < 0:
        return None
    column, kind = pc.field(path[0]), schema.field(path[0]).type
    if isinstance(found, spark_filters.IsNull):
        return column.is_null()
    if isinstance(found, spark_filters.IsNotNull):
        return column.is_valid()
    return _valued(found, column, kind)


def _valued(found: Filter, column: pc.Expression, kind: pa.DataType) -> pc.Expression | None:
    if not (pa.types.is_integer(kind) or pa.types.is_string(kind) or pa.types.is_boolean(kind) or pa.types.is_date(kind)
            or pa.types.is_timestamp(kind) or pa.types.is_decimal(kind)):  # fmt: skip
        return None
    value = getattr(found, "value", None)
    try:
        if isinstance(found, spark_filters.In):
            return column.isin(pa.array(list(value), kind))
        compare = _COMPARISONS.get(type(found))
        return None if compare is None or value is None else compare(column, pa.scalar(value, kind))
    except (pa.ArrowInvalid, pa.ArrowTypeError, TypeError):
        return None


def row_bounds(found: Sequence[Filter]) -> tuple[int | None, int, int]:
    """What the filters say of ``_partition`` and ``_row_index``: the partition, and the range [low, high) of rows."""
    partition, low, high = None, 0, 2**62
    for each in found:
        if isinstance(each, spark_filters.EqualTo) and each.attribute == ("_partition",):
            partition = int(each.value)
        if getattr(each, "attribute", ()) != ("_row_index",) or not isinstance(getattr(each, "value", None), int):
            continue
        if isinstance(each, spark_filters.EqualTo | spark_filters.GreaterThanOrEqual):
            low = max(low, each.value)
        if isinstance(each, spark_filters.EqualTo | spark_filters.LessThanOrEqual):
            high = min(high, each.value + 1)
        if isinstance(each, spark_filters.GreaterThan):
            low = max(low, each.value + 1)
        if isinstance(each, spark_filters.LessThan):
            high = min(high, each.value)
    return partition, low, high
