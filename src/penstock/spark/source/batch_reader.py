"""Batch reads of a queue, with filters pushed down as Arrow expressions.

Only filters with the same meaning in Spark and Arrow are pushed down. Those on floating-point columns are
not: in Spark NaN equals NaN and is the largest value (SQL reference, "NaN Semantics"), in Arrow neither.
Spark offers no filter on the values of columns with a collation (4.2 and 4.3).
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import reduce
from operator import and_

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as pat
from pyspark.sql.datasource import (
    DataSourceReader,
    EqualNullSafe,
    EqualTo,
    Filter,
    GreaterThan,
    GreaterThanOrEqual,
    In,
    InputPartition,
    IsNotNull,
    IsNull,
    LessThan,
    LessThanOrEqual,
    Not,
    StringContains,
    StringEndsWith,
    StringStartsWith,
)

from penstock.queue.store import open_store
from penstock.spark.error_boundary import without_tracebacks
from penstock.spark.options import SourceOptions
from penstock.spark.source.ranges import end_positions, skip_trimmed, split_into_tasks, start_positions
from penstock.spark.source.read_task import RangePartition, Scan
from penstock.store.database import Transaction
from penstock.store.records import catalog
from penstock.store.records.catalog import QueueRecord

_COMPARISONS: dict[type[Filter], Callable[[pc.Expression, pa.Scalar], pc.Expression]] = {
    EqualTo: operator.eq,
    GreaterThan: operator.gt,
    GreaterThanOrEqual: operator.ge,
    LessThan: operator.lt,
    LessThanOrEqual: operator.le,
}
_TEXT: dict[type[Filter], Callable[[pc.Expression, str], pc.Expression]] = {
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
"""A row index beyond any row."""


@without_tracebacks
class QueueReader(DataSourceReader):
    """Reads the rows between two positions, which are fixed when the query is planned."""

    def __init__(self, options: SourceOptions, queue: QueueRecord, schema: pa.Schema) -> None:
        self._options = options
        self._scan = Scan(options.url, queue, schema, options.fail_on_data_loss)
        self._bounds: tuple[int | None, int, int] = (None, 0, NO_ROW)

    def partitions(self) -> Sequence[InputPartition]:
        """Return the tasks of the read."""
        start, end = open_store(self._options.url).database.run(self._range, write=False)
        only, low, high = self._bounds
        return [
            RangePartition(partition, max(first, low), min(last, high))
            for partition, first, last in split_into_tasks(start, end, self._options.rows_per_task)
            if only in (None, partition) and max(first, low) < min(last, high)
        ]

    def _range(self, tx: Transaction) -> tuple[list[int], list[int]]:
        # All partitions as one statement sees them, so that the read has whole appends.
        partitions = catalog.partitions(tx, self._scan.queue)
        wanted = start_positions(tx, self._options, self._scan.queue, partitions)
        start = skip_trimmed(self._options, partitions, wanted)
        return start, end_positions(self._options, self._scan.queue, partitions, start)

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Return the rows of one task."""
        return self._scan.read(partition)


@without_tracebacks
class FilteringQueueReader(QueueReader):
    """A reader with filter pushdown.

    Spark refuses it if its setting spark.sql.python.filterPushdown.enabled is off.
    """

    def pushFilters(self, filters: list[Filter]) -> Iterable[Filter]:
        """Push down the filters with the same meaning in Arrow, and return the others to Spark."""
        pushed, expressions, left = [], [], []
        for condition in filters:
            expression = to_arrow_expression(condition, self._scan.schema)
            if expression is None:
                left.append(condition)
            else:
                pushed.append(condition)
                expressions.append(expression)
        if expressions:
            self._scan = replace(self._scan, predicate=reduce(and_, expressions))
        if self._options.service_columns:
            self._bounds = row_bounds(pushed)
        return left


def to_arrow_expression(condition: Filter, schema: pa.Schema) -> pc.Expression | None:
    """Return the Arrow expression of a filter, null where SQL's is null.

    None to leave the filter to Spark.
    """
    if isinstance(condition, Not):
        inner = to_arrow_expression(condition.child, schema)
        return None if inner is None else ~inner
    path: Sequence[str] = getattr(condition, "attribute", ())
    if len(path) != 1 or schema.get_field_index(path[0]) < 0:
        return None
    column, kind = pc.field(path[0]), schema.field(path[0]).type
    if isinstance(condition, IsNull):
        return column.is_null()
    if isinstance(condition, IsNotNull):
        return column.is_valid()
    if not any(is_kind(kind) for is_kind in _EXACT):
        return None
    try:
        return _comparison(condition, column, kind)
    except (pa.ArrowInvalid, pa.ArrowTypeError, pa.ArrowNotImplementedError, TypeError):
        # A value that the column's type cannot hold.
        return None


def _comparison(condition: Filter, column: pc.Expression, kind: pa.DataType) -> pc.Expression | None:
    if isinstance(condition, In):
        return _in(condition.value, column, kind)
    value = getattr(condition, "value", None)
    if value is None:
        return None
    if isinstance(condition, EqualNullSafe):
        return pc.if_else(column.is_valid(), column == pa.scalar(value, kind), False)
    if compare := _COMPARISONS.get(type(condition)):
        return compare(column, pa.scalar(value, kind))
    if (test := _TEXT.get(type(condition))) and pat.is_string(kind):
        return test(column, value)
    return None


def _in(values: Sequence[object], column: pc.Expression, kind: pa.DataType) -> pc.Expression:
    """Return SQL's IN: null for a null, and for a value that is not in a list with a null."""
    known = [value for value in values if value is not None]
    null = pa.scalar(None, pa.bool_())
    is_in = column.isin(pa.array(known, kind))
    if len(known) < len(values):
        is_in = pc.if_else(is_in, True, null)
    return pc.if_else(column.is_valid(), is_in, null)


def row_bounds(filters: Sequence[Filter]) -> tuple[int | None, int, int]:
    """Return the ``_partition`` and the range [low, high) of ``_row_index`` that filters allow."""
    partition, low, high = None, 0, NO_ROW
    for condition in filters:
        value = getattr(condition, "value", None)
        if not isinstance(value, int):
            continue
        if isinstance(condition, EqualTo) and condition.attribute == ("_partition",):
            partition = value
        if getattr(condition, "attribute", ()) != ("_row_index",):
            continue
        if isinstance(condition, EqualTo | GreaterThanOrEqual):
            low = max(low, value)
        if isinstance(condition, EqualTo | LessThanOrEqual):
            high = min(high, value + 1)
        if isinstance(condition, GreaterThan):
            low = max(low, value + 1)
        if isinstance(condition, LessThan):
            high = min(high, value)
    return partition, low, high
