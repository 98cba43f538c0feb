"""Batch writes into a queue: all rows become visible at once, or none."""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Iterator, Sequence

import pyarrow as pa
from pyspark.sql.datasource import DataSourceArrowWriter, WriterCommitMessage

from penstock.queue.opened import open_store
from penstock.spark.boundary import plain_errors
from penstock.spark.options import SinkOptions
from penstock.spark.task_writer import TaskWriter
from penstock.spark.writing import Wrote
from penstock.store import staging
from penstock.store.records.catalog import QueueRecord

_BATCH = 0


@plain_errors
class QueueWriter(DataSourceArrowWriter):
    """One batch write."""

    def __init__(self, options: SinkOptions, queue: QueueRecord) -> None:
        self._options = options
        self._queue = queue
        self._job = f"job:{uuid.uuid4()}"

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        """Stage the rows of one task."""
        return TaskWriter(self._options, self._queue).stage(self._job, _BATCH, iterator)

    def commit(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        """Make what the tasks staged visible, as one append."""
        store = open_store(self._options.url)
        attempts = {wrote.attempt: wrote.segments for wrote in messages if isinstance(wrote, Wrote)}
        if not any(attempts.values()):
            return

        appended = store.database.run(
            lambda tx: staging.promote(tx, self._queue, self._job, _BATCH, attempts)
        )
        store.tend(self._queue, appended.crowded)

    def abort(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        """Drop what was staged; where that fails it is invisible, and swept later."""
        # An error here would hide the one that led here.
        with contextlib.suppress(Exception):
            database = open_store(self._options.url).database
            database.run(lambda tx: staging.discard(tx, self._queue, self._job, _BATCH))
