"""Check that a queue still has the rows that an offset refers to.

A store that was restored from an older backup and has received rows since has other rows at the same indexes.
They were appended at other times, so an offset includes the timestamp of the last row in each partition.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import zip_longest
from typing import NoReturn

from penstock.commit.offsets import QueueOffset
from penstock.errors import CheckpointMismatchError
from penstock.store.database import Row, Transaction
from penstock.store.log.segmenting import Runs, by_size
from penstock.store.records import catalog
from penstock.store.records.catalog import PartitionRecord, QueueRecord

_MAX_RUNS_BYTES = 32 << 20
TRIMMED = -1
"""The value in an offset's times for a row that was trimmed already."""


class SourceRows:
    """Checks that a queue has the rows that offsets refer to.

    An idle query repeats this check. So the segments in which rows were found are cached: only compacted
    segments have to be read, and each of them only once.
    """

    def __init__(self) -> None:
        self._verified_segments: dict[tuple[int, int, int | None], int] = {}
        """The last timestamp of the compacted segment that contains a row, by the row's partition, end and
        timestamp.
        """

    def require(self, tx: Transaction, queue_id: int, offset: QueueOffset) -> None:
        """Refuse an offset if the queue lacks its rows, or has other rows in their place, because its store
        was restored from an older backup.

        Raises
        ------
        CheckpointMismatchError
            ``CHECKPOINT_MISMATCH.SOURCE_BEHIND``, or ``.OTHER_SOURCE`` if the queue was recreated.
        """
        requested = [
            (partition, end, time)
            for partition, (end, time) in enumerate(zip_longest(offset.end, offset.times))
        ]
        is_incomplete = True
        while is_incomplete:
            is_incomplete = False
            verified = {}
            known = [
                (end, time, self._verified_segments.get((part, end, time))) for part, end, time in requested
            ]
            rows = tx.all("other_rows", queue_id=queue_id, last_rows=json.dumps(known))
            for row, runs in _with_runs(tx, rows):
                partition, end, time = requested[row.partition]
                if runs is None and row.runs_of is not None:
                    is_incomplete = True
                elif runs is None or _time_at(runs, end - 1 - row.start_index) != time:
                    _refuse(tx, offset)
                else:
                    verified[partition, end, time] = row.last_timestamp
            if verified:
                self._verified_segments = {
                    key: self._verified_segments[key] for key in requested if key in self._verified_segments
                } | verified


def _refuse(tx: Transaction, offset: QueueOffset) -> NoReturn:
    queue = catalog.find_queue(tx, offset.queue)
    if offset.consumer is None:
        offset.require(offset.store, queue.name, None, queue.generation)
    offset.require_reached([part.next_index for part in catalog.partitions(tx, queue)])
    raise _other_rows_error(offset.queue, f"up to {list(offset.end)}", list(offset.end))


def _other_rows_error(queue: str, where: str, offsets: list[int]) -> CheckpointMismatchError:
    return CheckpointMismatchError(
        f"queue {queue!r} has other rows than this query has read, {where}: its store was restored from an "
        "older backup. Restore the checkpoint of the same time, or use a new one. A query that was running "
        "at that time only needs a restart",
        condition="CHECKPOINT_MISMATCH.SOURCE_BEHIND",
        queue=queue,
        offsets=offsets,
    )


def row_times(
    tx: Transaction, queue: QueueRecord, partitions: Sequence[PartitionRecord], ends: Sequence[int]
) -> tuple[int | None, ...]:
    """Return when the last row before each end was appended; None for rows that no longer exist."""
    times = [
        record.last_timestamp if record.first_index < end == record.next_index else None
        for record, end in zip(partitions, ends, strict=True)
    ]
    inner_ends = [
        (record.partition, end)
        for record, end in zip(partitions, ends, strict=True)
        if record.first_index < end < record.next_index
    ]
    if inner_ends:
        for (partition, _), time in _look_up_times(tx, queue, inner_ends).items():
            times[partition] = time
    return tuple(times)


def times_before(tx: Transaction, queue: QueueRecord, starts: Sequence[int]) -> tuple[int | None, ...]:
    """Return when the rows before the start of a query were appended; :data:`TRIMMED` for trimmed rows.

    If the store has such a row again later, it was restored.
    """
    requested = [(partition, start) for partition, start in enumerate(starts) if start]
    times = _look_up_times(tx, queue, requested) if requested else {}
    return tuple(times.get(key, TRIMMED) if key[1] else None for key in enumerate(starts))


def require_read(tx: Transaction, queue: QueueRecord, read_times: Mapping[tuple[int, int], int]) -> None:
    """Raise an error if a queue has other rows now than were read from it. Trimmed rows are ignored.

    ``read_times`` maps each partition and the end of the rows read from it to the time when the row before
    that end was appended.

    Raises
    ------
    CheckpointMismatchError
        ``CHECKPOINT_MISMATCH.SOURCE_BEHIND``
    """
    for (partition, end), time in _look_up_times(tx, queue, list(read_times)).items():
        if time != read_times[partition, end]:
            raise _other_rows_error(queue.name, f"partition {partition}, up to {end}", [end])


def _look_up_times(
    tx: Transaction, queue: QueueRecord, ends: Sequence[tuple[int, int]]
) -> dict[tuple[int, int], int]:
    """Return when the row before each end of a partition was appended, without rows that no longer exist."""
    times: dict[tuple[int, int], int] = {}
    while ends:
        rows = tx.all("row_times", queue_id=queue.queue_id, ends=json.dumps(ends))
        ends = []
        for row, runs in _with_runs(tx, rows):
            key = row.partition, row.row_end
            if runs is not None:
                times[key] = _time_at(runs, row.place)
            elif row.runs_of is None:
                times[key] = row.last_timestamp
            else:
                ends.append(key)
    return times


def _with_runs(tx: Transaction, rows: Sequence[Row]) -> Iterator[tuple[Row, bytes | None]]:
    """Yield rows with the runs of their segments, reading as many at a time as fit into memory.

    The runs are None for a segment without runs. They are also None for a segment that was compacted since it
    was found, which the caller must look up again.
    """
    for group in by_size(rows, lambda row: row.runs_size or 0, _MAX_RUNS_BYTES):
        ids = [row.runs_of for row in group if row.runs_of is not None]
        payloads = tx.all("runs_of", payload_ids=json.dumps(ids)) if ids else []
        runs = {payload.payload_id: payload.runs for payload in payloads}
        yield from ((row, runs.get(row.runs_of)) for row in group)
        payloads, runs = [], {}


def _time_at(runs: bytes, row: int) -> int:
    return Runs.from_bytes(runs, None).timestamp_at(row)
