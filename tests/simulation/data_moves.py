"""What changes queues, consumers, checkpoints and stores under a query.

Each is called between two tasks, with random numbers of its own.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from functools import partial
from typing import Any

import pyarrow as pa

from penstock.errors import CommitOutcomeUnknownError, PenstockError
from penstock.queue.maintenance import trim_partition
from tests.simulation.objects import ORPHAN_SECONDS
from tests.simulation.operator import Late, Operator
from tests.simulation.scenario import (
    ADDED,
    CONSUMER,
    FOREIGN,
    SINK,
    SOURCE,
    WIDER,
)
from tests.simulation.scheduler import Process
from tests.support.auditor import Violation

MISMATCH, SOURCE_BEHIND, SINK_BEHIND, OTHER_INPUT = (
    "CHECKPOINT_MISMATCH",
    "CHECKPOINT_MISMATCH.SOURCE_BEHIND",
    "CHECKPOINT_MISMATCH.SINK_BEHIND",
    "CHECKPOINT_MISMATCH.OTHER_INPUT",
)
CONSUMER_MOVED = "CHECKPOINT_MISMATCH.CONSUMER_MOVED"
REWOUND, CONFLICT, LOST = "CHECKPOINT_REWOUND", "OFFSET_CONFLICT", "DATA_LOST"
NO_QUEUE, REFUSED = "QUEUE_NOT_FOUND", "COMMIT_REFUSED"
"""Conditions that a query may be refused with."""


# The queues.


def grow_source(op: Operator, rng: random.Random) -> None:
    op.with_store(op.source, lambda store: store.queue(SOURCE).add_partitions(1 + rng.randrange(2)))


def grow_sink(op: Operator, rng: random.Random) -> None:
    if op.scenario.sink != "table":
        op.with_store(op.sink, lambda store: store.queue(SINK).add_partitions(1 + rng.randrange(2)))


def add_columns(op: Operator, rng: random.Random) -> None:
    server, name = rng.choice([(op.source, SOURCE), (op.sink, SINK)])
    if name == SINK and op.scenario.sink == "table":
        return

    def work(store: Any) -> None:
        queue = store.queue(name)
        if ADDED not in queue.schema.names:
            queue.add_columns(pa.schema([(ADDED, pa.string())]))

    op.change_columns(server, work)


def widen_columns(op: Operator, rng: random.Random) -> None:
    server, name = rng.choice([(op.source, SOURCE), (op.sink, SINK)])
    if name == SOURCE or op.scenario.sink != "table":
        op.change_columns(server, lambda store: store.queue(name).widen_columns(WIDER))


def recreate_sink(op: Operator, rng: random.Random) -> None:
    """The sink is dropped with all its rows, and recreated."""
    if op.scenario.sink == "table":
        return

    def work(store: Any) -> None:
        op.history.recreated = True
        op.history.foreign.clear()
        with suppress(CommitOutcomeUnknownError):
            store.drop_queue(SINK)
        op.pass_over({each for rows in op.reader().source for each in rows})
        op.create_sink(store)

    # A driver that wakes writes to the checkpoint what it has committed to the queue that was dropped; its
    # successor has committed the same epoch to the new one. And what only the dropped queue has of a
    # micro-batch is not committed again: the consumer is past it.
    op.may_refuse |= {SINK_BEHIND, NO_QUEUE, CONFLICT}
    op.with_store(op.sink, work)


def recreate_source(op: Operator, rng: random.Random) -> None:
    """The source is dropped and recreated with the same name; the query keeps its checkpoint."""

    def work(store: Any) -> None:
        op.pass_over({each for rows in op.reader().source for each in rows})
        op.history.recreated = True
        with suppress(CommitOutcomeUnknownError):
            store.drop_queue(SOURCE, force=True)
        op.create_source(store)
        # They own a consumer of the queue that is gone.
        op.loose.update(driver for driver, _ in op.runs)
        op.produce(SOURCE, op.fresh_ids(), 2 + rng.randrange(8))

    op.may_refuse |= {MISMATCH, SOURCE_BEHIND, NO_QUEUE}
    op.with_store(op.source, work)


def foreign(op: Operator, rng: random.Random) -> None:
    """Others append to the sink as well."""
    if op.scenario.sink != "table":
        first = FOREIGN + 1000 * len(op.producers)
        op.produce(SINK, first, 2 + rng.randrange(4))


def maintain(op: Operator, rng: random.Random) -> None:
    """By hand, perhaps by two at once."""
    older = timedelta(seconds=rng.choice([0, 0, 2, 86400]))
    server = rng.choice([op.source, op.sink])
    for _ in range(1 + rng.randrange(2)):
        op.with_store(server, lambda store: op.tend(store, older))


def trim(op: Operator, rng: random.Random) -> None:
    """By hand, as far as consumers allow."""
    before = rng.choice([rng.randrange(12), 1_000_000, 1_000_000])
    scenario, history = op.scenario, op.history
    waits = scenario.consumer and scenario.vital

    def work(store: Any) -> None:
        if op.trimming:
            return
        op.trimming = True
        try:
            trimmed(store)
        finally:
            op.trimming = False

    def trimmed(store: Any) -> None:
        # What comes meanwhile is trimmed as well, and nobody could say which rows those were.
        beyond = not op.producing
        record = store.queue(SOURCE).record
        now, hand = op.reader(), op.in_hand()
        # A query that has committed nothing begins at the first row that is left.
        begun = scenario.consumer or op.committed
        for partition, (first, ids) in enumerate(zip(now.first, now.source, strict=True)):
            bound = before if beyond else min(before, first + len(ids))
            gone = ids[: max(0, bound - first)]
            history.trimmed.update(gone)
            if not waits and not (scenario.fail_on_data_loss and begun):
                history.may_lack.update(gone)
            trim_partition(store.database, record, partition, bound)
        if hand is not None and op.in_hand() is hand:
            _require_kept(op, hand, now.first)
        if beyond:
            op.produce(SOURCE, op.fresh_ids(), 2)

    if scenario.fail_on_data_loss and not waits:
        op.may_refuse.add(LOST)
    if scenario.guarantee == "idempotent" and not scenario.fail_on_data_loss:
        # A task that is repeated finds fewer rows than it has written.
        op.may_refuse.add(REFUSED)
    op.with_store(op.source, work)


def _require_kept(op: Operator, hand: list[tuple[int, int]], before: list[int]) -> None:
    """A micro-batch whose driver has lived all the while keeps its rows until it is committed."""
    now = op.reader()
    first = now.first
    for partition, (start, end) in enumerate(hand):
        if now.offsets is not None and now.offsets[partition] >= end:
            continue
        if before[partition] <= start < min(end, first[partition]):
            raise Violation(
                "trimmed",
                f"rows of partition {partition} from {start} on are gone while a micro-batch reads them",
            )


def seek(op: Operator, rng: random.Random) -> None:
    """The query is dead or not.

    A consumer that is in use refuses, and then a new checkpoint resumes at the consumer's offset.
    """
    if not op.scenario.consumer:
        return
    found = op.current
    if found is not None and not found[0].paused and rng.random() < 0.6:
        if rng.random() < 0.5:
            found[0].kill()
        else:
            # Long enough for the next query to have committed before this one wakes.
            op.stand_still(found[0], 12.0)
    if found is not None and found[0].paused:
        for server in (op.source, op.sink):
            op.lose_locks(server, found[0])
    to = rng.choice(["same", "same", "earliest"])

    def work(store: Any) -> None:
        consumer, owner = store.consumer(CONSUMER), op.owner()
        before, restores = consumer.offsets(SOURCE), op.source.restores
        op.history.sought = True
        with suppress(CommitOutcomeUnknownError):
            consumer.seek(SOURCE, to=before if to == "same" else "earliest")
        _require_refused(op, owner)
        _may_repeat(op, consumer.offsets(SOURCE))
        now = op.reader()
        if op.source.restores != restores or (op.history.restored and op.scenario.two_stores):
            # It was sought to where it stood before the backup came, or not to where the other store is now.
            op.history.may_lack.update(each for rows in now.source for each in rows)
        # It goes on behind rows that are gone.
        there = {each for rows in now.source for each in rows}
        op.history.may_lack.update(op.history.trimmed - there)
        if op.owner() is not None:
            # It has started since the consumer was moved.
            _may_lag(op)
        _new_checkpoint(op)

    op.with_store(op.source, work)


def _require_refused(op: Operator, owner: Process | None) -> None:
    """Called where a consumer has been moved: nobody moves one that a query owns all the while."""
    if owner is not None and op.owner() is owner:
        raise Violation("moved", f"the consumer was moved although {owner!r} owns it")


def advance(op: Operator, rng: random.Random) -> None:
    """A program takes rows through the query's own consumer."""
    if not op.scenario.consumer:
        return
    history = op.history

    def work(store: Any) -> None:
        consumer, owner = store.consumer(CONSUMER), op.owner()
        partition, restores = rng.randrange(len(consumer.offsets(SOURCE))), op.source.restores
        pull = consumer.pull(SOURCE, partition, max_rows=1 + rng.randrange(4))
        ids = set(pull.table["id"].to_pylist())
        added = ids - history.may_lack
        history.may_lack |= ids
        try:
            consumer.advance(SOURCE, partition, old=pull.start, new=pull.end)
        except CommitOutcomeUnknownError:
            return
        except PenstockError:
            history.may_lack -= added - op.passed
            raise
        history.taken |= added
        # Another program that has pulled the same rows is refused.
        op.pass_over(ids)
        if op.source.restores != restores:
            # A backup came in between, and other rows may be there by now.
            now = op.reader()
            history.may_lack.update(now.source[partition][: pull.end - now.first[partition]])
        if pull.start < pull.end:
            _require_refused(op, owner)

    op.may_refuse |= {CONFLICT, LOST}
    op.with_store(op.source, work)


def _may_repeat(op: Operator, offsets: dict[int, int]) -> None:
    """Rows from there on come again, as far as they have come before, or come late."""
    now = op.reader()
    there = {row[0] for rows in now.sink for row in rows}
    again = [
        each
        for partition, (first, ids) in enumerate(zip(now.first, now.source, strict=True))
        for each in ids[max(0, offsets.get(partition, 0) - first) :]
    ]
    committing = {tx.process for tx in op.sink.open if tx.write}
    late = {driver for driver, run in op.runs if driver.alive and (run.busy or driver in committing)}
    if op.scenario.two_stores and op.scenario.guarantee == "exactly_once":
        op.history.repeats.update(each for each in again if each in there)
        op.late.append(Late(late, [each for each in again if each not in there], op.checkpoints + 1))
    else:
        op.history.repeats.update(each for each in again if late or each in there)


# Checkpoints and backups.


def lose_checkpoint(op: Operator, rng: random.Random) -> None:
    """A new checkpoint where a consumer knows how far the query has come.

    Drivers that have the old one are zombies.
    """
    # Where only the sink was restored, the consumer has to be sought first.
    lost = op.history.restored and op.scenario.two_stores
    if op.scenario.consumer and op.scenario.guarantee != "idempotent" and not lost:
        _may_lag(op)
        _new_checkpoint(op)
        op.start()


def _may_lag(op: Operator) -> None:
    """A query with a new checkpoint resumes at a consumer that may be behind the sink."""
    if op.scenario.guarantee == "at_least_once":
        # The consumer is where the checkpoint was committed, and the sink may have more.
        op.machine.repeats += 1
    elif op.scenario.two_stores:
        # The consumer may not have followed yet what the sink has.
        op.may_refuse.add(CONFLICT)


def _new_checkpoint(op: Operator) -> None:
    if any(driver.alive and not run.owned for driver, run in op.runs):
        # A driver with the old one that has yet to take the consumer over takes it from the new query. What
        # that has committed is then behind its checkpoint where no sink moves the consumer.
        op.may_refuse |= {CONFLICT, SOURCE_BEHIND}
    op.new_checkpoint()


def restore_checkpoint(op: Operator, rng: random.Random) -> None:
    """An older copy of the checkpoint comes back, with the query stopped.

    An entry, once written, stays as it is.
    """
    if op.history.restored and op.scenario.two_stores:
        # One that has committed nothing resumes at the consumer's offset, which has to be sought first.
        return
    op.kill_all()
    begun = op.machine.disk.numbers(f"{op.checkpoint}/offsets")
    if not begun:
        return
    last = rng.choice([max(begun) - 1, rng.randrange(-1, max(begun) + 1), -1])
    op.machine.disk.cut(op.checkpoint, last, committed=rng.random() < 0.5)
    op.may_begin_late()
    op.machine.repeats += 1
    op.may_refuse |= {REWOUND, OTHER_INPUT, CONFLICT, LOST}


def take_backup(op: Operator, rng: random.Random) -> None:
    op.backup = op.copied()
    if op.scenario.objects and rng.random() < 0.5:
        # What its rows are in is still there when it is restored, whatever has been cleaned up meanwhile.
        for seconds, move in (rng.choice([0.5, 2.0]), maintain), (rng.choice([3.0, 6.0]), restore):
            op.later(seconds, partial(_unless_quiet, op, move, rng))


def _unless_quiet(op: Operator, move: Callable[[Operator, random.Random], None], rng: random.Random) -> None:
    if not op.quiet:
        move(op, rng)


def restore(op: Operator, rng: random.Random) -> None:
    """Of one store or of both, with the checkpoint or without; the query is stopped for it, as a rule."""
    backup = op.backup
    if backup is None:
        return
    if backup.planned and not op.scenario.pipeline:
        # Only a pipeline notices before its consumer moves that what the backup has planned was done since.
        return
    which = rng.choice([[op.source], [op.source], [op.sink], [op.source, op.sink]])
    if op.scenario.two_stores and not op.machine.disk.numbers(f"{op.checkpoint}/commits"):
        if not op.machine.disk.numbers(f"{op.checkpoint}/offsets"):
            # A new checkpoint that has begun nothing knows of nothing that another store could have lost.
            return
        which = [op.source]
    # A query whose tasks append for all to see is asked to stop: nothing remembers rows that they have
    # appended and no commit has entered in the ledger, or that they have read before and append after.
    stopped = rng.random() < 0.8 or op.scenario.guarantee != "exactly_once"
    if stopped:
        op.kill_all()
    # Rows may have come again by the time that the query does.
    op.halt(rng.choice([0.0, 3.0, 8.0]) if stopped else 0.0)
    for server in set(which):
        op.lose_locks(server)
        server.restore(backup.stores[server.url])
    if op.clocks_jumped or op.world.now - backup.taken_at > ORPHAN_SECONDS:
        # Its objects may be gone otherwise; those of a younger one are kept.
        op.machine.bucket.objects = {**backup.objects, **op.machine.bucket.objects}
    # One that has committed nothing is as good as a new one, which resumes at the consumer's offset in
    # another store.
    needed = f"{op.checkpoint}/{'commits/' if op.scenario.two_stores else 'metadata'}"
    if stopped and rng.random() < 0.3 and any(path.startswith(needed) for path in backup.files):
        op.machine.disk.files = dict(backup.files)
    op.later(0.0, partial(op.create_missing, columns=rng.random() < 0.5))
    op.history.restored = True
    op.may_refuse |= {MISMATCH, SOURCE_BEHIND, SINK_BEHIND, OTHER_INPUT, REWOUND, CONFLICT}
    if op.scenario.two_stores and op.sink not in which:
        # The sink may know of a seek, or of a registration, that the source's backup is older than.
        op.may_refuse.add(CONSUMER_MOVED)
    # Whoever restores goes on producing.
    op.produce_later(0.0, op.fresh_ids(), 2 + rng.randrange(6))
