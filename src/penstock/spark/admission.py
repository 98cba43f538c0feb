"""How much of a queue goes into the next micro-batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from penstock.commit.offsets import pad
from penstock.spark.options import SourceOptions
from penstock.store.catalog import PartitionRecord, QueueRecord
from penstock.store.database import Database
from penstock.store.log import PAGE_SEGMENTS
from penstock.store.runs import Runs


@dataclass(frozen=True)
class Backlog:
    """Rows [start, end) of a partition, waiting."""

    partition: int
    start: int
    end: int

    @property
    def rows(self) -> int:
        return self.end - self.start


def next_end(
    database: Database,
    queue: QueueRecord,
    there: Sequence[PartitionRecord],
    start: Sequence[int],
    options: SourceOptions,
    cap: Sequence[int] | None = None,
) -> tuple[int, ...]:
    """The end of the next micro-batch, by partition.

    Parameters
    ----------
    there
        The partitions as they are now.
    start
        Where the last micro-batch ended; partitions that were added since start at 0.
    cap
        Rows from there on are left for another run (``availableNow``); None for no cap.
    """
    starts = pad(start, len(there))
    caps = [part.next_index for part in there] if cap is None else [*cap, *starts[len(cap) :]]
    waiting = [
        Backlog(part.partition, first, max(first, min(part.next_index, limit)))
        for part, first, limit in zip(there, starts, caps, strict=True)
    ]
    limited = waiting
    if options.max_rows_per_partition is not None:
        limited = [_cut(b, options.max_rows_per_partition) for b in limited]
    if options.max_rows_per_trigger is not None:
        limited = _share(limited, options.max_rows_per_trigger)
    if options.max_bytes_per_trigger is not None:
        limited = _within_bytes(database, queue, limited, options.max_bytes_per_trigger)
    if options.align_to_appends and any(b.rows for b in waiting):
        limited = _aligned(database, queue, waiting, limited)
    return tuple(b.end for b in limited)


def _cut(backlog: Backlog, rows: int) -> Backlog:
    return Backlog(backlog.partition, backlog.start, min(backlog.end, backlog.start + rows))


def _share(waiting: Sequence[Backlog], rows: int) -> list[Backlog]:
    """Each partition its share of ``rows``, by the length of its backlog; all of them together no more."""
    total = sum(b.rows for b in waiting)
    if total <= rows:
        return list(waiting)
    shares = [b.rows * rows // total for b in waiting]
    left = rows - sum(shares)
    for index in sorted(range(len(waiting)), key=lambda i: -(waiting[i].rows * rows % total)):
        if left and shares[index] < waiting[index].rows:
            shares[index] += 1
            left -= 1
    return [_cut(b, share) for b, share in zip(waiting, shares, strict=True)]


def _within_bytes(
    database: Database, queue: QueueRecord, waiting: Sequence[Backlog], size: int
) -> list[Backlog]:
    """Rows whose compressed bytes fit into ``size``, one row at the least."""
    total = sum(b.rows for b in waiting)
    budgets = [size * b.rows / total if total else 0.0 for b in waiting]
    cut = [_cut_bytes(database, queue, b, budget) for b, budget in zip(waiting, budgets, strict=True)]
    if total and not any(b.rows for b in cut):
        longest = max(range(len(waiting)), key=lambda i: waiting[i].rows)
        cut[longest] = _cut(waiting[longest], 1)
    return cut


def _cut_bytes(database: Database, queue: QueueRecord, backlog: Backlog, budget: float) -> Backlog:
    position = backlog.start
    while position < backlog.end:
        page = _segments(database, queue, backlog.partition, position)
        for segment in page:
            rows = min(segment.end_index, backlog.end) - position
            cost = segment.bytes * rows / (segment.end_index - segment.start_index)
            if cost > budget:
                return Backlog(backlog.partition, backlog.start, position + int(rows * budget / cost))
            budget -= cost
            position += rows
            if position >= backlog.end:
                return backlog
        if not page:
            break
    return Backlog(backlog.partition, backlog.start, position)


def _segments(database: Database, queue: QueueRecord, partition: int, start: int) -> list[Any]:
    return database.run(
        lambda tx: tx.all(
            "read_segments",
            queue_id=queue.queue_id,
            partition=partition,
            start_index=start,
            max_segments=PAGE_SEGMENTS,
        ),
        write=False,
    )


def _aligned(
    database: Database, queue: QueueRecord, waiting: Sequence[Backlog], limited: Sequence[Backlog]
) -> list[Backlog]:
    """Whole appends only: those whose rows all fit into the limits, or else the oldest one, however large.

    Append ids ascend inside each partition, so the rows up to one id are a prefix of every partition.
    """
    bounds = [
        _first_append_past(database, queue, full, part)
        for full, part in zip(waiting, limited, strict=True)
        if part.end < full.end
    ]
    last = min((bound for bound in bounds if bound is not None), default=None)
    if last is None:
        return list(waiting)
    ends = [_end_before(database, queue, b, last) for b in waiting]
    if all(end == b.start for b, end in zip(waiting, ends, strict=True)):
        ends = [_end_before(database, queue, b, last + 1) for b in waiting]
    return [Backlog(b.partition, b.start, end) for b, end in zip(waiting, ends, strict=True)]


def _first_append_past(database: Database, queue: QueueRecord, full: Backlog, part: Backlog) -> int | None:
    """The id of the first append that does not lie before ``part.end``."""
    if part.end >= full.end:
        return None
    segment = _segment_at(database, queue, full.partition, part.end)
    if segment.first_append == segment.last_append:
        return int(segment.first_append)
    runs = _runs(database, segment)
    return runs.append_at(part.end - segment.start_index)


def _end_before(database: Database, queue: QueueRecord, backlog: Backlog, append: int) -> int:
    """The end of the rows whose append id is below ``append``."""
    low, high = backlog.start, backlog.end
    while low < high:
        segment = _segment_at(database, queue, backlog.partition, (low + high) // 2)
        if segment.last_append < append:
            low = segment.end_index
        elif segment.first_append >= append:
            high = max(low, segment.start_index)
        else:
            inside = segment.start_index + _runs(database, segment).end_of(append - 1)
            return min(max(backlog.start, inside), backlog.end)
    return min(low, backlog.end)


def _segment_at(database: Database, queue: QueueRecord, partition: int, row_index: int) -> Any:
    return database.run(
        lambda tx: tx.one("segment_at", queue_id=queue.queue_id, partition=partition, row_index=row_index),
        write=False,
    )


def _runs(database: Database, segment: Any) -> Runs:
    row = database.run(lambda tx: tx.one("read_runs", payload_id=segment.payload_id), write=False)
    return Runs.from_bytes(row.runs)


def split(start: Sequence[int], end: Sequence[int], rows_per_task: int) -> list[list[int]]:
    """The tasks of a range: [partition, start, end] each, of at most ``rows_per_task`` rows and about equal."""
    tasks = []
    for partition, (first, last) in enumerate(zip(pad(start, len(end)), end, strict=True)):
        pieces = -(-(last - first) // rows_per_task)
        for piece in range(pieces):
            low = first + (last - first) * piece // pieces
            tasks.append([partition, low, first + (last - first) * (piece + 1) // pieces])
    return tasks
