"""The second half of a task: the rows that come out of the transformation, into the sink."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.compute as pc
from pyspark import TaskContext

from penstock.continuous.plan.metadata_columns import EPOCH, KIND, MARKER, kinds_of
from penstock.continuous.task.channel import WRITER, Channel, CoordinatorAddress
from penstock.continuous.task.reader import MOST_TIMES
from penstock.errors import ContinuousFailed
from penstock.instants import now_micros
from penstock.spark.error_boundary import iterate_without_tracebacks
from penstock.spark.internals.gc_tuning import freeze_imports
from penstock.spark.internals.udf_wrapper import ROW

if TYPE_CHECKING:
    from penstock.continuous.plan.dataframe import ContinuousFrame

FLUSH_ROWS = 250_000
FLUSH_BYTES = 32 << 20
"""Rows that are written although more of them are coming: so many, or of this size."""
REPORT = "epochs bigint"
_REPORT = pa.schema([("epochs", pa.int64())])


class SinkWriter(ABC):
    """One task's part of a sink."""

    @abstractmethod
    def write(self, rows: list[pa.RecordBatch], epoch: int) -> None:
        """Write rows of an epoch, for everybody to see or staged for its end."""

    @abstractmethod
    def end(self, epoch: int) -> dict[str, Any]:
        """All rows of the epoch are written; what the sink on the driver is to know, by attempt, such as how much that staged."""

    @abstractmethod
    def close(self) -> None:
        """Give up what it holds."""


class WriterFactory(ABC):
    """A sink of a continuous query, carried to its tasks."""

    def shaped(self, frame: ContinuousFrame) -> ContinuousFrame:
        """What Spark does to the rows last, for the tasks to take them."""
        return frame

    @abstractmethod
    def open(self, task: int) -> SinkWriter:
        """Write a task's rows, on an executor."""


@dataclass
class WriteTask:
    """For ``mapInArrow`` behind the transformation."""

    sink: WriterFactory
    address: CoordinatorAddress
    limited: bool = False
    """Whether the driver says how many rows may be written."""

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        return iterate_without_tracebacks(self._run(iter(batches)))

    def _run(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        context = TaskContext.get()
        assert context is not None
        freeze_imports()
        task = context.partitionId()
        link = self.address.link(WRITER, task)
        try:
            sink = self.sink.open(task)
            try:
                ended = WriteLoop(sink, link, limited=self.limited).all(batches)
            except Exception as error:
                # At rest Spark does not look at what a writer ends with.
                with suppress(ContinuousFailed):
                    link.tell("failed", error=_told(task, error))
                raise
            finally:
                sink.close()
            link.tell("done")
        finally:
            link.close()
        yield pa.RecordBatch.from_pydict({"epochs": [ended]}, schema=_REPORT)


class WriteLoop:
    """What a writer does with what comes; not for several threads at once."""

    def __init__(self, sink: SinkWriter, link: Channel, *, limited: bool = False) -> None:
        self._sink, self._link = sink, link
        self._limited, self._may_write = limited, True
        self._waiting: list[pa.RecordBatch] = []
        self._rows = self._waiting_rows = self._waiting_bytes = self._epoch = self._ended = 0
        self._written: list[int] = []
        """When the rows of the epoch were written."""

    def all(self, batches: Iterator[pa.RecordBatch]) -> int:
        """Everything, to the end of the run; the number of epochs."""
        for batch in batches:
            self._take(batch)
        self._flush()
        return self._ended

    def _take(self, batch: pa.RecordBatch) -> None:
        if not batch.num_rows:
            return
        kinds = kinds_of(batch)
        if kinds.count(ROW) == len(kinds):
            self._add(batch)
            return
        start = 0
        # A batch has few markers: an epoch is long for a batch.
        while (end := kinds.find(MARKER, start)) >= 0:
            self._add(_real(batch, kinds, start, end))
            self._end_epoch(batch.column(EPOCH)[end].as_py())
            start = end + 1
        self._add(_real(batch, kinds, start, batch.num_rows))
        # What pushes rows through says that none follow for now.
        self._flush()

    def _add(self, batch: pa.RecordBatch) -> None:
        """Rows between two markers, which are all of one epoch."""
        if not batch.num_rows:
            return
        self._epoch = batch.column(EPOCH)[0].as_py()
        rows = batch.drop_columns([KIND, EPOCH])
        self._waiting.append(rows)
        self._waiting_rows += rows.num_rows
        self._waiting_bytes += rows.nbytes
        if self._waiting_rows >= FLUSH_ROWS or self._waiting_bytes >= FLUSH_BYTES:
            self._flush()

    def _flush(self) -> None:
        if self._limited:
            self._cut()
        if self._waiting:
            self._sink.write(self._waiting, self._epoch)
            self._rows += self._waiting_rows
            # The last one stands for those that are too many.
            del self._written[MOST_TIMES - 1 :]
            self._written.append(now_micros())
            self._waiting = []
            self._waiting_rows = self._waiting_bytes = 0

    def _cut(self) -> None:
        """Drop what the limit does not let through."""
        left = self._granted(self._waiting_rows) if self._waiting and self._may_write else 0
        self._may_write = left >= self._waiting_rows
        kept = []
        for batch in self._waiting:
            kept.append(batch.slice(0, left))
            left -= kept[-1].num_rows
        self._waiting = [batch for batch in kept if batch.num_rows]
        self._waiting_rows = sum(batch.num_rows for batch in self._waiting)

    def _granted(self, rows: int) -> int:
        self._link.tell("want", number=self._epoch, rows=rows)
        return int(self._link.answer()["rows"])

    def _end_epoch(self, number: int) -> None:
        self._flush()
        written, self._written = self._written, []
        attempts = self._sink.end(number)
        self._link.tell("wrote", number=number, attempts=attempts, rows=self._rows, written=written)
        self._rows, self._ended = 0, self._ended + 1


def _told(task: int, error: Exception) -> str:
    """Its class stands at the beginning of a line, as in a traceback."""
    kind = type(error)
    return f"the writer of task {task} failed:\n{kind.__module__}.{kind.__qualname__}: {error}"


def _real(batch: pa.RecordBatch, kinds: bytes, start: int, end: int) -> pa.RecordBatch:
    count = kinds.count(ROW, start, end)
    first = kinds.find(ROW, start, end)
    if kinds.count(ROW, first, first + count) == count:
        # As a rule the rows are one behind the other, between fillers.
        return batch.slice(max(first, start), count)
    part = batch.slice(start, end - start)
    return part.filter(pc.equal(part.column(KIND), ROW))
