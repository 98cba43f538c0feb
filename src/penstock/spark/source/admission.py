"""Where appends begin and end in a backlog, merged segments included."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from penstock.commit.offsets import pad
from penstock.spark.options import SourceOptions
from penstock.store.database import Transaction
from penstock.store.log.partition_log import PAGE_SEGMENTS
from penstock.store.log.segmenting import Runs
from penstock.store.records.catalog import PartitionRecord, QueueRecord


@dataclass(frozen=True)
class Backlog:
    """Rows [start, end) of a partition, waiting."""

    partition: int
    start: int
    end: int

    @property
    def rows(self) -> int:
        return self.end - self.start

    def upto(self, end: int) -> Backlog:
        """The rows before ``end``."""
        return Backlog(self.partition, self.start, max(self.start, min(self.end, end)))


def whole_appends(
    tx: Transaction, queue: QueueRecord, waiting: Sequence[Backlog], limited: Sequence[Backlog]
) -> list[Backlog]:
    """The appends in ``waiting`` all of whose rows are in ``limited``; or else the oldest one, however large.

    Append ids ascend inside each partition, so the rows up to one id are a prefix of every partition.
    """
    cut = [
        _append_at(tx, queue, part.partition, part.end)
        for full, part in zip(waiting, limited, strict=True)
        if part.end < full.end
    ]
    first_left = min((append for append in cut if append is not None), default=None)
    if first_left is None:
        return list(waiting)
    whole = [_before(tx, queue, each, first_left) for each in waiting]
    if not any(each.rows for each in whole):
        whole = [_before(tx, queue, each, first_left + 1) for each in waiting]
    return whole


def _append_at(tx: Transaction, queue: QueueRecord, partition: int, row: int) -> int | None:
    """The id of the append that brought a row; None when it and all later ones are gone."""
    segment = _segment(tx, queue, partition, row)
    if segment is None:
        return None
    if segment.first_append == segment.last_append:
        return int(segment.first_append)
    return Runs.from_bytes(segment.runs).append_at(row - segment.start_index)


def _before(tx: Transaction, queue: QueueRecord, backlog: Backlog, append: int) -> Backlog:
    """The rows whose append id is below ``append``, by bisection."""
    low, high = backlog.start, backlog.end
    while low < high:
        middle = (low + high) // 2
        segment = _segment(tx, queue, backlog.partition, middle)
        if segment is None or segment.first_append >= append:
            high = middle if segment is None else min(middle, max(low, segment.start_index))
        elif segment.last_append < append:
            low = segment.end_index
        else:
            return backlog.upto(segment.start_index + Runs.from_bytes(segment.runs).end_of(append - 1))
    return backlog.upto(low)


def _segment(tx: Transaction, queue: QueueRecord, partition: int, row: int) -> Any:
    """The segment of a row with its runs, in one statement: a merge may take it away before a second one."""
    return tx.one("appends_at", queue_id=queue.queue_id, partition=partition, row_index=row)


# ---- admission: How much of a queue goes into the next micro-batch.


def next_end(
    tx: Transaction,
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
        The partitions as they are now, all of them seen by one statement: whole appends.
    start
        Where the last micro-batch ended; partitions that were added since start at 0.
    cap
        Rows from there on are left for another run (``availableNow``); None for no cap.
    """
    starts = pad(start, len(there))
    caps = [part.next_index for part in there] if cap is None else [*cap, *starts[len(cap) :]]
    waiting = [_waiting(part, first, limit) for part, first, limit in zip(there, starts, caps, strict=True)]
    limited = waiting
    if options.max_rows_per_partition is not None:
        limited = [b.upto(b.start + options.max_rows_per_partition) for b in limited]
    if options.max_rows_per_trigger is not None:
        limited = _share(limited, options.max_rows_per_trigger)
    if options.max_bytes_per_trigger is not None:
        limited = _within_bytes(tx, queue, limited, options.max_bytes_per_trigger)
    if options.align_to_appends and any(b.rows for b in waiting):
        limited = whole_appends(tx, queue, waiting, limited)
    return tuple(b.end for b in limited)


def _waiting(part: PartitionRecord, start: int, cap: int) -> Backlog:
    # Rows that were trimmed count for no limit.
    first = max(start, part.first_index)
    return Backlog(part.partition, first, max(first, min(part.next_index, cap)))


def _share(waiting: Sequence[Backlog], rows: int) -> list[Backlog]:
    """Each partition its share of ``rows``, by the length of its backlog; all of them together no more."""
    total = sum(b.rows for b in waiting)
    if total <= rows:
        return list(waiting)
    shares = [b.rows * rows // total for b in waiting]
    left = rows - sum(shares)
    for index in sorted(range(len(waiting)), key=lambda i: -(waiting[i].rows * rows % total))[:left]:
        shares[index] += 1
    return [b.upto(b.start + share) for b, share in zip(waiting, shares, strict=True)]


def _within_bytes(
    tx: Transaction, queue: QueueRecord, waiting: Sequence[Backlog], size: int
) -> list[Backlog]:
    """Rows whose compressed bytes fit into ``size``, one row at the least."""
    total = sum(b.rows for b in waiting)
    if total == 0:
        return list(waiting)
    cut = [_cut_bytes(tx, queue, b, size * b.rows / total) for b in waiting]
    if not any(b.rows for b in cut):
        longest = max(range(len(waiting)), key=lambda i: waiting[i].rows)
        cut[longest] = waiting[longest].upto(waiting[longest].start + 1)
    return cut


def _cut_bytes(tx: Transaction, queue: QueueRecord, backlog: Backlog, budget: float) -> Backlog:
    position = backlog.start
    while position < backlog.end:
        page = tx.all(
            "read_segments",
            queue_id=queue.queue_id,
            partition=backlog.partition,
            start_index=position,
            max_segments=PAGE_SEGMENTS,
        )
        for segment in page:
            rows = min(segment.end_index, backlog.end) - max(segment.start_index, position)
            cost = segment.bytes * rows / (segment.end_index - segment.start_index)
            if cost > budget:
                return backlog.upto(position + int(rows * budget / cost))
            budget -= cost
            position = segment.end_index
            if position >= backlog.end:
                return backlog
        if not page:
            break
    return backlog.upto(position)


def split_into_tasks(start: Sequence[int], end: Sequence[int], rows_per_task: int) -> list[list[int]]:
    """The tasks of a range: [partition, start, end] each, of at most ``rows_per_task`` rows and about equal."""
    tasks = []
    for partition, (first, last) in enumerate(zip(pad(start, len(end)), end, strict=True)):
        pieces = -(-(last - first) // rows_per_task)
        for piece in range(pieces):
            low = first + (last - first) * piece // pieces
            tasks.append([partition, low, first + (last - first) * (piece + 1) // pieces])
    return tasks
