"""Queues as source and sink of continuous queries.

On the driver the source owns and moves a consumer, and the sink promotes staged rows.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import pyarrow as pa
from pyspark.sql.types import StructType

from penstock.arguments import in_quotes
from penstock.commit.micro_batch import QueueTarget
from penstock.commit.offsets import QueueOffset, pad
from penstock.commit.owner import Owner, move_past_commit, offset_of, raise_safe_offset
from penstock.commit.protocol import append_task
from penstock.commit.source_rows import SourceRows, times_before
from penstock.continuous.channel import Channel
from penstock.continuous.connectors.ledger import Commits
from penstock.continuous.connectors.protocol import (
    Epoch,
    Positions,
    ReaderFactory,
    SinkDriver,
    SinkEpoch,
    SinkWriter,
    SourceDriver,
    SourceReader,
    WriterFactory,
)
from penstock.continuous.connectors.staging_writer import MOST_BYTES, MOST_ROWS, StagingWriter
from penstock.json_text import JsonValue
from penstock.queue.placement import placement_of
from penstock.queue.store import Store, open_store
from penstock.spark.internals.python_workers import check_reach
from penstock.spark.options import SinkOptions, SourceOptions
from penstock.spark.queue_readers import Scan
from penstock.spark.queue_writers import SegmentGroups
from penstock.spark.ranges import parse_offset, skip_trimmed, start_positions
from penstock.spark.schemas import check_writable, require_columns, source_schema
from penstock.store import staging
from penstock.store.database import Transaction
from penstock.store.log.reading import Chunk, Range
from penstock.store.log.segmenting import Segment
from penstock.store.records import catalog
from penstock.store.records.catalog import QueueRecord, queue_sink
from penstock.store.staging import Attempt
from penstock.store.watch_queue import watch


@dataclass
class QueueSourceDriver(SourceDriver):
    """Driver side of a queue that is read, with or without a consumer."""

    options: SourceOptions = field(repr=False)
    _owner: Owner | None = field(default=None, init=False)
    _pinned: QueueRecord | None = field(default=None, init=False)
    """The queue that the current run reads: when an epoch is planned, another queue may have its name."""
    _last: QueueOffset | None = field(default=None, init=False)
    """The last offset, or the start of a query without a consumer."""
    _source_rows: SourceRows = field(default_factory=SourceRows, init=False, repr=False)

    @property
    def description(self) -> str:
        return f"queue {in_quotes(self.options.queue)}"

    @cached_property
    def schema(self) -> pa.Schema:
        """The columns that the queue had when the query began, for all its runs."""
        return source_schema(_look_up(self.options).schema, self.options.metadata_columns)

    def own(self) -> None:
        self._pinned = None
        if self.options.consumer is not None:
            if self._owner is not None:
                # So that a suspended driver that repeats its run does not take the consumer back from its
                # successor.
                self._owner.require()
            self._release_owner()
            self._owner = Owner(
                self._store().database,
                self.options.consumer,
                self.options.queue,
                moved_by_sink=self.options.moved_by_sink,
            )

    def start(self, logged: JsonValue, begun: Callable[[], JsonValue] | None = None) -> Positions:
        store, self._pinned = self._store(), _look_up(self.options)
        queue = self._pinned

        # Lost rows are refused here, or else skipped by the tasks: an epoch begins where the last one ended.
        def work(tx: Transaction) -> Positions:
            partitions = catalog.partitions(tx, queue)
            if logged is None and (begun is None or self.options.consumer is not None):
                first = start_positions(tx, self.options, queue, partitions)
                skip_trimmed(self.options, partitions, first)
                if self.options.consumer is None:
                    self._last = self._offset(first, first, times_before(tx, queue, first))
                return dict(enumerate(first))
            offset = parse_offset(begun() if begun is not None and logged is None else logged)
            offset.require(store.uuid, queue.name, self.options.consumer, self._generation(queue))
            self._source_rows.require(tx, queue.queue_id, offset)
            self._last = offset
            offsets = pad(offset.start if logged is None else offset.end, len(partitions))
            skip_trimmed(self.options, partitions, offsets)
            return dict(enumerate(offsets))

        return store.database.run(work, write=False)

    def ends(self) -> Positions:
        queue = self._queue()
        partitions = self._store().database.run(lambda tx: catalog.partitions(tx, queue), write=False)
        return {part.partition: part.next_index for part in partitions}

    def readers(self) -> QueueReaderFactory:
        queue = self._queue()
        require_columns(queue, self.schema)
        return QueueReaderFactory(self.options.url, queue, self.schema, self.options.fail_on_data_loss)

    def plan(self, start: Positions, end: Positions, last_times: Mapping[int, int]) -> JsonValue:
        owner, begins, ends = self._owner, _listed(start, len(end)), _listed(end, len(end))
        times = [last_times.get(partition) for partition in range(len(end))]
        if owner is not None:
            offset = self._offset(begins, ends, times)
            if not self.advanced_by_sink:
                owner.plan(offset)
            return offset.to_dict()
        # Without a consumer, nothing else shows that the queue is older than the last epoch.
        assert self._last is not None, "`start` has set it"
        offset = self._offset(begins, ends, self._with_earlier_times(self._last, ends, times))
        self._require_rows(self._last, offset)
        self._last = offset
        return offset.to_dict()

    def _with_earlier_times(
        self, last: QueueOffset, ends: Sequence[int], times: Sequence[int | None]
    ) -> Sequence[int | None]:
        """Add the times of partitions from which an epoch has read no rows: they are known from before, or
        the epoch has skipped lost rows.
        """
        known = dict(zip(enumerate(last.end), last.times, strict=False))
        times = [
            known.get(place) if time is None else time
            for place, time in zip(enumerate(ends), times, strict=True)
        ]
        if all(time is not None or not end for end, time in zip(ends, times, strict=True)):
            return times
        queue = self._queue()
        found = self._store().database.run(lambda tx: times_before(tx, queue, ends), write=False)
        return [there if time is None else time for time, there in zip(times, found, strict=True)]

    def _offset(self, start: Sequence[int], end: Sequence[int], times: Sequence[int | None]) -> QueueOffset:
        store, queue, by_sink = self._store().uuid, self._queue(), self.advanced_by_sink
        return offset_of(self._owner, store, queue, start, end, unplanned=by_sink, times=tuple(times))

    @property
    def advanced_by_sink(self) -> bool:
        return self.options.consumer is not None and self.options.moved_by_sink

    def _require_rows(self, *offsets: QueueOffset) -> None:
        queue = self._queue()

        def work(tx: Transaction) -> None:
            for offset in offsets:
                self._source_rows.require(tx, queue.queue_id, offset)

        self._store().database.run(work, write=False)

    def follow(self, offset: JsonValue) -> None:
        parsed = QueueOffset.of(offset)
        if self.options.consumer is not None and parsed is not None:
            move_past_commit(self._store().database, parsed)

    def logged(self, offset: JsonValue) -> bool:
        if self._owner is None:
            # Rows of a restored queue may all be before the query's position.
            self._require_rows(parse_offset(offset))
            return False
        return self._owner.observe(parse_offset(offset))[2]

    def require_at(self, start: Positions) -> None:
        if self._owner is not None:
            self._owner.require_at(_listed(start, len(start)))

    def release(self, ended: JsonValue) -> None:
        self._release_owner()
        if self.options.consumer is not None and ended is not None:
            offset = parse_offset(ended)
            raise_safe_offset(self._store().database, offset, moved_by_sink=self.options.moved_by_sink)

    def _release_owner(self) -> None:
        if self._owner is not None:
            self._owner.release()
            self._owner = None

    def _store(self) -> Store:
        return open_store(self.options.url)

    def _queue(self) -> QueueRecord:
        return self._pinned or _look_up(self.options)

    def _generation(self, queue: QueueRecord) -> int:
        return queue.generation if self._owner is None else self._owner.generation


def _look_up(options: SourceOptions | SinkOptions) -> QueueRecord:
    database = open_store(options.url).database
    return database.run(lambda tx: catalog.find_queue(tx, options.queue), write=False)


def _listed(positions: Positions, length: int) -> tuple[int, ...]:
    return tuple(positions.get(partition, 0) for partition in range(length))


@dataclass
class QueueSinkDriver(SinkDriver):
    """Driver side of a queue that is written to."""

    options: SinkOptions = field(repr=False)
    query_id: str
    exactly_once: bool

    @property
    def description(self) -> str:
        return f"queue {in_quotes(self.options.queue)}"

    @property
    def at_once(self) -> bool:
        return not self.exactly_once

    @property
    def keeps_offsets(self) -> bool:
        return self.exactly_once

    def check(self, schema: StructType) -> None:
        queue = _look_up(self.options)
        check_writable(schema, queue)

    def writers(self) -> QueueWriterFactory:
        app_id = self._commits.app_id if self.exactly_once else None
        queue = _look_up(self.options)
        return QueueWriterFactory(self.options.url, queue, app_id, self.options.max_rows_per_write)

    def newest(self) -> SinkEpoch:
        return self._commits.newest(queue_sink(_look_up(self.options)))

    @property
    def may_be_new(self) -> bool:
        return self.options.allow_new_sink

    def commit(self, writers: WriterFactory, epoch: Epoch, offset: JsonValue) -> None:
        assert isinstance(writers, QueueWriterFactory), "`writers` has made it"
        # The queue for which the tasks placed the rows: the store refuses them if it has more partitions by
        # now.
        queue = writers.queue
        if not self.exactly_once:
            self._commits.note(queue_sink(queue), epoch, offset)
            return
        appended = self._commits.commit(QueueTarget(queue), epoch, offset)
        open_store(self.options.url).schedule_maintenance(
            queue, () if appended is None else appended.to_compact
        )

    @cached_property
    def _commits(self) -> Commits:
        options = self.options
        return Commits(
            options.url,
            self.query_id,
            options.app_id or self.query_id,
            rebind=options.allow_new_checkpoint,
            new_sink=options.allow_new_sink,
        )


_MAX_WAIT_SECONDS = 1.0
_AHEAD_ROWS = 131_072
_AHEAD_BYTES = 32 << 20
"""The bytes of rows that are read ahead, besides the last chunk."""
_READ_BYTES = 16 << 20
"""The bytes of rows that are read at once, besides the last row: Spark puts several reads into one batch."""


@dataclass(frozen=True)
class QueueReaderFactory(Scan, ReaderFactory):
    """Factory of readers of a queue."""

    def open(self, positions: Mapping[int, int]) -> QueueReader:
        check_reach(self.url, None)
        return QueueReader(self, positions)


@dataclass(frozen=True)
class _Ahead:
    """Rows of a chunk that were read ahead, from the index ``start``."""

    partition: int
    chunk: Chunk
    start: int
    rows: pa.RecordBatch

    def fitting(self, rows: int, size: int) -> int:
        """Return how many rows to take if so many fit, of so many bytes; at least one."""
        count = min(int(self.rows.num_rows), rows)
        while count > 1 and self.rows.slice(0, count).nbytes > size:
            count //= 2
        return count


class QueueReader(SourceReader):
    """Reader of some partitions of a queue."""

    def __init__(self, source: QueueReaderFactory, positions: Mapping[int, int]) -> None:
        self._source = source
        self._positions = dict(positions)
        self._watch = watch(open_store(source.url).database, source.queue, positions)
        self._ends: dict[int, int] = {}
        """The ends of partitions that have more rows than were read ahead."""
        self._known: dict[int, int] = {}
        """The last ends that were found."""
        self._held: deque[_Ahead] = deque()
        """Rows that were read ahead."""
        self._pages: dict[tuple[int, int], int] = {}
        """When the last row of each page of rows was appended, by partition and end."""
        self._times: list[tuple[int, int]] = []
        self._last_times: dict[int, int] = {}

    def read(self, max_rows: int) -> pa.RecordBatch | None:
        if not self._held:
            self._fetch()
        batches, left, room, self._times = [], max_rows, _READ_BYTES, []
        while self._held and left and room > 0:
            ahead = self._held.popleft()
            count = ahead.fitting(left, room)
            if ahead.rows.num_rows > count:
                later = replace(ahead, start=ahead.start + count, rows=ahead.rows.slice(count))
                self._held.appendleft(later)
                ahead = replace(ahead, rows=ahead.rows.slice(0, count))
            left, room = left - count, room - ahead.rows.nbytes
            self._positions[ahead.partition] = ahead.start + count
            appended = ahead.chunk.timestamp_of(ahead.start + count - 1)
            self._last_times[ahead.partition] = appended
            self._times.append((appended, count))
            batches.append(ahead.rows)
        return pa.concat_batches(batches) if len(batches) > 1 else batches[0] if batches else None

    def _fetch(self) -> None:
        if not self._ends:
            self._find(0)
        ends, self._ends = self._ends, {}
        room, later = _AHEAD_BYTES, {}
        for partition, end in ends.items():
            if room <= 0:
                self._ends[partition] = end
                continue
            start = self._positions[partition]
            wanted = Range(partition, start, min(end, start + _AHEAD_ROWS))
            reached, room = self._read_ahead(wanted, room)
            if reached < end:
                later[partition] = end
        self._ends.update(later)

    def _read_ahead(self, wanted: Range, room: int) -> tuple[int, int]:
        """Hold the rows of a range, or as many as there is room for; return their end and the room left."""
        partition, chunk = wanted.partition, None
        for chunk, rows in self._source.chunks([wanted], with_runs=True):
            self._held.append(_Ahead(partition, chunk, chunk.start, rows))
            room -= rows.nbytes
            full = room <= 0 and chunk.end < wanted.end
            if chunk.ends_page or full:
                self._pages[partition, chunk.end] = chunk.timestamp_of(chunk.end - 1)
            if full:
                return chunk.end, room
        if chunk is None:
            # All of these rows are lost; the next rows come after them.
            self._positions[partition], self.skipped = wanted.end, True
            self._last_times.pop(partition, None)
        return wanted.end, room

    def _find(self, timeout: float, channels: Sequence[Channel] = ()) -> None:
        self._known = self._ends = self._watch.wait(self._positions, timeout, channels).ends

    def behind(self) -> int:
        if not self._held and not self._ends:
            self._find(0)
        return sum(end - self._positions[partition] for partition, end in self._known.items())

    def times(self) -> list[tuple[int, int]]:
        return self._times

    def last_times(self) -> dict[int, int]:
        return self._last_times

    def offsets(self) -> dict[int, int]:
        self.skipped = False
        self._require_pages()
        return dict(self._positions)

    def _require_pages(self) -> None:
        """Check at the end of an epoch that the store was not restored between two reads of its rows, since
        the commit checks only the last row.
        """
        inner = {place: time for place, time in self._pages.items() if place[1] < self._positions[place[0]]}
        if inner:
            self._source.require_read(inner)
        self._pages = {
            place: time for place, time in self._pages.items() if place[1] > self._positions[place[0]]
        }

    @property
    def grown(self) -> bool:
        return self._watch.partitions > self._source.queue.partitions

    def wait(self, channel: Channel) -> None:
        self._find(_MAX_WAIT_SECONDS, [channel])

    def close(self) -> None:
        self._watch.close()


@dataclass(frozen=True)
class QueueWriterFactory(WriterFactory):
    """Factory of writers to a queue, whose rows are visible immediately, or staged until their epoch ends."""

    url: str = field(repr=False)
    queue: QueueRecord
    app_id: str | None
    """Set if rows are staged; None if they are visible immediately."""
    max_rows: int = 65_536

    def open(self, task: int) -> SinkWriter:
        check_reach(self.url, None)
        return QueueWriter(self, task) if self.app_id is None else QueueStagingWriter(self, task, self.app_id)


class _Segments:
    """Rows of a task as segments of the queue's partitions."""

    def __init__(self, sink: QueueWriterFactory, task: int) -> None:
        self.queue, self._task, self._max_rows = sink.queue, task, sink.max_rows
        # The process keeps the store open.
        self.store = open_store(sink.url)
        self._placement = placement_of(self.store.database, sink.queue)

    def of(self, rows: Sequence[pa.RecordBatch]) -> Iterator[Sequence[Segment]]:
        """Yield the segments of rows in groups, each for one transaction."""
        return SegmentGroups(self.queue, self._placement, self._task, self._max_rows).groups(iter(rows))


class QueueWriter(SinkWriter):
    """Writer of one task whose writes are appends."""

    def __init__(self, sink: QueueWriterFactory, task: int) -> None:
        self._segments = _Segments(sink, task)

    def write(self, rows: list[pa.RecordBatch], epoch: int) -> None:
        store, queue = self._segments.store, self._segments.queue
        to_compact: set[int] = set()
        for group in self._segments.of(rows):
            if (appended := append_task(store.database, queue, None, group)) is not None:
                to_compact.update(appended.to_compact)
        if to_compact:
            store.schedule_maintenance(queue, tuple(to_compact))

    def end(self, epoch: int) -> dict[str, int]:
        return {}


class QueueStagingWriter(StagingWriter):
    """Writer of one task whose rows are staged for the driver to promote with their epoch."""

    def __init__(self, sink: QueueWriterFactory, task: int, app_id: str) -> None:
        super().__init__(app_id, task, most_rows=MOST_ROWS, most_bytes=MOST_BYTES)
        self._segments = _Segments(sink, task)

    def stage(self, rows: Sequence[pa.RecordBatch], attempt: Attempt, staged: int) -> int:
        database, queue, before = self._segments.store.database, self._segments.queue, staged
        for group in self._segments.of(rows):
            staged += staging.stage_segments(database, queue, attempt, group, staged, durable=False)
        return staged - before
