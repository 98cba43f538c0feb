"""The commits of a change feed, and which rows of its queue belong to each."""

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

PAGE = 1024
_PRUNED_AT_ONCE = 64
_EVER = 2**63 - 1


@dataclass(frozen=True)
class FeedCommit:
    """One commit; times in microseconds since 1970."""

    version: int
    timestamp: int
    rows: int
    ends: tuple[int, ...]
    """Where each partition ends after it, without partitions that were added later."""


def newest(tx: Transaction, queue: QueueRecord, upto: int = _EVER) -> FeedCommit | None:
    """The newest commit at or below a version."""
    row = tx.one("feed_commit_upto", queue_id=queue.queue_id, version=upto)
    return None if row is None else _commit(row)


def page(
    tx: Transaction, queue: QueueRecord, after: int, upto: int = _EVER, most: int = PAGE
) -> list[FeedCommit]:
    """The first commits of the range (after, upto], in order."""
    rows = tx.all("read_feed_commits", queue_id=queue.queue_id, after=after, upto=upto, most=most)
    return [_commit(row) for row in rows]


@dataclass(frozen=True)
class Before:
    """Where a feed ends before commits are appended."""

    ends: Sequence[int]
    """Where each partition ends."""
    committed: int
    """How many of the rows belong to commits."""
    firsts: Sequence[int]
    """The first row that each partition still holds."""


def begin_commits(
    tx: Transaction, queue: QueueRecord, versions: Sequence[int], timestamps: Sequence[int]
) -> Before:
    """Lock the feed, and check that new commits follow all existing ones."""
    if catalog.find_queue(tx, queue.name, lock=True).queue_id != queue.queue_id:
        raise catalog.dropped(queue)
    last = newest(tx, queue)
    for version, timestamp in zip(versions, timestamps, strict=True):
        if last is not None and (version <= last.version or timestamp < last.timestamp):
            what = "version" if version <= last.version else "timestamp"
            raise CommitOutOfOrderError(
                f"commit {version} of feed {queue.name!r} goes backwards: its {what} must be after that of "
                f"the newest commit, {last.version}. Nothing was appended; if this repeats commit "
                f"{last.version}, that one is already committed",
                feed=queue.name,
                version=version,
                newest=last.version,
            )
    parts = catalog.partitions(tx, queue)
    committed = 0 if last is None else sum(_checked_ends(last, parts))
    return Before([part.next_index for part in parts], committed, [part.first_index for part in parts])


def insert_commits(
    tx: Transaction,
    queue: QueueRecord,
    before: Before,
    versions: Sequence[int],
    timestamps: Sequence[int],
    ends: Sequence[Sequence[int]],
    *,
    unless_empty: int | None = None,
) -> None:
    """Record where the partitions end after each commit, under the lock of ``begin_commits``.

    The commit with the version ``unless_empty`` is left out if it has no rows.
    """
    totals = [before.committed, *map(sum, ends)]
    counts = [after - total for total, after in pairwise(totals)]
    kept = [place for place, version in enumerate(versions) if counts[place] or version != unless_empty]
    if not kept:
        return
    columns: Columns = {
        "version": [versions[place] for place in kept],
        "timestamp": [timestamps[place] for place in kept],
        "row_count": [counts[place] for place in kept],
        "ends": [json.dumps(ends[place]) for place in kept],
    }
    tx.run_many("insert_feed_commit", columns, queue_id=queue.queue_id)
    _prune(tx, queue, before.firsts)


def starts(tx: Transaction, queue: QueueRecord, after: int) -> list[int]:
    """Return the first row index after a version, by partition."""
    partitions = catalog.partitions(tx, queue)
    last = newest(tx, queue, after)
    ends = [] if last is None else _checked_ends(last, partitions)
    return ends + [0] * (len(partitions) - len(ends))


def oldest(tx: Transaction, queue: QueueRecord) -> int:
    """Return the version after which nothing has been trimmed; -1 if nothing has been trimmed at all."""
    partitions = catalog.partitions(tx, queue)
    first = [part.first_index for part in partitions]
    if not any(first):
        return -1
    covering = (each for each in _commits(tx, queue) if _covers(_checked_ends(each, partitions), first))
    return next((each.version for each in covering), _EVER)


def _commits(tx: Transaction, queue: QueueRecord) -> Iterator[FeedCommit]:
    after = -1
    while commits := page(tx, queue, after):
        yield from commits
        after = commits[-1].version


def _prune(tx: Transaction, queue: QueueRecord, first: Sequence[int]) -> None:
    """Delete the oldest commits whose rows have been trimmed, a few at a time.

    The newest of them is kept, since the next commit begins at its end.
    """
    if not any(first):
        return
    gone = [each for each in page(tx, queue, -1, most=_PRUNED_AT_ONCE) if not _beyond(each.ends, first)]
    if len(gone) > 1:
        tx.run("delete_feed_commits", queue_id=queue.queue_id, version=gone[-1].version)


def _covers(ends: Sequence[int], first: Sequence[int]) -> bool:
    """Whether every row after these ends still exists."""
    padded = [*ends, *[0] * (len(first) - len(ends))]
    return all(end >= bound for end, bound in zip(padded, first, strict=True))


def _beyond(ends: Sequence[int], first: Sequence[int]) -> bool:
    """Whether any row before these ends still exists."""
    return any(end > bound for end, bound in zip(ends, first, strict=False))


def _checked_ends(commit: FeedCommit, partitions: Sequence[PartitionRecord]) -> list[int]:
    """Return the ends of a commit; refuse ends beyond the partitions' rows."""
    known = len(commit.ends) <= len(partitions) and all(
        0 <= end <= part.next_index for end, part in zip(commit.ends, partitions, strict=False)
    )
    if not known:
        raise unreadable_record(
            _named(commit.version), ValueError("its ends are beyond the rows of the queue's partitions")
        )
    return list(commit.ends)


def _named(version: int) -> str:
    return f"commit {version} of a feed"


def _commit(row: Row) -> FeedCommit:
    what = _named(row.version)
    ends = parse_record(row.ends, what, list)
    if not all(type(end) is int for end in ends):
        raise unreadable_record(what, ValueError("it is not a list of row indexes"))
    return FeedCommit(row.version, row.timestamp, row.row_count, tuple(ends))
