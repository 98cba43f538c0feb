"""Batch reads of a queue, with filters pushed down as Arrow expressions.

Only filters that mean the same in Spark and Arrow are pushed down. Filters on floating-point columns do not:
in Spark, NaN equals NaN and is the largest value (SQL reference, "NaN Semantics"), which is not so in Arrow.
Spark passes no filters on columns with a collation (4.2 and 4.3).
"""

from __future__ import annotations

import operator
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
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

from penstock.commit.source_rows import require_read
from penstock.queue.store import open_store
from penstock.spark.error_boundary import without_tracebacks
from penstock.spark.internals.python_workers import check_store_reach
from penstock.spark.options import SourceOptions
from penstock.spark.ranges import end_positions, report_loss, skip_trimmed, split_into_tasks, start_positions
from penstock.spark.schemas import to_output_batch
from penstock.store.database import Transaction
from penstock.store.log import reading
from penstock.store.log.reading import Chunk, Range
from penstock.store.records import catalog
from penstock.store.records.catalog import QueueRecord

SMALL_ROWS = 8192


class RangesPartition(InputPartition):
    """Rows of one or several partitions of a queue, for one task.

    Parameters
    ----------
    last_row_times
        When the last row of the micro-batch in each partition was appended, by partition and end; empty in a
        batch read, which is not planned earlier.
    """

    def __init__(
        self, ranges: Sequence[Range], last_row_times: Mapping[tuple[int, int], int] | None = None
    ) -> None:
        super().__init__(None)
        self.ranges, self.last_row_times = tuple(ranges), dict(last_row_times or {})

    def __repr__(self) -> str:
        return f"RangesPartition({list(map(tuple, self.ranges))})"


@dataclass(frozen=True)
class Scan:
    """Parameters of a read, which all its tasks share."""

    url: str = field(repr=False)
    queue: QueueRecord
    schema: pa.Schema
    fail_on_data_loss: bool = True
    predicate: pa.compute.Expression | None = None

    def read(self, task: InputPartition) -> Iterator[pa.RecordBatch]:
        if not isinstance(task, RangesPartition):
            # If there are no partitions, Spark passes an empty one.
            return iter(())
        check_store_reach(self.url, None)
        return self._filter(_coalesce(self._read_planned(task)))

    def _read_planned(self, task: RangesPartition) -> Iterator[pa.RecordBatch]:
        """Yield a task's rows; at the end, refuse them if the store was restored after they were planned, and
        other rows have been read.
        """
        for _, batch in self.chunks(task.ranges):
            yield batch
        if task.last_row_times:
            self.require_read(task.last_row_times)

    def require_read(self, read: Mapping[tuple[int, int], int]) -> None:
        """Refuse rows that were read if the queue has other rows there, because its store was restored."""
        open_store(self.url).database.run(lambda tx: require_read(tx, self.queue, read), write=False)

    def chunks(
        self, ranges: Sequence[Range], *, with_runs: bool = False
    ) -> Iterator[tuple[Chunk, pa.RecordBatch]]:
        """Yield the stored chunks of ranges with their rows; log lost rows, or raise an error for them.

        ``with_runs`` loads the time of each row even if its column is not read.
        """
        remaining = deque(ranges)
        chunks = reading.read(
            open_store(self.url).database,
            self.queue,
            ranges,
            columns=self._columns(),
            on_lost="fail" if self.fail_on_data_loss else "skip",
            with_runs=with_runs or "_timestamp" in set(self.schema.names).difference(self.queue.schema.names),
        )
        for chunk in chunks:
            while chunk.partition != remaining[0].partition or chunk.start >= remaining[0].end:
                self._log_loss(remaining.popleft())
            self._log_loss(remaining[0]._replace(end=chunk.start))
            remaining[0] = remaining[0]._replace(start=chunk.end)
            yield chunk, to_output_batch(chunk, self.queue, self.schema)
        for lost in remaining:
            self._log_loss(lost)

    def _log_loss(self, lost: Range) -> None:
        if lost.start < lost.end:
            report_loss(self.queue.name, *lost, fail=False)

    def _columns(self) -> pa.Schema:
        """Return the columns to decode, with the types of the read; the queue may have wider types by now."""
        names = self.queue.schema.names
        fields = [self.schema.field(name) for name in names if name in set(self.schema.names)]
        return pa.schema(fields or [self.queue.schema.field(0)])

    def _filter(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        if self.predicate is None:
            return batches
        filtered = (batch.filter(self.predicate) for batch in batches)
        return (batch for batch in filtered if batch.num_rows)


def _coalesce(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Combine small adjacent batches, so that many one-row appends do not become many Arrow batches."""
    pending: list[pa.RecordBatch] = []
    rows = 0
    for batch in batches:
        if batch.num_rows >= SMALL_ROWS and not pending:
            yield batch
            continue
        pending.append(batch)
        rows += batch.num_rows
        if rows >= SMALL_ROWS:
            yield _concatenate(pending)
            pending, rows = [], 0
    if pending:
        yield _concatenate(pending)


def _concatenate(batches: Sequence[pa.RecordBatch]) -> pa.RecordBatch:
    return batches[0] if len(batches) == 1 else pa.concat_batches(batches)


_COMPARISONS: dict[type[Filter], Callable[[pc.Expression, pa.Scalar], pc.Expression]] = {
    EqualTo: operator.eq,
    GreaterThan: operator.gt,
    GreaterThanOrEqual: operator.ge,
    LessThan: operator.lt,
    LessThanOrEqual: operator.le,
}
_TEXT_TESTS: dict[type[Filter], Callable[[pc.Expression, str], pc.Expression]] = {
    StringStartsWith: pc.starts_with,
    StringEndsWith: pc.ends_with,
    StringContains: pc.match_substring,
}
_COMPARABLE_TYPES = (
    pat.is_integer,
    pat.is_string,
    pat.is_binary,
    pat.is_boolean,
    pat.is_date,
    pat.is_timestamp,
    pat.is_decimal,
)
NO_ROW = 1 << 62
"""A row index that is larger than that of any row."""


@without_tracebacks
class QueueReader(DataSourceReader):
    """Reader for the rows between two positions, which are fixed when the query is planned."""

    def __init__(self, options: SourceOptions, queue: QueueRecord, schema: pa.Schema) -> None:
        self._options = options
        self._scan = Scan(options.url, queue, schema, options.fail_on_data_loss)
        self._bounds: tuple[int | None, int, int] = (None, 0, NO_ROW)

    def partitions(self) -> Sequence[InputPartition]:
        start, end = open_store(self._options.url).database.run(self._read_bounds, write=False)
        only_partition, low, high = self._bounds
        tasks = split_into_tasks(start, end, self._options.rows_per_task, self._options.max_tasks)
        bounded = [
            [
                Range(partition, max(first, low), min(last, high))
                for partition, first, last in task
                if only_partition in (None, partition) and max(first, low) < min(last, high)
            ]
            for task in tasks
        ]
        return [RangesPartition(task) for task in bounded if task]

    def _read_bounds(self, tx: Transaction) -> tuple[list[int], list[int]]:
        # Read all partitions with one statement, so that the range only has whole appends.
        partitions = catalog.partitions(tx, self._scan.queue)
        requested = start_positions(tx, self._options, self._scan.queue, partitions)
        start = skip_trimmed(self._options, partitions, requested)
        return start, end_positions(self._options, self._scan.queue, partitions, start)

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        return self._scan.read(partition)


@without_tracebacks
class FilteringQueueReader(QueueReader):
    """Reader with filter pushdown, for sessions with spark.sql.python.filterPushdown.enabled."""

    def pushFilters(self, filters: list[Filter]) -> Iterable[Filter]:
        """Push down filters that mean the same in Arrow; return the others to Spark."""
        pushed, expressions, unsupported = [], [], []
        for condition in filters:
            expression = to_arrow_expression(condition, self._scan.schema)
            if expression is None:
                unsupported.append(condition)
            else:
                pushed.append(condition)
                expressions.append(expression)
        if expressions:
            self._scan = replace(self._scan, predicate=reduce(and_, expressions))
        if self._options.metadata_columns:
            self._bounds = row_bounds(pushed)
        return unsupported


def to_arrow_expression(condition: Filter, schema: pa.Schema) -> pc.Expression | None:
    """Return the Arrow expression of a filter, which is null wherever SQL's is; None if Spark must filter."""
    if isinstance(condition, Not):
        inner = to_arrow_expression(condition.child, schema)
        return None if inner is None else ~inner
    path: Sequence[str] = getattr(condition, "attribute", ())
    if len(path) != 1 or schema.get_field_index(path[0]) < 0:
        return None
    column, data_type = pc.field(path[0]), schema.field(path[0]).type
    if isinstance(condition, IsNull):
        return column.is_null()
    if isinstance(condition, IsNotNull):
        return column.is_valid()
    if not any(is_kind(data_type) for is_kind in _COMPARABLE_TYPES):
        return None
    try:
        return _comparison(condition, column, data_type)
    except (pa.ArrowInvalid, pa.ArrowTypeError, pa.ArrowNotImplementedError, TypeError):
        # The column's type cannot hold the value.
        return None


def _comparison(condition: Filter, column: pc.Expression, data_type: pa.DataType) -> pc.Expression | None:
    if isinstance(condition, In):
        return _in_list(condition.value, column, data_type)
    value = getattr(condition, "value", None)
    if value is None:
        return None
    if isinstance(condition, EqualNullSafe):
        return pc.if_else(column.is_valid(), column == pa.scalar(value, data_type), False)
    if compare := _COMPARISONS.get(type(condition)):
        return compare(column, pa.scalar(value, data_type))
    if (test := _TEXT_TESTS.get(type(condition))) and pat.is_string(data_type):
        return test(column, value)
    return None


def _in_list(values: Sequence[object], column: pc.Expression, data_type: pa.DataType) -> pc.Expression:
    """Return SQL's IN: it is null for a null, and for a value that is not in a list with a null."""
    non_null = [value for value in values if value is not None]
    null = pa.scalar(None, pa.bool_())
    is_in = column.isin(pa.array(non_null, data_type))
    if len(non_null) < len(values):
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
