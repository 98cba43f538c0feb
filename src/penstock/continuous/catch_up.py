"""The reading and the writing half of a task that catches up: it reads a backlog, and ends.

The rows of a backlog need no low latency. So they pass through Spark like the rows of a micro-batch, in
batches of thousands, without metadata columns, markers and fillers, and their job uses every task slot. All
rows of the job are one epoch.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass

import pyarrow as pa
from pyspark import Accumulator, AccumulatorParam

from penstock.continuous.arriving import ArrivingBatches
from penstock.continuous.connectors.protocol import (
    Positions,
    ReaderFactory,
    SinkWriter,
    SourceReader,
    WriterFactory,
)
from penstock.continuous.tasks import BATCH_ROWS, FLUSH_BYTES, EpochReader, EpochWriter, task_number
from penstock.json_text import Json
from penstock.spark.error_boundary import iterate_in_worker

SECONDS = 5.0
"""For how long a task reads; its rows are committed only when the job ends."""
WRITTEN = "task int, report string"
_WRITTEN = pa.schema([("task", pa.int32()), ("report", pa.string())])


@dataclass(frozen=True)
class Backlog:
    """The rows for one task to read."""

    positions: Positions
    rows: int


class BacklogReader:
    """Reader of a backlog, or of as much of it as can be read in some seconds; not thread-safe."""

    def __init__(self, source: SourceReader, rows: int, seconds: float) -> None:
        self._source, self._most, self._seconds = source, rows, seconds
        self._reader = EpochReader(source)

    def batches(self) -> Iterator[pa.RecordBatch]:
        until = time.monotonic() + self._seconds
        while self._reader.rows < self._most and (not self._reader.rows or time.monotonic() < until):
            rows = self._source.read(BATCH_ROWS)
            if rows is not None and rows.num_rows:
                self._reader.note(rows)
                yield rows
            elif not self._source.behind():
                return

    def report(self) -> Json:
        """Return the task's part of the epoch, for the rows that were read."""
        return self._reader.end()


def write_backlog(sink: SinkWriter, epoch: int, groups: Iterable[Sequence[pa.RecordBatch]]) -> Json:
    """Write all rows as an epoch; return the task's part of it."""
    writer = EpochWriter(sink)
    for group in groups:
        for batch in group:
            if batch.num_rows:
                writer.add(batch)
            if writer.full:
                writer.write(epoch)
    writer.write(epoch)
    return writer.end(epoch)


class Reports(AccumulatorParam[list[str]]):
    """Accumulator for the reports of readers; Spark adds each task's reports once, when it has succeeded.

    (Spark's RDD programming guide, "Accumulators": for updates inside actions only, each task's update is
    applied once.)
    """

    def zero(self, value: list[str]) -> list[str]:
        return []

    def addInPlace(self, value1: list[str], value2: list[str]) -> list[str]:
        return [*value1, *value2]


@dataclass
class CatchUpReader:
    """Function for ``mapInArrow`` over a DataFrame with one row for each task."""

    source: ReaderFactory
    backlogs: Sequence[Backlog]
    """The backlog of each task."""
    seconds: float
    """The longest time that a task reads."""
    job: str
    """The id of the job."""
    reports: Accumulator[list[str]]

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        return iterate_in_worker(self._run())

    def _run(self) -> Iterator[pa.RecordBatch]:
        task = task_number()
        backlog = self.backlogs[task]
        with closing(self.source.open(backlog.positions)) as source:
            reader = BacklogReader(source, backlog.rows, self.seconds)
            yield from reader.batches()
            self.reports.add([json.dumps({"job": self.job, "task": task, **reader.report()})])


@dataclass
class CatchUpWriter:
    """Function for ``mapInArrow`` after the transformation."""

    sink: WriterFactory
    epoch: int

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        return iterate_in_worker(self._run(iter(batches)))

    def _run(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        task = task_number()
        with closing(self.sink.open(task)) as sink, closing(ArrivingBatches(batches, FLUSH_BYTES)) as groups:
            report = write_backlog(sink, self.epoch, groups)
        yield pa.RecordBatch.from_pydict({"task": [task], "report": [json.dumps(report)]}, schema=_WRITTEN)
