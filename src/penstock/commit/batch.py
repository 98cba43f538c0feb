"""The sink's side: one transaction that makes a micro-batch (or epoch) visible, once."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field

from penstock.commit.offsets import QueueOffset
from penstock.errors import (
    CheckpointMismatch,
    CheckpointRewound,
    CommitRefused,
    ConsumerBound,
    OffsetConflict,
    PlanMismatch,
)
from penstock.store import consumers, ledger, log, staging
from penstock.store.catalog import QueueRecord, find_queue
from penstock.store.consumers import Registration
from penstock.store.database import Database, Transaction
from penstock.store.ledger import LedgerKey
from penstock.store.log import Segment


@dataclass(frozen=True)
class BatchCommit:
    """A micro-batch whose tasks are done."""

    sink: QueueRecord
    app_id: str
    batch_id: int
    rows: int
    sources: Sequence[QueueOffset] = ()
    """What it covers of each source of ours."""
    attempts: dict[str, int] = field(default_factory=dict)
    """The number of segments that each acknowledged attempt staged."""
    stateful: bool = False
    """Whether the query keeps state, so that another checkpoint could not carry it on."""
    rebind: bool = False
    """Whether a stateful query may take a consumer over from another checkpoint all the same."""

    @property
    def key(self) -> LedgerKey:
        return LedgerKey(sink_name(self.sink), self.app_id, self.batch_id)


def sink_name(sink: QueueRecord) -> str:
    return f"queue:{sink.name}:{sink.generation}"


def commit_batch(database: Database, store_uuid: str, batch: BatchCommit) -> log.Appended | None:
    """Commit a micro-batch; what it appended, or None when it had been committed before.

    Raises
    ------
    CommitRefused
        And its kinds: when committing would lose or repeat rows. Nothing is visible then.
    OffsetConflict
        When the consumer does not stand where the micro-batch starts.
    """
    return database.run(lambda tx: _commit(tx, store_uuid, batch), idempotent=True)


def _commit(tx: Transaction, store_uuid: str, batch: BatchCommit) -> log.Appended | None:
    moved = [source for source in batch.sources if source.consumer is not None]
    own = sorted(
        (source for source in moved if source.store == store_uuid), key=lambda source: source.identity
    )
    locked = [(source, _locked(tx, source)) for source in own]
    ranges = _ranges(batch.sources)
    _refuse_rewound(tx, batch)
    before = ledger.enter(tx, batch.key, ranges, batch.rows)
    if before is not None:
        _same(batch, ranges, before.ranges)
        return None
    for source, registration in locked:
        _move(tx, batch, source, registration)
    for source in moved:
        if source.store != store_uuid:
            _move_mark(tx, batch, source)
    if find_queue(tx, batch.sink.name) != batch.sink:
        raise CommitRefused(
            f"queue {batch.sink.name!r} was changed while micro-batch {batch.batch_id} was written: "
            "restart the query, it repeats the micro-batch"
        )
    appended = staging.promote(tx, batch.sink, batch.app_id, batch.batch_id, batch.attempts)
    ledger.prune(tx, batch.key)
    return appended


def _locked(tx: Transaction, source: QueueOffset) -> Registration:
    return consumers.find_registration(tx, source.consumer or "", source.queue, lock=True)


def _ranges(sources: Sequence[QueueOffset]) -> str:
    """What the ledger remembers of a micro-batch's input."""
    lines = [[*source.identity, list(source.start), list(source.end)] for source in sources]
    return json.dumps(sorted(lines))


def _same(batch: BatchCommit, ranges: str, before: str) -> None:
    if ranges != before:
        raise CheckpointMismatch(
            f"app {batch.app_id!r} has committed micro-batch {batch.batch_id} into queue {batch.sink.name!r} before, "
            "with other input: a new checkpoint needs a new appId (leave the option out to get one)",
            app_id=batch.app_id,
            batch_id=batch.batch_id,
            committed=before,
            found=ranges,
        )


def _refuse_rewound(tx: Transaction, batch: BatchCommit) -> None:
    last = ledger.last_batch(tx, batch.key)
    oldest = None if last is None else last - ledger.KEEP
    if oldest is not None and batch.batch_id < oldest:
        raise CheckpointRewound(
            f"app {batch.app_id!r} is at micro-batch {last} in queue {batch.sink.name!r} and its checkpoint at "
            f"{batch.batch_id}, further back than the ledger remembers: it is an old copy; use the newest one",
            app_id=batch.app_id,
            batch_id=batch.batch_id,
            last=last,
        )


def _move(tx: Transaction, batch: BatchCommit, source: QueueOffset, registration: Registration) -> None:
    source.require(source.store, registration.queue, registration.consumer, registration.generation)
    _bind(tx, batch, source, registration)
    if source.empty:
        return
    planned = json.dumps(source.to_dict())
    if not registration.plan_open or registration.plan != planned:
        raise PlanMismatch(
            f"micro-batch {batch.batch_id} of app {batch.app_id!r} is not what the owner of consumer "
            f"{source.consumer!r} has planned: another query took the consumer over, or the checkpoint is a copy; "
            "run one query for each consumer",
            consumer=source.consumer,
            committed=planned,
            planned=registration.plan,
        )
    for partition, (old, new) in enumerate(zip(source.start, source.end, strict=True)):
        if old != new:
            consumers.advance(tx, registration, partition, old, new, safe=False)
    tx.run("close_plan", **registration.keys)


def _bind(tx: Transaction, batch: BatchCommit, source: QueueOffset, registration: Registration) -> None:
    if registration.app_id == batch.app_id:
        return
    if registration.app_id is not None:
        _refuse_bound(batch, source, registration.app_id)
    tx.run("bind_app", app_id=batch.app_id, **registration.keys)


def _refuse_bound(batch: BatchCommit, source: QueueOffset, app_id: str) -> None:
    if batch.stateful and not batch.rebind:
        raise ConsumerBound(
            f"consumer {source.consumer!r} on queue {source.queue!r} belongs to the checkpoint of app {app_id!r}; a "
            "stateful query with a new checkpoint would go on from there without its state. Use that checkpoint, or "
            "seek the consumer and drop the query's output, or set allowNewCheckpoint=true to start with empty state",
            consumer=source.consumer,
            bound=app_id,
            app_id=batch.app_id,
        )


def _move_mark(tx: Transaction, batch: BatchCommit, source: QueueOffset) -> None:
    """A consumer of another store: this store's own mark stands for it, and the consumer follows."""
    name = json.dumps([*source.identity, sink_name(batch.sink)])
    marks = {row.partition: row for row in tx.all("read_marks", source=name)}
    for bound in {row.app_id for row in marks.values()} - {batch.app_id}:
        _refuse_bound(batch, source, bound)
    for partition, (old, new) in enumerate(zip(source.start, source.end, strict=True)):
        if old == new:
            continue
        where = {"source": name, "partition": partition, "app_id": batch.app_id}
        if not tx.run("insert_mark", next_index=new, **where) and not tx.run("advance_mark", old=old, new=new, **where):
            raise OffsetConflict(
                f"queue {batch.sink.name!r} already has the rows of consumer {source.consumer!r} on queue "
                f"{source.queue!r}, partition {partition}, up to {marks[partition].next_index}, and the micro-batch "
                f"starts at {old}: seek the consumer to {{{partition}: {marks[partition].next_index}}}",
                consumer=source.consumer,
                queue=source.queue,
                partition=partition,
                expected=old,
                found=marks[partition].next_index,
            )


def append_task(
    database: Database, sink: QueueRecord, key: LedgerKey, segments: Sequence[Segment]
) -> log.Appended | None:
    """Append what one task of an idempotent sink has written; None when the task did so before."""

    def work(tx: Transaction) -> log.Appended | None:
        if ledger.enter(tx, key, "", sum(segment.rows for segment in segments)) is not None:
            return None
        return log.append(tx, sink, segments)

    return database.run(work, idempotent=True)
