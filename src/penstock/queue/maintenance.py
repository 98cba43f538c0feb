"""Retention, and background maintenance: compaction, trimming, and cleanup of staging, ledger and objects."""

from __future__ import annotations

import contextlib
import logging
import math
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial

from penstock.arguments import require
from penstock.errors import (
    InvalidInputError,
    NotFoundError,
    PenstockError,
    StoreReadOnlyError,
    StoreUnavailableError,
    condition_of,
)
from penstock.redaction import redacted_message
from penstock.store import forks, staging
from penstock.store.database import Database, Transaction
from penstock.store.forks import Forkable
from penstock.store.log import compact, object_cleaning
from penstock.store.log.decode import is_about_rows
from penstock.store.log.object_cleaning import CleanupResult
from penstock.store.log.partition_log import COMPACTION_FAN_IN
from penstock.store.log.trim import end_is_due, retention_bound, trim
from penstock.store.records import catalog, ledger
from penstock.store.records.catalog import PartitionRecord, QueueRecord, RetentionLimits
from penstock.store.records.consumers import owner_lock_name

log = logging.getLogger("penstock.queue")

_MAX_AGE = timedelta(microseconds=2**63)


@dataclass(frozen=True)
class Retention:
    """Limits on each partition of a queue. When any limit is exceeded, the oldest rows are deleted.

    Rows that a vital consumer has not safely processed are always kept. Without a limit, all rows are kept.

    Parameters
    ----------
    rows
        The number of rows to keep; 0 deletes rows as soon as every vital consumer has processed them.
    age
        How long to keep rows after their append.
    bytes
        The number of compressed bytes to keep, in whole segments.
    """

    rows: int | None = None
    age: timedelta | None = None
    bytes: int | None = None

    def __post_init__(self) -> None:
        for name in ("rows", "bytes"):
            value = getattr(self, name)
            if value is not None and (type(value) is not int or not 0 <= value < 2**63):
                raise InvalidInputError(
                    f"retention {name} is a whole number from 0 to 2**63 - 1, not {value!r}"
                )
        if self.age is not None and (
            not isinstance(self.age, timedelta) or not timedelta(0) <= self.age < _MAX_AGE
        ):
            raise InvalidInputError(f"retention age is a timedelta from 0 to 290000 years, not {self.age!r}")

    @classmethod
    def of(cls, limits: RetentionLimits) -> Retention:
        age = None if limits.age is None else timedelta(microseconds=limits.age)
        return cls(limits.rows, age, limits.bytes)


def limits_of(retention: Retention) -> RetentionLimits:
    """Convert a retention to the form in which the store keeps it."""
    require(
        "retention", retention, Retention, "a penstock.Retention, such as penstock.Retention(rows=1_000_000)"
    )
    age = None if retention.age is None else retention.age // timedelta(microseconds=1)
    return RetentionLimits(retention.rows, age, retention.bytes)


RETENTION_SECONDS = 1.0
CLEANUP_SECONDS = 3600.0
WAL_CHECKPOINT_SECONDS = 0.5
STAGING_AGE = timedelta(days=1)

_TaskKey = tuple[int, int | None]


class Maintainer(Forkable):
    """A thread that runs a store's maintenance, so that appends do not wait for it.

    The thread ends when no work is pending. A program that exits waits for the thread.
    """

    def __init__(self, database: Database) -> None:
        self._database = database
        self._closing = False
        self._reset()
        forks.register(self)

    def _reset(self) -> None:
        self._condition = threading.Condition()
        # The queue and the due time, by task: a partition to compact, or None for the queue's retention.
        self._pending: dict[_TaskKey, tuple[QueueRecord, float]] = {}
        self._retention_due: dict[int, float] = {}
        self.cleanup_due = self._wal_checkpoint_due = -math.inf
        self.thread: threading.Thread | None = None

    def after_change(self, queue: QueueRecord, to_compact: Iterable[int]) -> None:
        """Schedule the compaction of these partitions, and of the queue's retention at most once a second."""
        now = time.monotonic()
        with self._condition:
            if self._closing:
                return
            for partition in to_compact:
                self._pending[queue.queue_id, partition] = queue, now
            if not queue.retention.unlimited or (queue.payloads is not None and now >= self.cleanup_due):
                self._plan_retention(queue, now)
            if self._pending and self.thread is None:
                self._start()
            self._condition.notify_all()

    def _start(self) -> None:
        thread = threading.Thread(target=self._run, name="penstock-maintenance")
        try:
            thread.start()
        except RuntimeError as error:
            # Threads cannot be started while the program ends, for example. The next append tries again.
            log.debug("no maintenance now: %s", error, extra={"action": "maintenance_postponed"})
            self._pending.clear()
        else:
            self.thread = thread

    def _plan_retention(self, queue: QueueRecord, now: float) -> None:
        last = self._retention_due.get(queue.queue_id, now - RETENTION_SECONDS)
        if last <= now:
            due = max(now, last + RETENTION_SECONDS)
            self._retention_due[queue.queue_id] = due
            self._pending[queue.queue_id, None] = queue, due

    def close(self) -> None:
        """Finish all pending work, then end the thread."""
        with self._condition:
            self._closing = True
            self._condition.notify_all()
            thread = self.thread
        if thread is not None and thread is not threading.current_thread():
            thread.join()

    def _run(self) -> None:
        try:
            self._run_pending()
        finally:
            with self._condition:
                # However this thread ends, the next append can start another one.
                if self.thread is threading.current_thread():
                    self.thread = None

    def _run_pending(self) -> None:
        while (task := self._next_task()) is not None:
            queue, partition = task
            partitions = range(queue.partitions) if partition is None else [partition]
            # A failure does not stop the maintenance of other queues.
            self._run_logged(queue, partial(maintain_partitions, self._database, queue, partitions))
            self._run_logged(queue, self._checkpoint_wal_if_due)
            self._run_logged(queue, self._clean_up_if_due)

    def _run_logged(self, queue: QueueRecord, work: Callable[[], None]) -> None:
        try:
            work()
        except NotFoundError:
            log.debug(
                "queue %r was dropped before its maintenance",
                queue.name,
                extra={"action": "maintenance_skipped", "queue": queue.name},
            )
        except Exception as error:
            log.warning(
                "maintenance of queue %r failed: %s",
                queue.name,
                redacted_message(error),
                extra={"action": "maintenance_failed", "queue": queue.name, "error": condition_of(error)},
            )
            if isinstance(error, StoreUnavailableError):
                # Drop the pending tasks, since each would wait for the store. Later appends request them
                # again.
                with self._condition:
                    self._pending.clear()

    def _checkpoint_wal_if_due(self) -> None:
        now = time.monotonic()
        if now >= self._wal_checkpoint_due:
            self._wal_checkpoint_due = now + WAL_CHECKPOINT_SECONDS
            self._database.checkpoint_wal()

    def _clean_up_if_due(self) -> None:
        now = time.monotonic()
        if now >= self.cleanup_due:
            self.cleanup_due = now + CLEANUP_SECONDS
            clean_staging(self._database, STAGING_AGE)
            # A role that only appends may lack the rights on the ledger, or the credentials for deleting
            # objects.
            with contextlib.suppress(StoreReadOnlyError):
                clean_ledger(self._database)
                clean_objects(self._database, interval=object_cleaning.CLEANUP_INTERVAL)

    def _next_task(self) -> tuple[QueueRecord, int | None] | None:
        with self._condition:
            while self._pending:
                key, (queue, due) = min(self._pending.items(), key=lambda item: item[1][1])
                seconds_left = due - time.monotonic()
                if seconds_left <= 0 or self._closing:
                    del self._pending[key]
                    return queue, key[1]
                self._condition.wait(seconds_left)
            self.thread = None
            return None

    def after_fork_in_child(self) -> None:
        self._reset()


def maintain_partitions(database: Database, queue: QueueRecord, partitions: Iterable[int]) -> None:
    """Apply the queue's current retention, and compact partitions with many small segments.

    Raises
    ------
    PenstockError
        If rows of a partition cannot be read. All other partitions are maintained.
    """
    selected = set(partitions)

    def find_due(tx: Transaction) -> _Due:
        record, now = catalog.reload_queue(tx, queue), tx.now()
        due = _Due(record)
        for partition_record in catalog.partitions(tx, record):
            if partition_record.partition in selected:
                due.add(tx, partition_record, now)
        return due

    due = database.run(find_due, write=False)
    for partition in due.trimmable:
        with due.collecting():
            trim_partition(database, due.queue, partition, None)
    for partition in due.to_compact:
        with due.collecting():
            compact.compact_newest(database, due.queue, partition)
    if due.errors:
        raise due.errors[0]


@dataclass
class _Due:
    """The partitions of a queue that need maintenance, and the errors of unreadable ones."""

    queue: QueueRecord
    trimmable: list[int] = field(default_factory=list)
    to_compact: list[int] = field(default_factory=list)
    errors: list[PenstockError] = field(default_factory=list)

    def add(self, tx: Transaction, record: PartitionRecord, now: int) -> None:
        with self.collecting():
            bound = retention_bound(tx, self.queue, record, now)
            if bound > record.first_index or end_is_due(tx, self.queue, record, now):
                self.trimmable.append(record.partition)
        if record.segments >= COMPACTION_FAN_IN:
            self.to_compact.append(record.partition)

    @contextlib.contextmanager
    def collecting(self) -> Iterator[None]:
        """Collect errors about unreadable or unwritable rows, so that other partitions are still
        maintained.
        """
        try:
            yield
        except PenstockError as error:
            if not is_about_rows(error):
                raise
            self.errors.append(error)


def trim_partition(
    database: Database, queue: QueueRecord, partition: int, before: int | None
) -> tuple[int, int]:
    def work(tx: Transaction) -> tuple[int, int]:
        def has_owner(consumer: str) -> bool:
            return tx.owner_alive(owner_lock_name(database.uuid, consumer, queue.queue_id))

        return trim(tx, queue, partition, before=before, has_live_owner=has_owner)

    first, bound = database.run(work, idempotent=True)
    if bound > first:
        log.debug(
            "rows [%d, %d) of queue %r, partition %d, are trimmed",
            first,
            bound,
            queue.name,
            partition,
            extra={
                "action": "trimmed",
                "queue": queue.name,
                "partition": partition,
                "start": first,
                "end": bound,
            },
        )
    return first, bound


def clean_staging(database: Database, older_than: timedelta) -> int:
    deleted = staging.clean_up(database, older_than=older_than // timedelta(microseconds=1))
    if deleted:
        log.info(
            "%d segments that dead tasks had staged are deleted",
            deleted,
            extra={"action": "staging_cleaned", "segments": deleted},
        )
    return deleted


def clean_ledger(database: Database) -> int:
    """Delete ledger entries that no query needs; return the number of sinks and apps that had such
    entries.
    """
    cleaned = ledger.clean_up(database)
    if cleaned:
        log.info(
            "ledger entries of %d dropped queues and stopped queries are deleted",
            cleaned,
            extra={"action": "ledger_cleaned", "cleaned": cleaned},
        )
    return cleaned


def clean_objects(database: Database, *, interval: int = 0, take_over: bool = False) -> CleanupResult:
    """Delete objects without rows, as :func:`penstock.store.log.object_cleaning.clean_up` does, and log
    it.
    """
    cleaned = object_cleaning.clean_up(database, interval=interval, take_over=take_over)
    if cleaned.objects:
        log.info(
            "%d objects without rows are deleted",
            cleaned.objects,
            extra={"action": "objects_cleaned", "objects": cleaned.objects, "bytes": cleaned.bytes},
        )
    return cleaned
