"""Queues as sources and sinks of continuous queries.

On the driver, the source owns and moves a consumer, and the sink promotes staged rows.
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
from penstock.continuous.connectors.ledger import LedgerCommits, LedgerSinkDriver
from penstock.continuous.connectors.protocol import (
    Epoch,
    Positions,
    ReaderFactory,
    SinkEpoch,
    SinkWriter,
    SourceDriver,
    SourceReader,
    WriterFactory,
)
from penstock.continuous.connectors.staging_writer import MAX_BYTES, MAX_ROWS, StagingWriter
from penstock.json_text import JsonValue
from penstock.queue.placement import placement_of
from penstock.queue.store import Store, open_store
from penstock.spark.internals.python_workers import check_store_reach
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
    """Driver side of a queue as a source, with or without a consumer."""

    options: SourceOptions = field(repr=False)
    _owner: Owner | None = field(default=None, init=False)
    _pinned: QueueRecord | None = field(default=None, init=False)
    """The queue that the current run reads. Another queue may have its name when an epoch is planned."""
    _last_offset: QueueOffset | None = field(default=None, init=False)
    """Without a consumer: the last offset, or the start of the query."""
    _source_rows: SourceRows = field(default_factory=SourceRows, init=False, repr=False)

    @property
    def description(self) -> str:
        return f"queue {in_quotes(self.options.queue)}"

    @cached_property
    def schema(self) -> pa.Schema:
        """The queue's columns when the query started; all its runs use them."""
        return source_schema(_find_queue(self.options).schema, self.options.metadata_columns)

    def take_ownership(self) -> None:
        self._pinned = None
        if self.options.consumer is not None:
            if self._owner is not None:
                # A driver that was suspended must not take the consumer back from its successor.
                self._owner.require()
            self._release_owner()
            self._owner = Owner(
                self._store().database,
                self.options.consumer,
                self.options.queue,
                moved_by_sink=self.options.moved_by_sink,
            )

    def start(self, committed: JsonValue, read_begun: Callable[[], JsonValue] | None = None) -> Positions:
        store, self._pinned = self._store(), _find_queue(self.options)
        queue = self._pinned

        # Lost rows are refused here, or else tasks skip them. An epoch always starts where the last one
        # ended.
        def find_start(tx: Transaction) -> Positions:
            partitions = catalog.partitions(tx, queue)
            if committed is None and (read_begun is None or self.options.consumer is not None):
                starts = start_positions(tx, self.options, queue, partitions)
                skip_trimmed(self.options, partitions, starts)
                if self.options.consumer is None:
                    self._last_offset = self._offset(starts, starts, times_before(tx, queue, starts))
                return dict(enumerate(starts))
            offset = parse_offset(read_begun() if read_begun is not None and committed is None else committed)
            offset.require(store.uuid, queue.name, self.options.consumer, self._generation(queue))
            self._source_rows.require(tx, queue.queue_id, offset)
            self._last_offset = offset
            offsets = pad(offset.start if committed is None else offset.end, len(partitions))
            skip_trimmed(self.options, partitions, offsets)
            return dict(enumerate(offsets))

        return store.database.run(find_start, write=False)

    def end_offsets(self) -> Positions:
        queue = self._queue()
        partitions = self._store().database.run(lambda tx: catalog.partitions(tx, queue), write=False)
        return {part.partition: part.next_index for part in partitions}

    def reader_factory(self) -> QueueReaderFactory:
        queue = self._queue()
        require_columns(queue, self.schema)
        return QueueReaderFactory(self.options.url, queue, self.schema, self.options.fail_on_data_loss)

    def plan(self, start: Positions, end: Positions, last_times: Mapping[int, int]) -> JsonValue:
        owner, starts, ends = self._owner, _offset_list(start, len(end)), _offset_list(end, len(end))
        last_row_times = [last_times.get(partition) for partition in range(len(end))]
        if owner is not None:
            offset = self._offset(starts, ends, last_row_times)
            if not self.advanced_by_sink:
                owner.plan(offset)
            return offset.to_dict()
        # Without a consumer, only this shows that the queue was restored to before the last epoch.
        assert self._last_offset is not None, "`start` sets it"
        offset = self._offset(starts, ends, self._with_earlier_times(self._last_offset, ends, last_row_times))
        self._require_rows(self._last_offset, offset)
        self._last_offset = offset
        return offset.to_dict()

    def _with_earlier_times(
        self, last: QueueOffset, ends: Sequence[int], times: Sequence[int | None]
    ) -> Sequence[int | None]:
        """Fill in the times of partitions from which the epoch read no rows: from the last offset, or, if
        lost rows were skipped, from the store.
        """
        last_times = dict(zip(enumerate(last.end), last.times, strict=False))
        times = [
            last_times.get(position) if time is None else time
            for position, time in zip(enumerate(ends), times, strict=True)
        ]
        if all(time is not None or not end for end, time in zip(ends, times, strict=True)):
            return times
        queue = self._queue()
        stored_times = self._store().database.run(lambda tx: times_before(tx, queue, ends), write=False)
        return [
            stored_time if time is None else time
            for time, stored_time in zip(times, stored_times, strict=True)
        ]

    def _offset(self, start: Sequence[int], end: Sequence[int], times: Sequence[int | None]) -> QueueOffset:
        store, queue, unplanned = self._store().uuid, self._queue(), self.advanced_by_sink
        return offset_of(self._owner, store, queue, start, end, unplanned=unplanned, times=tuple(times))

    @property
    def advanced_by_sink(self) -> bool:
        return self.options.consumer is not None and self.options.moved_by_sink

    def _require_rows(self, *offsets: QueueOffset) -> None:
        queue = self._queue()

        def require_all(tx: Transaction) -> None:
            for offset in offsets:
                self._source_rows.require(tx, queue.queue_id, offset)

        self._store().database.run(require_all, write=False)

    def move_past_commit(self, offset: JsonValue) -> None:
        parsed = QueueOffset.of(offset)
        if self.options.consumer is not None and parsed is not None:
            move_past_commit(self._store().database, parsed)

    def notify_logged(self, offset: JsonValue) -> bool:
        if self._owner is None:
            # All rows of a restored queue may be before the query's position.
            self._require_rows(parse_offset(offset))
            return False
        return self._owner.observe(parse_offset(offset))[2]

    def require_not_restored(self, start: Positions) -> None:
        if self._owner is not None:
            self._owner.require_at(_offset_list(start, len(start)))

    def release(self, last_offset: JsonValue) -> None:
        self._release_owner()
        if self.options.consumer is not None and last_offset is not None:
            offset = parse_offset(last_offset)
            raise_safe_offset(self._store().database, offset, moved_by_sink=self.options.moved_by_sink)

    def _release_owner(self) -> None:
        if self._owner is not None:
            self._owner.release()
            self._owner = None

    def _store(self) -> Store:
        return open_store(self.options.url)

    def _queue(self) -> QueueRecord:
        return self._pinned or _find_queue(self.options)

    def _generation(self, queue: QueueRecord) -> int:
        return queue.generation if self._owner is None else self._owner.generation


def _find_queue(options: SourceOptions | SinkOptions) -> QueueRecord:
    database = open_store(options.url).database
    return database.run(lambda tx: catalog.find_queue(tx, options.queue), write=False)


def _offset_list(positions: Positions, length: int) -> tuple[int, ...]:
    return tuple(positions.get(partition, 0) for partition in range(length))


@dataclass
class QueueSinkDriver(LedgerSinkDriver):
    """Driver side of a queue as a sink."""

    options: SinkOptions = field(repr=False)
    query_id: str
    exactly_once: bool
    commits: LedgerCommits = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self.commits = LedgerCommits(
            self.options.url,
            self.query_id,
            self.options.app_id or self.query_id,
            rebind=self.options.allow_new_checkpoint,
            new_sink=self.options.allow_new_sink,
        )

    @property
    def description(self) -> str:
        return f"queue {in_quotes(self.options.queue)}"

    def check(self, schema: StructType) -> None:
        queue = _find_queue(self.options)
        check_writable(schema, queue)

    def writer_factory(self) -> QueueWriterFactory:
        app_id = self.commits.app_id if self.exactly_once else None
        queue = _find_queue(self.options)
        return QueueWriterFactory(self.options.url, queue, app_id, self.options.max_rows_per_write)

    def newest(self) -> SinkEpoch:
        return self.commits.newest(queue_sink(_find_queue(self.options)))

    def commit(self, writers: WriterFactory, epoch: Epoch, offset: JsonValue) -> None:
        assert isinstance(writers, QueueWriterFactory), "`writer_factory` returns it"
        # The queue for which tasks placed the rows. The store refuses them if the queue has more partitions
        # by now.
        queue = writers.queue
        if not self.exactly_once:
            self.commits.record(queue_sink(queue), epoch, offset)
            return
        appended = self.commits.commit(QueueTarget(queue), epoch, offset)
        open_store(self.options.url).schedule_maintenance(
            queue, () if appended is None else appended.to_compact
        )


_MAX_WAIT_SECONDS = 1.0
_AHEAD_ROWS = 131_072
_AHEAD_BYTES = 32 << 20
"""The size limit for rows that are read ahead, not counting the last chunk."""
_READ_BYTES = 16 << 20
"""The size limit for the rows of one read, not counting the last row; Spark merges reads into a batch."""


@dataclass(frozen=True)
class QueueReaderFactory(Scan, ReaderFactory):
    """Factory of readers of a queue."""

    def open(self, positions: Mapping[int, int]) -> QueueReader:
        check_store_reach(self.url, None)
        return QueueReader(self, positions)


@dataclass(frozen=True)
class _RowsAhead:
    """Rows of a chunk that were read ahead, starting at row index ``start``."""

    partition: int
    chunk: Chunk
    start: int
    rows: pa.RecordBatch

    def count_within(self, max_rows: int, max_bytes: int) -> int:
        """Return how many rows fit into the limits; at least one."""
        count = min(int(self.rows.num_rows), max_rows)
        while count > 1 and self.rows.slice(0, count).nbytes > max_bytes:
            count //= 2
        return count


class QueueReader(SourceReader):
    """Reader of some partitions of a queue."""

    def __init__(self, source: QueueReaderFactory, positions: Mapping[int, int]) -> None:
        self._source = source
        self._positions = dict(positions)
        self._watch = watch(open_store(source.url).database, source.queue, positions)
        self._ends: dict[int, int] = {}
        """The ends of partitions with rows that were not read ahead."""
        self._last_ends: dict[int, int] = {}
        """The ends of partitions when they were last looked up."""
        self._rows_ahead: deque[_RowsAhead] = deque()
        """Rows that were read ahead and not returned yet."""
        self._page_times: dict[tuple[int, int], int] = {}
        """When the last row of each page was appended, by partition and end of the page."""
        self._creation_times: list[tuple[int, int]] = []
        self._last_times: dict[int, int] = {}

    def read(self, max_rows: int) -> pa.RecordBatch | None:
        if not self._rows_ahead:
            self._read_ahead()
        batches, rows_left, bytes_left, self._creation_times = [], max_rows, _READ_BYTES, []
        while self._rows_ahead and rows_left and bytes_left > 0:
            ahead = self._rows_ahead.popleft()
            count = ahead.count_within(rows_left, bytes_left)
            if ahead.rows.num_rows > count:
                remainder = replace(ahead, start=ahead.start + count, rows=ahead.rows.slice(count))
                self._rows_ahead.appendleft(remainder)
                ahead = replace(ahead, rows=ahead.rows.slice(0, count))
            rows_left, bytes_left = rows_left - count, bytes_left - ahead.rows.nbytes
            self._positions[ahead.partition] = ahead.start + count
            appended_at = ahead.chunk.timestamp_of(ahead.start + count - 1)
            self._last_times[ahead.partition] = appended_at
            self._creation_times.append((appended_at, count))
            batches.append(ahead.rows)
        return pa.concat_batches(batches) if len(batches) > 1 else batches[0] if batches else None

    def _read_ahead(self) -> None:
        if not self._ends:
            self._find_ends(0)
        ends, self._ends = self._ends, {}
        bytes_left, unfinished = _AHEAD_BYTES, {}
        for partition, end in ends.items():
            if bytes_left <= 0:
                self._ends[partition] = end
                continue
            start = self._positions[partition]
            requested = Range(partition, start, min(end, start + _AHEAD_ROWS))
            range_end, bytes_left = self._read_range(requested, bytes_left)
            if range_end < end:
                unfinished[partition] = end
        self._ends.update(unfinished)

    def _read_range(self, requested: Range, bytes_left: int) -> tuple[int, int]:
        """Read rows of a range ahead, up to ``bytes_left``; return their end and the bytes that are left."""
        partition, chunk = requested.partition, None
        for chunk, rows in self._source.chunks([requested], with_runs=True):
            self._rows_ahead.append(_RowsAhead(partition, chunk, chunk.start, rows))
            bytes_left -= rows.nbytes
            full = bytes_left <= 0 and chunk.end < requested.end
            if chunk.ends_page or full:
                self._page_times[partition, chunk.end] = chunk.timestamp_of(chunk.end - 1)
            if full:
                return chunk.end, bytes_left
        if chunk is None:
            # All rows of the range are lost: skip them.
            self._positions[partition], self.skipped_rows = requested.end, True
            self._last_times.pop(partition, None)
        return requested.end, bytes_left

    def _find_ends(self, timeout: float, channels: Sequence[Channel] = ()) -> None:
        self._last_ends = self._ends = self._watch.wait(self._positions, timeout, channels).ends

    def unread_rows(self) -> int:
        if not self._rows_ahead and not self._ends:
            self._find_ends(0)
        return sum(end - self._positions[partition] for partition, end in self._last_ends.items())

    def creation_times(self) -> list[tuple[int, int]]:
        return self._creation_times

    def last_times(self) -> dict[int, int]:
        return self._last_times

    def offsets(self) -> dict[int, int]:
        self.skipped_rows = False
        self._require_unchanged_pages()
        return dict(self._positions)

    def _require_unchanged_pages(self) -> None:
        """Check that the store was not restored between two reads of an epoch; the commit checks only the
        epoch's last row.
        """
        finished = {
            page: time for page, time in self._page_times.items() if page[1] < self._positions[page[0]]
        }
        if finished:
            self._source.require_read(finished)
        self._page_times = {
            page: time for page, time in self._page_times.items() if page[1] > self._positions[page[0]]
        }

    @property
    def has_new_partitions(self) -> bool:
        return self._watch.partitions > self._source.queue.partitions

    def wait(self, channel: Channel) -> None:
        self._find_ends(_MAX_WAIT_SECONDS, [channel])

    def close(self) -> None:
        self._watch.close()


@dataclass(frozen=True)
class QueueWriterFactory(WriterFactory):
    """Factory of writers to a queue; rows are visible immediately, or staged until the commit."""

    url: str = field(repr=False)
    queue: QueueRecord
    app_id: str | None
    """The app id of staged rows; None if rows are visible immediately."""
    max_rows: int = 65_536

    def open(self, task: int) -> SinkWriter:
        check_store_reach(self.url, None)
        return QueueWriter(self, task) if self.app_id is None else QueueStagingWriter(self, task, self.app_id)


class _TaskSegments:
    """Division of a task's rows into segments of the queue's partitions."""

    def __init__(self, sink: QueueWriterFactory, task: int) -> None:
        self.queue, self._task, self._max_rows = sink.queue, task, sink.max_rows
        # The process keeps the store open.
        self.store = open_store(sink.url)
        self._placement = placement_of(self.store.database, sink.queue)

    def groups(self, rows: Sequence[pa.RecordBatch]) -> Iterator[Sequence[Segment]]:
        """Yield the segments of rows, in groups that are each written in one transaction."""
        return SegmentGroups(self.queue, self._placement, self._task, self._max_rows).groups(iter(rows))


class QueueWriter(SinkWriter):
    """Writer of one task that appends rows immediately."""

    def __init__(self, sink: QueueWriterFactory, task: int) -> None:
        self._segments = _TaskSegments(sink, task)

    def write(self, rows: list[pa.RecordBatch], epoch: int) -> None:
        store, queue = self._segments.store, self._segments.queue
        to_compact: set[int] = set()
        for group in self._segments.groups(rows):
            if (appended := append_task(store.database, queue, None, group)) is not None:
                to_compact.update(appended.to_compact)
        if to_compact:
            store.schedule_maintenance(queue, tuple(to_compact))

    def end(self, epoch: int) -> dict[str, int]:
        return {}


class QueueStagingWriter(StagingWriter):
    """Writer of one task that stages rows; the driver promotes them when it commits their epoch."""

    def __init__(self, sink: QueueWriterFactory, task: int, app_id: str) -> None:
        super().__init__(app_id, task, max_rows=MAX_ROWS, max_bytes=MAX_BYTES)
        self._segments = _TaskSegments(sink, task)

    def stage(self, rows: Sequence[pa.RecordBatch], attempt: Attempt, staged_parts: int) -> int:
        database, queue, already_staged = self._segments.store.database, self._segments.queue, staged_parts
        for group in self._segments.groups(rows):
            staged_parts += staging.stage_segments(
                database, queue, attempt, group, staged_parts, durable=False
            )
        return staged_parts - already_staged
