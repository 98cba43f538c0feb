"""Segments that a task has written and that nobody sees until the micro-batch is committed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from penstock.errors import CommitRefused
from penstock.store.database import Database, Transaction
from penstock.store.log.partition_log import (
    Appended,
    Segment,
    allocate_payloads,
    place,
    publish,
    store_payloads,
)
from penstock.store.postgres import staging_relations
from penstock.store.records.catalog import QueueRecord, require_unchanged
from penstock.store.records.consumers import list_registrations

_FAR_AHEAD = 86_400_000_000


class Place(Protocol):
    """What rows are staged for: a queue, or whatever has a number that no queue has."""

    @property
    def queue_id(self) -> int: ...


@dataclass(frozen=True)
class Attempt:
    """One try of one task of a micro-batch (or epoch)."""

    app_id: str
    batch_id: int
    task: int
    attempt: str
    """Unique for each try, so that a retried or speculative twin cannot be mistaken for it."""


def stage_segments(
    database: Database, place: Place, attempt: Attempt, segments: Sequence[Segment], first: int
) -> int:
    """Stage segments of an attempt, numbered from ``first``, in a transaction of their own; return how many."""
    database.run(lambda tx: stage(tx, place, attempt, segments, first), idempotent=True)
    return len(segments)


def stage(tx: Transaction, place: Place, attempt: Attempt, segments: Sequence[Segment], ordinal: int) -> None:
    """Write segments invisibly; ``ordinal`` is the number of the first one inside the attempt.

    It may be repeated: what an earlier call has written from that number on makes way.
    """
    key = {"app_id": attempt.app_id, "batch_id": attempt.batch_id, "attempt": attempt.attempt}
    before = tx.all("delete_staged_from", ordinal=ordinal, **key)
    drop_payloads(tx, [row.payload_id for row in before])
    ids = store_payloads(tx, segments)
    now = tx.now()
    tx.many(
        "insert_staged",
        [
            {
                "app_id": attempt.app_id,
                "batch_id": attempt.batch_id,
                "attempt": attempt.attempt,
                "task": attempt.task,
                "ordinal": ordinal + number,
                "queue_id": place.queue_id,
                "partition": segment.partition,
                "row_count": segment.rows,
                "bytes": segment.bytes,
                "payload_id": payload_id,
                "now": now,
            }
            for number, (segment, payload_id) in enumerate(zip(segments, ids, strict=True))
        ],
    )


def promote(
    tx: Transaction, queue: QueueRecord, app_id: str, batch_id: int, attempts: Mapping[str, int]
) -> Appended:
    """Make the listed attempts visible as one append and drop everything else staged up to the batch.

    Parameters
    ----------
    attempts
        The number of segments that each acknowledged attempt staged.

    Raises
    ------
    CommitRefused
        When what an attempt staged is not all there any more, or the rows would go to partitions where they do not
        belong by now.
    """
    staged = take(tx, queue, app_id, batch_id)
    rows = [row for row in staged if row.batch_id == batch_id and row.attempt in attempts]
    if len(rows) != sum(attempts.values()):
        raise CommitRefused(
            f"{app_id!r} staged {sum(attempts.values())} segments for its batch {batch_id} and {len(rows)} are left: they were "
            "swept, as too old; nothing of the batch is visible. Restart the query, it repeats the micro-batch; a batch "
            "write is to be run again",
            batch_id=batch_id,
        )
    kept = {row.payload_id for row in rows}
    drop_payloads(tx, [row.payload_id for row in staged if row.payload_id not in kept])
    if not rows:
        require_unchanged(tx, queue)
        return Appended({})
    rows.sort(key=lambda row: (row.partition, row.task, row.attempt, row.ordinal))
    places = place(tx, queue, [(row.partition, row.row_count, row.bytes) for row in rows])
    # The id is taken under the partitions' locks, so that append ids ascend inside each partition.
    appended = publish(tx, queue, places, [row.payload_id for row in rows], allocate_payloads(tx, 1)[0])
    require_unchanged(tx, queue)
    return appended


def take(tx: Transaction, place: Place, app_id: str, batch_id: int) -> list[Any]:
    """Forget what an app staged for micro-batches up to ``batch_id``; the payloads are the caller's now."""
    return tx.all("delete_staged_batch", app_id=app_id, queue_id=place.queue_id, batch_id=batch_id)


def discard(tx: Transaction, place: Place, app_id: str, batch_id: int) -> None:
    """Drop what an app staged for micro-batches up to ``batch_id``."""
    drop_payloads(tx, [row.payload_id for row in take(tx, place, app_id, batch_id)])


def drop_payloads(tx: Transaction, payload_ids: Sequence[int]) -> None:
    tx.many("delete_payload", [{"payload_id": payload_id} for payload_id in sorted(payload_ids)])


def sweep(database: Database, store_uuid: str, *, older_than: int) -> int:
    """Drop what was staged more than ``older_than`` microseconds ago, but not that of running queries; the number of segments,
    and of relations, that went.

    A query is known to run by the consumer that it owns. Without one its micro-batch in hand loses its staging to a sweep,
    is refused when it commits, and repeated.
    """

    def work(tx: Transaction) -> int:
        now = tx.now()
        # A database's integers end where those of a timedelta go on.
        before = min(max(now - older_than, 0), 2**62)
        # What was staged under a clock that was far ahead would not be old for as long.
        ahead = now + _FAR_AHEAD
        aged = [each for each in staging_relations.listed(tx) if not before <= each.created_at <= ahead]
        old = {row.app_id for row in tx.all("staged_apps") if not before <= row.oldest <= ahead}
        running = _running(tx, store_uuid) if old or aged else set()
        dead = sorted(old - running)
        gone = [
            row
            for app in dead
            for row in tx.all("delete_staged_before", app_id=app, created_at=before, ahead=ahead)
        ]
        drop_payloads(tx, [row.payload_id for row in gone])
        idle = [relation for relation in aged if relation.app_id not in running]
        for relation in idle:
            staging_relations.drop(tx, relation.name)
        return len(gone) + len(idle)

    return database.run(work, idempotent=True)


def _running(tx: Transaction, store_uuid: str) -> set[str]:
    """The apps that own a consumer now."""
    return {
        each.app_id
        for each in list_registrations(tx)
        if each.app_id is not None and tx.owner_alive(each.lock_name(store_uuid))
    }
