"""The commits of a change feed, and the rows of its queue that belong to each commit."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from penstock.errors import CommitOutOfOrderError
from penstock.json_text import parse_record, unreadable_record
from penstock.store.database import Columns, Row, Transaction
from penstock.store.records import catalog
from penstock.store.records.catalog import PartitionRecord, QueueRecord

PAGE_COMMITS = 1024
_PRUNED_PER_CALL = 64
_MAX_VERSION = 2**63 - 1


@dataclass(frozen=True)
class FeedCommit:
    """A commit of a change feed. Times are in microseconds since 1970."""

    version: int
    timestamp: int
    rows: int
    ends: tuple[int, ...]
    """The end of each partition after this commit, without partitions that were added later."""


def newest_commit(tx: Transaction, queue: QueueRecord, upto: int = _MAX_VERSION) -> FeedCommit | None:
    """Return the newest commit whose version is at most ``upto``."""
    row = tx.one("feed_commit_upto", queue_id=queue.queue_id, version=upto)
    return None if row is None else _commit(row)


def list_page(
    tx: Transaction, queue: QueueRecord, after: int, upto: int = _MAX_VERSION, max_commits: int = PAGE_COMMITS
) -> list[FeedCommit]:
    """Return the first commits with versions in (after, upto], in order."""
    rows = tx.all("read_feed_commits", queue_id=queue.queue_id, after=after, upto=upto, most=max_commits)
    return [_commit(row) for row in rows]


@dataclass(frozen=True)
class FeedEnd:
    """The end of a feed before new commits are appended."""

    ends: Sequence[int]
    """The end of each partition."""
    committed: int
    """The total number of rows that belong to commits."""
    first_indexes: Sequence[int]
    """The first row index that each partition still holds."""


def begin_commits(
    tx: Transaction, queue: QueueRecord, versions: Sequence[int], timestamps: Sequence[int]
) -> FeedEnd:
    """Lock the feed, and check that new commits follow all existing ones."""
    if catalog.find_queue(tx, queue.name, lock=True).queue_id != queue.queue_id:
        raise catalog.dropped(queue)
    last = newest_commit(tx, queue)
    for version, timestamp in zip(versions, timestamps, strict=True):
        if last is not None and (version <= last.version or timestamp < last.timestamp):
            what = "version" if version <= last.version else "timestamp"
            raise CommitOutOfOrderError(
                f"commit {version} of feed {queue.name!r} is out of order: its {what} must be greater than "
                f"that of the newest commit, {last.version}. Nothing was appended. If this is a repeat of "
                f"commit {last.version}, that commit is already in the feed",
                feed=queue.name,
                version=version,
                newest=last.version,
            )
    partitions = catalog.partitions(tx, queue)
    committed = 0 if last is None else sum(_checked_ends(last, partitions))
    return FeedEnd(
        [partition.next_index for partition in partitions],
        committed,
        [partition.first_index for partition in partitions],
    )


def insert_commits(
    tx: Transaction,
    queue: QueueRecord,
    feed_end: FeedEnd,
    versions: Sequence[int],
    timestamps: Sequence[int],
    ends: Sequence[Sequence[int]],
    *,
    unless_empty: int | None = None,
) -> None:
    """Record where the partitions end after each commit, under the lock of ``begin_commits``.

    The commit with the version ``unless_empty`` is left out if it has no rows.
    """
    totals = [feed_end.committed, *map(sum, ends)]
    counts = [after - total for total, after in pairwise(totals)]
    kept_positions = [
        position for position, version in enumerate(versions) if counts[position] or version != unless_empty
    ]
    if not kept_positions:
        return
    columns: Columns = {
        "version": [versions[position] for position in kept_positions],
        "timestamp": [timestamps[position] for position in kept_positions],
        "row_count": [counts[position] for position in kept_positions],
        "ends": [json.dumps(ends[position]) for position in kept_positions],
    }
    tx.run_many("insert_feed_commit", columns, queue_id=queue.queue_id)
    _prune(tx, queue, feed_end.first_indexes)


def start_indexes(tx: Transaction, queue: QueueRecord, after: int) -> list[int]:
    """Return the first row index after the commit ``after``, by partition."""
    partitions = catalog.partitions(tx, queue)
    commit = newest_commit(tx, queue, after)
    ends = [] if commit is None else _checked_ends(commit, partitions)
    return ends + [0] * (len(partitions) - len(ends))


def oldest_readable(tx: Transaction, queue: QueueRecord) -> int:
    """Return the version after which all rows still exist; -1 if nothing has been trimmed."""
    partitions = catalog.partitions(tx, queue)
    first_indexes = [partition.first_index for partition in partitions]
    if not any(first_indexes):
        return -1
    readable = (
        commit for commit in _commits(tx, queue) if _covers(_checked_ends(commit, partitions), first_indexes)
    )
    return next((commit.version for commit in readable), _MAX_VERSION)


def _commits(tx: Transaction, queue: QueueRecord) -> Iterator[FeedCommit]:
    after = -1
    while commits := list_page(tx, queue, after):
        yield from commits
        after = commits[-1].version


def _prune(tx: Transaction, queue: QueueRecord, first_indexes: Sequence[int]) -> None:
    """Delete the records of the oldest commits, whose rows have been trimmed, a few at a time.

    The newest of these records stays, since the next commit begins at its end.
    """
    if not any(first_indexes):
        return
    trimmed = [
        commit
        for commit in list_page(tx, queue, -1, max_commits=_PRUNED_PER_CALL)
        if not _has_rows_left(commit.ends, first_indexes)
    ]
    if len(trimmed) > 1:
        tx.run("delete_feed_commits", queue_id=queue.queue_id, version=trimmed[-1].version)


def _covers(ends: Sequence[int], first_indexes: Sequence[int]) -> bool:
    """Return whether all rows after these ends still exist."""
    padded = [*ends, *[0] * (len(first_indexes) - len(ends))]
    return all(end >= first_index for end, first_index in zip(padded, first_indexes, strict=True))


def _has_rows_left(ends: Sequence[int], first_indexes: Sequence[int]) -> bool:
    """Return whether any row before these ends still exists."""
    return any(end > first_index for end, first_index in zip(ends, first_indexes, strict=False))


def _checked_ends(commit: FeedCommit, partitions: Sequence[PartitionRecord]) -> list[int]:
    """Return the ends of a commit, and refuse ends beyond the partitions' rows."""
    is_valid = len(commit.ends) <= len(partitions) and all(
        0 <= end <= partition.next_index for end, partition in zip(commit.ends, partitions, strict=False)
    )
    if not is_valid:
        raise unreadable_record(
            _commit_name(commit.version), ValueError("its ends are beyond the rows of the queue's partitions")
        )
    return list(commit.ends)


def _commit_name(version: int) -> str:
    return f"commit {version} of a feed"


def _commit(row: Row) -> FeedCommit:
    what = _commit_name(row.version)
    ends = parse_record(row.ends, what, list)
    if not all(type(end) is int for end in ends):
        raise unreadable_record(what, ValueError("it is not a list of row indexes"))
    return FeedCommit(row.version, row.timestamp, row.row_count, tuple(ends))
