"""The sink's side: one transaction that makes a micro-batch (or epoch) visible, once."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from typing import Any, TypeVar

from penstock.commit.consumer_moves import lock_consumer, move_consumer, move_mark
from penstock.commit.micro_batch import BatchCommit
from penstock.commit.offsets import QueueOffset, plan_text
from penstock.errors import CheckpointMismatch, CheckpointRewound, CommitRefused
from penstock.store.database import Database, Transaction
from penstock.store.log import partition_log
from penstock.store.log.partition_log import Segment
from penstock.store.records import catalog, ledger
from penstock.store.records.catalog import QueueRecord
from penstock.store.records.consumers import Registration
from penstock.store.records.ledger import LedgerKey

logger = logging.getLogger("penstock.commit")

T = TypeVar("T")

OTHER_INPUT = "CHECKPOINT_MISMATCH.OTHER_INPUT"
"""The condition of a micro-batch that the sink has with other input."""


def commit_batch(database: Database, store_uuid: str, batch: BatchCommit[T]) -> T | None:
    """Commit a micro-batch; what its target says of it, or None when it had been committed before.

    Raises
    ------
    CommitRefused
        And its kinds: when committing would lose or repeat rows. Nothing is visible then.
    OffsetConflict
        When the consumer does not stand where the micro-batch starts.
    """
    published = database.run(lambda tx: _commit(tx, store_uuid, batch), idempotent=True)
    fields = {"sink": batch.sink.name, "app_id": batch.app_id, "batch": batch.batch_id, "rows": batch.rows}
    told = (batch.batch_id, batch.app_id, batch.sink)
    if published is None:
        logger.info(
            "micro-batch %d of app %s was in %s already", *told, extra={"action": "batch_repeated", **fields}
        )
    else:
        logger.debug(
            "micro-batch %d of app %s is in %s", *told, extra={"action": "batch_committed", **fields}
        )
    return published


def _commit(tx: Transaction, store_uuid: str, batch: BatchCommit[T]) -> T | None:
    moved = sorted(
        (source for source in batch.sources if source.consumer is not None),
        key=lambda source: source.identity,
    )
    # All commits lock in this order, before anything else.
    locked = [(source, lock_consumer(tx, source)) for source in moved if source.store == store_uuid]
    _refuse_rewound(tx, batch.key)
    before = ledger.enter(tx, batch.key, batch.ranges(), batch.rows, batch.logged)
    if before is not None:
        _same(batch, before.ranges)
        _settle(tx, batch, locked)
        return None
    refuse_gap(tx, batch.key, new_sink=batch.new_sink)
    _check_tasks(tx, batch)
    for source, registration in locked:
        move_consumer(tx, batch, source, registration)
    for source in moved:
        if source.store != store_uuid:
            move_mark(tx, batch, source)
    published = batch.sink.publish(tx, batch)
    if batch.logged is not None:
        tx.run("forget_logged", sink=batch.key.sink, app_id=batch.app_id, batch_id=batch.batch_id - 1)
    ledger.prune(tx, batch.key)
    return published


def refuse_gap(tx: Transaction, key: LedgerKey, *, new_sink: bool) -> None:
    """Refuse a micro-batch when the sink lacks the one before it: the sink's store was restored from an older backup.

    Parameters
    ----------
    new_sink
        Whether the sink may have nothing of the query although the checkpoint is not new.

    Raises
    ------
    CheckpointMismatch
    """
    if not key.batch_id or ledger.find(tx, key.before) is not None:
        return
    newest = ledger.newest(tx, key.sink, key.app_id, key.batch_id)
    if newest is not None or not new_sink:
        raise sink_behind(key.sink, key.batch_id, None if newest is None else newest.batch_id)


def sink_behind(sink: str, batch_id: int, last: int | None) -> CheckpointMismatch:
    """Make the error for a sink that lacks micro-batches which the checkpoint has committed."""
    has = "nothing of this query" if last is None else f"the query's micro-batches up to {last}"
    return CheckpointMismatch(
        f"the checkpoint has committed micro-batch {batch_id - 1}, and {sink} has {has}: was its store restored from an older "
        "backup? Then restore the checkpoint of the same moment; a new one resumes where the consumer stands, so seek that first "
        "where it is in another store. If the query writes to this sink for the first time, set allowNewSink=true",
        condition="CHECKPOINT_MISMATCH.SINK_BEHIND",
        batch_id=batch_id,
        last=last,
    )


def note_batch(
    database: Database,
    key: LedgerKey,
    origin: str,
    rows: int,
    *,
    new_sink: bool,
    logged: str | None = None,
) -> None:
    """Enter a micro-batch of a sink that may repeat rows, so that one that the sink has lost is noticed later.

    Raises
    ------
    CheckpointMismatch
        When the sink lacks the micro-batch before.
    """

    def work(tx: Transaction) -> None:
        if ledger.rewound(tx, key) is not None:
            # An old copy of the checkpoint repeats rows, as it may, and the sink lacks none.
            return
        if ledger.enter(tx, key, json.dumps([origin, []]), rows, logged) is None:
            refuse_gap(tx, key, new_sink=new_sink)
            ledger.prune(tx, key)

    database.run(work, idempotent=True)


def _same(batch: BatchCommit[Any], before: str) -> None:
    if batch.ranges() != before:
        raise CheckpointMismatch(
            f"app {batch.app_id!r} has committed micro-batch {batch.batch_id} into {batch.sink} before, "
            "with other input: the checkpoint is an old copy, or a new one under the appId of another. Use the newest "
            "checkpoint; a new one needs a new appId (leave the option out to get one)",
            condition=OTHER_INPUT,
            app_id=batch.app_id,
            batch_id=batch.batch_id,
            committed=before,
            found=batch.ranges(),
        )


def _settle(
    tx: Transaction, batch: BatchCommit[Any], locked: Sequence[tuple[QueueOffset, Registration]]
) -> None:
    """A replay of what had been committed: what it staged goes, and its plan is done."""
    batch.sink.discard(tx, batch)
    for source, registration in locked:
        if registration.plan == plan_text(source):
            tx.run("close_plan", **registration.keys)


def _refuse_rewound(tx: Transaction, key: LedgerKey) -> None:
    last = ledger.rewound(tx, key)
    if last is not None:
        raise CheckpointRewound(
            f"app {key.app_id!r} is at micro-batch {last} in {key.sink} and its checkpoint at {key.batch_id}, "
            "further back than the ledger remembers: it is an old copy; use the newest one",
            app_id=key.app_id,
            batch_id=key.batch_id,
            last=last,
        )


def _check_tasks(tx: Transaction, batch: BatchCommit[Any]) -> None:
    """What single tasks have appended before must be just what is committed now."""
    appended = ledger.tasks(tx, batch.key)
    if appended == dict(batch.tasks or {}):
        return
    if batch.tasks is None:
        raise CommitRefused(
            f"micro-batch {batch.batch_id} of app {batch.app_id!r} was begun with guarantee=idempotent, and rows of it "
            f"are in {batch.sink} already: let a run with that guarantee finish it first",
            app_id=batch.app_id,
            batch_id=batch.batch_id,
        )
    raise _unrepeatable(batch.key, appended, dict(batch.tasks))


def _unrepeatable(key: LedgerKey, before: object, now: object) -> CommitRefused:
    return CommitRefused(
        f"micro-batch {key.batch_id} of app {key.app_id!r} was cut into other tasks, or gave other rows, when it was "
        f"repeated (rows by task: {before} before, {now} now), so guarantee=idempotent cannot tell which of them are "
        "there already: repeat it with the settings it was begun with, and use guarantee=exactly_once from then on",
        app_id=key.app_id,
        batch_id=key.batch_id,
    )


def append_task(
    database: Database,
    sink: QueueRecord,
    key: LedgerKey | None,
    segments: Sequence[Segment],
    *,
    origin: str = "",
    covers: str = "",
    new_sink: bool = False,
) -> partition_log.Appended | None:
    """Append what one task has written; None when the task, or its micro-batch, did so before.

    Parameters
    ----------
    key
        The task's entry in the ledger, which makes a repeat a no-op; None for a sink that may repeat rows.
    origin
        The id of the checkpoint that the task's micro-batch belongs to.
    covers
        What tells the micro-batch's input from any other; empty where the task cannot know it.
    new_sink
        As in :class:`BatchCommit`.

    Raises
    ------
    CheckpointMismatch
        When another checkpoint, or a micro-batch of other input, has made the entry, or the sink lacks the micro-batch before.
    CheckpointRewound
        When the ledger does not reach back so far.
    CommitRefused
        When the task wrote another number of rows before, or the queue is not the one that the rows were placed for.
    """
    rows = sum(segment.rows for segment in segments)

    def work(tx: Transaction) -> partition_log.Appended | None:
        if key is not None and _appended_before(tx, key, origin, covers, rows, new_sink):
            return None
        appended = partition_log.append(tx, sink, segments)
        catalog.require_unchanged(tx, sink)
        return appended

    # Without a key it may repeat rows anyway.
    return database.run(work, idempotent=True)


def _appended_before(
    tx: Transaction, key: LedgerKey, origin: str, covers: str, rows: int, new_sink: bool
) -> bool:
    _refuse_rewound(tx, key)
    if ledger.find(tx, key.whole) is not None:
        return True
    written = ledger.task_input(tx, key)
    if written is not None:
        _same_input(key, written, origin, covers)
    before = ledger.enter(tx, key, f"{origin} {covers}", rows)
    if before is None:
        refuse_gap(tx, key, new_sink=new_sink)
        return False
    if before.rows != rows:
        raise _unrepeatable(key, {key.task: before.rows}, {key.task: rows})
    return True


def _same_input(key: LedgerKey, written: str, origin: str, covers: str) -> None:
    """Refuse a task when one of the same micro-batch has written rows of other input."""
    before_origin, _, before_covers = written.partition(" ")
    if before_origin != origin:
        raise CheckpointMismatch(
            f"app {key.app_id!r} has written micro-batch {key.batch_id} from another checkpoint before: a new "
            "checkpoint needs a new appId (leave the option out to get one)",
            app_id=key.app_id,
            batch_id=key.batch_id,
        )
    if covers and before_covers and before_covers != covers:
        raise CheckpointMismatch(
            f"tasks of app {key.app_id!r} have written rows of micro-batch {key.batch_id} into {key.sink} before, when it had "
            "other input: the checkpoint is an old copy, or its last entries were lost with the machine's power. Use the newest "
            "checkpoint, or a new one with guarantee=exactly_once",
            condition=OTHER_INPUT,
            app_id=key.app_id,
            batch_id=key.batch_id,
        )
