"""The reading half of a task: an endless stream of rows, with a marker at the end of each epoch."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import pyarrow as pa
from pyspark import TaskContext

from penstock.continuous.connectors.protocol import ReaderFactory, SourceReader
from penstock.continuous.plan.metadata_columns import FILLER, MARKER, Labels
from penstock.continuous.task.channel import READER, Channel, CoordinatorAddress, with_whole_batches
from penstock.instants import now_micros
from penstock.spark.error_boundary import iterate_without_tracebacks
from penstock.spark.internals.python_workers import freeze_imports
from penstock.spark.internals.udf_wrapper import ROW

MOST_TIMES = 1000
"""Instants of an epoch that are reported for its latencies."""
BATCH_ROWS = 10_000
"""Rows between two checks for messages of the driver."""
BEHIND_ROWS = 1_000_000
"""With so many unread rows a restart of the tasks with larger batches pays off."""
_LONGEST_PAUSE = 1.0
_GAP = 0.001
"""Seconds from one send to the next read, while no further rows are known: those that come meanwhile take
one round of reader, Spark and writer together, whose time a busy source would need for its later rows.
Like Nagle's algorithm (RFC 896) with a limit; it delays a row by less than this."""


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
        channel = self.address.open(READER, task)
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
        self._reported: set[str] = set()
        """What has been reported in this run, or for skipped rows in this epoch."""
        self._times: list[tuple[int, int, int]] = []

    def batches(self) -> Iterator[pa.RecordBatch]:
        """Yield rows, markers and fillers until the driver ends it."""
        while True:
            message = self._channel.receive()
            if message is not None:
                if message["kind"] == "finish":
                    break
                if message["kind"] == "pause":
                    self._paused = True
                    # After all messages about rows: the driver knows of all of them when it gets this one.
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
                self._report("sent", not self._rows and self._source.skipped)
                self._report("pace", self._large_batches)
                self._report("grown", self._source.grown)
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
        self._report("pace", not self._large_batches and self._source.behind >= BEHIND_ROWS)
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
        last_times = {str(partition): time for partition, time in self._source.last_times().items()}
        self._channel.send(
            "read", number=number, offsets=offsets, rows=self._rows, times=times, last_times=last_times
        )
        self._epoch = number + 1
        self._reported.discard("sent")
        if self._rows:
            assert self._last is not None
            self._rows, self._held = 0, True
            yield self._labelled(self._last, MARKER, number)

    def _fillers(self) -> pa.RecordBatch:
        assert self._last is not None
        return self._labelled(self._last.take(self._places), FILLER, self._epoch)

    def _report(self, kind: str, applies: bool) -> None:
        """Report once: skipped rows, that other batches suit better, or that the source grew."""
        if applies and kind not in self._reported:
            self._reported.add(kind)
            self._channel.send(kind)
