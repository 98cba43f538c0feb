"""Consumers: registrations, offsets, and their owners' micro-batches in flight."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from penstock.arguments import did_you_mean, in_quotes
from penstock.errors import (
    AlreadyExistsError,
    ConsumerNotFoundError,
    NotRegisteredError,
    OffsetConflictError,
)
from penstock.json_text import require_numbered, unreadable_record
from penstock.store.database import Columns, Row, Transaction
from penstock.store.records.catalog import QueueRecord, find_queue, lock_partitions


@dataclass(frozen=True)
class Registration:
    """A consumer's registration on a queue."""

    consumer_id: int
    queue_id: int
    consumer: str
    queue: str
    vital: bool
    generation: int
    """A number that every seek raises, so that older offsets are recognised."""
    epoch: int
    """A number that every new owner raises, so that a fenced owner is recognised."""
    owner: str | None
    """A text that is unique for each owner. The epoch is not: if the store was restored from a backup, a
    later owner may get the epoch of an earlier one.
    """
    app_id: str | None
    plan_epoch: int | None
    plan: str | None
    draining: bool

    @property
    def plan_open(self) -> bool:
        return self.plan_epoch is not None and self.plan_epoch == self.epoch

    @property
    def keys(self) -> dict[str, int]:
        return {"consumer_id": self.consumer_id, "queue_id": self.queue_id}

    def lock_name(self, store_uuid: str) -> str:
        return owner_lock_name(store_uuid, self.consumer, self.queue_id)


def owner_lock_name(store_uuid: str, consumer: str, queue_id: int) -> str:
    """Return the name of the lock that the owner of a consumer on a queue holds."""
    return f"{store_uuid}/{queue_id}/{consumer}"


def _registration(row: Row) -> Registration:
    return Registration(
        row.consumer_id,
        row.queue_id,
        row.consumer,
        row.queue,
        bool(row.vital),
        row.generation,
        row.epoch,
        row.owner,
        row.app_id,
        row.plan_epoch,
        row.plan,
        bool(row.draining),
    )


def create_consumer(tx: Transaction, name: str) -> None:
    if tx.one("insert_consumer", name=name, now=tx.now()) is None:
        raise AlreadyExistsError(
            f"consumer {name!r} already exists: open it, or choose another name", consumer=name
        )


def find_consumer(tx: Transaction, name: str) -> int:
    row = tx.one("find_consumer", name=name)
    if row is None:
        names = [consumer.name for consumer in tx.all("list_consumers")]
        raise ConsumerNotFoundError(
            f"there is no consumer {in_quotes(name)}."
            + (
                did_you_mean(name, names)
                or " Create it with store.create_consumer or `penstock consumer create`"
            ),
            consumer=name,
        )
    return int(row.consumer_id)


def list_consumers(tx: Transaction) -> list[str]:
    return [row.name for row in tx.all("list_consumers")]


def drop_consumer(tx: Transaction, name: str) -> None:
    tx.run("delete_consumer", consumer_id=find_consumer(tx, name))


def find_registration(tx: Transaction, consumer: str, queue: str, *, lock: bool = False) -> Registration:
    row = tx.one(
        "lock_registration" if lock and tx.write else "find_registration", consumer=consumer, queue=queue
    )
    if row is not None:
        return _registration(row)
    find_consumer(tx, consumer)
    find_queue(tx, queue)
    raise NotRegisteredError(
        f"consumer {consumer!r} is not registered on queue {queue!r}; if the queue was recreated, register "
        f"it again: store.consumer({consumer!r}).register({queue!r}), or `penstock consumer register`",
        consumer=consumer,
        queue=queue,
    )


def list_registrations(tx: Transaction) -> list[Registration]:
    return [_registration(row) for row in tx.all("list_registrations")]


def summarize_registrations(tx: Transaction, max_rows: int) -> list[Row]:
    """Return rows for a list of consumers and their registrations: the first ones by name, with texts of
    limited length. A consumer without a registration has one row, without a queue. ``total`` is the number of
    rows without the limit.
    """
    return tx.all("outline_registrations", most=max_rows)


def registrations_of(tx: Transaction, queue: QueueRecord) -> list[Registration]:
    return [_registration(row) for row in tx.all("registrations_of_queue", queue_id=queue.queue_id)]


def register(tx: Transaction, consumer: str, queue: QueueRecord, *, vital: bool | None) -> bool:
    """Register a consumer; return False if it was registered already.

    The caller must then write the offsets of a new registration. An existing registration keeps its offsets,
    and its ``vital`` too if the parameter is None.
    """
    keys = {"consumer_id": find_consumer(tx, consumer), "queue_id": queue.queue_id}
    # The generation is new, so that offsets of an earlier registration with the same names are refused.
    generation = new_generation(tx)
    if not tx.run("insert_registration", vital=int(bool(vital)), generation=generation, **keys):
        if vital is not None:
            tx.run("set_vital", vital=int(vital), **keys)
        # Wait for running trims, which do not see this change.
        lock_partitions(tx, queue)
        return False
    return True


def write_offsets(tx: Transaction, registration: Registration, offsets: Sequence[int]) -> None:
    """Write the first offsets of a new registration, by partition."""
    tx.run_many("insert_position", _by_partition(offsets), **registration.keys)


def _by_partition(offsets: Sequence[int]) -> Columns:
    return {"partition": range(len(offsets)), "next_index": offsets}


def read_offsets(tx: Transaction, registration: Registration) -> tuple[list[int], list[int]]:
    """Return the offsets and the safe offsets, by partition."""
    rows = tx.tuples("read_positions", **registration.keys)
    partitions, offsets, safe_offsets = map(list, zip(*rows, strict=True)) if rows else ([], [], [])
    require_numbered(partitions, f"the offsets of consumer {registration.consumer!r}")
    return offsets, safe_offsets


def require_reachable(registration: Registration, partition: int, offset: int, next_index: int) -> None:
    """Refuse an offset past the partition's end, where the consumer would wait for ever.

    The caller must read ``next_index`` after the offset.
    """
    if not 0 <= offset <= next_index:
        raise unreadable_record(
            f"the offset of consumer {registration.consumer!r} on queue {registration.queue!r}, partition "
            f"{partition}",
            ValueError(f"it is {offset}, and the next row is {next_index}"),
        )


def advance(
    tx: Transaction,
    registration: Registration,
    moves: Mapping[str, Sequence[int]],
    *,
    safe: Literal["old", "new"] | None,
) -> None:
    """Move offsets by compare-and-set. ``moves`` has the columns ``partition``, in ascending order, ``old``
    and ``new``.

    ``safe`` says where the safe offsets move: to the new offsets if only the caller's own transaction depends
    on the moves, to the old offsets if those are in the checkpoint, or nowhere if it is None.
    """
    rows = {**moves, "safe": moves[safe] if safe else [0] * len(moves["partition"])}
    if tx.run_many("advance_position", rows, **registration.keys) < len(moves["partition"]):
        raise _moved_by_another(tx, registration, moves)


def _moved_by_another(
    tx: Transaction, registration: Registration, moves: Mapping[str, Sequence[int]]
) -> OffsetConflictError:
    subject = f"consumer {registration.consumer!r} on queue {registration.queue!r}"
    parameters = {"consumer": registration.consumer, "queue": registration.queue}
    current = {row.partition: row.next_index for row in tx.all("read_positions", **registration.keys)}
    all_moves = list(zip(moves["partition"], moves["old"], moves["new"], strict=True))
    # This transaction has moved some offsets to ``new``, but another program may have moved one there too.
    conflicting = (
        all_moves if len(all_moves) == 1 else [move for move in all_moves if current.get(move[0]) != move[2]]
    )
    if not conflicting:
        return OffsetConflictError(
            f"another program or query has moved {subject} to the same offsets: read its offsets and resume "
            "there",
            condition="OFFSET_CONFLICT.ADVANCE",
            **parameters,
        )
    partition, old, _ = conflicting[0]
    stored_offset = current.get(partition)
    position = "does not exist" if stored_offset is None else f"is at {stored_offset}"
    return OffsetConflictError(
        f"{subject}, partition {partition}, {position}, not at {old}: another program or query moved it; "
        "read its offsets and resume there",
        condition="OFFSET_CONFLICT.ADVANCE",
        **parameters,
        partition=partition,
        expected=old,
        found=stored_offset,
    )


def raise_safe(tx: Transaction, registration: Registration, safe: Sequence[int]) -> None:
    """Raise the safe offsets, and any offsets that are below them."""
    stored_safe = read_offsets(tx, registration)[1]
    raised = [
        partition for partition, (new, old) in enumerate(zip(safe, stored_safe, strict=False)) if old < new
    ]
    rows = {"partition": raised, "safe_index": [safe[partition] for partition in raised]}
    tx.run_many("raise_safe", rows, **registration.keys)


def seek(tx: Transaction, registration: Registration, offsets: Sequence[int], generation: int) -> None:
    """Set all offsets and safe offsets, with a new generation, so that older checkpoints are refused."""
    tx.run_many("set_position", _by_partition(offsets), **registration.keys)
    tx.run("set_generation", generation=generation, **registration.keys)


def new_generation(tx: Transaction) -> int:
    """Return a generation above all others of the store. Call this before locking anything else."""
    row = tx.one("new_generation", now=tx.now())
    if row is None:
        raise unreadable_record("the last generation", ValueError("no later one is possible"))
    return int(row.last_generation)


def lock_registrations(tx: Transaction, queue: QueueRecord) -> list[Registration]:
    """Lock and return all registrations on a queue, in the order of their consumers' names."""
    return [_registration(row) for row in tx.all("lock_registrations", queue_id=queue.queue_id)]


def add_partition_positions(
    tx: Transaction, registrations: Sequence[Registration], first: int, last: int
) -> None:
    """Insert positions at 0 for partitions [first, last) of registrations."""
    rows = {"partition": range(first, last), "next_index": [0] * (last - first)}
    for registration in registrations:
        tx.run_many("insert_position", rows, **registration.keys)
