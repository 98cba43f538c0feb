"""Moves that change the query's queues, consumers, checkpoints and stores.

The scheduler calls a move outside all tasks, with a random generator of its own.
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
from tests.simulation.operator import LateCommits, Operator
from tests.simulation.scenario import ADDED_COLUMN, CONSUMER, SINK, SOURCE, WIDER_KEY
from tests.simulation.scheduler import Process
from tests.support.auditor import FIRST_FOREIGN_ID, Violation

# Conditions with which a query may fail.
MISMATCH = "CHECKPOINT_MISMATCH"
SOURCE_BEHIND = "CHECKPOINT_MISMATCH.SOURCE_BEHIND"
SINK_BEHIND = "CHECKPOINT_MISMATCH.SINK_BEHIND"
OTHER_INPUT = "CHECKPOINT_MISMATCH.OTHER_INPUT"
CONSUMER_MOVED = "CHECKPOINT_MISMATCH.CONSUMER_MOVED"
REWOUND = "CHECKPOINT_REWOUND"
CONFLICT = "OFFSET_CONFLICT"
LOST = "DATA_LOST"
NO_QUEUE = "QUEUE_NOT_FOUND"
REFUSED = "COMMIT_REFUSED"


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
        if ADDED_COLUMN not in queue.schema.names:
            queue.add_columns(pa.schema([(ADDED_COLUMN, pa.string())]))

    op.change_columns(server, work)


def widen_columns(op: Operator, rng: random.Random) -> None:
    server, name = rng.choice([(op.source, SOURCE), (op.sink, SINK)])
    if name == SOURCE or op.scenario.sink != "table":
        op.change_columns(server, lambda store: store.queue(name).widen_columns(WIDER_KEY))


def recreate_sink(op: Operator, rng: random.Random) -> None:
    """Drop the sink with all its rows and recreate it."""
    if op.scenario.sink == "table":
        return

    def work(store: Any) -> None:
        op.history.recreated = True
        op.history.foreign.clear()
        with suppress(CommitOutcomeUnknownError):
            store.drop_queue(SINK)
        op.allow_skipped({row_id for rows in op.read_snapshot().source for row_id in rows})
        op.create_sink(store)

    # A resumed driver may log an epoch that it had committed to the dropped queue, although its successor has
    # committed that epoch to the new one. A micro-batch that only the dropped queue had is not committed
    # again, since the consumer has passed it.
    op.expected_conditions |= {SINK_BEHIND, NO_QUEUE, CONFLICT}
    op.with_store(op.sink, work)


def recreate_source(op: Operator, rng: random.Random) -> None:
    """Drop the source and recreate it with the same name, while the query keeps its checkpoint."""

    def work(store: Any) -> None:
        op.allow_skipped({row_id for rows in op.read_snapshot().source for row_id in rows})
        op.history.recreated = True
        with suppress(CommitOutcomeUnknownError):
            store.drop_queue(SOURCE, force=True)
        op.create_source(store)
        # The drivers own the consumer of the dropped queue.
        op.maybe_unlocked.update(process for process, _ in op.drivers)
        op.start_producer(SOURCE, op.allocate_ids(), 2 + rng.randrange(8))

    op.expected_conditions |= {MISMATCH, SOURCE_BEHIND, NO_QUEUE}
    op.with_store(op.source, work)


def feed_sink(op: Operator, rng: random.Random) -> None:
    """Start a producer that appends to the sink directly."""
    if op.scenario.sink != "table":
        first_id = FIRST_FOREIGN_ID + 1000 * len(op.producers)
        op.start_producer(SINK, first_id, 2 + rng.randrange(4))


def maintain_store(op: Operator, rng: random.Random) -> None:
    """Maintain a store by hand, once or twice at the same time."""
    older_than = timedelta(seconds=rng.choice([0, 0, 2, 86400]))
    server = rng.choice([op.source, op.sink])
    for _ in range(1 + rng.randrange(2)):
        op.with_store(server, lambda store: op.maintain(store, older_than))


def trim_source(op: Operator, rng: random.Random) -> None:
    """Trim the source by hand, as far as its consumers allow."""
    requested = rng.choice([rng.randrange(12), 1_000_000, 1_000_000])
    scenario, history = op.scenario, op.history
    waits_for_consumer = scenario.consumer and scenario.vital

    def work(store: Any) -> None:
        if op.trimming:
            return
        op.trimming = True
        try:
            trim(store)
        finally:
            op.trimming = False

    def trim(store: Any) -> None:
        # Rows that arrive during a trim past the end may be trimmed too, without a record of their ids. So
        # trim past the end only when no rows arrive.
        past_end = not op.is_producing
        record = store.queue(SOURCE).record
        snapshot, in_flight = op.read_snapshot(), op.ranges_in_flight()
        # A query that has committed nothing starts after the trimmed rows.
        has_position = scenario.consumer or op.has_committed
        for partition, (first, ids) in enumerate(zip(snapshot.first_indexes, snapshot.source, strict=True)):
            bound = requested if past_end else min(requested, first + len(ids))
            trimmed = ids[: max(0, bound - first)]
            history.trimmed.update(trimmed)
            if not waits_for_consumer and not (scenario.fail_on_data_loss and has_position):
                history.may_be_missing.update(trimmed)
            trim_partition(store.database, record, partition, bound)
        if in_flight is not None and op.ranges_in_flight() is in_flight:
            _check_not_trimmed(op, in_flight, snapshot.first_indexes)
        if past_end:
            op.start_producer(SOURCE, op.allocate_ids(), 2)

    if scenario.fail_on_data_loss and not waits_for_consumer:
        op.expected_conditions.add(LOST)
    if scenario.guarantee == "idempotent" and not scenario.fail_on_data_loss:
        # A retried task may find fewer rows than it has already written.
        op.expected_conditions.add(REFUSED)
    op.with_store(op.source, work)


def _check_not_trimmed(
    op: Operator, in_flight: list[tuple[int, int]], first_indexes_before: list[int]
) -> None:
    """Check that a trim has kept the rows of a micro-batch that was in flight the whole time."""
    snapshot = op.read_snapshot()
    for partition, (start, end) in enumerate(in_flight):
        if snapshot.offsets is not None and snapshot.offsets[partition] >= end:
            continue
        if first_indexes_before[partition] <= start < min(end, snapshot.first_indexes[partition]):
            raise Violation(
                "trimmed",
                f"rows of partition {partition} from {start} on were trimmed while a micro-batch reads them",
            )


def seek_consumer(op: Operator, rng: random.Random) -> None:
    """Seek the consumer, usually after killing or pausing the driver, and use a new checkpoint.

    A consumer that a query owns refuses the seek.
    """
    if not op.scenario.consumer:
        return
    driver = op.current_driver
    if driver is not None and not driver.process.paused and rng.random() < 0.6:
        if rng.random() < 0.5:
            driver.process.kill()
        else:
            # Long enough for the next driver to commit before this one resumes.
            op.pause(driver.process, 12.0)
    if driver is not None and driver.process.paused:
        for server in (op.source, op.sink):
            op.release_owner_locks(server, driver.process)
    to = rng.choice(["same", "same", "earliest"])

    def work(store: Any) -> None:
        consumer, owner = store.consumer(CONSUMER), op.owner()
        offsets, restores = consumer.offsets(SOURCE), op.source.restores
        op.history.sought = True
        with suppress(CommitOutcomeUnknownError):
            consumer.seek(SOURCE, to=offsets if to == "same" else "earliest")
        _check_not_owned(op, owner)
        _allow_repeats(op, consumer.offsets(SOURCE))
        snapshot = op.read_snapshot()
        present = {row_id for rows in snapshot.source for row_id in rows}
        if op.source.restores != restores or (op.history.restored and op.scenario.two_stores):
            # The offsets are from before the restore, or do not match what the other store has now.
            op.history.may_be_missing.update(present)
        # The query resumes after the trimmed rows.
        op.history.may_be_missing.update(op.history.trimmed - present)
        if op.owner() is not None:
            # A driver has started since the seek.
            _expect_lagging_consumer(op)
        _use_new_checkpoint(op)

    op.with_store(op.source, work)


def _check_not_owned(op: Operator, owner: Process | None) -> None:
    """Check, after a consumer was moved, that the query did not own it the whole time."""
    if owner is not None and op.owner() is owner:
        raise Violation("moved", f"the consumer was moved although {owner!r} owns it")


def advance_consumer(op: Operator, rng: random.Random) -> None:
    """Let a program take rows through the query's own consumer."""
    if not op.scenario.consumer:
        return
    history = op.history

    def work(store: Any) -> None:
        consumer, owner = store.consumer(CONSUMER), op.owner()
        partition, restores = rng.randrange(len(consumer.offsets(SOURCE))), op.source.restores
        pull = consumer.pull(SOURCE, partition, max_rows=1 + rng.randrange(4))
        ids = set(pull.table["id"].to_pylist())
        newly_skipped = ids - history.may_be_missing
        history.may_be_missing |= ids
        try:
            consumer.advance(SOURCE, partition, old=pull.start, new=pull.end)
        except CommitOutcomeUnknownError:
            return
        except PenstockError:
            history.may_be_missing -= newly_skipped - op.skipped
            raise
        history.taken_by_programs |= newly_skipped
        # Keep them allowed even when another program that has pulled the same rows is refused.
        op.allow_skipped(ids)
        if op.source.restores != restores:
            # The store was restored meanwhile, and these offsets may now have other rows.
            snapshot = op.read_snapshot()
            skipped = snapshot.source[partition][: pull.end - snapshot.first_indexes[partition]]
            history.may_be_missing.update(skipped)
        if pull.start < pull.end:
            _check_not_owned(op, owner)

    op.expected_conditions |= {CONFLICT, LOST}
    op.with_store(op.source, work)


def _allow_repeats(op: Operator, offsets: dict[int, int]) -> None:
    """Allow rows from these offsets on to come again, if they are in the sink or may still be committed."""
    snapshot = op.read_snapshot()
    sink_ids = {row[0] for rows in snapshot.sink for row in rows}
    read_again = [
        row_id
        for partition, (first, ids) in enumerate(zip(snapshot.first_indexes, snapshot.source, strict=True))
        for row_id in ids[max(0, offsets.get(partition, 0) - first) :]
    ]
    committing = {tx.process for tx in op.sink.transactions if tx.write}
    drivers = {
        process for process, run in op.drivers if process.alive and (run.busy or process in committing)
    }
    if op.scenario.two_stores and op.scenario.guarantee == "exactly_once":
        op.history.allowed_repeats.update(row_id for row_id in read_again if row_id in sink_ids)
        not_in_sink = [row_id for row_id in read_again if row_id not in sink_ids]
        op.late_commits.append(LateCommits(drivers, not_in_sink, op.checkpoints + 1))
    else:
        op.history.allowed_repeats.update(row_id for row_id in read_again if drivers or row_id in sink_ids)


# Checkpoints and backups.


def lose_checkpoint(op: Operator, rng: random.Random) -> None:
    """Start the query with a new checkpoint, which resumes at the consumer's offset.

    Drivers with the old checkpoint may still run.
    """
    # If only the sink was restored, a user must seek the consumer first.
    must_seek = op.history.restored and op.scenario.two_stores
    if op.scenario.consumer and op.scenario.guarantee != "idempotent" and not must_seek:
        _expect_lagging_consumer(op)
        _use_new_checkpoint(op)
        op.start_driver()


def _expect_lagging_consumer(op: Operator) -> None:
    """Account for a query with a new checkpoint that resumes at a consumer which lags behind the sink."""
    if op.scenario.guarantee == "at_least_once":
        # The consumer follows the checkpoint's commits, and the sink may have more.
        op.machine.reruns += 1
    elif op.scenario.two_stores:
        # The consumer follows the sink's commits, and may not have caught up.
        op.expected_conditions.add(CONFLICT)


def _use_new_checkpoint(op: Operator) -> None:
    if any(process.alive and not run.owns_consumer for process, run in op.drivers):
        # A driver with the old checkpoint may still take the consumer from the new query. If the sink does
        # not move the consumer, it then lags behind what the new query has committed.
        op.expected_conditions |= {CONFLICT, SOURCE_BEHIND}
    op.use_new_checkpoint()


def restore_checkpoint(op: Operator, rng: random.Random) -> None:
    """Kill the query and restore an older state of its checkpoint."""
    if op.history.restored and op.scenario.two_stores:
        # A checkpoint without commits resumes at the consumer, which a user must seek first.
        return
    op.kill_query()
    logged = op.machine.disk.numbers(f"{op.checkpoint}/offsets")
    if not logged:
        return
    last = rng.choice([max(logged) - 1, rng.randrange(-1, max(logged) + 1), -1])
    op.machine.disk.rewind(op.checkpoint, last, committed=rng.random() < 0.5)
    op.allow_late_start()
    op.machine.reruns += 1
    op.expected_conditions |= {REWOUND, OTHER_INPUT, CONFLICT, LOST}


def take_backup(op: Operator, rng: random.Random) -> None:
    op.backup = op.create_backup()
    if op.scenario.object_storage and rng.random() < 0.5:
        # A cleanup between backup and restore must keep the objects of the backup.
        for seconds, move in (
            (rng.choice([0.5, 2.0]), maintain_store),
            (rng.choice([3.0, 6.0]), restore_backup),
        ):
            op.run_later(seconds, partial(_apply_unless_quiet, op, move, rng))


def _apply_unless_quiet(
    op: Operator, move: Callable[[Operator, random.Random], None], rng: random.Random
) -> None:
    if not op.quiet:
        move(op, rng)


def restore_backup(op: Operator, rng: random.Random) -> None:
    """Restore one store or both, with or without the checkpoint, usually while the query is stopped."""
    backup = op.backup
    if backup is None:
        return
    if backup.has_open_plan and not op.scenario.pipeline:
        # Only a pipeline notices, before it moves the consumer, that the open plan has since been committed.
        return
    restored = rng.choice([[op.source], [op.source], [op.sink], [op.source, op.sink]])
    if op.scenario.two_stores and not op.machine.disk.numbers(f"{op.checkpoint}/commits"):
        if not op.machine.disk.numbers(f"{op.checkpoint}/offsets"):
            # An empty checkpoint has no record of what the other store has lost.
            return
        restored = [op.source]
    # The query must be stopped if its tasks append before the commit. Rows that they have appended are in no
    # ledger yet, and they may append rows later that they read before the restore.
    stops_query = rng.random() < 0.8 or op.scenario.guarantee != "exactly_once"
    if stops_query:
        op.kill_query()
    # Producers may append again before the query restarts.
    op.suspend_starts(rng.choice([0.0, 3.0, 8.0]) if stops_query else 0.0)
    for server in set(restored):
        op.release_owner_locks(server)
        server.restore(backup.stores[server.url])
    if op.clocks_changed or op.world.now - backup.taken_at > ORPHAN_SECONDS:
        # A cleanup may have deleted the objects of an old backup, so restore them from older versions.
        op.machine.bucket.objects = {**backup.objects, **op.machine.bucket.objects}
    # With two stores, restore only a checkpoint that has commits: without any, the query would resume at the
    # consumer's offset, which does not match the other store.
    needed = f"{op.checkpoint}/{'commits/' if op.scenario.two_stores else 'metadata'}"
    if stops_query and rng.random() < 0.3 and any(path.startswith(needed) for path in backup.files):
        op.machine.disk.files = dict(backup.files)
    op.run_later(0.0, partial(op.create_missing, columns=rng.random() < 0.5))
    op.history.restored = True
    op.expected_conditions |= {MISMATCH, SOURCE_BEHIND, SINK_BEHIND, OTHER_INPUT, REWOUND, CONFLICT}
    if op.scenario.two_stores and op.sink not in restored:
        # The sink may know of a seek or a registration that is newer than the source's backup.
        op.expected_conditions.add(CONSUMER_MOVED)
    # Producers append new rows after a restore.
    op.start_producer_later(0.0, op.allocate_ids(), 2 + rng.randrange(6))
