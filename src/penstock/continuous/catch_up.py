"""Tasks of a catch-up job, which reads a backlog as one epoch and ends.

The rows of a backlog need no low latency. They pass through Spark like the rows of a micro-batch: in batches
of thousands, without metadata columns, markers and fillers. The job uses every task slot.
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
from penstock.continuous.tasks import BATCH_ROWS, FLUSH_BYTES, EpochWriter, ReadStatistics, task_number
from penstock.json_text import Json
from penstock.spark.error_boundary import iterate_in_worker

MAX_READ_SECONDS = 5.0
"""The longest time that a task reads. Its rows are committed only when the job ends."""
CATCH_UP_REPORT = "task int, report string"
_CATCH_UP_REPORT_SCHEMA = pa.schema([("task", pa.int32()), ("report", pa.string())])


@dataclass(frozen=True)
class Backlog:
    """The rows for one task to read."""

    positions: Positions
    rows: int


class BacklogReader:
    """Reader of a backlog, which stops after ``max_seconds``; not thread-safe."""

    def __init__(self, source: SourceReader, max_rows: int, max_seconds: float) -> None:
        self._source, self._max_rows, self._max_seconds = source, max_rows, max_seconds
        self._statistics = ReadStatistics(source)

    def batches(self) -> Iterator[pa.RecordBatch]:
        deadline = time.monotonic() + self._max_seconds
        while self._statistics.rows < self._max_rows and (
            not self._statistics.rows or time.monotonic() < deadline
        ):
            rows = self._source.read(BATCH_ROWS)
            if rows is not None and rows.num_rows:
                self._statistics.add(rows)
                yield rows
            elif not self._source.unread_rows():
                return

    def report(self) -> Json:
        """Return the task's report of the rows that it has read."""
        return self._statistics.end()


def write_backlog(sink: SinkWriter, epoch: int, groups: Iterable[Sequence[pa.RecordBatch]]) -> Json:
    """Write all rows as one epoch; return the task's report."""
    writer = EpochWriter(sink)
    for group in groups:
        for batch in group:
            if batch.num_rows:
                writer.add(batch)
            if writer.full:
                writer.write(epoch)
    writer.write(epoch)
    return writer.end(epoch)


class ReportsParam(AccumulatorParam[list[str]]):
    """Accumulator for the reports of readers.

    Spark applies the updates of each successful task exactly once, if they are made inside an action (RDD
    programming guide, "Accumulators").
    """

    def zero(self, value: list[str]) -> list[str]:
        return []

    def addInPlace(self, value1: list[str], value2: list[str]) -> list[str]:
        return [*value1, *value2]


@dataclass
class CatchUpReader:
    """Function for ``mapInArrow`` that reads a backlog in each task; its input has one row per task."""

    source: ReaderFactory
    backlogs: Sequence[Backlog]
    """The backlog of each task."""
    max_seconds: float
    """The longest time that a task reads."""
    job_id: str
    """The id of the job."""
    reports: Accumulator[list[str]]

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        return iterate_in_worker(self._run())

    def _run(self) -> Iterator[pa.RecordBatch]:
        task = task_number()
        backlog = self.backlogs[task]
        with closing(self.source.open(backlog.positions)) as source:
            reader = BacklogReader(source, backlog.rows, self.max_seconds)
            yield from reader.batches()
            self.reports.add([json.dumps({"job": self.job_id, "task": task, **reader.report()})])


@dataclass
class CatchUpWriter:
    """Function for ``mapInArrow`` that writes the transformed rows."""

    sink: WriterFactory
    epoch: int

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        return iterate_in_worker(self._run(iter(batches)))

    def _run(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        task = task_number()
        with closing(self.sink.open(task)) as sink, closing(ArrivingBatches(batches, FLUSH_BYTES)) as groups:
            report = write_backlog(sink, self.epoch, groups)
        yield pa.RecordBatch.from_pydict(
            {"task": [task], "report": [json.dumps(report)]}, schema=_CATCH_UP_REPORT_SCHEMA
        )
