"""The reading and the writing half of a continuous query's task."""

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
    Labels,
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

MOST_TIMES = 1000
"""The number of instants of an epoch that are reported for its latencies."""
BATCH_ROWS = 10_000
"""The number of rows between two checks for messages from the driver."""
BEHIND_ROWS = 1_000_000
"""With this many unread rows, a job that only reads these pays off (`catch_up`)."""
_LONGEST_PAUSE = 1.0
_GAP = 0.001
"""Seconds from one send to the next read while no further rows are known. Rows that arrive meanwhile then
share one round through reader, Spark and writer, which keeps a busy source from falling behind. Like Nagle's
algorithm (RFC 896) with a limit; it delays a row by less than this."""


@dataclass
class ReadTask:
    """Function for ``mapInArrow`` over a DataFrame with one row for each task."""

    source: ReaderFactory
    tasks: int
    """The number of tasks; the driver assigns partitions to each."""
    address: CoordinatorAddress
    filler_rows: int
    """The number of rows that push the rows before them through all later buffers."""

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        return iterate_in_worker(self._run())

    def _run(self) -> Iterator[pa.RecordBatch]:
        with closing(self.address.open(READER, task_number())) as channel:
            epoch, positions = await_start(channel)
            with closing(self.source.open(positions)) as source:
                reading = ReadLoop(source, channel, epoch, self.filler_rows)
                yield from with_whole_batches(reading.batches())


def task_number() -> int:
    context = TaskContext.get()
    assert context is not None
    return int(context.partitionId())


def await_start(channel: Channel) -> tuple[int, dict[int, int]]:
    """Wait for the first epoch and the positions to read from, which arrive when the last run has ended."""
    message = channel.await_message()
    return message["epoch"], {int(partition): at for partition, at in message["positions"].items()}


class EpochReader:
    """The rows of an epoch that one task has read."""

    def __init__(self, source: SourceReader) -> None:
        self._source = source
        self.rows = 0
        self._times: list[tuple[int, int, int]] = []

    def note(self, rows: pa.RecordBatch) -> None:
        """Count rows that the source has just returned."""
        self.rows += rows.num_rows
        if len(self._times) < MOST_TIMES:
            now = now_micros()
            self._times += [(made, now, count) for made, count in self._source.times()]

    def end(self) -> Json:
        """End an epoch; return the task's report."""
        report = {
            "offsets": {str(partition): end for partition, end in self._source.offsets().items()},
            "rows": self.rows,
            "times": self._times[:MOST_TIMES],
            "last_times": {str(partition): time for partition, time in self._source.last_times().items()},
        }
        self.rows, self._times = 0, []
        return report


class ReadLoop:
    """The loop that sends rows, markers and fillers; not thread-safe."""

    def __init__(self, source: SourceReader, channel: Channel, epoch: int, filler_rows: int) -> None:
        self._source, self._channel, self._epoch = source, channel, epoch
        # Indexes to repeat a row as fillers.
        self._places = pa.repeat(0, filler_rows)
        self._empty: pa.RecordBatch | None = None
        """The row of markers and fillers."""
        self._labels: Labels | None = None
        self._reader = EpochReader(source)
        """The rows that have been sent since the last marker."""
        self._sent_at = -_GAP
        self._held = False
        """Whether later buffers may hold rows back."""
        self._paused = False
        """Whether the driver has paused it."""
        self._reported: set[str] = set()
        """The kinds of reports sent in this run, or, for skipped rows, in this epoch."""

    def batches(self) -> Iterator[pa.RecordBatch]:
        while True:
            message = self._channel.receive()
            if message is not None:
                if message["kind"] == "finish":
                    break
                if message["kind"] == "pause":
                    self._paused = True
                    # Sent after all messages about rows, so that the driver then knows about all rows.
                    self._channel.send("paused")
                    continue
                yield from self._end_epoch(message["number"])
                continue
            rows = None if self._paused else self._read()
            if rows is not None and rows.num_rows:
                yield self._sent(rows)
            elif self._held:
                self._held = False
                yield self._fillers()
            elif self._paused:
                self._channel.wait(_LONGEST_PAUSE)
            else:
                # An epoch without rows moves the offsets past lost rows.
                self._report("sent", not self._reader.rows and self._source.skipped)
                self._report("grown", self._source.grown)
                self._source.wait(self._channel)
        self._channel.send("done")

    def _read(self) -> pa.RecordBatch | None:
        early = self._sent_at + _GAP - time.monotonic()
        if early > 0 and not self._held:
            time.sleep(early)
        return self._source.read(BATCH_ROWS)

    def _sent(self, rows: pa.RecordBatch) -> pa.RecordBatch:
        if not self._reader.rows:
            self._channel.send("sent")
        self._sent_at = time.monotonic()
        self._reader.note(rows)
        if self._empty is None:
            self._empty = empty_row(rows)
        # This many further rows push these through all buffers. If there are fewer, checking loses no time.
        enough = len(self._places)
        behind = self._source.behind() if rows.num_rows >= enough else 0
        self._held = behind >= enough
        self._report("behind", behind >= BEHIND_ROWS)
        sent = self._labelled(rows, ROW, self._epoch)
        # One batch arrives earlier than two.
        return sent if self._held else pa.concat_batches([sent, self._fillers()])

    def _labelled(self, rows: pa.RecordBatch, kind: int, epoch: int) -> pa.RecordBatch:
        if self._labels is None:
            self._labels = Labels(rows.schema)
        return self._labels.beside(rows, kind, epoch)

    def _end_epoch(self, number: int) -> Iterator[pa.RecordBatch]:
        has_rows = self._reader.rows > 0
        self._channel.send("read", number=number, **self._reader.end())
        self._epoch = number + 1
        self._reported.discard("sent")
        if has_rows:
            assert self._empty is not None
            marker = self._labelled(self._empty, MARKER, number)
            self._held = False
            yield pa.concat_batches([marker, self._fillers()])

    def _fillers(self) -> pa.RecordBatch:
        assert self._empty is not None
        return self._labelled(self._empty.take(self._places), FILLER, self._epoch)

    def _report(self, kind: str, applies: bool) -> None:
        """Report once: skipped rows, that the reader is far behind, or that the source has grown."""
        if applies and kind not in self._reported:
            self._reported.add(kind)
            self._channel.send(kind)


FLUSH_ROWS = 250_000
FLUSH_BYTES = 32 << 20
"""The number of waiting rows, or their bytes, at which they are written although more rows are coming."""
REPORT = "epochs bigint"
_REPORT = pa.schema([("epochs", pa.int64())])


@dataclass
class WriteTask:
    """Function for ``mapInArrow`` after the transformation."""

    sink: WriterFactory
    address: CoordinatorAddress
    limited: bool = False
    """Whether writers have to ask the driver how many rows they may write."""

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        return iterate_in_worker(self._run(iter(batches)))

    def _run(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        task = task_number()
        with closing(self.address.open(WRITER, task)) as channel:
            with closing(self.sink.open(task)) as sink:
                try:
                    with closing(ArrivingBatches(batches, FLUSH_BYTES)) as groups:
                        ended = WriteLoop(sink, channel, limited=self.limited).all(groups)
                except Exception as error:
                    # Spark does not notice the failure of an idle task.
                    with suppress(ContinuousFailedError):
                        channel.send("failed", error=_failure_text(task, error))
                    raise
            channel.send("done")
        yield pa.RecordBatch.from_pydict({"epochs": [ended]}, schema=_REPORT)


class EpochWriter:
    """Writer of one task's rows of an epoch, in few writes."""

    def __init__(self, sink: SinkWriter) -> None:
        self._sink = sink
        self._waiting: list[pa.RecordBatch] = []
        self.waiting_rows = self._waiting_bytes = self._rows = 0
        self._written: list[int] = []
        """The instants of the epoch's writes."""

    def add(self, rows: pa.RecordBatch) -> None:
        self._waiting.append(rows)
        self.waiting_rows += rows.num_rows
        self._waiting_bytes += rows.nbytes

    @property
    def full(self) -> bool:
        """Whether the waiting rows should be written although more rows are coming."""
        return self.waiting_rows >= FLUSH_ROWS or self._waiting_bytes >= FLUSH_BYTES

    def keep(self, most: int) -> None:
        """Keep at most ``most`` waiting rows, and drop the others."""
        kept: list[pa.RecordBatch] = []
        for batch in self._waiting:
            kept.append(batch.slice(0, most))
            most -= kept[-1].num_rows
        self._waiting = [batch for batch in kept if batch.num_rows]
        self.waiting_rows = sum(batch.num_rows for batch in self._waiting)

    def write(self, epoch: int) -> None:
        """Write the waiting rows."""
        if self._waiting:
            self._sink.write(self._waiting, epoch)
            self._rows += self.waiting_rows
            # Above the limit, the last instant stands for several writes.
            del self._written[MOST_TIMES - 1 :]
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
    """The loop that writes rows and ends epochs; not thread-safe."""

    def __init__(self, sink: SinkWriter, channel: Channel, *, limited: bool = False) -> None:
        self._writer, self._channel = EpochWriter(sink), channel
        self._limited, self._may_write = limited, True
        self._epoch = self._ended = 0
        self._due = False
        """Whether the waiting rows should be written, since no others followed them."""

    def all(self, groups: Iterable[Sequence[pa.RecordBatch]]) -> int:
        """Write everything up to the end of the run; return the number of epochs.

        A group has all batches that arrived while the previous group was written.
        """
        for group in groups:
            for batch in group:
                self._take(batch)
            if self._due:
                self._flush()
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
        # A batch has few markers, since epochs are long in comparison.
        while (end := kinds.find(MARKER, start)) >= 0:
            self._add(_real(batch, kinds, start, end))
            self._end_epoch(batch.column(EPOCH)[end].as_py())
            start = end + 1
        self._add(_real(batch, kinds, start, batch.num_rows))
        # Fillers mean that no rows followed when they were sent.
        self._due = True

    def _add(self, batch: pa.RecordBatch) -> None:
        """Add rows between two markers; they all belong to one epoch."""
        if batch.num_rows:
            self._epoch = batch.column(EPOCH)[0].as_py()
            self._writer.add(batch.drop_columns([KIND, EPOCH]))
            if self._writer.full:
                self._flush()

    def _flush(self) -> None:
        self._due = False
        if self._limited:
            self._cut()
        self._writer.write(self._epoch)

    def _cut(self) -> None:
        """Drop rows beyond the limit."""
        left, wanted = 0, self._writer.waiting_rows
        if wanted and self._may_write:
            self._channel.send("want", number=self._epoch, rows=wanted)
            left = int(self._channel.await_message()["rows"])
        self._may_write = left >= wanted
        self._writer.keep(left)

    def _end_epoch(self, number: int) -> None:
        self._flush()
        self._channel.send("wrote", number=number, **self._writer.end(number))
        self._ended += 1


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


def _real(batch: pa.RecordBatch, kinds: bytes, start: int, end: int) -> pa.RecordBatch:
    count = kinds.count(ROW, start, end)
    first = kinds.find(ROW, start, end)
    if kinds.count(ROW, first, first + count) == count:
        # Usually the rows are contiguous, between fillers.
        return batch.slice(max(first, start), count)
    part = batch.slice(start, end - start)
    return part.filter(pc.equal(part.column(KIND), ROW))
