"""Merging small segments into large ones, beside appends and reads.

The segments are read and encoded outside any write transaction; the exchange is a short one that changes nothing when
one of them has gone meanwhile. A reader pages by row index, so it meets the old segments or the new one, never a gap.

The newest segments are merged when there are 64 of them that together have at least twice the rows of the largest: each
merge at least doubles what a row lies in, so that a row is rewritten a logarithmic number of times, whatever the sizes of the
appends are (O'Neil et al., "The Log-Structured Merge-Tree", 1996).

A merged segment has the columns of the widest of those that went into it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pyarrow as pa

from penstock.store.database import Database, Transaction
from penstock.store.log.decode import decode_together
from penstock.store.log.partition_log import MERGE_FAN_IN, PAGE_SEGMENTS, store_payloads
from penstock.store.log.segmenting import SEGMENT_RAW_BYTES, SEGMENT_ROWS, Part, Runs, Segment
from penstock.store.records.catalog import QueueRecord, lock_partition, reread

SEGMENT_BYTES = 8 << 20
_NEWEST = 4 * MERGE_FAN_IN
_PASSES = 10


def merge_crowd(database: Database, queue: QueueRecord, partition: int) -> int:
    """Merge the newest segments when there are many small ones; the number of segments that went."""
    newest = database.run(
        lambda tx: tx.all(
            "read_last_segments", queue_id=queue.queue_id, partition=partition, max_segments=_NEWEST
        ),
        write=False,
    )
    return sum(_merge_run(database, queue, partition, run) for run in _groups(_crowd(newest)))


def merge_all(database: Database, queue: QueueRecord, partition: int) -> int:
    """Merge every run of small segments as far as segments may grow; the number of segments that went."""
    went = 0
    before: list[list[Any]] = []
    for _ in range(_PASSES):
        runs = [run for run in _small_runs(database, queue, partition) if len(run) > 1]
        if runs == before:
            break
        # A run that somebody else merged or trimmed meanwhile comes up again, as it is by then.
        went += sum(_merge_run(database, queue, partition, run) for run in runs)
        before = runs
    return went


def _crowd(newest: Sequence[Any]) -> list[Any]:
    """The longest run of the newest segments that is worth merging, oldest first; empty when there is none.

    Parameters
    ----------
    newest
        Segments, the newest first.
    """
    length = rows = largest = 0
    for count, segment in enumerate(newest, 1):
        own = segment.end_index - segment.start_index
        if own >= SEGMENT_ROWS // 2 or segment.bytes >= SEGMENT_BYTES // 2:
            break
        rows, largest = rows + own, max(largest, own)
        if count >= MERGE_FAN_IN and rows >= 2 * largest:
            length = count
    return list(reversed(newest[:length]))


def _small_runs(database: Database, queue: QueueRecord, partition: int) -> Iterator[list[Any]]:
    position = -1
    pending: list[Any] = []
    while True:
        where = {"queue_id": queue.queue_id, "partition": partition, "start_index": position}
        page = database.run(
            lambda tx, where=where: tx.all("read_segments", max_segments=PAGE_SEGMENTS, **where),  # type: ignore[misc]  # where is bound now
            write=False,
        )
        *complete, pending = [*_groups(pending + page)] or [[]]
        yield from complete
        if len(page) < PAGE_SEGMENTS:
            yield pending
            return
        position = page[-1].end_index


def _groups(segments: Sequence[Any]) -> Iterator[list[Any]]:
    """Neighbours that fit into one segment."""
    group: list[Any] = []
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


def _merge_run(database: Database, queue: QueueRecord, partition: int, run: Sequence[Any]) -> int:
    """Merge neighbours, into several segments where one would take too much memory; the number of segments that went."""
    went = 0
    while len(run) > 1:
        queue, rows = _payloads(database, queue, partition, run)
        if not rows or [row.payload_id for row in rows] != [found.payload_id for found in run[: len(rows)]]:
            break
        batches = _within_memory(queue, rows)
        if len(batches) > 1:
            if not _replace(database, queue, partition, rows[: len(batches)], batches):
                break
            went += len(batches) - 1
        run = run[len(batches) :]
    return went


def _within_memory(queue: QueueRecord, rows: Sequence[Any]) -> list[pa.RecordBatch]:
    """The decoded segments, the first of them at least, as far as they are small together."""
    batches: list[pa.RecordBatch] = []
    size = 0
    for batch in decode_together(queue, rows):
        # Nothing of it is a slice, so that its buffers need no closer look.
        size += batch.get_total_buffer_size()
        if batches and size > SEGMENT_RAW_BYTES:
            break
        batches.append(batch)
    return batches


def _replace(
    database: Database,
    queue: QueueRecord,
    partition: int,
    rows: Sequence[Any],
    batches: Sequence[pa.RecordBatch],
) -> bool:
    batch = pa.concat_batches(batches)
    parts = [
        Part(row.end_index - row.start_index, row.first_append, row.first_timestamp, row.runs) for row in rows
    ]
    segment, runs = Segment(partition, batch), Runs.concat(parts).to_buffer()
    _ = segment.payload  # compressed before anything is locked
    return database.run(lambda tx: _exchange(tx, queue, rows, segment, runs), idempotent=True)


def _payloads(
    database: Database, queue: QueueRecord, partition: int, run: Sequence[Any]
) -> tuple[QueueRecord, list[Any]]:
    """The segments with their payloads, and the queue with all columns that they have."""

    def work(tx: Transaction) -> tuple[QueueRecord, list[Any]]:
        rows = tx.page(
            queue_id=queue.queue_id,
            partition=partition,
            start_index=run[0].start_index,
            end_index=run[-1].end_index,
            max_segments=len(run),
            max_bytes=2 * SEGMENT_BYTES + run[0].bytes,
            with_runs=1,
        )
        # Columns may have come since the queue was looked up; what is merged without them would lose them.
        return reread(tx, queue) if rows else queue, rows

    return database.run(work, write=False)


def _identity(row: Any) -> tuple[int, ...]:
    """What tells a segment from any other, even from one that was given its payload's id after a backup was restored."""
    return row.payload_id, row.start_index, row.end_index, row.first_timestamp, row.last_timestamp, row.bytes


def _exchange(tx: Transaction, queue: QueueRecord, old: Sequence[Any], new: Segment, runs: pa.Buffer) -> bool:
    """Put one segment in the place of several, if they are all still there."""
    where = {"queue_id": queue.queue_id, "partition": new.partition}
    # Everything that adds or removes segments holds this lock.
    lock_partition(tx, queue, new.partition)
    present = tx.all("read_segments", start_index=old[0].start_index, max_segments=len(old), **where)
    if list(map(_identity, present)) != list(map(_identity, old)):
        return False
    payload_id = store_payloads(tx, [new], runs)[0]
    tx.many("delete_payload", [{"payload_id": row.payload_id} for row in old])
    tx.many("delete_segment", [{"end_index": row.end_index, **where} for row in old])
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
