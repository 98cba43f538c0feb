"""Readers and writers in the tasks of a continuous query."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from traceback import format_exception
from types import TracebackType

import pyarrow as pa
import pyarrow.compute as pc
from pyspark import TaskContext

from penstock.continuous.arriving import ArrivingBatches
from penstock.continuous.channel import (
    EPOCH,
    FILLER,
    KIND,
    MARKER,
    READER,
    WRITER,
    Channel,
    CoordinatorAddress,
    RowLabeler,
    empty_row,
    kinds_of,
    with_whole_batches,
)
from penstock.continuous.connectors.protocol import ReaderFactory, SinkWriter, SourceReader, WriterFactory
from penstock.errors import ContinuousFailedError, PenstockError
from penstock.instants import now_micros
from penstock.json_text import Json
from penstock.spark.error_boundary import iterate_in_worker
from penstock.spark.internals.udf_wrapper import ROW

MAX_TIMES = 1000
"""The maximum number of times that a task reports for the latencies of an epoch."""
BATCH_ROWS = 10_000
"""The maximum number of rows that are read between two checks for messages from the driver."""
BEHIND_ROWS = 1_000_000
"""With this many unread rows, a catch-up job (`catch_up`) is faster."""
_MAX_PAUSE_SECONDS = 1.0
_READ_GAP_SECONDS = 0.001
"""Seconds from sending rows to the next read, unless more rows are waiting. Rows that arrive meanwhile travel
together through reader, Spark and writer, so that readers of a busy source do not fall behind. Like Nagle's
algorithm (RFC 896), but it delays a row by less than this time."""


@dataclass
class ReadTask:
    """Function for ``mapInArrow`` that reads the source in each task; its input has one row per task."""

    source: ReaderFactory
    tasks: int
    """The number of tasks; the driver assigns partitions to them."""
    address: CoordinatorAddress
    filler_rows: int
    """The number of filler rows that push the rows before them through all later buffers."""

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        return iterate_in_worker(self._run())

    def _run(self) -> Iterator[pa.RecordBatch]:
        with closing(self.address.open(READER, task_number())) as channel:
            epoch, positions = await_start(channel)
            with closing(self.source.open(positions)) as source:
                loop = ReadLoop(source, channel, epoch, self.filler_rows)
                yield from with_whole_batches(loop.batches())


def task_number() -> int:
    context = TaskContext.get()
    assert context is not None
    return int(context.partitionId())


def await_start(channel: Channel) -> tuple[int, dict[int, int]]:
    """Wait for the number of the first epoch, and the offsets to start at."""
    message = channel.await_message()
    return message["epoch"], {int(partition): offset for partition, offset in message["positions"].items()}


class ReadStatistics:
    """Statistics of the rows that one task has read for an epoch."""

    def __init__(self, source: SourceReader) -> None:
        self._source = source
        self.rows = 0
        self._times: list[tuple[int, int, int]] = []

    def add(self, rows: pa.RecordBatch) -> None:
        """Add rows that the source has just returned."""
        self.rows += rows.num_rows
        if len(self._times) < MAX_TIMES:
            now = now_micros()
            self._times += [(created, now, count) for created, count in self._source.creation_times()]

    def end(self) -> Json:
        """End the epoch; return the task's report."""
        report = {
            "offsets": {str(partition): end for partition, end in self._source.offsets().items()},
            "rows": self.rows,
            "times": self._times[:MAX_TIMES],
            "last_times": {str(partition): time for partition, time in self._source.last_times().items()},
        }
        self.rows, self._times = 0, []
        return report


class ReadLoop:
    """The loop of a reader, which sends rows, markers and fillers; not thread-safe."""

    def __init__(self, source: SourceReader, channel: Channel, epoch: int, filler_rows: int) -> None:
        self._source, self._channel, self._epoch = source, channel, epoch
        # Indices that repeat one row.
        self._filler_indices = pa.repeat(0, filler_rows)
        self._empty_row: pa.RecordBatch | None = None
        """The row for markers and fillers."""
        self._labeler: RowLabeler | None = None
        self._statistics = ReadStatistics(source)
        """The rows that were sent since the last marker."""
        self._sent_at = -_READ_GAP_SECONDS
        self._rows_held_back = False
        """Whether later buffers may still hold rows."""
        self._paused = False
        """Whether the driver has paused this reader."""
        self._reported: set[str] = set()
        """The kinds of reports sent in this run; that of skipped rows, in this epoch."""

    def batches(self) -> Iterator[pa.RecordBatch]:
        while True:
            message = self._channel.receive()
            if message is not None:
                if message["kind"] == "finish":
                    break
                if message["kind"] == "pause":
                    self._paused = True
                    # The driver has already got all messages about rows, since this one is sent after them.
                    self._channel.send("paused")
                    continue
                yield from self._end_epoch(message["number"])
                continue
            rows = None if self._paused else self._read()
            if rows is not None and rows.num_rows:
                yield self._prepare(rows)
            elif self._rows_held_back:
                self._rows_held_back = False
                yield self._fillers()
            elif self._paused:
                self._channel.wait(_MAX_PAUSE_SECONDS)
            else:
                # An epoch without rows moves the offsets past lost rows.
                self._report("sent", not self._statistics.rows and self._source.skipped_rows)
                self._report("grown", self._source.has_new_partitions)
                self._source.wait(self._channel)
        self._channel.send("done")

    def _read(self) -> pa.RecordBatch | None:
        seconds_left = self._sent_at + _READ_GAP_SECONDS - time.monotonic()
        if seconds_left > 0 and not self._rows_held_back:
            time.sleep(seconds_left)
        return self._source.read(BATCH_ROWS)

    def _prepare(self, rows: pa.RecordBatch) -> pa.RecordBatch:
        if not self._statistics.rows:
            self._channel.send("sent")
        self._sent_at = time.monotonic()
        self._statistics.add(rows)
        if self._empty_row is None:
            self._empty_row = empty_row(rows)
        # This many unread rows push these rows through all buffers, so no fillers are needed.
        filler_rows = len(self._filler_indices)
        unread = self._source.unread_rows() if rows.num_rows >= filler_rows else 0
        self._rows_held_back = unread >= filler_rows
        self._report("behind", unread >= BEHIND_ROWS)
        labelled_rows = self._label(rows, ROW, self._epoch)
        # One batch arrives faster than two.
        return labelled_rows if self._rows_held_back else pa.concat_batches([labelled_rows, self._fillers()])

    def _label(self, rows: pa.RecordBatch, kind: int, epoch: int) -> pa.RecordBatch:
        if self._labeler is None:
            self._labeler = RowLabeler(rows.schema)
        return self._labeler.label(rows, kind, epoch)

    def _end_epoch(self, number: int) -> Iterator[pa.RecordBatch]:
        has_rows = self._statistics.rows > 0
        self._channel.send("read", number=number, **self._statistics.end())
        self._epoch = number + 1
        self._reported.discard("sent")
        if has_rows:
            assert self._empty_row is not None
            marker = self._label(self._empty_row, MARKER, number)
            self._rows_held_back = False
            yield pa.concat_batches([marker, self._fillers()])

    def _fillers(self) -> pa.RecordBatch:
        assert self._empty_row is not None
        return self._label(self._empty_row.take(self._filler_indices), FILLER, self._epoch)

    def _report(self, kind: str, applies: bool) -> None:
        """Report once that rows were skipped, that the reader is far behind, or that the source has grown."""
        if applies and kind not in self._reported:
            self._reported.add(kind)
            self._channel.send(kind)


FLUSH_ROWS = 250_000
FLUSH_BYTES = 32 << 20
"""At this number or size of waiting rows, they are written although more rows are coming."""
WRITE_REPORT = "epochs bigint"
_WRITE_REPORT_SCHEMA = pa.schema([("epochs", pa.int64())])


@dataclass
class WriteTask:
    """Function for ``mapInArrow`` that writes the transformed rows."""

    sink: WriterFactory
    address: CoordinatorAddress
    limited: bool = False
    """Whether writers must ask the driver how many rows they may write."""

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        return iterate_in_worker(self._run(iter(batches)))

    def _run(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        task = task_number()
        with closing(self.address.open(WRITER, task)) as channel:
            with closing(self.sink.open(task)) as sink:
                try:
                    with closing(ArrivingBatches(batches, FLUSH_BYTES)) as groups:
                        epochs = WriteLoop(sink, channel, limited=self.limited).write_all(groups)
                except Exception as error:
                    # Spark does not report the failure of an idle task.
                    with suppress(ContinuousFailedError):
                        channel.send("failed", error=_failure_text(task, error))
                    raise
            channel.send("done")
        yield pa.RecordBatch.from_pydict({"epochs": [epochs]}, schema=_WRITE_REPORT_SCHEMA)


class EpochWriter:
    """Writer of one task's rows of an epoch; it combines batches into few writes."""

    def __init__(self, sink: SinkWriter) -> None:
        self._sink = sink
        self._waiting: list[pa.RecordBatch] = []
        self.waiting_rows = self._waiting_bytes = self._rows = 0
        self._written: list[int] = []
        """The times of the epoch's writes."""

    def add(self, rows: pa.RecordBatch) -> None:
        self._waiting.append(rows)
        self.waiting_rows += rows.num_rows
        self._waiting_bytes += rows.nbytes

    @property
    def full(self) -> bool:
        """Whether the waiting rows must be written although more rows are coming."""
        return self.waiting_rows >= FLUSH_ROWS or self._waiting_bytes >= FLUSH_BYTES

    def truncate(self, max_rows: int) -> None:
        """Keep at most ``max_rows`` waiting rows, and drop the others."""
        kept: list[pa.RecordBatch] = []
        for batch in self._waiting:
            kept.append(batch.slice(0, max_rows))
            max_rows -= kept[-1].num_rows
        self._waiting = [batch for batch in kept if batch.num_rows]
        self.waiting_rows = sum(batch.num_rows for batch in self._waiting)

    def write(self, epoch: int) -> None:
        """Write the waiting rows."""
        if self._waiting:
            self._sink.write(self._waiting, epoch)
            self._rows += self.waiting_rows
            # Above the limit, the last time stands for several writes.
            del self._written[MAX_TIMES - 1 :]
            self._written.append(now_micros())
            self._waiting = []
            self.waiting_rows = self._waiting_bytes = 0

    def end(self, epoch: int) -> Json:
        """End an epoch whose rows are all written; return the task's report."""
        attempts = self._sink.end(epoch)
        report = {"attempts": attempts, "rows": self._rows, "written": self._written}
        self._rows, self._written = 0, []
        return report


class WriteLoop:
    """The loop of a writer, which writes rows and ends epochs; not thread-safe."""

    def __init__(self, sink: SinkWriter, channel: Channel, *, limited: bool = False) -> None:
        self._writer, self._channel = EpochWriter(sink), channel
        self._limited, self._limit_left = limited, True
        self._epoch = self._epochs_written = 0
        self._flush_due = False
        """Whether the waiting rows should be written because no more rows followed them."""

    def write_all(self, groups: Iterable[Sequence[pa.RecordBatch]]) -> int:
        """Write all rows until the run ends; return the number of epochs.

        A group has all batches that arrived while the previous group was written.
        """
        for group in groups:
            for batch in group:
                self._process(batch)
            if self._flush_due:
                self._flush()
        self._flush()
        return self._epochs_written

    def _process(self, batch: pa.RecordBatch) -> None:
        if not batch.num_rows:
            return
        kinds = kinds_of(batch)
        if kinds.count(ROW) == len(kinds):
            self._add(batch)
            return
        start = 0
        # A batch has few markers, because an epoch usually spans many batches.
        while (end := kinds.find(MARKER, start)) >= 0:
            self._add(_source_rows(batch, kinds, start, end))
            self._end_epoch(batch.column(EPOCH)[end].as_py())
            start = end + 1
        self._add(_source_rows(batch, kinds, start, batch.num_rows))
        # Fillers are only sent when no more rows are waiting.
        self._flush_due = True

    def _add(self, batch: pa.RecordBatch) -> None:
        """Add rows between two markers, which belong to one epoch."""
        if batch.num_rows:
            self._epoch = batch.column(EPOCH)[0].as_py()
            self._writer.add(batch.drop_columns([KIND, EPOCH]))
            if self._writer.full:
                self._flush()

    def _flush(self) -> None:
        self._flush_due = False
        if self._limited:
            self._apply_limit()
        self._writer.write(self._epoch)

    def _apply_limit(self) -> None:
        """Ask the driver how many of the waiting rows to write, and drop the others."""
        granted, requested = 0, self._writer.waiting_rows
        if requested and self._limit_left:
            self._channel.send("want", number=self._epoch, rows=requested)
            granted = int(self._channel.await_message()["rows"])
        self._limit_left = granted >= requested
        self._writer.truncate(granted)

    def _end_epoch(self, number: int) -> None:
        self._flush()
        self._channel.send("wrote", number=number, **self._writer.end(number))
        self._epochs_written += 1


def _failure_text(task: int, error: Exception) -> str:
    """Return a message with the error's class at the start of its second line.

    The traceback of an error in a user's function follows, from the function on.
    """
    kind = type(error)
    text = f"the writer of task {task} failed:\n{kind.__module__}.{kind.__qualname__}: {error}"
    if isinstance(error, PenstockError):
        return text
    frames = error.__traceback__
    while frames is not None and _is_internal(frames):
        frames = frames.tb_next
    if frames is None:
        return text
    return f"{text}\n{''.join(format_exception(error.with_traceback(frames)))}".rstrip()


def _is_internal(frame: TracebackType) -> bool:
    return str(frame.tb_frame.f_globals.get("__name__", "")).partition(".")[0] == "penstock"


def _source_rows(batch: pa.RecordBatch, kinds: bytes, start: int, end: int) -> pa.RecordBatch:
    count = kinds.count(ROW, start, end)
    first = kinds.find(ROW, start, end)
    if kinds.count(ROW, first, first + count) == count:
        # Usually the rows are contiguous.
        return batch.slice(max(first, start), count)
    part = batch.slice(start, end - start)
    return part.filter(pc.equal(part.column(KIND), ROW))
