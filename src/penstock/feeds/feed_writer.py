"""Appends of whole commits to several feeds in queues, in one transaction of their store."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from penstock.queue.placement import Placement
from penstock.queue.queue import Queue
from penstock.store.database import Database, Transaction
from penstock.store.log import partition_log
from penstock.store.log.partition_log import Appended
from penstock.store.log.payloads import write_objects
from penstock.store.log.segmenting import Segment
from penstock.store.records import feed_commits
from penstock.store.records.catalog import QueueChanged, QueueRecord

T = TypeVar("T")


@dataclass(frozen=True)
class FeedRows:
    """Rows of commits for one queue, in the order of the commits."""

    queue: Queue
    rows: pa.Table
    versions: Sequence[int]
    """The commits that end here, ascending; rows after the last end belong to a commit that continues."""
    timestamps: Sequence[int]
    """Their times, in microseconds since 1970."""
    ends: Sequence[int]
    """How many of the rows there are up to the end of each."""
    continued: int | None = None
    """One of the commits, some of whose rows may have been appended before; without any rows, before or now,
    it is left out.
    """


def append_commits(
    database: Database, parts: Sequence[FeedRows], move: Callable[[Transaction], bool] | None = None
) -> list[Appended]:
    """Append the rows of commits, all of them or nothing; return what was appended to each queue.

    Parameters
    ----------
    move
        Called first in the transaction; returns False if all of this was done before, which then appends
        nothing. With it, the transaction is repeated when its outcome is unknown.

    Raises
    ------
    CommitOutOfOrderError
        When a queue already has a later commit.
    """
    ordered = sorted(parts, key=lambda part: part.queue.record.queue_id)

    def attempt() -> list[Appended]:
        placed = [_Placed.of(part) for part in ordered]
        for each in placed:
            write_objects(database, each.record, each.segments)

        def work(tx: Transaction) -> list[Appended]:
            if move is not None and not move(tx):
                return [Appended() for _ in placed]
            return [each.append(tx) for each in placed]

        appended = database.run(work, idempotent=move is not None)
        for each, what in zip(placed, appended, strict=True):
            each.part.queue.after_append(each.record, what)
        return appended

    return _until_placed([part.queue for part in ordered], attempt)


def _until_placed(queues: Sequence[Queue], attempt: Callable[[], T]) -> T:
    """Repeat an append to several queues, with their new placement, while any of them changes."""
    if not queues:
        return attempt()

    def once() -> T:
        try:
            return attempt()
        except QueueChanged:
            for queue in queues:
                queue.refresh()
            raise

    return queues[0].until_placed(once)


@dataclass(frozen=True)
class _Placed:
    """Rows with their places in the partitions of a queue."""

    part: FeedRows
    record: QueueRecord
    segments: list[Segment]
    partition_rows: NDArray[np.int64]
    """For each commit that ends, the rows up to its end in each partition."""

    @classmethod
    def of(cls, part: FeedRows) -> _Placed:
        record, placement = part.queue.current_placement()
        segments = part.queue.segments_of(part.rows, placement)
        return cls(part, record, segments, _rows_by_partition(part, placement, segments))

    def append(self, tx: Transaction) -> Appended:
        record, part = self.record, self.part
        before = feed_commits.begin_commits(tx, record, part.versions[:1], part.timestamps[:1])
        appended = partition_log.append(tx, record, self.segments)
        # Of a queue without a key, which may have got more partitions meanwhile.
        added = len(before.ends) - self.partition_rows.shape[1]
        ends = np.array(before.ends, np.int64) + np.pad(self.partition_rows, ((0, 0), (0, added)))
        feed_commits.insert_commits(
            tx, record, before, part.versions, part.timestamps, ends.tolist(), unless_empty=part.continued
        )
        return appended


def _rows_by_partition(
    part: FeedRows, placement: Placement, segments: Sequence[Segment]
) -> NDArray[np.int64]:
    ends, partitions = np.array(part.ends, np.int64), placement.partitions
    touched = {segment.partition for segment in segments}
    if len(touched) <= 1:
        rows = np.zeros((len(ends), partitions), np.int64)
        rows[:, list(touched)] = ends[:, None]
        return rows
    # Which commit each row belongs to; rows of a commit that continues are not counted.
    commit = np.searchsorted(ends, np.arange(part.rows.num_rows), side="right")
    cells = commit * partitions + placement.targets(part.rows).to_numpy(zero_copy_only=False)
    counts = np.bincount(cells, minlength=(len(ends) + 1) * partitions).reshape(-1, partitions)
    return np.cumsum(counts[: len(ends)], axis=0)
