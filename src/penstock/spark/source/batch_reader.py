"""Filters that Spark pushes down to a batch read, as Arrow expressions.

Only those are taken whose meaning is the same in Spark and Arrow. Floating-point columns are not: to Spark NaN equals NaN
and is the largest value (SQL reference, "NaN Semantics"), to Arrow it is neither. Columns with a collation come with no
filter on their values (Spark 4.2 and 4.3).
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import reduce
from operator import and_
from typing import Any

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

from penstock.queue.open_stores import open_store
from penstock.spark.error_boundary import without_tracebacks
from penstock.spark.options import SourceOptions
from penstock.spark.source.admission import split_into_tasks
from penstock.spark.source.positions import end_positions, skip_trimmed, start_positions
from penstock.spark.source.read_task import RangePartition, Scan
from penstock.store.database import Transaction
from penstock.store.records import catalog
from penstock.store.records.catalog import QueueRecord

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


def to_arrow_expression(found: Filter, schema: pa.Schema) -> pc.Expression | None:
    """The Arrow expression of a filter, null where SQL's is; None when the filter is left to Spark."""
    if isinstance(found, Not):
        inner = to_arrow_expression(found.child, schema)
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


# ---- batch_reader: Batch reads of a queue.


@without_tracebacks
class QueueReader(DataSourceReader):
    """Reads the rows between two positions, as they are when the query is planned."""

    def __init__(self, options: SourceOptions, queue: QueueRecord, schema: pa.Schema) -> None:
        self._options = options
        self._scan = Scan(options.url, queue, schema, options.fail_on_data_loss)
        self._bounds: tuple[int | None, int, int] = (None, 0, NO_ROW)

    def partitions(self) -> Sequence[InputPartition]:
        """The tasks of the read."""
        start, end = open_store(self._options.url).database.run(self._range, write=False)
        only, low, high = self._bounds
        return [
            RangePartition(partition, max(first, low), min(last, high))
            for partition, first, last in split_into_tasks(start, end, self._options.rows_per_task)
            if only in (None, partition) and max(first, low) < min(last, high)
        ]

    def _range(self, tx: Transaction) -> tuple[list[int], list[int]]:
        # One statement's view of all partitions, so that the read has whole appends.
        there = catalog.partitions(tx, self._scan.queue)
        wanted = start_positions(tx, self._options, self._scan.queue, there)
        start = skip_trimmed(self._options, there, wanted)
        return start, end_positions(self._options, self._scan.queue, there, start)

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """The rows of one task."""
        return self._scan.read(partition)


@without_tracebacks
class FilteringQueueReader(QueueReader):
    """A reader that takes filters; Spark refuses one while its setting spark.sql.python.filterPushdown.enabled is off."""

    def pushFilters(self, filters: list[Filter]) -> Iterable[Filter]:
        """Take the filters that mean the same to Arrow; the rest goes back to Spark."""
        taken = {
            id(each): found
            for each in filters
            if (found := to_arrow_expression(each, self._scan.schema)) is not None
        }
        if taken:
            self._scan = replace(self._scan, predicate=reduce(and_, taken.values()))
        if self._options.service_columns:
            self._bounds = row_bounds([each for each in filters if id(each) in taken])
        return [each for each in filters if id(each) not in taken]
