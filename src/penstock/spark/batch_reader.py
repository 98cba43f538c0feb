"""Batch reads of a queue."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import reduce
from operator import and_

import pyarrow as pa
from pyspark.sql.datasource import DataSourceReader, Filter, InputPartition

from penstock.queue.opened import open_store
from penstock.spark.admission import split
from penstock.spark.boundary import plain_errors
from penstock.spark.filters import NO_ROW, expression, row_bounds
from penstock.spark.options import SourceOptions
from penstock.spark.positions import end_positions, start_positions, still_there
from penstock.spark.tasks import RangePartition, Scan
from penstock.store.database import Transaction
from penstock.store.records import catalog
from penstock.store.records.catalog import QueueRecord


@plain_errors
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
            for partition, first, last in split(start, end, self._options.rows_per_task)
            if only in (None, partition) and max(first, low) < min(last, high)
        ]

    def _range(self, tx: Transaction) -> tuple[list[int], list[int]]:
        # One statement's view of all partitions, so that the read has whole appends.
        there = catalog.partitions(tx, self._scan.queue)
        wanted = start_positions(tx, self._options, self._scan.queue, there)
        start = still_there(self._options, there, wanted)
        return start, end_positions(self._options, self._scan.queue, there, start)

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """The rows of one task."""
        return self._scan.read(partition)


@plain_errors
class FilteringQueueReader(QueueReader):
    """A reader that takes filters; Spark refuses one while its setting spark.sql.python.filterPushdown.enabled is off."""

    def pushFilters(self, filters: list[Filter]) -> Iterable[Filter]:
        """Take the filters that mean the same to Arrow; the rest goes back to Spark."""
        taken = {
            id(each): found for each in filters if (found := expression(each, self._scan.schema)) is not None
        }
        if taken:
            self._scan = replace(self._scan, predicate=reduce(and_, taken.values()))
        if self._options.service_columns:
            self._bounds = row_bounds([each for each in filters if id(each) in taken])
        return [each for each in filters if id(each) not in taken]
