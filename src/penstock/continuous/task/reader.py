"""The first half of a task: rows of the source without end, with a marker at the end of each epoch."""

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
"""Of an epoch, which are told for its latencies."""
BATCH_ROWS = 10_000
"""Rows between two looks at what the driver says."""
BEHIND_ROWS = 1_000_000
"""From so many unread rows on it pays to start the tasks anew, for batches that suit many rows."""
_LONGEST_REST = 1.0
_GAP = 0.001
"""Seconds from one send to the next read, where no more rows are known to be there: what comes meanwhile is one turn of reader, Spark and
writer, whose time a busy source would need for its later rows. As Nagle's algorithm (RFC 896) with a limit; it delays a row by less."""


class SourceReader(ABC):
    """Some partitions of a source, read by one task."""

    @abstractmethod
    def read(self, max_rows: int) -> pa.RecordBatch | None:
        """Rows that have come; None when there are none."""

    @abstractmethod
    def offsets(self) -> dict[int, int]:
        """Where each partition stands behind the rows that were read."""

    @abstractmethod
    def wait(self, link: Channel) -> None:
        """Return when there may be rows, or the driver says something."""

    def times(self) -> list[tuple[int, int]]:
        """When the rows of the last read were made: an instant in microseconds, and how many of the rows have it."""
        return []

    @property
    def ahead(self) -> bool:
        """Whether more rows are known to be there."""
        return False

    @property
    def behind(self) -> int:
        """How many rows are known to be there that were not read yet."""
        return 0

    @property
    def skipped(self) -> bool:
        """Whether it has passed over rows that are gone since its offsets were last asked for, and has read none."""
        return False

    @property
    def grown(self) -> bool:
        """Whether the source has partitions that no task reads."""
        return False

    @abstractmethod
    def close(self) -> None:
        """Give up what it holds."""


class ReaderFactory(ABC):
    """A source of a continuous query, carried to its tasks."""

    schema: pa.Schema

    @abstractmethod
    def open(self, positions: Mapping[int, int]) -> SourceReader:
        """Read some partitions from these offsets on, on an executor."""


@dataclass
class ReadTask:
    """For ``mapInArrow`` over a row for each task."""

    source: ReaderFactory
    tasks: int
    """How many there are; each is told by the driver what to read."""
    address: CoordinatorAddress
    filler_rows: int
    """How many rows push those before them through all buffers behind."""
    hurried: bool = False
    """Whether the batches behind are large, for many rows rather than for early ones."""

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        return iterate_without_tracebacks(self._run())

    def _run(self) -> Iterator[pa.RecordBatch]:
        context = TaskContext.get()
        assert context is not None
        freeze_imports()
        task = context.partitionId()
        link = self.address.link(READER, task)
        try:
            epoch, positions = await_start(link)
            source = self.source.open(positions)
            try:
                reading = ReadLoop(source, link, epoch, self.filler_rows, hurried=self.hurried)
                yield from with_whole_batches(reading.batches())
            finally:
                source.close()
        finally:
            link.close()


def await_start(link: Channel) -> tuple[int, dict[int, int]]:
    """The first epoch, and where each partition of a task stands, as the driver says once the run before has ended."""
    message = link.answer()
    return message["epoch"], {int(partition): at for partition, at in message["positions"].items()}


class ReadLoop:
    """What a reader sends, and when; not for several threads at once."""

    def __init__(
        self, source: SourceReader, link: Channel, epoch: int, filler_rows: int, *, hurried: bool = False
    ) -> None:
        self._source, self._link, self._epoch = source, link, epoch
        # As many times the last row.
        self._places = pa.repeat(0, filler_rows)
        self._last: pa.RecordBatch | None = None
        self._labels: Labels | None = None
        self._rows = 0
        """Sent since the last marker."""
        self._sent_at = -_GAP
        self._held = False
        """Whether buffers may hold something back."""
        self._resting = False
        """Whether the driver wants no more rows."""
        self._hurried = hurried
        self._told_growth = self._told_pace = self._told_skipped = False
        self._times: list[tuple[int, int, int]] = []

    def batches(self) -> Iterator[pa.RecordBatch]:
        """Rows, markers and fillers, until the driver lets it end."""
        while True:
            message = self._link.heard()
            if message is not None:
                if message["kind"] == "finish":
                    break
                if message["kind"] == "rest":
                    self._resting = True
                    # Behind what was told of rows before: who hears this has heard of all of them.
                    self._link.tell("resting")
                    continue
                yield from self._end_epoch(message["number"])
                continue
            rows = None if self._resting else self._read()
            if rows is not None and rows.num_rows:
                yield self._sent(rows)
            elif self._held:
                self._held = False
                yield self._fillers()
            elif self._resting:
                self._link.waits(_LONGEST_REST)
            else:
                self._tell_skipped()
                self._tell_pace(self._hurried)
                self._tell_growth()
                self._source.wait(self._link)
        self._link.tell("done")

    def _read(self) -> pa.RecordBatch | None:
        early = self._sent_at + _GAP - time.monotonic()
        if early > 0 and not self._held:
            time.sleep(early)
        return self._source.read(BATCH_ROWS)

    def _sent(self, rows: pa.RecordBatch) -> pa.RecordBatch:
        if not self._rows:
            self._link.tell("sent")
        self._rows += rows.num_rows
        self._sent_at = time.monotonic()
        self._note_times()
        self._last = rows.slice(rows.num_rows - 1)
        self._held = self._source.ahead
        if not self._hurried and self._source.behind >= BEHIND_ROWS:
            self._tell_pace(True)
        sent = self._labelled(rows, ROW, self._epoch)
        # One batch is under way sooner than two.
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
        self._link.tell("read", number=number, offsets=offsets, rows=self._rows, times=times)
        self._epoch, self._told_skipped = number + 1, False
        if self._rows:
            assert self._last is not None
            self._rows, self._held = 0, True
            yield self._labelled(self._last, MARKER, number)

    def _fillers(self) -> pa.RecordBatch:
        assert self._last is not None
        return self._labelled(self._last.take(self._places), FILLER, self._epoch)

    def _tell_skipped(self) -> None:
        """An epoch without rows takes the offsets past those that are gone."""
        if not self._told_skipped and not self._rows and self._source.skipped:
            self._told_skipped = True
            self._link.tell("sent")

    def _tell_pace(self, other: bool) -> None:
        """Tell once that the other pace would suit."""
        if other and not self._told_pace:
            self._told_pace = True
            self._link.tell("pace")

    def _tell_growth(self) -> None:
        if not self._told_growth and self._source.grown:
            self._told_growth = True
            self._link.tell("grown")
