"""The reading half of a task: an endless stream of rows, with a marker at the end of each epoch."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import pyarrow as pa
from pyspark import TaskContext

from penstock.continuous.plan.metadata_columns import FILLER, MARKER, Labels
from penstock.continuous.task.channel import READER, Channel, CoordinatorAddress, with_whole_batches
from penstock.instants import now_micros
from penstock.spark.error_boundary import iterate_without_tracebacks
from penstock.spark.internals.gc_tuning import freeze_imports
from penstock.spark.internals.udf_wrapper import ROW

MOST_TIMES = 1000
"""Instants of an epoch that are reported for its latencies."""
BATCH_ROWS = 10_000
"""Rows between two checks for messages of the driver."""
BEHIND_ROWS = 1_000_000
"""With so many unread rows a restart of the tasks with larger batches pays off."""
_LONGEST_REST = 1.0
_GAP = 0.001
"""Seconds from one send to the next read, while no further rows are known: those that come meanwhile take
one round of reader, Spark and writer together, whose time a busy source would need for its later rows.
Like Nagle's algorithm (RFC 896) with a limit; it delays a row by less than this."""


class SourceReader(ABC):
    """Reader of some partitions of a source, in one task."""

    @abstractmethod
    def read(self, max_rows: int) -> pa.RecordBatch | None:
        """Return rows that have come; None if there are none."""

    @abstractmethod
    def offsets(self) -> dict[int, int]:
        """Return the offset of each partition after the rows that were read."""

    @abstractmethod
    def wait(self, channel: Channel) -> None:
        """Return when there may be rows, or the driver has sent a message."""

    def times(self) -> list[tuple[int, int]]:
        """Return when the last rows were created: instants in microseconds with their numbers of rows."""
        return []

    @property
    def ahead(self) -> bool:
        """Whether further rows are known."""
        return False

    @property
    def behind(self) -> int:
        """How many rows are known that were not read yet."""
        return 0

    @property
    def skipped(self) -> bool:
        """Whether it has skipped lost rows since its offsets were last asked for, and has read none."""
        return False

    @property
    def grown(self) -> bool:
        """Whether the source has partitions that no task reads."""
        return False

    @abstractmethod
    def close(self) -> None:
        """Release its resources."""


class ReaderFactory(ABC):
    """Factory of readers for a source, carried to the tasks of a continuous query."""

    schema: pa.Schema

    @abstractmethod
    def open(self, positions: Mapping[int, int]) -> SourceReader:
        """Open a reader of some partitions, from these offsets on, in a task."""


@dataclass
class ReadTask:
    """Function for ``mapInArrow`` over a DataFrame with one row for each task."""

    source: ReaderFactory
    tasks: int
    """How many tasks there are; the driver assigns partitions to each."""
    address: CoordinatorAddress
    filler_rows: int
    """How many rows push the ones before them through all later buffers."""
    large_batches: bool = False
    """Whether later stages work in large batches, for throughput rather than latency."""

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        return iterate_without_tracebacks(self._run())

    def _run(self) -> Iterator[pa.RecordBatch]:
        context = TaskContext.get()
        assert context is not None
        freeze_imports()
        task = context.partitionId()
        channel = self.address.connect(READER, task)
        try:
            epoch, positions = await_start(channel)
            source = self.source.open(positions)
            try:
                reading = ReadLoop(source, channel, epoch, self.filler_rows, large_batches=self.large_batches)
                yield from with_whole_batches(reading.batches())
            finally:
                source.close()
        finally:
            channel.close()


def await_start(channel: Channel) -> tuple[int, dict[int, int]]:
    """Wait for the driver to assign the first epoch, and the partitions with their offsets.

    It does so once the last run has ended.
    """
    message = channel.await_message()
    return message["epoch"], {int(partition): at for partition, at in message["positions"].items()}


class ReadLoop:
    """The loop that sends rows, markers and fillers; not thread-safe."""

    def __init__(
        self,
        source: SourceReader,
        channel: Channel,
        epoch: int,
        filler_rows: int,
        *,
        large_batches: bool = False,
    ) -> None:
        self._source, self._channel, self._epoch = source, channel, epoch
        # The last row, as many times.
        self._places = pa.repeat(0, filler_rows)
        self._last: pa.RecordBatch | None = None
        self._labels: Labels | None = None
        self._rows = 0
        """Rows sent since the last marker."""
        self._sent_at = -_GAP
        self._held = False
        """Whether later buffers may hold rows back."""
        self._paused = False
        """Whether the driver has paused it."""
        self._large_batches = large_batches
        self._reported_growth = self._reported_batches = self._reported_skipped = False
        self._times: list[tuple[int, int, int]] = []

    def batches(self) -> Iterator[pa.RecordBatch]:
        """Yield rows, markers and fillers until the driver ends it."""
        while True:
            message = self._channel.receive()
            if message is not None:
                if message["kind"] == "finish":
                    break
                if message["kind"] == "rest":
                    self._paused = True
                    # After all messages about rows: the driver knows of all of them when it gets this one.
                    self._channel.send("resting")
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
                self._channel.wait(_LONGEST_REST)
            else:
                self._report_skipped()
                self._report_batches(self._large_batches)
                self._report_growth()
                self._source.wait(self._channel)
        self._channel.send("done")

    def _read(self) -> pa.RecordBatch | None:
        early = self._sent_at + _GAP - time.monotonic()
        if early > 0 and not self._held:
            time.sleep(early)
        return self._source.read(BATCH_ROWS)

    def _sent(self, rows: pa.RecordBatch) -> pa.RecordBatch:
        if not self._rows:
            self._channel.send("sent")
        self._rows += rows.num_rows
        self._sent_at = time.monotonic()
        self._note_times()
        self._last = rows.slice(rows.num_rows - 1)
        self._held = self._source.ahead
        if not self._large_batches and self._source.behind >= BEHIND_ROWS:
            self._report_batches(True)
        sent = self._labelled(rows, ROW, self._epoch)
        # One batch arrives sooner than two.
        return sent if self._held else pa.concat_batches([sent, self._fillers()])

    def _labelled(self, rows: pa.RecordBatch, kind: int, epoch: int) -> pa.RecordBatch:
        if self._labels is None:
            self._labels = Labels(rows.schema)
        return self._labels.beside(rows, kind, epoch)

    def _note_times(self) -> None:
        if len(self._times) < MOST_TIMES:
            now = now_micros()
            self._times += [(made, now, count) for made, count in self._source.times()]

    def _end_epoch(self, number: int) -> Iterator[pa.RecordBatch]:
        offsets = {str(partition): end for partition, end in self._source.offsets().items()}
        times, self._times = self._times[:MOST_TIMES], []
        self._channel.send("read", number=number, offsets=offsets, rows=self._rows, times=times)
        self._epoch, self._reported_skipped = number + 1, False
        if self._rows:
            assert self._last is not None
            self._rows, self._held = 0, True
            yield self._labelled(self._last, MARKER, number)

    def _fillers(self) -> pa.RecordBatch:
        assert self._last is not None
        return self._labelled(self._last.take(self._places), FILLER, self._epoch)

    def _report_skipped(self) -> None:
        """Ask for an epoch without rows, which moves the offsets past lost rows."""
        if not self._reported_skipped and not self._rows and self._source.skipped:
            self._reported_skipped = True
            self._channel.send("sent")

    def _report_batches(self, other: bool) -> None:
        """Report once that batches of the other size would suit better."""
        if other and not self._reported_batches:
            self._reported_batches = True
            self._channel.send("pace")

    def _report_growth(self) -> None:
        if not self._reported_growth and self._source.grown:
            self._reported_growth = True
            self._channel.send("grown")
