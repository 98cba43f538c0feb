"""Batch reads of a queue."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import reduce
from operator import and_

import pyarrow as pa
from pyspark.sql.datasource import DataSourceReader, Filter, InputPartition

from penstock.errors import DataLost
from penstock.queue.store import Store
from penstock.spark.admission import split
from penstock.spark.boundary import plain_errors
from penstock.spark.filters import expression, row_bounds
from penstock.spark.options import SourceOptions
from penstock.spark.stores import open_store
from penstock.spark.tasks import RangePartition, Scan
from penstock.store import catalog, consumers
from penstock.store.catalog import QueueRecord
from penstock.store.database import Transaction


@plain_errors
class QueueReader(DataSourceReader):
    """Reads the rows between two positions, as they are when the query is planned."""

    def __init__(self, options: SourceOptions, queue: QueueRecord, schema: pa.Schema) -> None:
        self._options = options
        self._scan = Scan(options.url, queue, schema, options.fail_on_data_loss)
        self._bounds: tuple[int | None, int, int] = (None, 0, 2**62)

    def partitions(self) -> Sequence[InputPartition]:
        """The tasks of the read."""
        store = open_store(self._options.url)
        start, end = store.database.run(lambda tx: self._range(tx, store), write=False)
        only, low, high = self._bounds
        tasks = [
            RangePartition(partition, max(first, low), min(last, high))
            for partition, first, last in split(start, end, self._options.rows_per_task)
            if only in (None, partition) and max(first, low) < min(last, high)
        ]
        return list(tasks)

    def _range(self, tx: Transaction, store: Store) -> tuple[list[int], list[int]]:
        options, queue = self._options, self._scan.queue
        start = start_positions(tx, options, queue)
        end = consumers.resolve(tx, queue, options.ending_offsets)
        return start, [max(first, last) for first, last in zip(start, end, strict=True)]

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


def start_positions(tx: Transaction, options: SourceOptions, queue: QueueRecord) -> list[int]:
    """Where a read without a checkpoint starts, by partition.

    Raises
    ------
    DataLost
        When the consumer's next rows have been trimmed.
    """
    if options.consumer is not None:
        registration = consumers.find_registration(tx, options.consumer, queue.name)
        return within(tx, options, queue, consumers.read_offsets(tx, registration)[0])
    if options.starting_timestamp is not None:
        return consumers.resolve(tx, queue, options.starting_timestamp)
    return consumers.resolve(tx, queue, options.starting_offsets or "earliest")


def within(tx: Transaction, options: SourceOptions, queue: QueueRecord, offsets: list[int]) -> list[int]:
    """Offsets that are still there, or the first ones that are where data loss is accepted."""
    for part, offset in zip(catalog.partitions(tx, queue), offsets, strict=True):
        if offset < part.first_index and options.fail_on_data_loss:
            raise DataLost(
                f"consumer {options.consumer!r} stands at row {offset} of queue {queue.name!r}, partition "
                f"{part.partition}, whose first row is {part.first_index}: the rows between were trimmed; seek the "
                "consumer to 'earliest', or set failOnDataLoss=false",
                queue=queue.name,
                partition=part.partition,
                start=offset,
                end=part.first_index,
            )
    return [
        max(offset, part.first_index)
        for part, offset in zip(catalog.partitions(tx, queue), offsets, strict=True)
    ]
