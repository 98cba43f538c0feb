"""Merging small segments into large ones, beside appends and reads.

The segments are read and encoded outside any write transaction; the exchange is a short one that changes nothing when
one of them has gone meanwhile. A reader pages by row index, so it meets the old segments or the new one, never a gap.

An append merges by tiers, as log-structured merge trees do (O'Neil et al., "The Log-Structured Merge-Tree", 1996):
64 neighbours of one size become one of the next, so each row is rewritten a logarithmic number of times.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pyarrow as pa

from penstock.arrow.segments import decode, encode
from penstock.store.catalog import QueueRecord, lock_partition
from penstock.store.database import Database, Transaction
from penstock.store.log import MERGE_FAN_IN, PAGE_SEGMENTS, SEGMENT_ROWS, Segment, store_payloads
from penstock.store.runs import Part, Runs

SEGMENT_BYTES = 8 << 20
_FULL = 99
_PASSES = 10


def merge_crowd(database: Database, queue: QueueRecord, partition: int) -> int:
    """Merge the newest run of small segments, tier by tier; the number of segments that went."""
    merged = 0
    while run := _newest_run(database, queue, partition):
        if not (went := _merge_run(database, queue, partition, run)):
            break
        merged += went
    return merged


def merge_all(database: Database, queue: QueueRecord, partition: int) -> int:
    """Merge every run of small segments as far as segments may grow; the number of segments that went."""
    went = 0
    for _ in range(_PASSES):
        runs = [run for run in _small_runs(database, queue, partition) if len(run) > 1]
        if not runs:
            break
        # A run that somebody else merged or trimmed meanwhile comes up again, as it is by then.
        went += sum(_merge_run(database, queue, partition, run) for run in runs)
    return went


def _tier(segment: Any) -> int:
    rows, tier = segment.end_index - segment.start_index, 0
    if rows >= SEGMENT_ROWS // 2 or segment.bytes >= SEGMENT_BYTES // 2:
        return _FULL
    while rows >= MERGE_FAN_IN:
        rows //= MERGE_FAN_IN
        tier += 1
    return tier


def _newest_run(database: Database, queue: QueueRecord, partition: int) -> list[Any] | None:
    """At least 64 neighbours of one tier among the newest segments, oldest first; None when there is no such run."""
    newest = database.run(
        lambda tx: tx.all(
            "read_last_segments", queue_id=queue.queue_id, partition=partition, max_segments=PAGE_SEGMENTS
        ),
        write=False,
    )
    run: list[Any] = []
    for segment in newest:
        if run and _tier(run[-1]) != _tier(segment):
            if len(run) >= MERGE_FAN_IN:
                break
            run = []
        run.append(segment)
    oldest_first = run[::-1]
    chosen = next(_groups(oldest_first), None) if len(run) >= MERGE_FAN_IN else None
    return chosen if chosen is not None and _tier(chosen[0]) != _FULL else None


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
    if len(run) < 2:
        return 0
    rows = _payloads(database, queue, partition, run)
    if [row.payload_id for row in rows] != [segment.payload_id for segment in run]:
        return 0
    batch = pa.concat_batches([decode(row.data, queue.schema) for row in rows])
    parts = [Part(row.end_index - row.start_index, row.first_append, row.first_timestamp, row.runs) for row in rows]
    segment, runs = Segment(partition, batch.num_rows, encode(batch)), Runs.concat(parts).to_buffer()
    exchanged = database.run(lambda tx: _exchange(tx, queue, rows, segment, runs))
    return len(run) - 1 if exchanged else 0


def _payloads(database: Database, queue: QueueRecord, partition: int, run: Sequence[Any]) -> list[Any]:
    return database.run(
        lambda tx: tx.all(
            "read_page",
            queue_id=queue.queue_id,
            partition=partition,
            start_index=run[0].start_index,
            end_index=run[-1].end_index,
            max_segments=len(run),
            max_bytes=2 * SEGMENT_BYTES + run[0].bytes,
            with_runs=1,
        ),
        write=False,
    )


def _exchange(tx: Transaction, queue: QueueRecord, old: Sequence[Any], new: Segment, runs: pa.Buffer) -> bool:
    """Put one segment in the place of several, if they are all still there."""
    where = {"queue_id": queue.queue_id, "partition": new.partition}
    # Everything that adds or removes segments holds this lock.
    lock_partition(tx, queue, new.partition)
    present = tx.all("read_segments", start_index=old[0].start_index, max_segments=len(old), **where)
    if [row.payload_id for row in present] != [row.payload_id for row in old]:
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
