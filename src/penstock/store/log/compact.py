"""Compaction: replace small segments by large ones while appends and reads continue.

The segments are read and encoded outside any write transaction. A short transaction then replaces them, and
does nothing if one of the segments is gone. A reader pages by row index, so it sees the old segments or the
new one, never a gap.

The newest segments are compacted when there are 64 of them that together have at least twice the rows of the
largest. Each compaction at least doubles the size of a row's segment, so a row is rewritten a logarithmic
number of times, whatever the sizes of the appends (O'Neil et al., "The Log-Structured Merge-Tree", 1996).

A compacted segment has the columns of the widest segment in it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from operator import attrgetter

import pyarrow as pa

from penstock.arrow.segments import MOST_WITHOUT_BYTES, values_without_bytes
from penstock.errors import PenstockError, StoreError
from penstock.store.database import Database, Row, Transaction, stored_bytes
from penstock.store.log.decode import decode_together, unreadable
from penstock.store.log.partition_log import COMPACTION_FAN_IN
from penstock.store.log.payloads import store_payloads, with_payloads, write_objects
from penstock.store.log.reading import PAGE_SEGMENTS
from penstock.store.log.segmenting import SEGMENT_RAW_BYTES, SEGMENT_ROWS, Part, Runs, Segment, by_size
from penstock.store.records.catalog import QueueRecord, lock_partition, require_columns, reread
from penstock.store.records.locations import require_own_location

SEGMENT_BYTES = 8 << 20
TOGETHER_BYTES = 4 * SEGMENT_BYTES
"""The bytes of runs that are compacted at the same time."""
NEWEST = 4 * COMPACTION_FAN_IN
_PASSES = 10


@dataclass(frozen=True)
class Run:
    """Adjacent segments of a partition that are to become one."""

    partition: int
    segments: Sequence[Row]

    @property
    def bytes(self) -> int:
        return sum(segment.bytes for segment in self.segments)


@dataclass(frozen=True)
class _Compacted:
    """Segments, and the segment that replaces them; None if there is only one segment."""

    rows: Sequence[Row]
    segment: Segment | None = None
    runs: pa.Buffer | None = None


@dataclass(frozen=True)
class CompactedRuns:
    """Compacted segments that have not yet replaced the original ones."""

    database: Database
    queue: QueueRecord
    compacted: Sequence[_Compacted]

    def replace(self) -> list[tuple[int, int]]:
        """Store the compacted segments. Return for each run how many of its segments were processed, and how
        many of those are gone; (0, 0) for a run that has changed.
        """
        segments = [each.segment for each in self.compacted if each.segment is not None]
        write_objects(self.database, self.queue, segments)
        return [self._replaced(each) for each in self.compacted]

    def _replaced(self, compacted: _Compacted) -> tuple[int, int]:
        segment, runs = compacted.segment, compacted.runs
        if segment is None or runs is None:
            return len(compacted.rows), 0
        exchange = partial(_exchange, queue=self.queue, old=compacted.rows, new=segment, runs=runs)
        if not self.database.run(exchange, idempotent=True):
            return 0, 0
        return len(compacted.rows), len(compacted.rows) - 1


def compact_newest(database: Database, queue: QueueRecord, partition: int) -> int:
    """Compact the newest segments if many are small; return how many segments are gone."""
    newest = database.run(
        lambda tx: tx.all(
            "read_last_segments", queue_id=queue.queue_id, partition=partition, max_segments=NEWEST
        ),
        write=False,
    )
    return sum(compact_run(database, queue, partition, run) for run in groups(worthwhile_run(newest)))


def compact_all(database: Database, queue: QueueRecord, partitions: Iterable[int]) -> int:
    """Compact every run of small segments in some partitions, up to the largest size of a segment; return how
    many segments are gone.

    Partitions are compacted together: payloads that share an object are read with one request, and new
    payloads are written into shared objects.

    Raises
    ------
    PenstockError
        When segments cannot be read. The other segments are compacted.
    """
    gone = 0
    errors: dict[int, PenstockError] = {}
    before: dict[int, list[Run]] = {partition: [] for partition in partitions}
    for _ in range(_PASSES):
        runs = {partition: _runs_of(database, queue, partition) for partition in before}
        # A run that was compacted or trimmed meanwhile is listed again, as it is now.
        before = {each: found for each, found in runs.items() if found != before[each]}
        for group in by_size(chain.from_iterable(before.values()), attrgetter("bytes"), TOGETHER_BYTES):
            gone += _compact_group(database, queue, group, errors)
        before = {each: found for each, found in before.items() if each not in errors}
        if not before:
            break
    if errors:
        raise errors[min(errors)]
    return gone


def _runs_of(database: Database, queue: QueueRecord, partition: int) -> list[Run]:
    runs = [Run(partition, segments) for segments in _small_runs(database, queue, partition)]
    return [run for run in runs if len(run.segments) > 1]


def _compact_group(
    database: Database, queue: QueueRecord, group: Sequence[Run], errors: dict[int, PenstockError]
) -> int:
    try:
        return _compact_runs(database, queue, group)
    except PenstockError as error:
        if len(group) == 1:
            errors[group[0].partition] = error
            return 0
    return sum(_compact_group(database, queue, [run], errors) for run in group)


def worthwhile_run(newest: Sequence[Row]) -> list[Row]:
    """Return the longest run of small segments that is worth compacting, oldest first; ``newest`` is ordered
    newest first.
    """
    length = rows = largest = 0
    for count, segment in enumerate(newest, 1):
        own = segment.end_index - segment.start_index
        if own >= SEGMENT_ROWS // 2 or segment.bytes >= SEGMENT_BYTES // 2:
            break
        rows, largest = rows + own, max(largest, own)
        if count >= COMPACTION_FAN_IN and rows >= 2 * largest:
            length = count
    return list(reversed(newest[:length]))


def _small_runs(database: Database, queue: QueueRecord, partition: int) -> Iterator[list[Row]]:
    def read(tx: Transaction) -> list[Row]:
        return tx.all(
            "read_segments",
            queue_id=queue.queue_id,
            partition=partition,
            start_index=position,
            max_segments=PAGE_SEGMENTS,
        )

    position = -1
    pending: list[Row] = []
    while True:
        page = database.run(read, write=False)
        *complete, pending = [*groups(pending + page)] or [[]]
        yield from complete
        if len(page) < PAGE_SEGMENTS:
            yield pending
            return
        position = page[-1].end_index


def groups(segments: Sequence[Row]) -> Iterator[list[Row]]:
    """Yield groups of adjacent segments that fit into one segment."""
    group: list[Row] = []
    rows = size = 0
    for segment in segments:
        count = segment.end_index - segment.start_index
        if group and (rows + count > SEGMENT_ROWS or size + segment.bytes > SEGMENT_BYTES):
            yield group
            group, rows, size = [], 0, 0
        group.append(segment)
        rows += count
        size += segment.bytes
    if group:
        yield group


def compact_run(database: Database, queue: QueueRecord, partition: int, run: Sequence[Row]) -> int:
    """Compact adjacent segments, into several if one would take too much memory; return how many segments are
    gone.
    """
    return _compact_runs(database, queue, [Run(partition, run)])


def _compact_runs(database: Database, queue: QueueRecord, runs: Sequence[Run]) -> int:
    gone = 0
    while runs := [run for run in runs if len(run.segments) > 1]:
        results = load(database, queue, runs).replace()
        gone += sum(fewer for _, fewer in results)
        runs = [
            Run(run.partition, run.segments[done:])
            for run, (done, _) in zip(runs, results, strict=True)
            if done
        ]
    return gone


def load(database: Database, queue: QueueRecord, runs: Sequence[Run]) -> CompactedRuns:
    """Read and compact the first segments of each run, as many as fit into memory; nothing is replaced
    yet.
    """
    queue, loaded = _payloads(database, queue, runs)
    compacted = [_compacted(queue, run, rows) for run, rows in zip(runs, loaded, strict=True)]
    return CompactedRuns(database, queue, compacted)


def _compacted(queue: QueueRecord, run: Run, rows: Sequence[Row]) -> _Compacted:
    if not rows or [row.payload_id for row in rows] != [old.payload_id for old in run.segments[: len(rows)]]:
        return _Compacted([])
    try:
        batches = within_memory(queue, rows)
    except StoreError as error:
        bad = _first_unreadable(queue, rows)
        raise unreadable(queue, run.partition, bad[0].start_index, bad[-1].end_index, error) from error
    columns_id = queue.columns.latest(row.columns_id for row in rows)
    rows = rows[: len(batches)]
    if len(batches) == 1:
        return _Compacted(rows)
    parts = [
        Part(row.end_index - row.start_index, row.first_append, row.first_timestamp, row.runs) for row in rows
    ]
    segment = Segment(run.partition, pa.concat_batches(batches), columns_id)
    _ = segment.payload  # compress before anything is locked and before the next run is decoded
    return _Compacted(rows, segment, Runs.concat(parts).to_buffer())


def within_memory(queue: QueueRecord, rows: Sequence[Row]) -> list[pa.RecordBatch]:
    """Return as many decoded segments as fit into memory together, at least the first one."""
    batches: list[pa.RecordBatch] = []
    size = without_bytes = 0
    for row, batch in zip(rows, decode_together(queue, rows), strict=False):
        # Nulls of columns that were added later share one buffer until they are joined.
        size += batch.nbytes if row.columns_id != queue.columns.id else batch.get_total_buffer_size()
        without_bytes += values_without_bytes(batch)
        if batches and (size > SEGMENT_RAW_BYTES or without_bytes > MOST_WITHOUT_BYTES):
            break
        batches.append(batch)
    return batches


def _first_unreadable(queue: QueueRecord, rows: Sequence[Row]) -> Sequence[Row]:
    """Return the first segment that cannot be read alone; all of them if only their runs cannot be joined."""
    for place in range(len(rows)):
        try:
            within_memory(queue, rows[place : place + 1])
        except StoreError:
            return rows[place : place + 1]
    return rows


def _payloads(
    database: Database, queue: QueueRecord, runs: Sequence[Run]
) -> tuple[QueueRecord, list[list[Row]]]:
    """Return the queue with all columns of the segments, and as many segments of each run, with their
    payloads, as fit into memory together.
    """

    def work(tx: Transaction) -> tuple[QueueRecord, list[list[Row]]]:
        if queue.payloads is not None:
            # A copy of the store may not write objects: check this before doing the work.
            require_own_location(tx, database.uuid, queue.payloads)
        found: list[list[Row]] = []
        size = 0
        for run in runs:
            # Count the payloads' real sizes, not those in the log. At least one run is read.
            rows = [] if size > TOGETHER_BYTES else _page(tx, queue, run)
            size += sum(map(stored_bytes, rows))
            found.append(rows)
        # Without this, columns added since the queue was looked up would be lost.
        return reread(tx, queue) if any(found) else queue, found

    queue, found = database.run(work, write=False)
    pages = [(run.partition, rows) for run, rows in zip(runs, found, strict=True)]
    return queue, with_payloads(database, queue, pages)


def _page(tx: Transaction, queue: QueueRecord, run: Run) -> list[Row]:
    return tx.page(
        queue_id=queue.queue_id,
        partition=run.partition,
        start_index=run.segments[0].start_index,
        end_index=run.segments[-1].end_index,
        max_segments=len(run.segments),
        max_bytes=2 * SEGMENT_BYTES,
        with_runs=1,
    )


def _identity(row: Row) -> tuple[int, ...]:
    """Identify a segment even if its payload's id was reused after a backup was restored."""
    return row.payload_id, row.start_index, row.end_index, row.first_timestamp, row.last_timestamp, row.bytes


def _exchange(tx: Transaction, queue: QueueRecord, old: Sequence[Row], new: Segment, runs: pa.Buffer) -> bool:
    """Replace several segments by one if all of them still exist."""
    where = {"queue_id": queue.queue_id, "partition": new.partition}
    # Segments are added and removed only under this lock.
    lock_partition(tx, queue, new.partition)
    present = tx.all("read_segments", start_index=old[0].start_index, max_segments=len(old), **where)
    if list(map(_identity, present)) != list(map(_identity, old)):
        return False
    require_columns(tx, queue, [new.columns_id])
    payload_id = store_payloads(tx, [new], runs)[0]
    tx.run_many("delete_payload", {"payload_id": [row.payload_id for row in old]})
    tx.run_many("delete_segment", {"end_index": [row.end_index for row in old]}, **where)
    tx.run(
        "insert_segment",
        start_index=old[0].start_index,
        end_index=old[-1].end_index,
        first_append=old[0].first_append,
        last_append=old[-1].last_append,
        first_timestamp=old[0].first_timestamp,
        last_timestamp=old[-1].last_timestamp,
        bytes=new.bytes,
        payload_id=payload_id,
        **where,
    )
    tx.run("account_merge", bytes=new.bytes - sum(row.bytes for row in old), segments=1 - len(old), **where)
    return True
