"""Compaction: replace small segments with large ones while appends and reads continue.

Compaction reads and encodes the segments outside any write transaction. A short transaction then replaces
them, and does nothing if one of them no longer exists. Readers page by row index, so they see either the old
segments or the new one, never a gap.

The newest segments are compacted when there are 64 of them that together have at least twice as many rows as
the largest. So each compaction at least doubles the size of the segment that a row is in. Whatever the sizes
of the appends, a row is therefore rewritten a logarithmic number of times (O'Neil et al., "The Log-Structured
Merge-Tree", 1996).

A compacted segment has the latest columns that any of the original segments has.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from operator import attrgetter

import pyarrow as pa

from penstock.arrow.segments import MAX_VALUES_WITHOUT_BYTES, values_without_bytes
from penstock.errors import PenstockError, StoreError
from penstock.store.database import Database, Row, Transaction, stored_bytes
from penstock.store.log.decode import decode_together, unreadable
from penstock.store.log.partition_log import COMPACTION_FAN_IN
from penstock.store.log.payloads import store_compacted, with_payloads, write_objects
from penstock.store.log.reading import PAGE_SEGMENTS
from penstock.store.log.segmenting import SEGMENT_RAW_BYTES, SEGMENT_ROWS, Runs, Segment, SegmentRuns, by_size
from penstock.store.records.catalog import QueueRecord, lock_partition, reload_queue, require_columns
from penstock.store.records.locations import require_own_location

SEGMENT_BYTES = 8 << 20
GROUP_BYTES = 4 * SEGMENT_BYTES
"""The most bytes of the groups that are compacted at the same time."""
NEWEST_SEGMENTS = 4 * COMPACTION_FAN_IN
_MAX_PASSES = 10


@dataclass(frozen=True)
class SegmentGroup:
    """Adjacent segments of a partition to compact into one."""

    partition: int
    segments: Sequence[Row]

    @property
    def bytes(self) -> int:
        return sum(segment.bytes for segment in self.segments)


@dataclass(frozen=True)
class _Compacted:
    """Segments, and the compacted segment that replaces them; None if there is only one."""

    rows: Sequence[Row]
    segment: Segment | None = None
    runs: pa.Buffer | None = None


@dataclass(frozen=True)
class CompactedGroups:
    """Compacted segments that have not replaced the original segments yet."""

    database: Database
    queue: QueueRecord
    compacted: Sequence[_Compacted]

    def replace(self) -> list[tuple[int, int]]:
        """Store the compacted segments. Return two numbers for each group: how many of its segments were
        processed, and how many fewer segments there are now. Both are 0 for a group that has changed.
        """
        segments = [compacted.segment for compacted in self.compacted if compacted.segment is not None]
        write_objects(self.database, self.queue, segments)
        return [self._replace(compacted) for compacted in self.compacted]

    def _replace(self, compacted: _Compacted) -> tuple[int, int]:
        segment, runs = compacted.segment, compacted.runs
        if segment is None or runs is None:
            return len(compacted.rows), 0
        replace_segments = partial(
            _replace_segments, queue=self.queue, old=compacted.rows, new=segment, runs=runs
        )
        if not self.database.run(replace_segments, idempotent=True):
            return 0, 0
        return len(compacted.rows), len(compacted.rows) - 1


def compact_newest(database: Database, queue: QueueRecord, partition: int) -> int:
    """Compact the newest segments if many of them are small; return by how many the number of segments
    fell.
    """
    newest = database.run(
        lambda tx: tx.all(
            "read_last_segments", queue_id=queue.queue_id, partition=partition, max_segments=NEWEST_SEGMENTS
        ),
        write=False,
    )
    return sum(
        compact_segments(database, queue, partition, group)
        for group in adjacent_groups(segments_worth_compacting(newest))
    )


def compact_all(database: Database, queue: QueueRecord, partitions: Iterable[int]) -> int:
    """Compact all small segments in some partitions, up to the largest size of a segment. Return by how many
    the number of segments fell.

    The partitions are compacted together, so that payloads in the same object are read with one request and
    new payloads share objects.

    Raises
    ------
    PenstockError
        If segments cannot be read. All other segments are compacted.
    """
    removed = 0
    errors: dict[int, PenstockError] = {}
    pending: dict[int, list[SegmentGroup]] = {partition: [] for partition in partitions}
    for _ in range(_MAX_PASSES):
        listed = {partition: _compactable_groups(database, queue, partition) for partition in pending}
        # A group that was compacted or trimmed in the meantime is listed again.
        pending = {partition: groups for partition, groups in listed.items() if groups != pending[partition]}
        for group in by_size(chain.from_iterable(pending.values()), attrgetter("bytes"), GROUP_BYTES):
            removed += _compact_group_or_each(database, queue, group, errors)
        pending = {partition: groups for partition, groups in pending.items() if partition not in errors}
        if not pending:
            break
    if errors:
        raise errors[min(errors)]
    return removed


def _compactable_groups(database: Database, queue: QueueRecord, partition: int) -> list[SegmentGroup]:
    groups = [SegmentGroup(partition, segments) for segments in _list_groups(database, queue, partition)]
    return [group for group in groups if len(group.segments) > 1]


def _compact_group_or_each(
    database: Database, queue: QueueRecord, group: Sequence[SegmentGroup], errors: dict[int, PenstockError]
) -> int:
    try:
        return _compact_groups(database, queue, group)
    except PenstockError as error:
        if len(group) == 1:
            errors[group[0].partition] = error
            return 0
    return sum(_compact_group_or_each(database, queue, [single], errors) for single in group)


def segments_worth_compacting(newest: Sequence[Row]) -> list[Row]:
    """Return the longest sequence of small segments that is worth compacting, oldest first. ``newest`` has
    the newest segment first.
    """
    length = rows = largest = 0
    for count, segment in enumerate(newest, 1):
        row_count = segment.end_index - segment.start_index
        if row_count >= SEGMENT_ROWS // 2 or segment.bytes >= SEGMENT_BYTES // 2:
            break
        rows, largest = rows + row_count, max(largest, row_count)
        if count >= COMPACTION_FAN_IN and rows >= 2 * largest:
            length = count
    return list(reversed(newest[:length]))


def _list_groups(database: Database, queue: QueueRecord, partition: int) -> Iterator[list[Row]]:
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
        *complete, pending = [*adjacent_groups(pending + page)] or [[]]
        yield from complete
        if len(page) < PAGE_SEGMENTS:
            yield pending
            return
        position = page[-1].end_index


def adjacent_groups(segments: Sequence[Row]) -> Iterator[list[Row]]:
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


def compact_segments(database: Database, queue: QueueRecord, partition: int, segments: Sequence[Row]) -> int:
    """Compact adjacent segments into one, or into several if one would take too much memory. Return by how
    many the number of segments fell.
    """
    return _compact_groups(database, queue, [SegmentGroup(partition, segments)])


def _compact_groups(database: Database, queue: QueueRecord, groups: Sequence[SegmentGroup]) -> int:
    removed = 0
    while groups := [group for group in groups if len(group.segments) > 1]:
        results = compact_in_memory(database, queue, groups).replace()
        removed += sum(removed_count for _, removed_count in results)
        groups = [
            SegmentGroup(group.partition, group.segments[processed:])
            for group, (processed, _) in zip(groups, results, strict=True)
            if processed
        ]
    return removed


def compact_in_memory(
    database: Database, queue: QueueRecord, groups: Sequence[SegmentGroup]
) -> CompactedGroups:
    """Read and compact the first segments of each group, as many as fit into memory, without replacing any
    yet.
    """
    queue, loaded = _read_payloads(database, queue, groups)
    compacted = [_compact_group(queue, group, rows) for group, rows in zip(groups, loaded, strict=True)]
    return CompactedGroups(database, queue, compacted)


def _compact_group(queue: QueueRecord, group: SegmentGroup, rows: Sequence[Row]) -> _Compacted:
    if not rows or list(map(_place_of, rows)) != list(map(_place_of, group.segments[: len(rows)])):
        return _Compacted([])
    try:
        batches = decode_within_memory(queue, rows)
    except StoreError as error:
        unreadable_rows = _find_unreadable(queue, rows)
        raise unreadable(
            queue, group.partition, unreadable_rows[0].start_index, unreadable_rows[-1].end_index, error
        ) from error
    columns_id = queue.columns.latest(row.columns_id for row in rows)
    rows = rows[: len(batches)]
    if len(batches) == 1:
        return _Compacted(rows)
    parts = [
        SegmentRuns(row.end_index - row.start_index, row.first_append, row.first_timestamp, row.runs)
        for row in rows
    ]
    segment = Segment(group.partition, pa.concat_batches(batches), columns_id)
    _ = segment.payload  # compress before anything is locked and before the next group is decoded
    return _Compacted(rows, segment, Runs.concat(parts).to_buffer())


def decode_within_memory(queue: QueueRecord, rows: Sequence[Row]) -> list[pa.RecordBatch]:
    """Decode as many segments as fit into memory together, but at least the first one."""
    batches: list[pa.RecordBatch] = []
    size = without_bytes = 0
    for row, batch in zip(rows, decode_together(queue, rows), strict=False):
        # The nulls of columns that were added later share one buffer until the batches are concatenated.
        size += batch.nbytes if row.columns_id != queue.columns.id else batch.get_total_buffer_size()
        without_bytes += values_without_bytes(batch)
        if batches and (size > SEGMENT_RAW_BYTES or without_bytes > MAX_VALUES_WITHOUT_BYTES):
            break
        batches.append(batch)
    return batches


def _find_unreadable(queue: QueueRecord, rows: Sequence[Row]) -> Sequence[Row]:
    """Return the first segment that cannot be read; all segments if only their runs cannot be joined."""
    for position in range(len(rows)):
        try:
            decode_within_memory(queue, rows[position : position + 1])
        except StoreError:
            return rows[position : position + 1]
    return rows


def _read_payloads(
    database: Database, queue: QueueRecord, groups: Sequence[SegmentGroup]
) -> tuple[QueueRecord, list[list[Row]]]:
    """Return the queue with all columns of the segments, and the first segments of each group with their
    payloads, as many as fit into memory together.
    """

    def work(tx: Transaction) -> tuple[QueueRecord, list[list[Row]]]:
        if queue.payloads is not None:
            # A copy of the store must not write objects: check this before doing the work.
            require_own_location(tx, database.uuid, queue.payloads)
        pages_rows: list[list[Row]] = []
        size = 0
        for group in groups:
            # Count the real sizes of the payloads, not those in the log. Read at least one group.
            rows = [] if size > GROUP_BYTES else _read_page(tx, queue, group)
            size += sum(map(stored_bytes, rows))
            pages_rows.append(rows)
        # Otherwise columns that were added since the queue was looked up would be lost.
        return reload_queue(tx, queue) if any(pages_rows) else queue, pages_rows

    queue, pages_rows = database.run(work, write=False)
    pages = [(group.partition, rows) for group, rows in zip(groups, pages_rows, strict=True)]
    return queue, with_payloads(database, queue, pages)


def _read_page(tx: Transaction, queue: QueueRecord, group: SegmentGroup) -> list[Row]:
    return tx.page(
        queue_id=queue.queue_id,
        partition=group.partition,
        start_index=group.segments[0].start_index,
        end_index=group.segments[-1].end_index,
        max_segments=len(group.segments),
        max_bytes=2 * SEGMENT_BYTES,
        with_runs=1,
    )


def _place_of(row: Row) -> tuple[int | None, ...]:
    """Return where the rows of a segment are."""
    return row.payload_id, row.object_id, row.start_byte


def _segment_identity(row: Row) -> tuple[int | None, ...]:
    """Return what identifies a segment, even if a restored store has given the id of its payload again."""
    return (
        *_place_of(row),
        row.start_index,
        row.end_index,
        row.first_timestamp,
        row.last_timestamp,
        row.bytes,
    )


def _replace_segments(
    tx: Transaction, queue: QueueRecord, old: Sequence[Row], new: Segment, runs: pa.Buffer
) -> bool:
    """Replace several segments with one if all of them still exist."""
    where = {"queue_id": queue.queue_id, "partition": new.partition}
    # Segments are added and removed only under this lock.
    lock_partition(tx, queue, new.partition)
    current = tx.all("read_segments", start_index=old[0].start_index, max_segments=len(old), **where)
    if list(map(_segment_identity, current)) != list(map(_segment_identity, old)):
        return False
    require_columns(tx, queue, [new.columns_id])
    stored = store_compacted(tx, new, runs)
    payload_ids = [row.payload_id for row in old if row.payload_id is not None]
    tx.run_many("delete_payload", {"payload_id": payload_ids})
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
        columns_id=new.columns_id,
        payload_id=stored.payload_id[0],
        object_id=stored.object_id[0],
        start_byte=stored.start_byte[0],
        checksum=stored.checksum[0],
        **where,
    )
    tx.run("account_merge", bytes=new.bytes - sum(row.bytes for row in old), segments=1 - len(old), **where)
    return True
