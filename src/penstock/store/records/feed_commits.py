"""The commits of a change feed: which rows of its queue belong to which."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from penstock.errors import CommitOutOfOrder
from penstock.store.database import Transaction
from penstock.store.records import catalog
from penstock.store.records.catalog import QueueRecord

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
    """Where each partition ends behind it; partitions that were added later are not there."""


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


def open_commit(tx: Transaction, queue: QueueRecord, version: int, timestamp: int) -> None:
    """Lock the feed, and see that the commit comes behind all others.

    Raises
    ------
    CommitOutOfOrder
        When the version is not above the newest one, or the timestamp lies before the newest one.
    """
    if catalog.find_queue(tx, queue.name, lock=True).queue_id != queue.queue_id:
        raise catalog.dropped(queue)
    last = newest(tx, queue)
    if last is not None and (version <= last.version or timestamp < last.timestamp):
        what = "version" if version <= last.version else "timestamp"
        raise CommitOutOfOrder(
            f"commit {version} of feed {queue.name!r} goes backwards: the newest one is {last.version}, and its {what} has to lie "
            f"before. Nothing was appended; if this is a repeat of commit {last.version}, it is there already",
            feed=queue.name,
            version=version,
            newest=last.version,
        )


def close_commit(tx: Transaction, queue: QueueRecord, version: int, timestamp: int, rows: int) -> None:
    """Note where the partitions end now, under the lock that ``open_commit`` took."""
    there = catalog.partitions(tx, queue)
    tx.run(
        "insert_feed_commit",
        queue_id=queue.queue_id,
        version=version,
        timestamp=timestamp,
        row_count=rows,
        ends=json.dumps([part.next_index for part in there]),
    )
    _prune(tx, queue, [part.first_index for part in there])


def starts(tx: Transaction, queue: QueueRecord, after: int, partitions: int) -> list[int]:
    """Where each partition goes on behind a version."""
    last = newest(tx, queue, after)
    found = [] if last is None else list(last.ends)
    return found + [0] * (partitions - len(found))


def oldest(tx: Transaction, queue: QueueRecord) -> int:
    """The version behind which nothing has been trimmed; -1 where nothing has been trimmed at all."""
    first = [part.first_index for part in catalog.partitions(tx, queue)]
    if not any(first):
        return -1
    return next((each.version for each in _commits(tx, queue) if _covers(each.ends, first)), _EVER)


def _commits(tx: Transaction, queue: QueueRecord) -> Iterator[FeedCommit]:
    after = -1
    while found := page(tx, queue, after):
        yield from found
        after = found[-1].version


def _prune(tx: Transaction, queue: QueueRecord, first: Sequence[int]) -> None:
    """Forget the oldest commits whose rows have been trimmed, a few at a time; the last one of them tells where the next begins."""
    if not any(first):
        return
    gone = [each for each in page(tx, queue, -1, most=_PRUNED_AT_ONCE) if not _beyond(each.ends, first)]
    if len(gone) > 1:
        tx.run("delete_feed_commits", queue_id=queue.queue_id, version=gone[-1].version)


def _covers(ends: Sequence[int], first: Sequence[int]) -> bool:
    """Whether everything behind these ends is there."""
    padded = [*ends, *[0] * (len(first) - len(ends))]
    return all(end >= bound for end, bound in zip(padded, first, strict=True))


def _beyond(ends: Sequence[int], first: Sequence[int]) -> bool:
    """Whether anything before these ends is there."""
    return any(end > bound for end, bound in zip(ends, first, strict=False))


def _commit(row: Any) -> FeedCommit:
    return FeedCommit(row.version, row.timestamp, row.row_count, tuple(json.loads(row.ends)))
