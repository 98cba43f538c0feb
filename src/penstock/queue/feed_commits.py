"""Whole commits of a change feed, appended to the queue that holds it."""

from __future__ import annotations

from datetime import datetime

import pyarrow as pa

from penstock.errors import InvalidInput
from penstock.instants import micros_of
from penstock.queue.queue import Queue
from penstock.store.database import Transaction
from penstock.store.log import partition_log
from penstock.store.records import feed_commits


def append_commit(queue: Queue, version: int, moment: int, rows: pa.Table) -> partition_log.Appended:
    """Append the change rows of one commit, all of them or none, over all partitions that they touch.

    Parameters
    ----------
    version
        Above that of the newest commit, and past :func:`check_version`.
    moment
        When it happened, as :func:`micros` tells it; not before the newest commit.
    rows
        Its change rows, in the queue's schema; none are fine.

    Raises
    ------
    CommitOutOfOrder
        When a version or a timestamp goes backwards; nothing is appended then.
    """
    record = queue.record

    def first(tx: Transaction) -> bool:
        feed_commits.open_commit(tx, record, version, moment)
        return True

    def then(tx: Transaction, appended: partition_log.Appended) -> None:
        feed_commits.close_commit(tx, record, version, moment, appended.rows)

    return queue.append_with(rows, first=first, then=then)


def check_version(version: object) -> None:
    """Refuse what is no commit's version.

    Raises
    ------
    InvalidInput
    """
    if type(version) is not int or not 0 <= version < 2**63:
        raise InvalidInput(f"a commit's version is a whole number from 0 to 2**63 - 1, not {version!r}")


def micros(timestamp: datetime) -> int:
    """A commit's time in microseconds since 1970.

    Raises
    ------
    InvalidInput
        When it has no time zone.
    """
    if not isinstance(timestamp, datetime) or timestamp.tzinfo is None:
        raise InvalidInput(f"a commit's timestamp is a datetime with a time zone, not {timestamp!r}")
    return micros_of(timestamp)
