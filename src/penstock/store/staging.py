"""Staging of segments: tasks write them, and readers see them only after the micro-batch is committed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import compress, count
from operator import attrgetter, not_

from penstock.errors import CommitRefusedError
from penstock.store.database import Database, Row, Transaction
from penstock.store.log.partition_log import Appended, append_task_segments, publish_segments
from penstock.store.log.payloads import PayloadOwner, store_payloads, write_objects
from penstock.store.log.segmenting import Segment
from penstock.store.log.written import SegmentIndex, TaskSegments
from penstock.store.postgres import staging_relations
from penstock.store.records.catalog import QueueRecord, require_columns, require_same_layout
from penstock.store.records.consumers import list_registrations
from penstock.store.records.staged import delete_staged_payloads, insert_staged, segments_of

_STAGING_CLOCK_SKEW = 86_400_000_000


@dataclass(frozen=True)
class Attempt:
    """One try of one task of a micro-batch (or epoch)."""

    app_id: str
    batch_id: int
    task: int
    attempt: str
    """Unique for each try. A retry and a speculative copy of a task are different attempts."""


class StagingLost(CommitRefusedError):
    """Rows that were staged for a micro-batch are gone. None of the micro-batch's rows are visible."""

    condition = "COMMIT_REFUSED.STAGING_LOST"


def stage_segments(
    database: Database,
    owner: PayloadOwner,
    attempt: Attempt,
    segments: Sequence[Segment],
    first: int,
    *,
    durable: bool = True,
) -> int:
    """Stage an attempt's segments, numbered from ``first``, in a separate transaction; return how many there
    are.

    Segments that are not ``durable`` become durable when their micro-batch is committed. If the database's
    machine fails before that, the commit detects that they are lost.
    """
    write_objects(database, owner, segments)
    attempt_numbers = count()

    def work(tx: Transaction) -> None:
        if next(attempt_numbers):
            _unstage(tx, attempt, first)
        stage(tx, owner, attempt, segments, first)

    database.run(work, durable=durable, idempotent=True)
    return len(segments)


def _unstage(tx: Transaction, attempt: Attempt, ordinal: int) -> None:
    """Drop an attempt's segments with the number ``ordinal`` or higher, if an earlier try has staged them."""
    deleted = tx.all(
        "delete_staged_from",
        app_id=attempt.app_id,
        batch_id=attempt.batch_id,
        attempt=attempt.attempt,
        ordinal=ordinal,
    )
    delete_staged_payloads(tx, deleted)


def stage(
    tx: Transaction, owner: PayloadOwner, attempt: Attempt, segments: Sequence[Segment], ordinal: int
) -> None:
    """Stage an attempt's segments; ``ordinal`` is the number of the first one.

    Raises
    ------
    QueueChanged
        If the rows are for a queue that does not have their columns.
    """
    if isinstance(owner, QueueRecord):
        require_columns(tx, owner, map(attrgetter("columns_id"), segments))
    insert_staged(
        tx,
        store_payloads(tx, segments),
        task=attempt.task,
        queue_id=owner.queue_id,
        app_id=attempt.app_id,
        batch_id=attempt.batch_id,
        attempt=attempt.attempt,
        ordinal=ordinal,
    )


def promote(
    tx: Transaction, queue: QueueRecord, app_id: str, batch_id: int, attempts: Mapping[str, int]
) -> Appended:
    """Make the segments of the listed attempts visible as one append, and drop everything else that was
    staged for micro-batches up to this one.

    ``attempts`` maps each acknowledged attempt to the number of segments that it staged.
    """
    staged = remove_records(tx, queue, app_id, batch_id)
    is_acknowledged = [row.batch_id == batch_id and row.attempt in attempts for row in staged]
    rows = [*compress(staged, is_acknowledged)]
    remaining = sum(row.segments for row in rows)
    if remaining != sum(attempts.values()):
        raise StagingLost(
            f"{app_id!r} staged {sum(attempts.values())} segments for its batch {batch_id}, but only "
            f"{remaining} are left: maintenance removed the others because of their age, or they were lost "
            "when the database's machine failed. No rows of the batch are visible. Restart the query, which "
            "repeats the micro-batch, or run the batch write again",
            batch_id=batch_id,
        )
    delete_staged_payloads(tx, compress(staged, map(not_, is_acknowledged)))
    if not rows:
        require_same_layout(tx, queue)
        return Appended()
    rows.sort(key=attrgetter("task", "attempt", "ordinal"))
    return publish_segments(tx, queue, segments_of(rows))


def publish_written(
    tx: Transaction, queue: QueueRecord, app_id: str, batch_id: int, written: Sequence[TaskSegments]
) -> Appended:
    """Make segments that tasks have written without using the database visible as one append, in the order of
    the tasks. Drop everything that was staged for micro-batches up to this one.
    """
    discard(tx, queue, app_id, batch_id)
    index = SegmentIndex.of(written)
    if not index.partition:
        require_same_layout(tx, queue)
    return append_task_segments(tx, queue, written, index)


def staged_records(tx: Transaction, owner: PayloadOwner, app_id: str, batch_id: int) -> list[Row]:
    """Return the records of the segments that an app has staged for a micro-batch."""
    return tx.all("find_staged", app_id=app_id, queue_id=owner.queue_id, batch_id=batch_id)


def remove_records(tx: Transaction, owner: PayloadOwner, app_id: str, batch_id: int) -> list[Row]:
    """Delete and return the records of the segments that an app staged for micro-batches up to ``batch_id``.
    Their payloads remain, and the caller is now responsible for them.
    """
    return tx.all("delete_staged_batch", app_id=app_id, queue_id=owner.queue_id, batch_id=batch_id)


def discard(tx: Transaction, owner: PayloadOwner, app_id: str, batch_id: int) -> None:
    """Drop everything that an app staged for micro-batches up to ``batch_id``."""
    delete_staged_payloads(tx, remove_records(tx, owner, app_id, batch_id))


def clean_up(database: Database, *, older_than: int) -> int:
    """Drop everything that was staged more than ``older_than`` microseconds ago, except by running queries.
    Return the number of segments and relations dropped.

    A query counts as running if it owns a consumer, or has staged something within ``older_than``. If a query
    has no consumer and its last task takes longer than that, its staged rows are dropped. Its commit is then
    refused, and it repeats the micro-batch.
    """

    def work(tx: Transaction) -> int:
        now = tx.now()
        # A timedelta may be too large for the database's integers.
        cutoff = min(max(now - older_than, 0), 2**62)
        # Rows that were staged while the clock was far ahead would not count as old for a long time.
        latest_valid = now + _STAGING_CLOCK_SKEW
        relations, apps = staging_relations.list_relations(tx), tx.all("staged_apps")
        stale_relations = [
            relation
            for relation in relations
            if relation.droppable and not cutoff <= relation.used_at <= latest_valid
        ]
        stale_apps = {row.app_id for row in apps if not cutoff <= row.oldest <= row.newest <= latest_valid}
        if not stale_apps and not stale_relations:
            return 0
        running = _apps_with_owners(tx, database.uuid)
        running |= {relation.app_id for relation in relations if cutoff <= relation.used_at <= latest_valid}
        running |= {row.app_id for row in apps if cutoff <= row.newest <= latest_valid}
        deleted = [
            row
            for app in sorted(stale_apps - running)
            for row in tx.all("delete_staged_before", app_id=app, created_at=cutoff, ahead=latest_valid)
        ]
        segments = delete_staged_payloads(tx, deleted)
        unused_relations = [relation for relation in stale_relations if relation.app_id not in running]
        for relation in unused_relations:
            staging_relations.drop(tx, relation.name)
        return segments + len(unused_relations)

    return database.run(work, idempotent=True)


def _apps_with_owners(tx: Transaction, store_uuid: str) -> set[str]:
    """Return the apps that own a consumer."""
    return {
        registration.app_id
        for registration in list_registrations(tx)
        if registration.app_id is not None and tx.owner_alive(registration.lock_name(store_uuid))
    }
