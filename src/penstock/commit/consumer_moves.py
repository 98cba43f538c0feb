"""How a micro-batch moves the consumers that it has read through."""

from __future__ import annotations

import hashlib
import json
from typing import Any

from penstock.commit.micro_batch import BatchCommit
from penstock.commit.offsets import QueueOffset, pad, plan_text
from penstock.errors import CheckpointMismatch, ConsumerBound, OffsetConflict, PlanMismatch
from penstock.store.database import Transaction
from penstock.store.records import consumers
from penstock.store.records.consumers import Registration


def lock_consumer(tx: Transaction, source: QueueOffset) -> Registration:
    return consumers.find_registration(tx, source.consumer or "", source.queue, lock=True)


def move_consumer(
    tx: Transaction, batch: BatchCommit[Any], source: QueueOffset, registration: Registration
) -> None:
    """Move a consumer of this store from the start of a micro-batch to its end.

    Raises
    ------
    CheckpointMismatch, ConsumerBound, PlanMismatch, OffsetConflict
        When the micro-batch is not the one that the consumer's owner has in hand.
    """
    source.require(source.store, registration.queue, registration.consumer, registration.generation)
    if source.empty:
        _require_there(tx, source, registration)
        _bind(tx, batch, source, registration)
        return
    _require_planned(batch, source, registration)
    _bind(tx, batch, source, registration)
    for partition, (old, new) in enumerate(zip(source.start, source.end, strict=True)):
        if old != new:
            _advance(tx, source, registration, partition)
    tx.run("close_plan", **registration.keys)


def _advance(tx: Transaction, source: QueueOffset, registration: Registration, partition: int) -> None:
    old, new = source.start[partition], source.end[partition]
    try:
        consumers.advance(tx, registration, partition, old, new, safe=False)
    except OffsetConflict as conflict:
        found = conflict.parameters["found"]
        raise _moved(source, {partition: old}, {partition: found}) from None


def _moved(source: QueueOffset, expected: dict[int, int], found: dict[int, int]) -> OffsetConflict:
    return OffsetConflict(
        f"consumer {source.consumer!r} on queue {source.queue!r} stands at {found}, and this query's checkpoint "
        f"at {expected}: another program moved it. Start the query with a new checkpoint, and it goes on where the "
        f"consumer stands; to have it read the rows in between as well, seek the consumer to {expected} before. Give each "
        "query and each program a consumer of its own",
        consumer=source.consumer,
        queue=source.queue,
        expected=expected,
        found=found,
    )


def _require_planned(batch: BatchCommit[Any], source: QueueOffset, registration: Registration) -> None:
    planned = plan_text(source)
    if not registration.plan_open or registration.plan != planned:
        raise PlanMismatch(
            f"micro-batch {batch.batch_id} of app {batch.app_id!r} is not what the owner of consumer "
            f"{source.consumer!r} has planned: another query took the consumer over, or the checkpoint is a copy; "
            "run one query for each consumer",
            consumer=source.consumer,
            committed=planned,
            planned=registration.plan,
        )


def _require_there(tx: Transaction, source: QueueOffset, registration: Registration) -> None:
    """A micro-batch without new rows has no plan to tell who owns the consumer; where it stands does."""
    offsets = consumers.read_offsets(tx, registration)[0]
    expected = pad(source.end, len(offsets))
    if tuple(offsets) != expected:
        raise _moved(source, dict(enumerate(expected)), dict(enumerate(offsets)))


def _bind(tx: Transaction, batch: BatchCommit[Any], source: QueueOffset, registration: Registration) -> None:
    if registration.app_id == batch.app_id:
        return
    if registration.app_id is not None:
        _refuse_bound(batch, source, registration.app_id)
    tx.run("bind_app", app_id=batch.app_id, **registration.keys)


def _refuse_bound(batch: BatchCommit[Any], source: QueueOffset, app_id: str) -> None:
    if batch.stateful and not batch.rebind:
        raise ConsumerBound(
            f"consumer {source.consumer!r} on queue {source.queue!r} belongs to the checkpoint of app {app_id!r}; a "
            "stateful query with a new checkpoint would go on from there without its state. Use that checkpoint, or "
            "seek the consumer and drop the query's output, or set allowNewCheckpoint=true to start with empty state",
            consumer=source.consumer,
            bound=app_id,
            app_id=batch.app_id,
        )


def move_mark(tx: Transaction, batch: BatchCommit[Any], source: QueueOffset) -> None:
    """A consumer of another store: this store's own mark stands for it, and the consumer follows."""
    # Names may be long, and a database's index entries may not.
    text = json.dumps([source.store, source.queue, source.consumer, batch.sink.ledger_name])
    name = hashlib.sha256(text.encode()).hexdigest()
    _fence_mark(tx, batch, source, name)
    for bound in {row.app_id for row in tx.all("read_marks", source=name)} - {batch.app_id}:
        _refuse_bound(batch, source, bound)
    for partition, (old, new) in enumerate(zip(source.start, source.end, strict=True)):
        if old == new:
            continue
        where = {"source": name, "partition": partition, "app_id": batch.app_id}
        if not tx.run("insert_mark", next_index=new, **where) and not tx.run(
            "advance_mark", old=old, new=new, **where
        ):
            raise _mark_conflict(tx, batch, source, name, partition)


def _fence_mark(tx: Transaction, batch: BatchCommit[Any], source: QueueOffset, name: str) -> None:
    """Refuse a generation of the consumer that a newer one has followed, whose owner does not know it: the other store would tell."""
    claim = {"source": name, "app_id": batch.app_id, "generation": source.generation}
    if tx.run("lock_marked_source", **claim) or tx.run("insert_marked_source", **claim):
        return
    if tx.run("raise_marked_source", **claim):
        # Wherever the consumer was sought to, its marks begin there.
        tx.run("delete_marks", source=name)
        return
    raise CheckpointMismatch(
        f"consumer {source.consumer!r} on queue {source.queue!r} was sought elsewhere, or registered again, and {batch.sink} has "
        "rows of it from after that: start the query with a new checkpoint; the consumer's offset says where it goes on",
        condition="CHECKPOINT_MISMATCH.CONSUMER_MOVED",
        consumer=source.consumer,
        queue=source.queue,
    )


def _mark_conflict(
    tx: Transaction, batch: BatchCommit[Any], source: QueueOffset, name: str, partition: int
) -> OffsetConflict:
    found = next(row.next_index for row in tx.all("read_marks", source=name) if row.partition == partition)
    return OffsetConflict(
        f"{batch.sink} already has the rows of consumer {source.consumer!r} on queue {source.queue!r}, "
        f"partition {partition}, up to {found}, and the micro-batch starts at {source.start[partition]}: "
        f"seek the consumer to {{{partition}: {found}}}",
        consumer=source.consumer,
        queue=source.queue,
        partition=partition,
        expected=source.start[partition],
        found=found,
    )
