"""Ownership of consumers: epochs, plans, safe offsets and locks."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest

import penstock
from penstock.commit.offsets import QueueOffset
from penstock.commit.owner import Owner, move_past_commit, raise_safe_offset, request_drain
from penstock.errors import (
    CheckpointMismatchError,
    ConsumerInUseError,
    NotRegisteredError,
    OffsetConflictError,
    OwnerFencedError,
    StoreError,
)
from penstock.store.database import Transaction
from penstock.store.log.trim import append_time_of
from penstock.store.records.consumers import Registration
from penstock.testing import temporary_store
from tests.commit.protocol import Pair, make_pair, numbers
from tests.support.raw_sql import run_sql


@pytest.fixture
def pair(store: penstock.Store) -> Pair:
    return make_pair(store)


def test_a_later_owner_fences_the_earlier_one(pair: Pair, caplog: pytest.LogCaptureFixture) -> None:
    first = pair.own()
    offset = pair.planned(first, (0, 0), (5, 5))
    with caplog.at_level(logging.WARNING, "penstock.commit"):
        second = pair.own()
    assert second.epoch == first.epoch + 1
    assert "had a running owner" in caplog.text
    calls: list[Callable[[], object]] = [
        lambda: first.observe(offset),
        lambda: first.plan(offset),
    ]
    for call in calls:
        with pytest.raises(OwnerFencedError, match="another query took over consumer 'billing'"):
            call()
    second.observe(offset)


def test_an_owner_from_before_a_restore_is_fenced_even_if_its_epoch_is_assigned_again(
    pair: Pair,
) -> None:
    first = pair.own()
    offset = pair.offset(first, (0, 0), (5, 5))
    database = pair.store.database
    forget = "update penstock.registration set epoch = 0, owner = null"
    run_sql(database, forget)

    def require_fenced(condition: str, message: str) -> None:
        for call in (lambda: first.observe(offset), lambda: first.plan(offset), first.require):
            with pytest.raises(OwnerFencedError, match=message) as fenced:
                call()
            assert fenced.value.condition == condition

    require_fenced("OWNER_FENCED.STORE_RESTORED", "restored from an older backup while this query ran")
    assert pair.own().epoch == first.epoch
    require_fenced("OWNER_FENCED", "another query took over consumer 'billing'")


def test_taking_over_closes_the_open_plan(pair: Pair) -> None:
    first = pair.own()
    offset = pair.offset(first, (0, 0), (10, 0))
    first.plan(offset)
    assert pair.registration().plan_open
    second = pair.own()
    assert not pair.registration().plan_open
    second.plan(offset)
    assert pair.registration().plan_open


def test_offsets_that_spark_has_logged_become_safe_and_never_go_back(pair: Pair) -> None:
    owner = pair.own()
    logged = pair.planned(owner, (0, 0), (5, 3))
    owner.observe(logged)
    assert (pair.offsets(), pair.safe()) == ([5, 3], [5, 3])
    owner.observe(pair.offset(owner, (0, 0), (2, 3)))
    assert (pair.offsets(), pair.safe()) == ([5, 3], [5, 3])


def test_an_offset_from_before_the_queue_grew_can_be_observed(pair: Pair) -> None:
    owner = pair.own()
    logged = pair.planned(owner, (0, 0), (5, 3))
    pair.source.add_partitions(1)
    queue, there, _ = owner.observe(logged)
    assert (queue.partitions, len(there)) == (3, 3)
    assert pair.safe() == [5, 3, 0]


def test_a_checkpoint_ahead_of_a_consumer_that_its_sink_moves_is_refused(pair: Pair) -> None:
    """The store was restored from an older backup. The sink has lost those rows, so they must not be
    skipped.
    """
    owner = pair.own()
    pair.commit(pair.batch("app", 0, pair.planned(owner, (0, 0), (5, 5)), ids=None))
    with pytest.raises(CheckpointMismatchError, match="restored from an older"):
        owner.observe(pair.offset(owner, (5, 5), (9, 9)))
    assert (pair.offsets(), pair.safe()) == ([5, 5], [0, 0])


def _undo_commit(pair: Pair, before: Registration) -> None:
    """Reset the consumer to its state between a micro-batch's plan and its commit, as a restore does."""
    keys = before.keys
    planned = QueueOffset.of(json.loads(before.plan or "null"))
    assert planned is not None

    def work(tx: Transaction) -> None:
        for partition, index in enumerate(planned.start):
            tx.run("set_position", partition=partition, next_index=index, **keys)
        tx.run("open_plan", epoch=before.plan_epoch or 0, plan=before.plan, **keys)

    pair.store.database.run(work)


@pytest.mark.parametrize("moved_by_sink", [True, False])
def test_rows_that_a_restored_store_has_lost_are_not_skipped(pair: Pair, moved_by_sink: bool) -> None:
    """The backup was made between a plan and its commit. The owner did not know in advance that the sink
    moves the consumer, but saw it in the previous micro-batch.
    """
    owner = pair.own(moved_by_sink=moved_by_sink)
    if not moved_by_sink:
        first = pair.planned(owner, (0, 0), (2, 2))
        pair.commit(pair.batch("app", 0, first, ids=None))
        owner.observe(first)
        assert owner.moved_by_sink
    start = (0, 0) if moved_by_sink else (2, 2)
    logged = pair.planned(owner, start, (5, 5))
    backup = pair.registration()
    pair.commit(pair.batch("app", int(not moved_by_sink), logged, ids=None))
    _undo_commit(pair, backup)
    raise_safe_offset(pair.store.database, logged)
    assert pair.offsets() == list(start)
    with pytest.raises(CheckpointMismatchError) as caught:
        owner.observe(logged)
    assert caught.value.condition == "CHECKPOINT_MISMATCH.SOURCE_BEHIND"
    owner.release()
    with pytest.raises(CheckpointMismatchError):
        pair.own().observe(logged)
    assert pair.offsets() == list(start)


def test_a_query_that_logged_nothing_detects_a_consumer_before_its_start(pair: Pair) -> None:
    """The store was restored and rows were appended again, but none of them after the query's start."""
    pair.store.consumer("billing").seek("orders", to={0: 5, 1: 5})
    owner = pair.own()
    start = pair.offset(owner, (5, 5), (5, 5))
    owner.observe(start)
    keys = pair.registration().keys
    pair.store.database.run(lambda tx: tx.run("set_position", partition=1, next_index=3, **keys))
    with pytest.raises(CheckpointMismatchError) as caught:
        owner.observe(start)
    assert caught.value.condition == "CHECKPOINT_MISMATCH.SOURCE_BEHIND"


def test_a_query_may_repeat_a_planned_micro_batch_with_another_sink(pair: Pair) -> None:
    first = pair.own(moved_by_sink=True)
    logged = pair.planned(first, (0, 0), (5, 5))
    first.release()
    second = pair.own()
    second.plan(logged)
    second.observe(logged)
    assert pair.offsets() == [5, 5]


def test_a_micro_batch_committed_in_another_store_counts_after_a_takeover(pair: Pair) -> None:
    """Another query took over the consumer in between and planned the same rows, which the sink's store
    refuses.
    """
    logged = pair.planned(pair.own(), (0, 0), (5, 5))
    pair.planned(pair.own(), (0, 0), (9, 9))
    pair.own().observe(logged)
    assert pair.offsets() == [5, 5]


def test_a_fenced_driver_that_still_logs_its_micro_batch_does_not_stop_its_successors(pair: Pair) -> None:
    """An older copy of the checkpoint was restored, so the consumer is inside the micro-batch: at the end of
    the micro-batch that the copy lacks.
    """
    first = pair.own()
    first.observe(pair.planned(first, (0, 0), (5, 4)))
    second = pair.own()
    logged = pair.planned(second, (2, 2), (5, 5))
    third = pair.own()
    pair.planned(third, (2, 2), (9, 9))
    with pytest.raises(OwnerFencedError):
        second.observe(logged)
    pair.own().observe(logged)
    assert (pair.offsets(), pair.safe()) == ([5, 5], [5, 5])


def test_a_running_owner_fails_after_a_seek(pair: Pair) -> None:
    """This needs a lost lock, as when the database ends the owner's session."""
    owner = pair.own()
    offset = pair.planned(owner, (0, 0), (5, 5))
    owner.release()
    pair.store.consumer("billing").seek("orders", to="latest")
    with pytest.raises(CheckpointMismatchError, match="moved by a seek"):
        owner.plan(offset)
    with pytest.raises(CheckpointMismatchError):
        owner.observe(offset)
    assert pair.offsets() == [20, 20]


def test_seek_is_refused_while_an_owner_lives(pair: Pair) -> None:
    owner = pair.own()
    with pytest.raises(ConsumerInUseError):
        pair.store.consumer("billing").seek("orders", to="latest")
    owner.release()
    pair.store.consumer("billing").seek("orders", to="latest")


def test_a_new_owner_gets_the_lock_once_the_fenced_one_is_gone(pair: Pair) -> None:
    first, second = pair.own(), pair.own()
    first.release()
    second.observe(pair.offset(second, (0, 0), (0, 0)))
    with pytest.raises(ConsumerInUseError):
        pair.store.consumer("billing").seek("orders", to="latest")


def test_offsets_of_an_earlier_registration_of_the_same_names_are_refused(pair: Pair) -> None:
    owner = pair.own()
    offset = pair.planned(owner, (0, 0), (5, 5))
    owner.release()
    pair.store.drop_consumer("billing")
    pair.store.create_consumer("billing").register("orders")
    again = pair.own()
    with pytest.raises(CheckpointMismatchError, match="recreated"):
        again.observe(offset)
    with pytest.raises((OwnerFencedError, CheckpointMismatchError)):
        owner.plan(offset)


def test_a_consumer_without_a_registration_cannot_be_owned(pair: Pair) -> None:
    pair.store.consumer("billing").unregister("orders")
    with pytest.raises(NotRegisteredError):
        pair.own()


def test_a_drain_request_applies_until_the_next_owner(pair: Pair) -> None:
    owner = pair.own()
    stand = pair.offset(owner, (0, 0), (0, 0))
    assert owner.observe(stand)[2] is False
    request_drain(pair.store.database, stand)
    assert owner.observe(stand)[2] is True
    assert pair.own().observe(stand)[2] is False


def test_a_query_that_lost_its_consumer_does_not_drain_the_new_owner(pair: Pair) -> None:
    lost = pair.offset(pair.own(), (0, 0), (0, 0))
    owner = pair.own()
    stand = pair.offset(owner, (0, 0), (0, 0))
    request_drain(pair.store.database, lost)
    request_drain(pair.store.database, replace(stand, owner=lost.owner))
    assert owner.observe(stand)[2] is False
    request_drain(pair.store.database, stand)
    assert owner.observe(stand)[2] is True


def test_the_safe_offset_catches_up_with_the_consumer_after_a_query_ends(pair: Pair) -> None:
    owner = pair.own()
    ended = pair.planned(owner, (0, 0), (5, 5))
    raise_safe_offset(pair.store.database, ended)
    assert (pair.offsets(), pair.safe()) == ([5, 5], [5, 5])


def test_raising_the_safe_offset_ignores_the_micro_batch_of_another_query(pair: Pair) -> None:
    ended = pair.planned(pair.own(), (0, 0), (5, 5))
    pair.planned(pair.own(), (0, 0), (9, 9))
    raise_safe_offset(pair.store.database, ended)
    assert pair.offsets() == [0, 0]


def test_raising_the_safe_offset_after_a_seek_changes_nothing(pair: Pair) -> None:
    owner = pair.own()
    ended = pair.planned(owner, (0, 0), (5, 5))
    owner.release()
    pair.store.consumer("billing").seek("orders", to={0: 2})
    raise_safe_offset(pair.store.database, ended)
    assert pair.offsets() == [2, 0]


@pytest.mark.parametrize("plan", ["[" * 100_000, "{"], ids=["deep", "broken"])
def test_the_error_names_a_plan_that_penstock_did_not_write(pair: Pair, plan: str) -> None:
    logged = pair.planned(pair.own(), (0, 0), (5, 5))
    keys, epoch = pair.registration().keys, pair.registration().epoch
    pair.store.database.run(lambda tx: tx.run("open_plan", epoch=epoch, plan=plan, **keys))
    with pytest.raises(StoreError, match="the plan of consumer 'billing' is not what Penstock") as caught:
        move_past_commit(pair.store.database, logged)
    assert caught.value.condition == "STORE_ERROR.UNREADABLE_RECORD"


def test_vital_rows_are_kept_until_they_are_safe(pair: Pair) -> None:
    owner = pair.own()
    offset = pair.planned(owner, (0, 0), (5, 5))
    pair.commit(pair.batch("app", 0, offset, ids=None))
    assert pair.source.trim(before=20) == 0
    owner.observe(offset)
    assert pair.source.trim(before=20) == 10


def test_the_rows_of_a_live_plan_are_kept_for_a_consumer_that_is_not_vital(store: penstock.Store) -> None:
    pair = make_pair(store)
    store.consumer("billing").register("orders", vital=False)
    store.consumer("billing").advance("orders", 0, old=0, new=3)
    owner = pair.own()
    pair.planned(owner, (3, 0), (5, 5))
    pair.source.trim(before=20)
    assert pair.source.read(0, 3, 5)["id"].to_pylist() == [3, 4]
    assert [p.first_index for p in pair.source.info().partitions] == [3, 0]
    owner.release()
    pair.source.append(numbers(50, 51), partition=0)
    pair.source.trim(before=20)
    assert [p.first_index for p in pair.source.info().partitions] == [20, 20]


def test_an_owner_survives_the_loss_of_the_connection_that_holds_its_lock(pg_url: str) -> None:
    with temporary_store(pg_url) as store:
        pair = make_pair(store)
        owner = pair.own()
        backend = owner._lock._connection.info.backend_pid
        store.database.run(lambda tx: tx.execute(f"select pg_terminate_backend({backend})"))
        owner.observe(pair.offset(owner, (0, 0), (0, 0)))
        with pytest.raises(ConsumerInUseError):
            store.consumer("billing").seek("orders", to="latest")
        owner.release()


def test_a_consumer_that_is_more_than_one_micro_batch_behind_the_checkpoint_is_refused(pair: Pair) -> None:
    """The store was restored from an older backup. It does not matter whether an app was ever bound to the
    consumer.
    """
    owner = pair.own()
    pair.planned(owner, (0, 0), (5, 3))
    with pytest.raises(CheckpointMismatchError, match="restored from an older") as caught:
        owner.observe(pair.offset(owner, (5, 3), (9, 3)))
    assert caught.value.condition == "CHECKPOINT_MISMATCH.SOURCE_BEHIND"
    assert pair.offsets() == [0, 0]


def test_a_consumer_follows_its_sink_only_from_the_start_of_a_micro_batch(pair: Pair) -> None:
    owner = pair.own()
    for planned, committed in ((None, (0, 0)), ((0, 0), (1, 0))):
        if planned is not None:
            pair.planned(owner, planned, (4, 3))
        move_past_commit(pair.store.database, pair.offset(owner, committed, (5, 3)))
        assert pair.offsets() == [0, 0]
    move_past_commit(pair.store.database, pair.offset(owner, (0, 0), (5, 3)))
    assert (pair.offsets(), pair.safe()) == ([5, 3], [5, 3])


def test_a_micro_batch_repeated_on_a_store_restored_from_before_it_is_refused(pair: Pair) -> None:
    """Spark first plans the micro-batch again."""
    owner = pair.own()
    with pytest.raises(CheckpointMismatchError) as caught:
        owner.plan(pair.offset(owner, (5, 3), (9, 3)))
    assert caught.value.condition == "CHECKPOINT_MISMATCH.SOURCE_BEHIND"
    for start, end in (((0, 0), (5, 3)), ((5, 3), (9, 3)), ((5, 3), (9, 3))):
        owner.plan(pair.offset(owner, start, end))


@pytest.mark.parametrize("end", [(21, 0), (0, 21), (0, 0, 1)])
def test_a_plan_past_the_end_of_the_queue_is_refused(pair: Pair, end: tuple[int, ...]) -> None:
    owner = pair.own()
    start = (0,) * len(end)
    with pytest.raises(CheckpointMismatchError, match="but it ends at") as caught:
        owner.plan(pair.offset(owner, start, end))
    assert caught.value.condition == "CHECKPOINT_MISMATCH.SOURCE_BEHIND"
    assert not pair.registration().plan_open


def test_a_plan_of_rows_that_were_replaced_since_they_were_read_is_refused(pair: Pair) -> None:
    """The store was restored from an older backup, and the same number of rows were appended since."""
    owner = pair.own()
    queue = pair.source.record
    read = pair.store.database.run(lambda tx: append_time_of(tx, queue, 1, 4), write=False)
    planned = pair.offset(owner, (0, 0), (0, 5))
    owner.plan(replace(planned, times=(None, read)))
    with pytest.raises(CheckpointMismatchError, match="has other rows than this query has read") as caught:
        owner.plan(replace(planned, times=(None, read - 60_000_000)))
    assert caught.value.condition == "CHECKPOINT_MISMATCH.SOURCE_BEHIND"


def owned(pair: Pair, owner: Owner, start: Sequence[int], end: Sequence[int]) -> QueueOffset:
    """Return the offset of an epoch without a plan, whose owner the sink's transaction checks."""
    return replace(pair.offset(owner, start, end), unplanned=True)


def test_an_epoch_without_a_plan_moves_the_consumer_and_makes_the_previous_epoch_safe(pair: Pair) -> None:
    owner = pair.own(moved_by_sink=True)
    pair.commit(pair.batch("app", 0, owned(pair, owner, (0, 0), (5, 2)), ids=None))
    assert (pair.offsets(), pair.safe()) == ([5, 2], [0, 0])
    pair.commit(pair.batch("app", 1, owned(pair, owner, (5, 2), (9, 2)), ids=None))
    assert (pair.offsets(), pair.safe()) == ([9, 2], [5, 0])
    owner.observe(owned(pair, owner, (5, 2), (9, 2)))
    assert pair.safe() == [9, 2]


def test_an_epoch_without_a_plan_is_refused_if_another_query_took_over_the_consumer(
    pair: Pair,
) -> None:
    first = pair.own(moved_by_sink=True)
    late = owned(pair, first, (0, 0), (5, 5))
    first.release()
    second = pair.own(moved_by_sink=True)
    with pytest.raises(OwnerFencedError):
        pair.commit(pair.batch("app", 0, late, ids=None))
    # The later owner has the same epoch, as after the store was restored from a backup.
    with pytest.raises(OwnerFencedError):
        pair.commit(pair.batch("app", 0, replace(late, epoch=second.epoch), ids=None))
    assert (pair.offsets(), pair.sink.info().rows) == ([0, 0], 0)


def test_an_epoch_that_a_successor_has_committed_is_not_treated_as_a_repeat(pair: Pair) -> None:
    """A suspended driver must not continue after the epoch as if it had committed the epoch itself."""
    first = pair.own(moved_by_sink=True)
    late = owned(pair, first, (0, 0), (5, 2))
    pair.commit(pair.batch("app", 0, late, ids=None))
    pair.commit(pair.batch("app", 0, late, ids=None))
    first.release()
    second = pair.own(moved_by_sink=True)
    pair.commit(pair.batch("app", 1, owned(pair, second, (5, 2), (9, 2)), ids=None))
    with pytest.raises(OwnerFencedError):
        pair.commit(pair.batch("app", 1, owned(pair, first, (5, 2), (9, 2)), ids=None))
    assert pair.offsets() == [9, 2]


def test_an_epoch_without_a_plan_is_refused_after_a_seek(pair: Pair) -> None:
    """This needs a lost lock, as when the database ends the owner's session."""
    owner = pair.own(moved_by_sink=True)
    offset = owned(pair, owner, (0, 0), (5, 5))
    owner.release()
    pair.store.consumer("billing").seek("orders", to={0: 0, 1: 0})
    with pytest.raises(CheckpointMismatchError) as caught:
        pair.commit(pair.batch("app", 0, offset, ids=None))
    assert caught.value.condition == "CHECKPOINT_MISMATCH.MOVED_WHILE_RUNNING"
    assert pair.sink.info().rows == 0


def test_an_epoch_without_a_plan_is_refused_if_the_store_lacks_the_previous_one(pair: Pair) -> None:
    owner = pair.own(moved_by_sink=True)
    with pytest.raises(CheckpointMismatchError) as caught:
        pair.commit(pair.batch("app", 0, owned(pair, owner, (3, 3), (5, 5)), ids=None))
    assert caught.value.condition == "CHECKPOINT_MISMATCH.SOURCE_BEHIND"
    times = owned(pair, owner, (0, 0), (5, 5))
    with pytest.raises(CheckpointMismatchError) as caught:
        pair.commit(pair.batch("app", 0, replace(times, times=(1, 1)), ids=None))
    assert caught.value.condition == "CHECKPOINT_MISMATCH.SOURCE_BEHIND"
    assert (pair.offsets(), pair.sink.info().rows) == ([0, 0], 0)


def test_a_consumer_moved_into_a_committed_micro_batch_is_distinguished_from_a_restored_one(
    pair: Pair,
) -> None:
    owner = pair.own(moved_by_sink=True)
    ended = pair.offset(owner, (0, 0), (5, 5))
    with pytest.raises(CheckpointMismatchError, match="restored from an older backup"):
        owner.observe(ended)
    owner.release()  # as if it had lost its connection
    pair.store.consumer("billing").advance("orders", 0, old=0, new=2)
    with pytest.raises(OffsetConflictError, match=r"Seek it to \[5, 5\]") as caught:
        owner.observe(ended)
    assert caught.value.condition == "OFFSET_CONFLICT.CHECKPOINT"
