"""How much of a queue is kept."""

from __future__ import annotations

import contextlib
import logging
import math
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import timedelta

from penstock.arguments import require
from penstock.errors import InvalidInput, NotFound, StoreReadOnly, StoreUnavailable, condition_of
from penstock.store import forks, staging
from penstock.store.database import Database, Transaction
from penstock.store.forks import Forkable
from penstock.store.log import compact, observed_ends
from penstock.store.log.partition_log import MERGE_FAN_IN
from penstock.store.log.trim import retention_bound, trim
from penstock.store.records import catalog, ledger_cleanup
from penstock.store.records.catalog import QueueRecord, RetentionLimits
from penstock.store.records.consumers import owner_name

_AGES_END = timedelta(microseconds=2**63)


@dataclass(frozen=True)
class Retention:
    """Bounds on each partition of a queue; whichever is reached first lets the oldest rows go.

    Rows that a vital consumer has not safely processed stay in any case. Without a bound everything stays.

    Parameters
    ----------
    rows
        Rows to keep; 0 drops a row as soon as every vital consumer is done with it.
    age
        How long to keep rows, from their append.
    bytes
        Compressed bytes to keep, in whole segments.
    """

    rows: int | None = None
    age: timedelta | None = None
    bytes: int | None = None

    def __post_init__(self) -> None:
        for name in ("rows", "bytes"):
            value = getattr(self, name)
            if value is not None and (type(value) is not int or not 0 <= value < 2**63):
                raise InvalidInput(f"retention {name} is a whole number from 0 to 2**63 - 1, not {value!r}")
        if self.age is not None and (
            not isinstance(self.age, timedelta) or not timedelta(0) <= self.age < _AGES_END
        ):
            raise InvalidInput(f"retention age is a timedelta from 0 to 290000 years, not {self.age!r}")

    @classmethod
    def of(cls, limits: RetentionLimits) -> Retention:
        age = None if limits.age is None else timedelta(microseconds=limits.age)
        return cls(limits.rows, age, limits.bytes)


def limits_of(retention: Retention) -> RetentionLimits:
    """The bounds as the store keeps them.

    Raises
    ------
    InvalidInput
        When it is no retention.
    """
    require("retention", retention, Retention, "a ps.Retention, such as ps.Retention(rows=1_000_000)")
    age = None if retention.age is None else retention.age // timedelta(microseconds=1)
    return RetentionLimits(retention.rows, age, retention.bytes)


# ---- maintenance: Upkeep beside appends: merging small segments, what retention lets go, and what dead tasks have staged.

log = logging.getLogger("penstock.queue")

RETENTION_SECONDS = 1.0
SWEEP_SECONDS = 3600.0
TIDY_SECONDS = 0.5
STAGING_AGE = timedelta(days=1)

_Key = tuple[int, int | None]


class Maintainer(Forkable):
    """Does a store's upkeep in a thread of its own, so that no append waits for it.

    The thread lives while there is something to do, and the program does not end before it.
    """

    def __init__(self, database: Database, store_uuid: str) -> None:
        self._database = database
        self._store_uuid = store_uuid
        self._closing = False
        self._reset()
        forks.watch(self)

    def _reset(self) -> None:
        self._wake = threading.Condition()
        # What to look after, a partition or, for retention, all of a queue; and when.
        self._pending: dict[_Key, tuple[QueueRecord, float]] = {}
        self._retention_due: dict[int, float] = {}
        self._sweep_due = self._tidy_due = -math.inf
        self._thread: threading.Thread | None = None

    def after_change(self, queue: QueueRecord, crowded: Iterable[int]) -> None:
        """Ask for upkeep: of crowded partitions now, and of retention now and then."""
        now = time.monotonic()
        with self._wake:
            if self._closing:
                return
            for partition in crowded:
                self._pending[queue.queue_id, partition] = queue, now
            if not queue.retention.unlimited:
                self._plan_retention(queue, now)
            if self._pending and self._thread is None:
                self._start()
            self._wake.notify_all()

    def _start(self) -> None:
        thread = threading.Thread(target=self._work, name="penstock-upkeep")
        try:
            thread.start()
        except RuntimeError as error:
            # No thread is to be had, as at the program's end; whoever appends next may have one.
            log.debug("no upkeep: %s", error, extra={"action": "upkeep_put_off"})
            self._pending.clear()
        else:
            self._thread = thread

    def _plan_retention(self, queue: QueueRecord, now: float) -> None:
        last = self._retention_due.get(queue.queue_id, now - RETENTION_SECONDS)
        if last <= now:
            due = max(now, last + RETENTION_SECONDS)
            self._retention_due[queue.queue_id] = due
            self._pending[queue.queue_id, None] = queue, due

    def close(self) -> None:
        """Finish what was asked for, then end the thread."""
        with self._wake:
            self._closing = True
            self._wake.notify_all()
            thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join()

    def _work(self) -> None:
        while (task := self._next()) is not None:
            queue, partition = task
            try:
                upkeep(
                    self._database,
                    self._store_uuid,
                    queue,
                    range(queue.partitions) if partition is None else [partition],
                )
                self._tidy_now_and_then()
                self._sweep_now_and_then()
            except NotFound:
                log.debug(
                    "queue %r was dropped before its upkeep",
                    queue.name,
                    extra={"action": "upkeep_needless", "queue": queue.name},
                )
            except Exception as error:
                log.warning(
                    "upkeep of queue %r failed: %s",
                    queue.name,
                    error,
                    extra={"action": "upkeep_failed", "queue": queue.name, "error": condition_of(error)},
                )
                if isinstance(error, StoreUnavailable):
                    self._forget()

    def _tidy_now_and_then(self) -> None:
        now = time.monotonic()
        if now >= self._tidy_due:
            self._tidy_due = now + TIDY_SECONDS
            self._database.tidy()

    def _sweep_now_and_then(self) -> None:
        """Beside other upkeep: a store in which nothing is committed has no staging that grows."""
        now = time.monotonic()
        if now >= self._sweep_due:
            self._sweep_due = now + SWEEP_SECONDS
            sweep_staging(self._database, self._store_uuid, STAGING_AGE)
            # A role that only appends may not.
            with contextlib.suppress(StoreReadOnly):
                clean_ledger(self._database)

    def _next(self) -> tuple[QueueRecord, int | None] | None:
        with self._wake:
            while self._pending:
                key, (queue, due) = min(self._pending.items(), key=lambda item: item[1][1])
                left = due - time.monotonic()
                if left <= 0 or self._closing:
                    del self._pending[key]
                    return queue, key[1]
                self._wake.wait(left)
            self._thread = None
            return None

    def _forget(self) -> None:
        """Nothing is lost by upkeep that is not done, and a store that is away would hold each of them up."""
        with self._wake:
            self._pending.clear()

    def after_fork_in_child(self) -> None:
        self._reset()


def upkeep(database: Database, store_uuid: str, queue: QueueRecord, wanted: Iterable[int]) -> None:
    """Apply the retention that the queue has by now, then merge crowds of small segments.

    Raises
    ------
    QueueNotFound
        When the queue was dropped meanwhile.
    """

    def look(tx: Transaction) -> tuple[QueueRecord, list[int], list[int]]:
        found, now = catalog.reread(tx, queue), tx.now()
        there = [part for part in catalog.partitions(tx, found) if part.partition in chosen]
        old = [
            part.partition
            for part in there
            if retention_bound(tx, found, part, now) > part.first_index
            or observed_ends.is_due(tx, found, part, now)
        ]
        return found, old, [part.partition for part in there if part.segments >= MERGE_FAN_IN]

    chosen = set(wanted)
    current, old, crowded = database.run(look, write=False)
    for partition in old:
        trim_partition(database, store_uuid, current, partition, None)
    for partition in crowded:
        compact.merge_crowd(database, current, partition)


def trim_partition(
    database: Database, store_uuid: str, queue: QueueRecord, partition: int, before: int | None
) -> tuple[int, int]:
    def work(tx: Transaction) -> tuple[int, int]:
        return trim(tx, queue, partition, before=before, alive=liveness(tx, store_uuid, queue))

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


def sweep_staging(database: Database, store_uuid: str, older_than: timedelta) -> int:
    swept = staging.sweep(database, store_uuid, older_than=older_than // timedelta(microseconds=1))
    if swept:
        log.info(
            "%d segments that dead tasks had staged are swept",
            swept,
            extra={"action": "swept", "segments": swept},
        )
    return swept


def clean_ledger(database: Database) -> int:
    """Forget what no query can need any more of the ledger; the number of sinks and apps of which something went."""
    cleaned = ledger_cleanup.clean_up(database)
    if cleaned:
        log.info(
            "the ledger has forgotten what it no longer needs of %d dropped queues and stopped queries",
            cleaned,
            extra={"action": "ledger_cleaned", "cleaned": cleaned},
        )
    return cleaned


def liveness(tx: Transaction, store_uuid: str, queue: QueueRecord) -> Callable[[str], bool]:
    """Whether a consumer has a live owner on the queue."""
    return lambda consumer: tx.owner_alive(owner_name(store_uuid, consumer, queue.queue_id))
