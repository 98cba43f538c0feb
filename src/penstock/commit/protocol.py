"""The sink's side of the protocol: one transaction makes a micro-batch (or epoch) visible exactly once and
moves its consumers.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from typing import TypeVar

from penstock.arguments import brief
from penstock.commit.binding import bound_error, mark_name
from penstock.commit.micro_batch import BatchCommit
from penstock.commit.offsets import QueueOffset, pad, plan_text
from penstock.commit.owner import require_owned, require_owner
from penstock.errors import (
    CheckpointMismatchError,
    CheckpointRewoundError,
    CommitRefusedError,
    OffsetConflictError,
    PlanMismatchError,
)
from penstock.json_text import parse_record, unreadable_record
from penstock.store.database import Database, Transaction
from penstock.store.log import partition_log
from penstock.store.log.payloads import write_objects
from penstock.store.log.segmenting import Segment
from penstock.store.records import consumers, ledger
from penstock.store.records.catalog import QueueRecord, describe_sink
from penstock.store.records.consumers import Registration
from penstock.store.records.ledger import LedgerEntry, LedgerKey

logger = logging.getLogger("penstock.commit")

T = TypeVar("T")

OTHER_INPUT = "CHECKPOINT_MISMATCH.OTHER_INPUT"
"""The condition for a micro-batch that the sink has committed with different input."""


def commit_batch(database: Database, batch: BatchCommit[T]) -> T | None:
    """Commit a micro-batch; return its target's result, or None if it was already committed.

    A commit that would lose or repeat rows is refused. None of its rows become visible.
    """
    published = database.run(lambda tx: _commit(tx, database.uuid, batch), idempotent=True)
    fields = {"sink": batch.sink.name, "app_id": batch.app_id, "batch": batch.batch_id, "rows": batch.rows}
    arguments = (batch.batch_id, batch.app_id, batch.sink)
    if published is None:
        logger.info(
            "micro-batch %d of app %s was already committed to %s",
            *arguments,
            extra={"action": "batch_repeated", **fields},
        )
    else:
        logger.debug(
            "micro-batch %d of app %s is committed to %s",
            *arguments,
            extra={"action": "batch_committed", **fields},
        )
    return published


def _commit(tx: Transaction, store_uuid: str, batch: BatchCommit[T]) -> T | None:
    batch.sink.prepare(tx, batch)
    consumer_sources = sorted(
        (source for source in batch.sources if source.consumer is not None),
        key=lambda source: source.identity,
    )
    # All commits take their locks in this order.
    locked = [
        (source, consumers.find_registration(tx, source.consumer or "", source.queue, lock=True))
        for source in consumer_sources
        if source.store == store_uuid
    ]
    entries = ledger.adjacent_entries(tx, batch.key)
    if entries.empty:
        _refuse_rewound(tx, batch.key)
    existing = ledger.insert_entry(tx, batch.key, batch.ranges(), batch.rows, batch.logged)
    if existing is not None:
        _require_same_input(batch, existing.ranges)
        _finish_replay(tx, batch, locked)
        return None
    # Another driver may have committed the previous micro-batch since.
    previous = entries.previous or refuse_gap(tx, batch.key, new_sink=batch.new_sink)
    if previous is not None:
        _require_contiguous(batch, previous)
    _check_tasks(batch, entries.tasks)
    for source, registration in locked:
        _move_consumer(tx, batch, source, registration)
    for source in consumer_sources:
        if source.store != store_uuid:
            _move_mark(tx, batch, source)
    published = batch.sink.publish(tx, batch)
    # Oldest entries first: dropping a queue deletes its entries in the same order.
    ledger.prune(tx, batch.key)
    return published


def refuse_gap(tx: Transaction, key: LedgerKey, *, new_sink: bool) -> LedgerEntry | None:
    """Refuse a micro-batch if the sink lacks the previous one because its store was restored from an older
    backup. A ``new_sink`` may lack all commits of the query although the checkpoint is not new.

    Return the entry of the previous micro-batch, if any.
    """
    previous = ledger.find_entry(tx, key.before) if key.batch_id else None
    if key.batch_id and previous is None:
        newest = ledger.newest_entry(tx, key.sink, key.app_id, key.batch_id)
        if newest is not None or not new_sink:
            last = None if newest is None else newest.batch_id
            raise sink_behind_error(describe_sink(key.sink), key.batch_id, last)
    return previous


def _require_contiguous(batch: BatchCommit[T], previous: LedgerEntry) -> None:
    """Refuse a micro-batch that does not begin where the previous one ended in the sink.

    Another driver may have committed a different micro-batch while this driver was suspended. This driver
    mistakes it for its own, and resumes where its own would have ended.
    """
    record_name = f"the ledger of {batch.sink}"
    previous_input = parse_record(previous.ranges, record_name, list)
    try:
        ends = {tuple(line[:4]): tuple(map(int, line[5])) for line in previous_input[1]}
    except (IndexError, TypeError, ValueError, OverflowError) as error:
        raise unreadable_record(record_name, error) from None
    for source in batch.sources:
        end = ends.get(source.identity)
        if end is not None and pad(end, len(source.start)) != source.start:
            raise CheckpointMismatchError(
                f"micro-batch {batch.batch_id} of app {batch.app_id!r} begins at "
                f"{brief(str(list(source.start)))} of queue {source.queue!r}, but in {batch.sink} the "
                f"previous micro-batch ended at {brief(str(list(end)))}: another driver of the query has "
                "committed it. Restart the query, and run only one driver for it",
                condition=OTHER_INPUT,
                app_id=batch.app_id,
                batch_id=batch.batch_id,
            )


def sink_behind_error(sink: str, batch_id: int, last: int | None) -> CheckpointMismatchError:
    """Return the error for a sink without micro-batches that the checkpoint has committed."""
    description = "nothing of this query" if last is None else f"the query's micro-batches up to {last}"
    return CheckpointMismatchError(
        f"the checkpoint has committed micro-batch {batch_id - 1}, but {sink} has {description}: if its "
        "store was restored from an older backup, restore the checkpoint of the same time. If the sink was "
        "recreated, or the query writes to it for the first time, set allowNewSink=true",
        condition="CHECKPOINT_MISMATCH.SINK_BEHIND",
        batch_id=batch_id,
        last=last,
    )


def record_batch(
    database: Database,
    key: LedgerKey,
    origin: str,
    rows: int,
    *,
    new_sink: bool,
    logged: str | None = None,
) -> None:
    """Record a micro-batch of a sink that may repeat rows, so that later commits notice if one was lost."""

    def work(tx: Transaction) -> None:
        if ledger.newest_batch_if_rewound(tx, key) is not None:
            # An old copy of the checkpoint may repeat rows, but the sink lacks no rows.
            return
        if ledger.insert_entry(tx, key, json.dumps([origin, []]), rows, logged) is None:
            refuse_gap(tx, key, new_sink=new_sink)
            ledger.prune(tx, key)

    database.run(work, idempotent=True)


def _require_same_input(batch: BatchCommit[T], committed: str) -> None:
    if batch.ranges() != committed:
        raise CheckpointMismatchError(
            f"app {batch.app_id!r} already committed micro-batch {batch.batch_id} to {batch.sink} with "
            "other input: the checkpoint is an old copy, or a new one with the appId of another checkpoint. "
            "Use the newest checkpoint; a new checkpoint needs a new appId",
            condition=OTHER_INPUT,
            app_id=batch.app_id,
            batch_id=batch.batch_id,
            committed=committed,
            found=batch.ranges(),
        )


def _finish_replay(
    tx: Transaction, batch: BatchCommit[T], locked: Sequence[tuple[QueueOffset, Registration]]
) -> None:
    """Finish the replay of a committed micro-batch: drop the rows that it staged, and close its plan.

    A suspended driver may have read the rows of an epoch that its successor has committed. It must not take
    that epoch for its own, so check the owner.
    """
    batch.sink.discard(tx, batch)
    for source, registration in locked:
        if source.unplanned:
            require_owner(registration, source.epoch, source.owner, source.generation)
        if registration.plan == plan_text(source):
            tx.run("close_plan", **registration.keys)


def _refuse_rewound(tx: Transaction, key: LedgerKey) -> None:
    last = ledger.newest_batch_if_rewound(tx, key)
    if last is not None:
        raise CheckpointRewoundError(
            f"app {key.app_id!r} has committed micro-batch {last} to {key.sink}, but its checkpoint is at "
            f"{key.batch_id}, which the ledger no longer has: the checkpoint is an old copy; use the newest "
            "one",
            app_id=key.app_id,
            batch_id=key.batch_id,
            last=last,
        )


def _check_tasks(batch: BatchCommit[T], appended_rows: Mapping[int, int]) -> None:
    """Require that the tasks have appended exactly the rows that this commit covers."""
    if appended_rows == dict(batch.tasks or {}):
        return
    if batch.tasks is None:
        raise CommitRefusedError(
            f"micro-batch {batch.batch_id} of app {batch.app_id!r} began with guarantee=idempotent, and some "
            f"of its rows are already in {batch.sink}: finish it with that guarantee first",
            condition="COMMIT_REFUSED.NOT_REPEATABLE",
            app_id=batch.app_id,
            batch_id=batch.batch_id,
        )
    raise _not_repeatable_error(batch.key, dict(appended_rows), dict(batch.tasks))


def _not_repeatable_error(key: LedgerKey, previous: object, current: object) -> CommitRefusedError:
    return CommitRefusedError(
        f"micro-batch {key.batch_id} of app {key.app_id!r} had other tasks or other rows when it was "
        f"repeated (rows by task: {previous} before, {current} now), so it is unknown which rows the sink "
        "has: repeat it with its original settings, and use guarantee=exactly_once from then on",
        condition="COMMIT_REFUSED.NOT_REPEATABLE",
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
    input_id: str = "",
    new_sink: bool = False,
) -> partition_log.Appended | None:
    """Append the rows of one task; return None if the ledger already has the task or its micro-batch.

    ``key`` is the task's entry in the ledger, which makes a repeat a no-op. It is None for a sink that may
    repeat rows. ``origin`` is the id of the checkpoint. ``input_id`` identifies the micro-batch's input, and
    is empty if the task does not know it.
    """
    if key is None:
        return partition_log.append_at_least_once(database, sink, segments)
    rows = sum(segment.rows for segment in segments)
    write_objects(database, sink, segments)

    def work(tx: Transaction) -> partition_log.Appended | None:
        if _is_already_appended(tx, key, origin, input_id, rows, new_sink):
            return None
        return partition_log.append(tx, sink, segments)

    return database.run(work, idempotent=True)


def _is_already_appended(
    tx: Transaction, key: LedgerKey, origin: str, input_id: str, rows: int, new_sink: bool
) -> bool:
    if ledger.find_entry(tx, key.whole) is not None:
        return True
    stored_input = ledger.task_input(tx, key)
    if stored_input is not None:
        _require_same_task_input(key, stored_input, origin, input_id)
    existing = ledger.insert_entry(tx, key, f"{origin} {input_id}", rows)
    if existing is None:
        # If the task was suspended, the checks above ran long ago. Another driver may have committed the
        # micro-batch since, and the ledger may have deleted its entry.
        _refuse_rewound(tx, key)
        if ledger.find_entry(tx, key.whole) is not None:
            raise _not_repeatable_error(key, {}, {key.task: rows})
        refuse_gap(tx, key, new_sink=new_sink)
        return False
    if existing.rows != rows:
        raise _not_repeatable_error(key, {key.task: existing.rows}, {key.task: rows})
    return True


def _require_same_task_input(key: LedgerKey, stored: str, origin: str, input_id: str) -> None:
    """Refuse a task if another task of the same micro-batch has written rows of other input."""
    stored_origin, _, stored_input = stored.partition(" ")
    if stored_origin != origin:
        raise CheckpointMismatchError(
            f"app {key.app_id!r} already wrote micro-batch {key.batch_id} from another checkpoint: a new "
            "checkpoint needs a new appId (leave the option out to get one)",
            condition="CHECKPOINT_MISMATCH.OTHER_CHECKPOINT",
            app_id=key.app_id,
            batch_id=key.batch_id,
        )
    if input_id and stored_input and stored_input != input_id:
        raise CheckpointMismatchError(
            f"tasks of app {key.app_id!r} already wrote rows of micro-batch {key.batch_id} to {key.sink} "
            "with other input: the checkpoint is an old copy, or lost its last entries in a power failure. "
            "Use the newest checkpoint, or a new one with guarantee=exactly_once",
            condition=OTHER_INPUT,
            app_id=key.app_id,
            batch_id=key.batch_id,
        )


def _move_consumer(
    tx: Transaction, batch: BatchCommit[T], source: QueueOffset, registration: Registration
) -> None:
    """Move a consumer of this store from the start of a micro-batch to its end."""
    if source.unplanned:
        require_owned(tx, registration, source)
    source.require(source.store, registration.queue, registration.consumer, registration.generation)
    if source.empty:
        _require_unmoved(tx, source, registration)
        _bind(tx, batch, source, registration)
        return
    if not source.unplanned:
        _require_planned(batch, source, registration)
    _bind(tx, batch, source, registration)
    try:
        # An owner that stores no plans has logged everything up to the start.
        consumers.advance(tx, registration, source.moves(), safe="old" if source.unplanned else None)
    except OffsetConflictError as conflict:
        raise _moved_error(source, *_offset_difference(source, conflict)) from None
    if registration.plan_epoch is not None:
        tx.run("close_plan", **registration.keys)


def _offset_difference(
    source: QueueOffset, conflict: OffsetConflictError
) -> tuple[dict[int, int], dict[int, int]]:
    """Return the expected and the actual offsets of a consumer, in the partitions where they differ."""
    parameters = conflict.parameters
    if "partition" in parameters:
        return {parameters["partition"]: parameters["expected"]}, {
            parameters["partition"]: parameters["found"]
        }
    # Another program has moved the consumer to the end of the micro-batch, in some or all partitions.
    moves = source.moves()
    expected, found = (dict(zip(moves["partition"], moves[column], strict=True)) for column in ("old", "new"))
    return expected, found


def _moved_error(source: QueueOffset, expected: dict[int, int], found: dict[int, int]) -> OffsetConflictError:
    return OffsetConflictError(
        f"consumer {source.consumer!r} on queue {source.queue!r} is at {found}, but this query's checkpoint "
        f"is at {expected}: another query or program moved the consumer. Start the query with a new "
        "checkpoint, which resumes at the consumer's offset. Only if this query's sink lacks the rows in "
        f"between, seek the consumer to {expected} first",
        condition="OFFSET_CONFLICT.CHECKPOINT",
        consumer=source.consumer,
        queue=source.queue,
        expected=expected,
        found=found,
    )


def _require_planned(batch: BatchCommit[T], source: QueueOffset, registration: Registration) -> None:
    planned = plan_text(source)
    if not registration.plan_open or registration.plan != planned:
        raise PlanMismatchError(
            f"micro-batch {batch.batch_id} of app {batch.app_id!r} differs from the plan of the owner of "
            f"consumer {source.consumer!r}: another query took over the consumer, or the checkpoint is a "
            "copy. Use each consumer in only one query",
            consumer=source.consumer,
            committed=planned,
            planned=registration.plan,
        )


def _require_unmoved(tx: Transaction, source: QueueOffset, registration: Registration) -> None:
    """Check the offsets of a micro-batch without new rows, which has no plan."""
    offsets = consumers.read_offsets(tx, registration)[0]
    expected = pad(source.end, len(offsets))
    if tuple(offsets) != expected:
        raise _moved_error(source, dict(enumerate(expected)), dict(enumerate(offsets)))


def _bind(tx: Transaction, batch: BatchCommit[T], source: QueueOffset, registration: Registration) -> None:
    if registration.app_id == batch.app_id:
        return
    if registration.app_id is not None:
        _refuse_bound(batch, source, registration.app_id)
    tx.run("bind_app", app_id=batch.app_id, **registration.keys)


def _refuse_bound(batch: BatchCommit[T], source: QueueOffset, app_id: str) -> None:
    if batch.stateful and not batch.rebind:
        raise bound_error(source.queue, source.consumer, app_id, batch.app_id)


def _move_mark(tx: Transaction, batch: BatchCommit[T], source: QueueOffset) -> None:
    """Move this store's marks for a consumer of another store. The consumer follows later."""
    name = mark_name(source.store, source.queue, source.consumer, batch.sink.ledger_name)
    _fence_mark(tx, batch, source, name)
    marks = {row.partition: row for row in tx.all("read_marks", source=name)}
    for bound in {mark.app_id for mark in marks.values()} - {batch.app_id}:
        _refuse_bound(batch, source, bound)
    where = {"source": name, "app_id": batch.app_id}
    has_mark = [partition in marks for partition in range(len(source.end))]
    new_marks = source.moves(partition for partition, is_known in enumerate(has_mark) if not is_known)
    existing_marks = source.moves(partition for partition, is_known in enumerate(has_mark) if is_known)
    moved_count = tx.run_many("insert_mark", new_marks, **where) + tx.run_many(
        "advance_mark", existing_marks, **where
    )
    if moved_count < len(new_marks["partition"]) + len(existing_marks["partition"]):
        raise _mark_conflict(batch, source, {partition: mark.next_index for partition, mark in marks.items()})


def _fence_mark(tx: Transaction, batch: BatchCommit[T], source: QueueOffset, name: str) -> None:
    """Refuse a micro-batch whose consumer generation is older than one that this store has committed."""
    mark_source = {"source": name, "app_id": batch.app_id, "generation": source.generation}
    if tx.run("lock_marked_source", **mark_source) or tx.run("insert_marked_source", **mark_source):
        return
    if tx.run("raise_marked_source", **mark_source):
        # The marks start again after a seek.
        tx.run("delete_marks", source=name)
        return
    raise CheckpointMismatchError(
        f"consumer {source.consumer!r} on queue {source.queue!r} was moved by a seek or registered again, "
        f"and {batch.sink} has rows from after that. Start the query with a new checkpoint, which resumes "
        "at the consumer's offset. If that is refused too, the source's store was restored from a backup "
        "older than that move: seek the consumer to where the query should resume, and use another new "
        "checkpoint",
        condition="CHECKPOINT_MISMATCH.CONSUMER_MOVED",
        consumer=source.consumer,
        queue=source.queue,
    )


def _mark_conflict(
    batch: BatchCommit[T], source: QueueOffset, marks: Mapping[int, int]
) -> OffsetConflictError:
    # Name the offsets of all partitions, so that one seek is enough.
    starts = enumerate(source.start)
    seek_offsets = {number: marks[number] for number, start in starts if marks.get(number, start) != start}
    moves = source.moves()["partition"]
    partition = next((number for number in moves if number in seek_offsets), moves[0])
    mark = marks.get(partition)
    return OffsetConflictError(
        f"{batch.sink} already has the rows of consumer {source.consumer!r} on queue {source.queue!r}, "
        f"partition {partition}, up to {mark}, but the micro-batch starts at {source.start[partition]}: "
        f"seek the consumer to {seek_offsets}",
        condition="OFFSET_CONFLICT.SINK",
        consumer=source.consumer,
        queue=source.queue,
        partition=partition,
        expected=source.start[partition],
        found=mark,
    )
