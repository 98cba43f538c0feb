"""Upkeep beside appends: merging small segments, and what retention lets go."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable

from penstock.errors import PenstockError
from penstock.store import merge
from penstock.store.catalog import QueueRecord, partitions
from penstock.store.consumers import owner_name
from penstock.store.database import Database, Transaction
from penstock.store.trim import trim

log = logging.getLogger("penstock.queue")

RETENTION_SECONDS = 1.0


class Maintainer:
    """Does a store's upkeep in a thread of its own, so that no append waits for it."""

    def __init__(self, database: Database, store_uuid: str) -> None:
        self._database = database
        self._store_uuid = store_uuid
        self._pending: dict[tuple[int, int], QueueRecord] = {}
        self._trimmed: dict[int, float] = {}
        self._wake = threading.Condition()
        self._thread: threading.Thread | None = None
        self._closing = False

    def after_change(self, queue: QueueRecord, crowded: Iterable[int]) -> None:
        """Ask for upkeep: of crowded partitions, and of retention now and then."""
        wanted = list(crowded)
        if not queue.retention.unlimited and time.monotonic() - self._trimmed.get(queue.queue_id, 0) > RETENTION_SECONDS:
            self._trimmed[queue.queue_id] = time.monotonic()
            wanted = list(range(queue.partitions))
        if wanted:
            self._submit(queue, wanted)

    def _submit(self, queue: QueueRecord, wanted: Iterable[int]) -> None:
        with self._wake:
            if self._closing:
                return
            self._pending.update({(queue.queue_id, partition): queue for partition in wanted})
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="penstock-upkeep", daemon=True)
                self._thread.start()
            self._wake.notify_all()

    def close(self) -> None:
        """Finish what was asked for, then end the thread."""
        with self._wake:
            self._closing = True
            self._wake.notify_all()
        if self._thread is not None:
            self._thread.join()

    def _work(self) -> None:
        while True:
            with self._wake:
                self._wake.wait_for(lambda: self._pending or self._closing)
                if not self._pending:
                    return
                (_, partition), queue = self._pending.popitem()
            try:
                upkeep(self._database, self._store_uuid, queue, [partition])
            except PenstockError as error:
                # The next append asks again; nothing is lost by a merge that did not happen.
                log.warning("upkeep of queue %r failed: %s", queue.name, error, extra={"action": "upkeep_failed"})


def upkeep(database: Database, store_uuid: str, queue: QueueRecord, wanted: Iterable[int]) -> None:
    """Merge crowds of small segments, then apply the queue's retention."""
    for partition in wanted:
        merge.merge_crowd(database, queue, partition)
        if not queue.retention.unlimited:
            trim_partition(database, store_uuid, queue, partition, None)


def trim_partition(
    database: Database, store_uuid: str, queue: QueueRecord, partition: int, before: int | None
) -> tuple[int, int]:
    def work(tx: Transaction) -> tuple[int, int]:
        return trim(tx, queue, partition, before=before, alive=liveness(database, store_uuid, queue))

    return database.run(work, idempotent=True)


def liveness(database: Database, store_uuid: str, queue: QueueRecord) -> Callable[[str], bool]:
    """Whether a consumer has a live owner on the queue."""

    def alive(consumer: str) -> bool:
        return database.owner_lock(owner_name(store_uuid, consumer, queue.queue_id)).held_elsewhere()

    return alive


def retained(database: Database, queue: QueueRecord) -> int:
    """Rows that are there now."""
    return database.run(lambda tx: sum(p.rows for p in partitions(tx, queue)), write=False)
