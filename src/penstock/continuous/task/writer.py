"""The writing half of a task: rows from the transformation into the sink."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.compute as pc
from pyspark import TaskContext

from penstock.continuous.connectors.protocol import SinkWriter, WriterFactory
from penstock.continuous.plan.metadata_columns import EPOCH, KIND, MARKER, kinds_of
from penstock.continuous.task.channel import WRITER, Channel, CoordinatorAddress
from penstock.continuous.task.reader import MOST_TIMES
from penstock.errors import ContinuousFailedError
from penstock.instants import now_micros
from penstock.spark.error_boundary import iterate_without_tracebacks
from penstock.spark.internals.python_workers import freeze_imports
from penstock.spark.internals.udf_wrapper import ROW

if TYPE_CHECKING:
    pass

FLUSH_ROWS = 250_000
FLUSH_BYTES = 32 << 20
"""How many waiting rows, or bytes of them, are written although more rows are coming."""
REPORT = "epochs bigint"
_REPORT = pa.schema([("epochs", pa.int64())])


@dataclass
class WriteTask:
    """Function for ``mapInArrow`` after the transformation."""

    sink: WriterFactory
    address: CoordinatorAddress
    limited: bool = False
    """Whether the driver grants how many rows may be written."""

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        return iterate_without_tracebacks(self._run(iter(batches)))

    def _run(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        context = TaskContext.get()
        assert context is not None
        freeze_imports()
        task = context.partitionId()
        channel = self.address.open(WRITER, task)
        try:
            sink = self.sink.open(task)
            try:
                ended = WriteLoop(sink, channel, limited=self.limited).all(batches)
            except Exception as error:
                # Spark does not notice the failure of an idle task.
                with suppress(ContinuousFailedError):
                    channel.send("failed", error=_failure_text(task, error))
                raise
            finally:
                sink.close()
            channel.send("done")
        finally:
            channel.close()
        yield pa.RecordBatch.from_pydict({"epochs": [ended]}, schema=_REPORT)


class WriteLoop:
    """The loop that writes rows and ends epochs; not thread-safe."""

    def __init__(self, sink: SinkWriter, channel: Channel, *, limited: bool = False) -> None:
        self._sink, self._channel = sink, channel
        self._limited, self._may_write = limited, True
        self._waiting: list[pa.RecordBatch] = []
        self._rows = self._waiting_rows = self._waiting_bytes = self._epoch = self._ended = 0
        self._written: list[int] = []
        """The instants of the epoch's writes."""

    def all(self, batches: Iterator[pa.RecordBatch]) -> int:
        """Write everything to the end of the run; return the number of epochs."""
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
        # A batch has few markers: an epoch is long in comparison.
        while (end := kinds.find(MARKER, start)) >= 0:
            self._add(_real(batch, kinds, start, end))
            self._end_epoch(batch.column(EPOCH)[end].as_py())
            start = end + 1
        self._add(_real(batch, kinds, start, batch.num_rows))
        # Fillers mean that no rows follow for now.
        self._flush()

    def _add(self, batch: pa.RecordBatch) -> None:
        """Take rows between two markers, which are all of one epoch."""
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
            # Beyond the limit, the last instant stands for several.
            del self._written[MOST_TIMES - 1 :]
            self._written.append(now_micros())
            self._waiting = []
            self._waiting_rows = self._waiting_bytes = 0

    def _cut(self) -> None:
        """Drop rows beyond the limit."""
        left = 0
        if self._waiting and self._may_write:
            self._channel.send("want", number=self._epoch, rows=self._waiting_rows)
            left = int(self._channel.await_message()["rows"])
        self._may_write = left >= self._waiting_rows
        kept = []
        for batch in self._waiting:
            kept.append(batch.slice(0, left))
            left -= kept[-1].num_rows
        self._waiting = [batch for batch in kept if batch.num_rows]
        self._waiting_rows = sum(batch.num_rows for batch in self._waiting)

    def _end_epoch(self, number: int) -> None:
        self._flush()
        written, self._written = self._written, []
        attempts = self._sink.end(number)
        self._channel.send("wrote", number=number, attempts=attempts, rows=self._rows, written=written)
        self._rows, self._ended = 0, self._ended + 1


def _failure_text(task: int, error: Exception) -> str:
    """Return a message with the error's class at the beginning of a line, as in a traceback."""
    kind = type(error)
    return f"the writer of task {task} failed:\n{kind.__module__}.{kind.__qualname__}: {error}"


def _real(batch: pa.RecordBatch, kinds: bytes, start: int, end: int) -> pa.RecordBatch:
    count = kinds.count(ROW, start, end)
    first = kinds.find(ROW, start, end)
    if kinds.count(ROW, first, first + count) == count:
        # Usually the rows are contiguous, between fillers.
        return batch.slice(max(first, start), count)
    part = batch.slice(start, end - start)
    return part.filter(pc.equal(part.column(KIND), ROW))
