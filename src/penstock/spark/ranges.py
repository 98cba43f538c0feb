"""Row ranges of reads: where they start and end, how far the next micro-batch reaches, and its tasks.

All functions take partitions of a queue that one statement has read, so that a range has whole appends.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

from penstock.commit.offsets import QueueOffset, pad
from penstock.errors import CheckpointMismatchError, DataLostError, InvalidOptionError, InvalidPositionError
from penstock.json_text import JsonValue
from penstock.spark.options import SourceOptions
from penstock.store.database import Transaction
from penstock.store.log import positions
from penstock.store.log.reading import Range, segments_from
from penstock.store.log.segmenting import Runs
from penstock.store.records import catalog, consumers
from penstock.store.records.catalog import PartitionRecord, QueueRecord

log = logging.getLogger("penstock.spark")

MOST_TASKS = 100_000
"""The largest number of tasks in a micro-batch or batch read, which a driver plans in seconds."""


def parse_offset(offset: JsonValue) -> QueueOffset:
    """Parse the offset of a queue in a checkpoint."""
    parsed = QueueOffset.of(offset)
    if parsed is None:
        raise CheckpointMismatchError(
            f"the checkpoint has the offset {str(offset)[:200]!r}, which is not a queue's: it belongs to "
            "another query; use that query's source, or a new checkpoint",
            condition="CHECKPOINT_MISMATCH.OTHER_SOURCE",
        )
    return parsed


def start_positions(
    tx: Transaction, options: SourceOptions, queue: QueueRecord, partitions: Sequence[PartitionRecord]
) -> list[int]:
    """Return the start of a read without a checkpoint, by partition; its first rows may be trimmed."""
    if options.consumer is not None:
        registration = consumers.find_registration(tx, options.consumer, queue.name)
        offsets = list(pad(consumers.read_offsets(tx, registration)[0], len(partitions))[: len(partitions)])
        if any(offset > part.next_index for part, offset in zip(partitions, offsets, strict=True)):
            # Rows may have been appended and processed since the partitions were read.
            for part, offset in zip(catalog.partitions(tx, queue), offsets, strict=False):
                consumers.require_reachable(registration, part.partition, offset, part.next_index)
        return offsets
    if options.starting_timestamp is not None:
        indexes = positions.resolve(tx, queue, options.starting_timestamp)
        return [min(index, part.next_index) for index, part in zip(indexes, partitions, strict=False)]
    start = options.starting_offsets or "earliest"
    if isinstance(start, str):
        return [part.first_index if start == "earliest" else part.next_index for part in partitions]
    return _checked(queue, partitions, start, [part.first_index for part in partitions])


def end_positions(
    options: SourceOptions, queue: QueueRecord, partitions: Sequence[PartitionRecord], start: Sequence[int]
) -> list[int]:
    """Return the end of a batch read, by partition; never before its start."""
    end = options.ending_offsets
    if isinstance(end, str):
        ends = [part.first_index if end == "earliest" else part.next_index for part in partitions]
    else:
        ends = _checked(queue, partitions, end, [part.next_index for part in partitions])
    if isinstance(options.starting_offsets, Mapping) and isinstance(end, Mapping):
        for partition in options.starting_offsets.keys() & end.keys():
            if ends[partition] < options.starting_offsets[partition]:
                raise InvalidPositionError(
                    f"endingOffsets has row {ends[partition]} for partition {partition}, before "
                    f"startingOffsets' {options.starting_offsets[partition]}: exchange them",
                    condition="INVALID_POSITION.BACKWARDS",
                    partition=partition,
                )
    return [max(first, last) for first, last in zip(start, ends, strict=True)]


def _checked(
    queue: QueueRecord,
    partitions: Sequence[PartitionRecord],
    indexes: Mapping[int, int],
    others: Sequence[int],
) -> list[int]:
    """Return the checked row indexes by partition, from ``others`` for partitions without one."""
    offsets = list(others)
    for partition, index in indexes.items():
        if not 0 <= partition < len(partitions):
            raise InvalidPositionError(
                f"queue {queue.name!r} has partitions 0 to {len(partitions) - 1}, not {partition}",
                condition="INVALID_POSITION.UNKNOWN_PARTITION",
                partition=partition,
            )
        end = partitions[partition].next_index
        if not 0 <= index <= end:
            raise InvalidPositionError(
                f"queue {queue.name!r}, partition {partition}, has rows up to {end}, not {index}: give a "
                f"position from 0 to {end}",
                condition="INVALID_POSITION" if index < 0 else "INVALID_POSITION.PAST_END",
                partition=partition,
            )
        offsets[partition] = index
    return offsets


def skip_trimmed(
    options: SourceOptions, partitions: Sequence[PartitionRecord], offsets: Sequence[int]
) -> list[int]:
    """Return the offsets, moved to the first rows that have not been trimmed."""
    for part, offset in zip(partitions, offsets, strict=True):
        if offset < part.first_index:
            report_loss(
                options.queue, part.partition, offset, part.first_index, fail=options.fail_on_data_loss
            )
    return [max(offset, part.first_index) for part, offset in zip(partitions, offsets, strict=True)]


def report_loss(queue: str, partition: int, start: int, end: int, *, fail: bool) -> None:
    """Raise an error or log a warning: rows [start, end) were trimmed before they were read."""
    lost = (
        f"rows [{start}, {end}) of queue {queue!r}, partition {partition}, were trimmed before they were read"
    )
    if not fail:
        log.warning(
            "rows are lost, and the query continues without them: %s",
            lost,
            extra={"action": "data_lost", "queue": queue, "partition": partition, "start": start, "end": end},
        )
        return
    raise DataLostError(
        f"{lost}: set failOnDataLoss=false to continue without them, or restart from existing rows (seek the "
        "consumer to 'earliest'; a stream also needs a new checkpoint)",
        condition="DATA_LOST.TRIMMED",
        queue=queue,
        partition=partition,
        start=start,
        end=end,
    )


@dataclass(frozen=True)
class Backlog:
    """The rows [start, end) of a partition that wait to be read."""

    partition: int
    start: int
    end: int

    @property
    def rows(self) -> int:
        return self.end - self.start

    def upto(self, end: int) -> Backlog:
        """Return the rows before ``end``."""
        return Backlog(self.partition, self.start, max(self.start, min(self.end, end)))


def next_end(
    tx: Transaction,
    queue: QueueRecord,
    partitions: Sequence[PartitionRecord],
    start: Sequence[int],
    options: SourceOptions,
    cap: Sequence[int] | None = None,
) -> tuple[int, ...]:
    """Return the end of the next micro-batch, by partition.

    ``start`` is the end of the last one; partitions that were added since then start at 0. ``cap`` is the end
    of an ``availableNow`` run.
    """
    starts = pad(start, len(partitions))
    caps = [part.next_index for part in partitions] if cap is None else [*cap, *starts[len(cap) :]]
    # Trimmed rows do not count towards a limit.
    firsts = [max(start, part.first_index) for part, start in zip(partitions, starts, strict=True)]
    ends = [
        max(first, min(part.next_index, cap))
        for part, first, cap in zip(partitions, firsts, caps, strict=True)
    ]
    if not options.limits_triggers:
        return tuple(ends)
    waiting = [Backlog(*each) for each in zip(range(len(ends)), firsts, ends, strict=True)]
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


def _share(waiting: Sequence[Backlog], rows: int) -> list[Backlog]:
    """Share ``rows`` among the partitions, in proportion to their backlogs."""
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
    """Return rows whose compressed bytes fit into ``size``, at least one row."""
    total = sum(b.rows for b in waiting)
    if total == 0:
        return list(waiting)
    cut = [_cut_bytes(tx, queue, b, size * b.rows / total) for b in waiting]
    if not any(b.rows for b in cut):
        longest = max(range(len(waiting)), key=lambda i: waiting[i].rows)
        cut[longest] = waiting[longest].upto(waiting[longest].start + 1)
    return cut


def _cut_bytes(tx: Transaction, queue: QueueRecord, backlog: Backlog, budget: float) -> Backlog:
    if not backlog.rows:
        return backlog
    position = backlog.start
    for segment in segments_from(tx, queue, backlog.partition, position):
        rows = min(segment.end_index, backlog.end) - max(segment.start_index, position)
        if rows <= 0:
            # The backlog's rows were trimmed meanwhile, or another program has inserted an empty segment.
            continue
        cost = segment.bytes * rows / (segment.end_index - segment.start_index)
        if cost > budget:
            return backlog.upto(position + int(rows * budget / cost))
        budget -= cost
        position = segment.end_index
        if position >= backlog.end:
            return backlog
    return backlog.upto(position)


def whole_appends(
    tx: Transaction, queue: QueueRecord, waiting: Sequence[Backlog], limited: Sequence[Backlog]
) -> list[Backlog]:
    """Return the appends in ``waiting`` that are completely in ``limited``, or the oldest, however large."""
    cut = [
        _append_at(tx, queue, part.partition, part.end)
        for full, part in zip(waiting, limited, strict=True)
        if part.end < full.end
    ]
    first_left = min((append for append in cut if append is not None), default=None)
    if first_left is None:
        return list(waiting)
    whole = [_before(tx, queue, backlog, first_left) for backlog in waiting]
    if not any(backlog.rows for backlog in whole):
        whole = [_before(tx, queue, backlog, first_left + 1) for backlog in waiting]
    return whole


class _Segment(Protocol):
    """A row of the statement ``appends_at``."""

    start_index: int
    end_index: int
    first_append: int
    last_append: int
    runs: bytes


def _append_at(tx: Transaction, queue: QueueRecord, partition: int, row: int) -> int | None:
    """Return the id of a row's append; None if this row and all later ones have been trimmed."""
    segment = _segment(tx, queue, partition, row)
    if segment is None:
        return None
    if segment.first_append == segment.last_append:
        return segment.first_append
    return _runs(segment).append_at(row - segment.start_index)


def _runs(segment: _Segment) -> Runs:
    return Runs.from_bytes(segment.runs, segment.end_index - segment.start_index)


def _before(tx: Transaction, queue: QueueRecord, backlog: Backlog, append: int) -> Backlog:
    """Return the rows with an append id below ``append``, by bisection."""
    low, high = backlog.start, backlog.end
    while low < high:
        middle = (low + high) // 2
        segment = _segment(tx, queue, backlog.partition, middle)
        if segment is None or segment.first_append >= append:
            high = middle if segment is None else min(middle, max(low, segment.start_index))
        elif segment.last_append < append:
            low = segment.end_index
        else:
            return backlog.upto(segment.start_index + _runs(segment).end_of(append - 1))
    return backlog.upto(low)


def _segment(tx: Transaction, queue: QueueRecord, partition: int, row: int) -> _Segment | None:
    """Return the segment of a row and its runs, in one statement, since compaction may remove it."""
    segment: _Segment | None = tx.one(
        "appends_at", queue_id=queue.queue_id, partition=partition, row_index=row
    )
    return segment


def require_few_tasks(start: Sequence[int], end: Sequence[int], rows_per_task: int) -> None:
    """Refuse a range that would be split into more tasks than Spark's driver can hold."""
    sizes = [last - first for first, last in zip(pad(start, len(end)), end, strict=True)]
    tasks = sum(-(-size // rows_per_task) for size in sizes)
    if tasks > MOST_TASKS:
        raise InvalidOptionError(
            f"{sum(sizes)} rows in tasks of {rows_per_task} would be {tasks} tasks, more than {MOST_TASKS}: "
            "raise rowsPerTask, or read fewer rows at a time",
            condition="INVALID_OPTION.TOO_MANY_TASKS",
            option="rowsPerTask",
        )


def split_into_tasks(
    start: Sequence[int], end: Sequence[int], rows_per_task: int, max_tasks: int | None
) -> list[list[Range]]:
    """Divide a range into tasks of at most ``rows_per_task`` rows.

    A partition with more rows is divided evenly. If there would be more than ``max_tasks``, neighbouring
    partitions with few rows share tasks of about equal size, which still have at most ``rows_per_task`` rows.
    """
    require_few_tasks(start, end, rows_per_task)
    pieces = []
    for partition, (first, last) in enumerate(zip(pad(start, len(end)), end, strict=True)):
        count = -(-(last - first) // rows_per_task)
        cuts = [first + (last - first) * piece // count for piece in range(count)]
        pieces += [Range(partition, *cut) for cut in pairwise([*cuts, last])]
    if max_tasks is None or len(pieces) <= max_tasks:
        return [[piece] for piece in pieces]
    return _shared(pieces, rows_per_task, max_tasks)


def _shared(pieces: Sequence[Range], rows_per_task: int, max_tasks: int) -> list[list[Range]]:
    total = sum(piece.end - piece.start for piece in pieces)
    tasks: list[list[Range]] = []
    before = rows = task = 0
    for piece in pieces:
        size = piece.end - piece.start
        # The task in whose equal share of the rows the piece begins.
        mine = before * max_tasks // total
        if tasks and mine == task and rows + size <= rows_per_task:
            tasks[-1].append(piece)
            rows += size
        else:
            tasks.append([piece])
            rows = size
        before, task = before + size, mine
    return tasks
