"""The source's side of the protocol: own a consumer on a queue, plan micro-batches, raise the safe offset."""

from __future__ import annotations

import logging
import uuid
from collections.abc import Sequence
from operator import ge
from typing import Any

from penstock.commit.offsets import QueueOffset, pad, plan_text
from penstock.commit.source_rows import SourceRows
from penstock.errors import (
    CheckpointMismatchError,
    OffsetConflictError,
    OwnerFencedError,
    PenstockError,
    StoreUnavailableError,
    condition_of,
)
from penstock.json_text import parse_record
from penstock.store.database import Database, Transaction
from penstock.store.records import catalog, consumers
from penstock.store.records.catalog import PartitionRecord, QueueRecord, within_limits
from penstock.store.records.consumers import Registration

log = logging.getLogger("penstock.commit")


class Owner:
    """A running query's ownership of a consumer. A later owner fences it with a new epoch.

    ``moved_by_sink`` says whether the query's sink moves the consumer in its own transaction. If it is False,
    the owner finds out at the query's first commit.
    """

    def __init__(self, database: Database, consumer: str, queue: str, *, moved_by_sink: bool = False) -> None:
        self._database = database
        self.consumer = consumer
        self.queue = queue
        registration = database.run(self._find, write=False)
        self._lock = database.owner_lock(registration.lock_name(database.uuid))
        self._warn_if_owned(registration)
        self.identity = str(uuid.uuid4())
        """Distinguishes this owner from all others, even if a restored store assigns the same epoch again."""
        self.epoch, self.generation = database.run(self._take_over, idempotent=True)
        self.moved_by_sink = moved_by_sink
        """Whether the sink moves the consumer, as far as this owner knows."""
        self._last_plan: str | None = None
        log.info(
            "consumer %r on queue %r has a new owner, of epoch %d",
            consumer,
            queue,
            self.epoch,
            extra={"action": "owned", "consumer": consumer, "queue": queue, "epoch": self.epoch},
        )

    def _take_over(self, tx: Transaction) -> tuple[int, int]:
        keys = self._find(tx, lock=True).keys
        with within_limits(f"the registration of consumer {self.consumer!r} on queue {self.queue!r}"):
            owned = tx.one("own_registration", owner=self.identity, **keys)
        return owned.epoch, owned.generation

    def _find(self, tx: Transaction, *, lock: bool = False) -> Registration:
        return consumers.find_registration(tx, self.consumer, self.queue, lock=lock)

    def _warn_if_owned(self, registration: Registration) -> None:
        if not self._acquire_lock():
            log.warning(
                "consumer %r on queue %r had a running owner, which is now fenced and will fail",
                registration.consumer,
                registration.queue,
                extra={
                    "action": "owner_taken_over",
                    "consumer": registration.consumer,
                    "queue": registration.queue,
                },
            )

    def positions(self) -> tuple[int, ...]:
        """Return the consumer's offsets."""
        return tuple(
            self._database.run(
                lambda tx: consumers.read_offsets(tx, self._owned_registration(tx))[0], write=False
            )
        )

    def observe(self, logged: QueueOffset) -> tuple[QueueRecord, list[PartitionRecord], bool]:
        """Record that Spark has logged everything up to ``logged``. Return the queue, its partitions, and
        whether the query should drain.

        The safe offset moves up to ``logged``. The offset moves too, unless the sink moves it.
        """
        registration, safe_offsets, queue, partitions = self._database.run(self._load_state, write=False)
        if self._last_plan is not None and self._last_plan == registration.plan:
            # Only a sink's commit closes a plan.
            self.moved_by_sink |= registration.plan_epoch is None
        logged.require(self._database.uuid, self.queue, self.consumer, registration.generation)
        if logged.empty:
            # A new checkpoint has logged nothing yet, so it begins at the consumer's offset.
            self.require_at(logged.end)
        elif any(stored < end for stored, end in zip(safe_offsets, logged.end, strict=False)):
            self._database.run(lambda tx: self._raise_safe(tx, logged), idempotent=True)
        self._acquire_lock()
        return queue, partitions, registration.draining

    def _acquire_lock(self) -> bool:
        """Take the lock if it was lost or if another owner held it so far; return whether this owner holds
        it.
        """
        try:
            return self._lock.acquire()
        except StoreUnavailableError as error:
            log.warning(
                "cannot take the lock of consumer %r yet: %s",
                self.consumer,
                error,
                extra={
                    "action": "owner_unlocked",
                    "consumer": self.consumer,
                    "queue": self.queue,
                    "error": condition_of(error),
                },
            )
            return False

    def _load_state(
        self, tx: Transaction
    ) -> tuple[Registration, Sequence[int], QueueRecord, list[PartitionRecord]]:
        registration = self._owned_registration(tx)
        queue = catalog.find_queue(tx, self.queue)
        return registration, consumers.read_offsets(tx, registration)[1], queue, catalog.partitions(tx, queue)

    def _raise_safe(self, tx: Transaction, logged: QueueOffset) -> None:
        registration = self._owned_registration(tx, lock=True)
        # The consumer is at most one micro-batch behind the checkpoint.
        expects_move = self.moved_by_sink and registration.plan_epoch == self.epoch
        if _is_ahead(tx, registration, logged, expects_move=expects_move) and not (
            self._was_fenced(tx, registration, logged)
        ):
            raise _lagging_error(tx, registration, logged)
        consumers.raise_safe(tx, registration, logged.end)

    def _was_fenced(self, tx: Transaction, registration: Registration, logged: QueueOffset) -> bool:
        """Return whether this query's logged micro-batch comes from a fenced driver: another query took over
        the consumer, and its plan begins where that micro-batch begins.

        The consumer may then be inside that micro-batch, because an older copy of the checkpoint divides the
        rows differently.
        """
        if logged.moved_by_sink or registration.plan_epoch == self.epoch:
            return False
        offsets = consumers.read_offsets(tx, registration)[0]
        start = pad(logged.start, len(offsets))
        return all(map(ge, offsets, start)) and _planned_from(registration, start)

    def plan(self, end: QueueOffset) -> None:
        """Store the plan of the micro-batch in flight. The sink's commit must match the plan.

        Raises
        ------
        CheckpointMismatchError
            If the queue no longer has the micro-batch's rows, because its store was restored.
        """

        def work(tx: Transaction) -> None:
            registration = self._owned_registration(tx, lock=True)
            _require_source_rows(tx, registration, end)
            tx.run("open_plan", epoch=self.epoch, plan=plan_text(end), **registration.keys)

        self._database.run(work, idempotent=True)
        self._last_plan = plan_text(end)
        rows = sum(end.end) - sum(end.start)
        log.debug(
            "planned a micro-batch of %d rows of consumer %r on queue %r",
            rows,
            self.consumer,
            self.queue,
            extra={
                "action": "planned",
                "consumer": self.consumer,
                "queue": self.queue,
                "epoch": self.epoch,
                "rows": rows,
            },
        )

    def _owned_registration(self, tx: Transaction, *, lock: bool = False) -> Registration:
        registration = self._find(tx, lock=lock)
        require_owner(registration, self.epoch, self.identity, self.generation)
        return registration

    def require(self) -> None:
        """Check that this query still owns the consumer, and that no seek has moved it."""
        self._database.run(self._owned_registration, write=False)

    def require_at(self, start: Sequence[int]) -> None:
        """Check that the consumer is not before the start of a query."""

        def work(tx: Transaction) -> None:
            registration = self._owned_registration(tx)
            offsets = consumers.read_offsets(tx, registration)[0]
            if any(offset < begin for offset, begin in zip(offsets, start, strict=False)):
                raise _source_behind_error(tx, registration, start)

        self._database.run(work, write=False)

    def release(self) -> None:
        """Release the consumer, as if the process had died."""
        self._lock.release()


def offset_of(
    owner: Owner | None,
    store: str,
    queue: QueueRecord,
    start: Sequence[int],
    end: Sequence[int],
    **more: Any,
) -> QueueOffset:
    """Return the offset for a range that a query reads from a queue, through its consumer if it has one."""
    if owner is None:
        return QueueOffset(store, queue.name, None, queue.generation, 0, tuple(start), tuple(end), **more)
    return QueueOffset(
        store,
        queue.name,
        owner.consumer,
        owner.generation,
        owner.epoch,
        tuple(start),
        tuple(end),
        moved_by_sink=owner.moved_by_sink,
        owner=owner.identity,
        **more,
    )


def require_owned(tx: Transaction, registration: Registration, end: QueueOffset) -> None:
    """Check a micro-batch without a stored plan, in the transaction that moves its consumer.

    Raises
    ------
    OwnerFencedError
        If another query has taken over the consumer.
    CheckpointMismatchError
        If a seek has moved the consumer, or the queue no longer has the rows because its store was restored.
    """
    require_owner(registration, end.epoch, end.owner, end.generation)
    _require_source_rows(tx, registration, end)


def require_owner(registration: Registration, epoch: int, identity: str | None, generation: int) -> None:
    """Check that a query owns the consumer, and that no seek has moved it."""
    consumer, queue = registration.consumer, registration.queue
    if registration.epoch < epoch and registration.generation <= generation:
        raise OwnerFencedError(
            f"the store was restored from an older backup while this query ran: consumer {consumer!r} on "
            f"queue {queue!r} has owner epoch {registration.epoch} there, and this query has {epoch}. "
            "Restore the checkpoint of the same time, and start the query again",
            condition="OWNER_FENCED.STORE_RESTORED",
            consumer=consumer,
            queue=queue,
            epoch=epoch,
            current=registration.epoch,
        )
    if (registration.epoch, registration.owner) != (epoch, identity):
        raise OwnerFencedError(
            f"another query took over consumer {consumer!r} on queue {queue!r} (its owner epoch is "
            f"{registration.epoch}, this query's is {epoch}): use each consumer in only one query, and only "
            "once there",
            consumer=consumer,
            queue=queue,
            epoch=epoch,
            current=registration.epoch,
        )
    if registration.generation != generation:
        raise CheckpointMismatchError(
            f"consumer {consumer!r} on queue {queue!r} was moved by a seek or registered again while this "
            "query ran: start it with a new checkpoint, which resumes at the consumer's offset",
            condition="CHECKPOINT_MISMATCH.MOVED_WHILE_RUNNING",
            consumer=consumer,
            queue=queue,
        )


def _is_ahead(
    tx: Transaction, registration: Registration, logged: QueueOffset, *, expects_move: bool
) -> bool:
    """Return whether Spark has logged rows past the consumer's offset, or past its plan if no sink moves the
    consumer.

    A restarted query may repeat its planned micro-batch with another sink. Its owner then plans it again.
    """
    offsets = consumers.read_offsets(tx, registration)[0]
    if all(offset >= end for offset, end in zip(offsets, logged.end, strict=False)):
        return False
    expects_move |= logged.moved_by_sink and registration.plan_epoch in (None, logged.epoch)
    return expects_move or registration.plan != plan_text(logged)


def _stored_plan(registration: Registration) -> QueueOffset | None:
    what = f"the plan of consumer {registration.consumer!r}"
    return QueueOffset.of(parse_record(registration.plan or "null", what))


def _planned_from(registration: Registration, offsets: Sequence[int]) -> bool:
    """Return whether the last plan begins at these offsets."""
    planned = _stored_plan(registration)
    return planned is not None and pad(planned.start, len(offsets)) == tuple(offsets)


def _require_source_rows(tx: Transaction, registration: Registration, end: QueueOffset) -> None:
    """Refuse a micro-batch if the store was restored, and now lacks its rows or the previous micro-batch."""
    if not _follows(tx, registration, end):
        raise _source_behind_error(tx, registration, end.start)
    SourceRows().require(tx, registration.queue_id, end)


def _follows(tx: Transaction, registration: Registration, end: QueueOffset) -> bool:
    """Return whether a micro-batch is the last plan, begins where that plan ends, or begins at or before the
    consumer's offset.
    """
    planned = _stored_plan(registration)
    if planned is not None and (planned == end or pad(planned.end, len(end.start)) == end.start):
        return True
    offsets = consumers.read_offsets(tx, registration)[0]
    return all(offset >= begin for offset, begin in zip(offsets, end.start, strict=False))


def _lagging_error(tx: Transaction, registration: Registration, logged: QueueOffset) -> PenstockError:
    """Return the error for a consumer that lags behind a committed micro-batch."""
    offsets = consumers.read_offsets(tx, registration)[0]
    is_inside = any(
        start < offset < end
        for start, offset, end in zip(pad(logged.start, len(offsets)), offsets, logged.end, strict=False)
    )
    if not is_inside:
        return _source_behind_error(tx, registration, logged.end)
    # No micro-batch ended at that offset, so no backup can have the consumer there.
    return OffsetConflictError(
        f"consumer {registration.consumer!r} on queue {registration.queue!r} is at {offsets}, inside the "
        f"micro-batch from {list(logged.start)} to {list(logged.end)} that this query has committed: another "
        f"program or query moved the consumer. Seek it to {list(logged.end)}, and start the query with a new "
        "checkpoint",
        condition="OFFSET_CONFLICT.CHECKPOINT",
        consumer=registration.consumer,
        queue=registration.queue,
        expected=list(logged.end),
        found=list(offsets),
    )


def _source_behind_error(
    tx: Transaction, registration: Registration, committed: Sequence[int]
) -> CheckpointMismatchError:
    return CheckpointMismatchError(
        f"the checkpoint has committed consumer {registration.consumer!r} on queue {registration.queue!r} "
        f"up to {list(committed)}, but the store has {consumers.read_offsets(tx, registration)[0]}: if the "
        "store was restored from an older backup, restore the checkpoint of the same time, or use a new "
        "one",
        condition="CHECKPOINT_MISMATCH.SOURCE_BEHIND",
        consumer=registration.consumer,
        queue=registration.queue,
    )


def raise_safe_offset(database: Database, final_offset: QueueOffset, *, moved_by_sink: bool = False) -> None:
    """Raise the safe offset to the offset that an ended query's checkpoint has committed."""

    def work(tx: Transaction) -> None:
        registration = consumers.find_registration(
            tx, final_offset.consumer or "", final_offset.queue, lock=True
        )
        is_same_registration = (
            final_offset.store == database.uuid and final_offset.generation == registration.generation
        )
        # Another query may have moved the consumer.
        if is_same_registration and not _is_ahead(tx, registration, final_offset, expects_move=moved_by_sink):
            consumers.raise_safe(tx, registration, final_offset.end)

    database.run(work, idempotent=True)


def move_past_commit(database: Database, committed: QueueOffset) -> None:
    """Move a consumer past a micro-batch that its sink has committed. The consumer moves only if it is at the
    start of the micro-batch and has planned one from there.

    Otherwise it does not move, since its store may be older than the sink's.
    """

    def work(tx: Transaction) -> None:
        registration = consumers.find_registration(tx, committed.consumer or "", committed.queue, lock=True)
        is_same_registration = (
            committed.store == database.uuid and committed.generation == registration.generation
        )
        offsets = tuple(consumers.read_offsets(tx, registration)[0])
        start = pad(committed.start, len(offsets))
        if is_same_registration and offsets == start and _planned_from(registration, start):
            consumers.raise_safe(tx, registration, committed.end)

    database.run(work, idempotent=True)


def request_drain(database: Database, planned: QueueOffset) -> None:
    """Ask the owner of a consumer to plan no more micro-batches, if that owner has planned this offset.

    Any other owner belongs to another query.
    """

    def work(tx: Transaction) -> None:
        registration = consumers.find_registration(tx, planned.consumer or "", planned.queue, lock=True)
        if (planned.epoch, planned.owner) == (registration.epoch, registration.owner):
            tx.run("set_draining", **registration.keys)

    database.run(work, idempotent=True)
