"""The reader's side: own a consumer on a queue, plan micro-batches, mark them safe."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from typing import Any

from penstock.commit.offsets import QueueOffset, pad
from penstock.errors import OwnerFenced
from penstock.store import catalog, consumers
from penstock.store.catalog import PartitionRecord, QueueRecord
from penstock.store.consumers import Registration
from penstock.store.database import Database, Transaction

log = logging.getLogger("penstock.commit")

Split = list[list[int]]
"""The tasks of a micro-batch: [partition, start, end] each."""


class Owner:
    """A running query's hold on a consumer. A later owner fences it: its epoch is no longer the stored one."""

    def __init__(self, database: Database, store_uuid: str, consumer: str, queue: str) -> None:
        self._database = database
        self._store_uuid = store_uuid
        self.consumer = consumer
        self.queue = queue
        registration = database.run(self._find, write=False)
        self._lock = database.owner_lock(registration.lock_name(store_uuid))
        self._warn_when_held(registration)
        owned = database.run(lambda tx: tx.one("own_registration", **registration.keys), idempotent=True)
        self.epoch: int = owned.epoch
        self.generation: int = owned.generation

    def _find(self, tx: Transaction, *, lock: bool = False) -> Registration:
        return consumers.find_registration(tx, self.consumer, self.queue, lock=lock)

    def _warn_when_held(self, registration: Registration) -> None:
        if not self._lock.acquire():
            log.warning(
                "consumer %r on queue %r had a running owner; it is fenced now and will fail",
                registration.consumer,
                registration.queue,
                extra={"action": "owner_taken_over"},
            )

    def positions(self) -> tuple[int, ...]:
        """The consumer's offsets."""
        return tuple(self._database.run(lambda tx: consumers.read_offsets(tx, self._checked(tx))[0], write=False))

    def observe(self, logged: QueueOffset) -> tuple[QueueRecord, list[PartitionRecord], bool]:
        """Take note that Spark has logged everything up to ``logged``; the queue now, and whether to drain.

        The safe offset moves up to it, and so does the offset where the sink does not move it itself.

        Raises
        ------
        OwnerFenced
            When somebody else owns the consumer by now.
        CheckpointMismatch
            When the consumer has been sought elsewhere.
        """
        self._lock.acquire()
        registration, safe, queue, there = self._database.run(self._state, write=False)
        logged.require(self._store_uuid, self.queue, self.consumer, registration.generation)
        if any(have < wanted for have, wanted in zip(safe, logged.end, strict=False)):
            self._database.run(lambda tx: self._raise_safe(tx, logged), idempotent=True)
        return queue, there, registration.draining

    def _state(self, tx: Transaction) -> tuple[Registration, Sequence[int], QueueRecord, list[PartitionRecord]]:
        registration = self._checked(tx)
        queue = catalog.find_queue(tx, self.queue)
        return registration, consumers.read_offsets(tx, registration)[1], queue, catalog.partitions(tx, queue)

    def _raise_safe(self, tx: Transaction, logged: QueueOffset) -> None:
        registration = self._checked(tx, lock=True)
        for partition, index in enumerate(logged.end):
            tx.run("raise_safe", partition=partition, safe_index=index, **registration.keys)

    def plan(self, end: dict[str, Any], split: Split) -> Split:
        """Store the micro-batch in hand; the split to use, which is the first one when it is planned again."""

        def work(tx: Transaction) -> Split:
            registration = self._checked(tx, lock=True)
            text = json.dumps(end)
            again = registration.plan == text and registration.split is not None
            kept: Split = json.loads(registration.split) if again and registration.split else split
            tx.run("open_plan", epoch=self.epoch, plan=text, split=json.dumps(kept), **registration.keys)
            return kept

        return self._database.run(work, idempotent=True)

    def _checked(self, tx: Transaction, *, lock: bool = False) -> Registration:
        registration = self._find(tx, lock=lock)
        if registration.epoch != self.epoch:
            raise OwnerFenced(
                f"another query took over consumer {self.consumer!r} on queue {self.queue!r} "
                f"(owner epoch {registration.epoch}, this query's is {self.epoch}): run one query for each consumer",
                consumer=self.consumer,
                queue=self.queue,
                epoch=self.epoch,
                current=registration.epoch,
            )
        return registration

    def release(self) -> None:
        """Give up the hold; the process's death does the same."""
        self._lock.release()


def level(database: Database, store_uuid: str, ended: QueueOffset) -> None:
    """After a query has ended: what its checkpoint has committed is processed and safe."""

    def work(tx: Transaction) -> None:
        registration = consumers.find_registration(tx, ended.consumer or "", ended.queue, lock=True)
        if ended.store == store_uuid and ended.generation == registration.generation:
            offsets = consumers.read_offsets(tx, registration)[0]
            for partition, index in enumerate(pad(ended.end, len(offsets))):
                tx.run("raise_safe", partition=partition, safe_index=index, **registration.keys)

    database.run(work, idempotent=True)


def drain(database: Database, consumer: str, queue: str) -> None:
    """Ask the owner of a consumer to plan nothing more."""

    def work(tx: Transaction) -> None:
        tx.run("set_draining", **consumers.find_registration(tx, consumer, queue).keys)

    database.run(work, idempotent=True)
