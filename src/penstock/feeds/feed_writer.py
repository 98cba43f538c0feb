"""Appends of whole commits to several feeds in queues, in one transaction of their store."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeVar

import pyarrow as pa
import pyarrow.compute as pc

from penstock.arrow.arrays import i64, zeros
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

    return queues[0].retry_placement(once)


@dataclass(frozen=True)
class _Placed:
    """Rows with their places in the partitions of a queue."""

    part: FeedRows
    record: QueueRecord
    segments: list[Segment]
    counts: _Counts

    @classmethod
    def of(cls, part: FeedRows) -> _Placed:
        record, placement = part.queue.current_placement()
        segments = part.queue.segments_of(part.rows, placement)
        return cls(part, record, segments, _Counts.of(part, placement, segments))

    def append(self, tx: Transaction) -> Appended:
        record, part = self.record, self.part
        before = feed_commits.begin_commits(tx, record, part.versions[:1], part.timestamps[:1])
        appended = partition_log.append(tx, record, self.segments)
        ends = self.counts.ends_after(before.ends)
        feed_commits.insert_commits(
            tx, record, before, part.versions, part.timestamps, ends, unless_empty=part.continued
        )
        return appended


@dataclass(frozen=True)
class _Counts:
    """How many rows commits have in partitions, in the order of the commits."""

    total: int
    """How many commits there are."""
    commits: Sequence[int]
    """The place of a commit among them."""
    partitions: Sequence[int]
    """A partition that has rows of it."""
    rows: Sequence[int]
    """How many."""

    @classmethod
    def of(cls, part: FeedRows, placement: Placement, segments: Sequence[Segment]) -> _Counts:
        """Count the rows of the commits that end."""
        total, touched = len(part.ends), {segment.partition for segment in segments}
        if len(touched) <= 1:
            sizes = [end - start for start, end in pairwise([0, *part.ends])]
            return cls(total, range(total), [max(touched, default=0)] * total, sizes)
        commits = _commits_of_rows(pa.array(part.ends, pa.int64()))
        targets, count = placement.targets(part.rows.slice(0, len(commits))), i64(placement.partitions)
        # Counted in the order in which they first occur, which is that of the commits.
        cells, rows = pc.value_counts(pc.add(pc.multiply(commits, count), targets)).flatten()
        commits = pc.divide(cells, count)
        targets = pc.subtract(cells, pc.multiply(commits, count))
        return cls(total, commits.to_pylist(), targets.to_pylist(), rows.to_pylist())

    def ends_after(self, before: Sequence[int]) -> list[list[int]]:
        """Return where each partition ends after each commit."""
        ends = list(before)
        after: list[list[int]] = []
        for commit, partition, rows in zip(self.commits, self.partitions, self.rows, strict=True):
            while len(after) < commit:
                after.append(ends.copy())
            ends[partition] += rows
        while len(after) < self.total:
            after.append(ends.copy())
        return after


def _commits_of_rows(ends: pa.Array) -> pa.Array:
    """Return the commit of each row, by its place among them."""
    has_rows = pc.greater(ends, pa.concat_arrays([zeros(ends.type), ends])[:-1])
    commits = pc.indices_nonzero(has_rows).cast(pa.int64())
    return pc.run_end_decode(pa.RunEndEncodedArray.from_arrays(ends.filter(has_rows), commits))
