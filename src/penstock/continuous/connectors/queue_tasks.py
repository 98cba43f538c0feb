"""Queues as source and sink of continuous queries, task side."""

from __future__ import annotations

import uuid
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

import pyarrow as pa

from penstock.commit.protocol import append_task
from penstock.continuous.connectors.protocol import ReaderFactory, SinkWriter, SourceReader, WriterFactory
from penstock.continuous.task.channel import Channel
from penstock.queue.placement import placement_of
from penstock.queue.store import open_store
from penstock.spark.internals.python_workers import check_reach
from penstock.spark.queue_writers import SegmentGroups
from penstock.spark.source.read_task import Scan
from penstock.store import staging
from penstock.store.log.segmenting import Segment
from penstock.store.records.catalog import QueueRecord
from penstock.store.staging import Attempt
from penstock.store.watch_queue import watch

_MAX_WAIT_SECONDS = 1.0
_AHEAD_ROWS = 131_072


@dataclass(frozen=True)
class QueueReaderFactory(Scan, ReaderFactory):
    """Factory of readers of a queue."""

    def open(self, positions: Mapping[int, int]) -> QueueReader:
        check_reach(self.url, None)
        return QueueReader(self, positions)


@dataclass(frozen=True)
class _Ahead:
    """Rows that were read ahead."""

    partition: int
    appended: int
    """When the rows were appended, in microseconds since 1970."""
    start: int
    """The index of the first row."""
    rows: pa.RecordBatch

    @property
    def end(self) -> int:
        return self.start + int(self.rows.num_rows)

    def upto(self, count: int) -> _Ahead:
        return replace(self, rows=self.rows.slice(0, count))

    def after(self, count: int) -> _Ahead:
        return replace(self, start=self.start + count, rows=self.rows.slice(count))


class QueueReader(SourceReader):
    """Reader of some partitions of a queue."""

    def __init__(self, source: QueueReaderFactory, positions: Mapping[int, int]) -> None:
        self._source = source
        self._positions = dict(positions)
        self._watch = watch(open_store(source.url).database, source.queue, positions)
        self._ends: dict[int, int] = {}
        """The ends of partitions that have more rows than were read ahead."""
        self._held: deque[_Ahead] = deque()
        """Rows that were read ahead."""
        self._times: list[tuple[int, int]] = []
        self._last_times: dict[int, int] = {}

    def read(self, max_rows: int) -> pa.RecordBatch | None:
        if not self._held:
            self._fetch()
        batches, left, self._times = [], max_rows, []
        while self._held and left:
            ahead = self._held.popleft()
            if ahead.rows.num_rows > left:
                self._held.appendleft(ahead.after(left))
                ahead = ahead.upto(left)
            left -= ahead.rows.num_rows
            self._positions[ahead.partition] = ahead.end
            self._last_times[ahead.partition] = ahead.appended
            self._times.append((ahead.appended, ahead.rows.num_rows))
            batches.append(ahead.rows)
        return pa.concat_batches(batches) if len(batches) > 1 else batches[0] if batches else None

    def _fetch(self) -> None:
        """Read ahead, in whole segments."""
        ends, self._ends = self._ends or self._watch.wait(self._positions, 0).ends, {}
        for partition, end in ends.items():
            start = self._positions[partition]
            upto = min(end, start + _AHEAD_ROWS)
            self._held.extend(
                _Ahead(partition, chunk.first_timestamp, chunk.start, rows)
                for chunk, rows in self._source.chunks(partition, start, upto)
            )
            if not self._held or self._held[-1].partition != partition:
                # All of them are lost; the next rows come after them.
                self._positions[partition], self.skipped = upto, True
                self._last_times.pop(partition, None)
            if upto < end:
                self._ends[partition] = end

    @property
    def ahead(self) -> bool:
        if not self._held:
            self._ends = self._ends or self._watch.wait(self._positions, 0).ends
        return bool(self._held or self._ends)

    @property
    def behind(self) -> int:
        return sum(end - self._positions[partition] for partition, end in self._ends.items())

    def times(self) -> list[tuple[int, int]]:
        return self._times

    def last_times(self) -> dict[int, int]:
        return self._last_times

    def offsets(self) -> dict[int, int]:
        self.skipped = False
        return dict(self._positions)

    @property
    def grown(self) -> bool:
        return self._watch.partitions > self._source.queue.partitions

    def wait(self, channel: Channel) -> None:
        self._ends = self._watch.wait(self._positions, _MAX_WAIT_SECONDS, [channel]).ends

    def close(self) -> None:
        self._watch.close()


@dataclass(frozen=True)
class QueueWriterFactory(WriterFactory):
    """Factory of writers to a queue: their rows are visible at once, or staged for the end of their epoch."""

    url: str = field(repr=False)
    queue: QueueRecord
    app_id: str | None
    """For rows that are staged; None for rows that are visible at once."""
    max_rows: int = 65_536

    def open(self, task: int) -> SinkWriter:
        check_reach(self.url, None)
        return (
            QueueAppendWriter(self, task)
            if self.app_id is None
            else QueueStagingWriter(self, task, self.app_id)
        )


class _QueueWriter(SinkWriter):
    """Writer of one task; the process keeps its store open."""

    def __init__(self, sink: QueueWriterFactory, task: int) -> None:
        self._sink, self._task = sink, task
        self._store = open_store(sink.url)
        self._placement = placement_of(self._store.database, sink.queue)

    def _groups(self, rows: list[pa.RecordBatch]) -> Iterator[list[Segment]]:
        pieces = SegmentGroups(self._sink.queue, self._placement, self._task, self._sink.max_rows)
        return pieces.groups(iter(rows))


class QueueAppendWriter(_QueueWriter):
    """Writer whose every write is an append."""

    def write(self, rows: list[pa.RecordBatch], epoch: int) -> None:
        crowded: set[int] = set()
        for group in self._groups(rows):
            appended = append_task(self._store.database, self._sink.queue, None, group)
            crowded.update(() if appended is None else appended.crowded)
        if crowded:
            self._store.tend(self._sink.queue, tuple(crowded))

    def end(self, epoch: int) -> dict[str, int]:
        return {}


class QueueStagingWriter(_QueueWriter):
    """Writer whose writes are staged; the driver promotes or deletes them with their epoch."""

    def __init__(self, sink: QueueWriterFactory, task: int, app_id: str) -> None:
        super().__init__(sink, task)
        self._app_id, self._attempt = app_id, str(uuid.uuid4())
        self._staged = 0

    def write(self, rows: list[pa.RecordBatch], epoch: int) -> None:
        attempt = Attempt(self._app_id, epoch, self._task, self._attempt)
        for group in self._groups(rows):
            self._staged += staging.stage_segments(
                self._store.database, self._sink.queue, attempt, group, self._staged
            )

    def end(self, epoch: int) -> dict[str, int]:
        staged, self._staged = self._staged, 0
        return {self._attempt: staged} if staged else {}
