"""Row ranges of reads: start and end, the end of the next micro-batch, and the division into tasks.

All functions take partitions that were read with one statement, so that a range only has whole appends.
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

MAX_TASKS = 100_000
"""The maximum number of tasks in a micro-batch or batch read; a driver plans as many in seconds."""


def parse_offset(offset: JsonValue) -> QueueOffset:
    """Parse the offset of a queue in a checkpoint."""
    parsed = QueueOffset.of(offset)
    if parsed is None:
        raise CheckpointMismatchError(
            f"the checkpoint has the offset {str(offset)[:200]!r}, which is not an offset of a queue: it "
            "belongs to another query. Use that query's source, or a new checkpoint",
            condition="CHECKPOINT_MISMATCH.OTHER_SOURCE",
        )
    return parsed


def start_positions(
    tx: Transaction, options: SourceOptions, queue: QueueRecord, partitions: Sequence[PartitionRecord]
) -> list[int]:
    """Return the start of a read without a checkpoint, by partition; the rows there may be trimmed."""
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
    return _explicit_positions(queue, partitions, start, [part.first_index for part in partitions])


def end_positions(
    options: SourceOptions, queue: QueueRecord, partitions: Sequence[PartitionRecord], start: Sequence[int]
) -> list[int]:
    """Return the end of a batch read, by partition; it is never before the start."""
    end = options.ending_offsets
    if isinstance(end, str):
        ends = [part.first_index if end == "earliest" else part.next_index for part in partitions]
    else:
        ends = _explicit_positions(queue, partitions, end, [part.next_index for part in partitions])
    if isinstance(options.starting_offsets, Mapping) and isinstance(end, Mapping):
        for partition in options.starting_offsets.keys() & end.keys():
            if ends[partition] < options.starting_offsets[partition]:
                raise InvalidPositionError(
                    f"endingOffsets has row {ends[partition]} for partition {partition}, which is before row "
                    f"{options.starting_offsets[partition]} of startingOffsets: exchange them",
                    condition="INVALID_POSITION.BACKWARDS",
                    partition=partition,
                )
    return [max(first, last) for first, last in zip(start, ends, strict=True)]


def _explicit_positions(
    queue: QueueRecord,
    partitions: Sequence[PartitionRecord],
    indexes: Mapping[int, int],
    defaults: Sequence[int],
) -> list[int]:
    """Check row indexes; return them by partition, with those of ``defaults`` for other partitions."""
    offsets = list(defaults)
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
    """Return the offsets, each moved to the first row that is not trimmed."""
    for part, offset in zip(partitions, offsets, strict=True):
        if offset < part.first_index:
            report_loss(
                options.queue, part.partition, offset, part.first_index, fail=options.fail_on_data_loss
            )
    return [max(offset, part.first_index) for part, offset in zip(partitions, offsets, strict=True)]


def report_loss(queue: str, partition: int, start: int, end: int, *, fail: bool) -> None:
    """Raise an error, or log a warning, for rows [start, end) that were trimmed before they were read."""
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
    """The unread rows [start, end) of a partition."""

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

    ``start`` is the end of the last one; partitions that were added later start at 0. ``cap`` is the end of a
    run with ``availableNow``.
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
    waiting = [Backlog(*bounds) for bounds in zip(range(len(ends)), firsts, ends, strict=True)]
    limited = waiting
    if options.max_rows_per_partition is not None:
        limited = [backlog.upto(backlog.start + options.max_rows_per_partition) for backlog in limited]
    if options.max_rows_per_trigger is not None:
        limited = _share_rows(limited, options.max_rows_per_trigger)
    if options.max_bytes_per_trigger is not None:
        limited = _within_bytes(tx, queue, limited, options.max_bytes_per_trigger)
    if options.align_to_appends and any(backlog.rows for backlog in waiting):
        limited = whole_appends(tx, queue, waiting, limited)
    return tuple(backlog.end for backlog in limited)


def _share_rows(waiting: Sequence[Backlog], rows: int) -> list[Backlog]:
    """Divide ``rows`` among the partitions, in proportion to their backlogs."""
    total = sum(backlog.rows for backlog in waiting)
    if total <= rows:
        return list(waiting)
    shares = [backlog.rows * rows // total for backlog in waiting]
    rows_left = rows - sum(shares)
    for index in sorted(range(len(waiting)), key=lambda i: -(waiting[i].rows * rows % total))[:rows_left]:
        shares[index] += 1
    return [backlog.upto(backlog.start + share) for backlog, share in zip(waiting, shares, strict=True)]


def _within_bytes(
    tx: Transaction, queue: QueueRecord, waiting: Sequence[Backlog], max_bytes: int
) -> list[Backlog]:
    """Return rows whose compressed bytes fit into ``max_bytes``, at least one row."""
    total = sum(backlog.rows for backlog in waiting)
    if total == 0:
        return list(waiting)
    cut = [_cut_bytes(tx, queue, backlog, max_bytes * backlog.rows / total) for backlog in waiting]
    if not any(backlog.rows for backlog in cut):
        largest = max(range(len(waiting)), key=lambda i: waiting[i].rows)
        cut[largest] = waiting[largest].upto(waiting[largest].start + 1)
    return cut


def _cut_bytes(tx: Transaction, queue: QueueRecord, backlog: Backlog, budget: float) -> Backlog:
    if not backlog.rows:
        return backlog
    position = backlog.start
    for segment in segments_from(tx, queue, backlog.partition, position):
        rows = min(segment.end_index, backlog.end) - max(segment.start_index, position)
        if rows <= 0:
            # Rows of the backlog were trimmed meanwhile, or another program has inserted an empty segment.
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
    """Return the appends of ``waiting`` that ``limited`` has completely; at least the oldest."""
    cut_appends = [
        _append_of(tx, queue, part.partition, part.end)
        for full, part in zip(waiting, limited, strict=True)
        if part.end < full.end
    ]
    first_cut = min((append for append in cut_appends if append is not None), default=None)
    if first_cut is None:
        return list(waiting)
    whole = [_rows_before(tx, queue, backlog, first_cut) for backlog in waiting]
    if not any(backlog.rows for backlog in whole):
        whole = [_rows_before(tx, queue, backlog, first_cut + 1) for backlog in waiting]
    return whole


class _Segment(Protocol):
    """A row of the statement ``appends_at``."""

    start_index: int
    end_index: int
    first_append: int
    last_append: int
    runs: bytes


def _append_of(tx: Transaction, queue: QueueRecord, partition: int, row: int) -> int | None:
    """Return the id of a row's append; None if this row and all later rows were trimmed."""
    segment = _segment(tx, queue, partition, row)
    if segment is None:
        return None
    if segment.first_append == segment.last_append:
        return segment.first_append
    return _runs(segment).append_at(row - segment.start_index)


def _runs(segment: _Segment) -> Runs:
    return Runs.from_bytes(segment.runs, segment.end_index - segment.start_index)


def _rows_before(tx: Transaction, queue: QueueRecord, backlog: Backlog, append: int) -> Backlog:
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
    """Return the segment of a row with its runs; in one statement, because compaction may delete it."""
    segment: _Segment | None = tx.one(
        "appends_at", queue_id=queue.queue_id, partition=partition, row_index=row
    )
    return segment


def require_few_tasks(start: Sequence[int], end: Sequence[int], rows_per_task: int) -> None:
    """Refuse a range with more tasks than Spark's driver can hold."""
    sizes = [last - first for first, last in zip(pad(start, len(end)), end, strict=True)]
    tasks = sum(-(-size // rows_per_task) for size in sizes)
    if tasks > MAX_TASKS:
        raise InvalidOptionError(
            f"{sum(sizes)} rows in tasks of {rows_per_task} would be {tasks} tasks, more than {MAX_TASKS}: "
            "raise rowsPerTask, or read fewer rows at a time",
            condition="INVALID_OPTION.TOO_MANY_TASKS",
            option="rowsPerTask",
        )


def split_into_tasks(
    start: Sequence[int], end: Sequence[int], rows_per_task: int, max_tasks: int | None
) -> list[list[Range]]:
    """Divide a range into tasks of at most ``rows_per_task`` rows.

    A partition with more rows is divided evenly. If there are more than ``max_tasks`` pieces, adjacent
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
    return _share_tasks(pieces, rows_per_task, max_tasks)


def _share_tasks(pieces: Sequence[Range], rows_per_task: int, max_tasks: int) -> list[list[Range]]:
    total = sum(piece.end - piece.start for piece in pieces)
    tasks: list[list[Range]] = []
    rows_before = rows = task = 0
    for piece in pieces:
        size = piece.end - piece.start
        # With equal shares of the rows for all tasks, the share in which the piece begins.
        share = rows_before * max_tasks // total
        if tasks and share == task and rows + size <= rows_per_task:
            tasks[-1].append(piece)
            rows += size
        else:
            tasks.append([piece])
            rows = size
        rows_before, task = rows_before + size, share
    return tasks
