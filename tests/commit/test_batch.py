"""The commit: rows, the consumer's offsets and the ledger entry are written in one transaction, exactly
once.
"""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import timedelta

import pytest

import penstock
from penstock import Retention
from penstock.commit.micro_batch import BatchCommit, QueueTarget
from penstock.commit.protocol import commit_batch, record_batch
from penstock.continuous.connectors.ledger import LedgerCommits
from penstock.errors import (
    CheckpointMismatchError,
    CheckpointRewoundError,
    CommitOutcomeUnknownError,
    CommitRefusedError,
    ConsumerBoundError,
    NotRegisteredError,
    OffsetConflictError,
    PlanMismatchError,
    QueueNotFoundError,
)
from penstock.store.database import Transaction
from penstock.store.log.partition_log import Appended
from penstock.store.records import ledger
from penstock.store.records.consumers import find_registration
from tests.commit.protocol import Pair, make_pair, rows_of, stage, with_attempts


@pytest.fixture
def pair(store: penstock.Store) -> Pair:
    return make_pair(store)


def test_a_micro_batch_moves_rows_and_consumer_together(pair: Pair) -> None:
    owner = pair.own()
    appended = pair.commit(pair.batch("app", 0, pair.planned(owner, (0, 0), (5, 2)), ids=None))
    assert appended.rows == 7
    assert rows_of(pair.sink) == [0, 1, 2, 3, 4, 1000, 1001]
    assert (pair.offsets(), pair.safe()) == ([5, 2], [0, 0])
    registration = pair.registration()
    assert (registration.app_id, registration.plan_open) == ("app", False)
    assert pair.store.info().staged_segments == 0


def test_no_lock_is_held_while_rows_are_sent(pair: Pair, store_url: str) -> None:
    """A client that is suspended while it sends rows does not block others."""
    if pair.store.database.dialect == "sqlite":
        pytest.skip("SQLite has one lock for all writers")
    locked = []

    class Target(QueueTarget):
        def prepare(self, tx: Transaction, batch: BatchCommit[Appended]) -> None:
            with penstock.connect(f"{store_url}&lock_wait=2s") as other:
                locked.append(
                    other.database.run(lambda tx: find_registration(tx, "billing", "orders", lock=True))
                )
                locked.append(other.queue("big").append([{"id": 99}]))

    owner = pair.own()
    batch = pair.batch("app", 0, pair.planned(owner, (0, 0), (5, 2)), ids=None)
    pair.commit(replace(batch, sink=Target(batch.sink.record)))
    assert len(locked) == 2
    assert pair.offsets() == [5, 2]


def test_a_replay_changes_nothing_and_leaves_no_staged_rows(pair: Pair) -> None:
    owner = pair.own()
    offset = pair.planned(owner, (0, 0), (5, 2))
    pair.commit(pair.batch("app", 0, offset, ids=None))
    again = pair.own()
    again.plan(offset)
    assert pair.commit(pair.batch("app", 0, offset, ids=None)) is None
    assert len(rows_of(pair.sink)) == 7
    assert pair.offsets() == [5, 2]
    assert pair.store.info().staged_segments == 0
    assert not pair.registration().plan_open


def test_a_replay_after_the_consumer_has_advanced_changes_nothing(pair: Pair) -> None:
    owner = pair.own()
    first = pair.planned(owner, (0, 0), (5, 2))
    pair.commit(pair.batch("app", 0, first, ids=None))
    second = pair.planned(owner, (5, 2), (9, 9))
    pair.commit(pair.batch("app", 1, second, ids=None))
    assert pair.commit(pair.batch("app", 0, first, ids=None)) is None
    assert len(rows_of(pair.sink)) == 18
    assert pair.offsets() == [9, 9]


def test_a_replay_with_other_input_is_refused(pair: Pair) -> None:
    owner = pair.own()
    pair.commit(pair.batch("app", 0, pair.planned(owner, (0, 0), (5, 2)), ids=None))
    other = pair.planned(owner, (5, 2), (9, 9))
    with pytest.raises(CheckpointMismatchError, match="with other input"):
        pair.commit(pair.batch("app", 0, other, ids=None))
    assert pair.offsets() == [5, 2]


def test_an_app_id_of_another_checkpoint_is_refused_even_with_equal_input(pair: Pair) -> None:
    pair.commit(pair.batch("app", 0, ids=[1, 2], origin="one", others=[{"logOffset": 0}]))
    with pytest.raises(CheckpointMismatchError):
        pair.commit(pair.batch("app", 0, ids=[1, 2], origin="two", others=[{"logOffset": 0}]))
    with pytest.raises(CheckpointMismatchError):
        pair.commit(pair.batch("app", 0, ids=[1, 2], origin="one", others=[{"logOffset": 1}]))
    assert pair.commit(pair.batch("app", 0, ids=[1, 2], origin="one", others=[{"logOffset": 0}])) is None
    assert rows_of(pair.sink) == [1, 2]


def test_only_acknowledged_attempts_become_visible(pair: Pair) -> None:
    batch = pair.batch("app", 0, ids=[1, 2])
    stage(pair.store, pair.sink.record, "app", 0, 0, [1, 2])
    stage(pair.store, pair.sink.record, "app", 0, 1, [3])
    stage(pair.store, pair.sink.record, "other", 0, 0, [4])
    pair.commit(batch)
    assert rows_of(pair.sink) == [1, 2]
    assert pair.store.info().staged_segments == 1


def test_rows_staged_late_by_a_slow_attempt_are_removed_by_the_next_commit(pair: Pair) -> None:
    pair.commit(pair.batch("app", 0, ids=[1]))
    stage(pair.store, pair.sink.record, "app", 0, 0, [1])
    pair.commit(pair.batch("app", 1, ids=[2]))
    assert rows_of(pair.sink) == [1, 2]
    assert pair.store.info().staged_segments == 0


def test_rows_staged_by_a_running_query_are_not_cleaned_up(pair: Pair) -> None:
    owner = pair.own()
    pair.commit(pair.batch("app", 0, pair.planned(owner, (0, 0), (1, 0)), ids=None))
    batch = pair.batch("app", 1, pair.planned(owner, (1, 0), (5, 2)), ids=None)
    stage(pair.store, pair.sink.record, "other", 0, 0, [4])
    assert pair.store.clean_up(timedelta(seconds=-1)) == 1, "the other app's"
    pair.commit(batch)
    assert len(rows_of(pair.sink)) == 7
    stage(pair.store, pair.sink.record, "app", 2, 0, [4])
    owner.release()
    assert pair.store.clean_up(timedelta(seconds=-1)) == 1, "nobody owns its consumer"


def test_a_micro_batch_whose_staged_rows_were_cleaned_up_is_refused_completely(pair: Pair) -> None:
    owner = pair.own()
    batch = pair.batch("app", 0, pair.planned(owner, (0, 0), (5, 2)), ids=None)
    assert pair.store.clean_up(timedelta(seconds=-1)) == 1
    with pytest.raises(CommitRefusedError, match="staged 1 segments for its batch 0, but only 0 are left"):
        pair.commit(batch)
    assert (rows_of(pair.sink), pair.offsets(), pair.store.info().commits) == ([], [0, 0], 0)
    pair.commit(pair.batch("app", 0, batch.sources[0], ids=None))
    assert len(rows_of(pair.sink)) == 7


def test_a_micro_batch_that_was_not_planned_is_refused(pair: Pair) -> None:
    owner = pair.own()
    with pytest.raises(PlanMismatchError, match="differs from the plan of the owner"):
        pair.commit(pair.batch("app", 0, pair.offset(owner, (0, 0), (5, 2)), ids=None))
    pair.planned(owner, (0, 0), (5, 2))
    with pytest.raises(PlanMismatchError):
        pair.commit(pair.batch("app", 0, pair.offset(owner, (0, 0), (5, 3)), ids=None))
    assert (rows_of(pair.sink), pair.offsets()) == ([], [0, 0])


def test_a_zombie_with_another_checkpoint_and_the_same_range_is_refused(pair: Pair) -> None:
    zombie = pair.batch("zombie", 0, pair.planned(pair.own(), (0, 0), (5, 2)), ids=None)
    owner = pair.own()
    with pytest.raises(PlanMismatchError):
        pair.commit(zombie)
    pair.planned(owner, (0, 0), (5, 2))
    with pytest.raises(PlanMismatchError):
        pair.commit(zombie)
    assert (rows_of(pair.sink), pair.registration().app_id) == ([], None)


def test_a_zombie_and_its_successor_with_the_same_checkpoint_commit_once(pair: Pair) -> None:
    offset = pair.planned(pair.own(), (0, 0), (5, 2))
    zombie = pair.batch("app", 0, offset, ids=None)
    owner = pair.own()
    with pytest.raises(PlanMismatchError):
        pair.commit(zombie)
    owner.plan(offset)
    mine = pair.batch("app", 0, offset, ids=None)
    assert pair.commit(zombie).rows == 7
    assert pair.commit(mine) is None
    assert len(rows_of(pair.sink)) == 7
    assert pair.offsets() == [5, 2]


def test_a_consumer_moved_by_another_program_is_a_conflict_and_nothing_is_committed(pair: Pair) -> None:
    owner = pair.own()
    offset = pair.planned(owner, (0, 0), (5, 2))
    owner.release()
    pair.store.consumer("billing").advance("orders", 1, old=0, new=1)
    with pytest.raises(
        OffsetConflictError,
        match=r"is at \{1: 1\}, .* at \{1: 0\}.*new checkpoint.*seek the consumer to \{1: 0\}",
    ):
        pair.commit(pair.batch("app", 0, offset, ids=None))
    assert (rows_of(pair.sink), pair.offsets(), pair.store.info().commits) == ([], [0, 1], 0)


def test_a_consumer_moved_to_the_end_of_the_micro_batch_is_a_conflict_too(pair: Pair) -> None:
    owner = pair.own()
    offset = pair.planned(owner, (0, 0), (5, 2))
    owner.release()
    pair.store.consumer("billing").advance("orders", 1, old=0, new=2)
    with pytest.raises(OffsetConflictError, match=r"seek the consumer to \{0: 0, 1: 0\}") as caught:
        pair.commit(pair.batch("app", 0, offset, ids=None))
    assert caught.value.condition == "OFFSET_CONFLICT.CHECKPOINT"
    assert (rows_of(pair.sink), pair.offsets(), pair.store.info().commits) == ([], [0, 2], 0)


def test_a_micro_batch_without_new_rows_fails_if_the_consumer_has_moved(pair: Pair) -> None:
    owner = pair.own()
    first = pair.planned(owner, (0, 0), (5, 2))
    pair.commit(pair.batch("app", 0, first, ids=None))
    still = replace(first, start=first.end)
    pair.commit(pair.batch("app", 1, still, ids=[77]))
    assert pair.commit(pair.batch("app", 1, still, ids=[77])) is None
    assert rows_of(pair.sink).count(77) == 1
    pair.commit(pair.batch("other", 0, pair.planned(pair.own(), (5, 2), (6, 2)), ids=None))
    with pytest.raises(OffsetConflictError, match=r"another query or program moved.*new checkpoint"):
        pair.commit(pair.batch("app", 2, still, ids=[78]))
    assert 78 not in rows_of(pair.sink)


def test_another_app_may_continue_a_stateless_query(pair: Pair) -> None:
    pair.commit(pair.batch("app", 0, pair.planned(pair.own(), (0, 0), (5, 2)), ids=None))
    pair.commit(pair.batch("new", 0, pair.planned(pair.own(), (5, 2), (9, 2)), ids=None))
    assert (pair.offsets(), pair.registration().app_id) == ([9, 2], "new")
    assert len(rows_of(pair.sink)) == 11


def test_another_stateful_app_is_refused_unless_a_new_checkpoint_is_allowed(pair: Pair) -> None:
    pair.commit(pair.batch("app", 0, pair.planned(pair.own(), (0, 0), (5, 2)), ids=None, stateful=True))
    offset = pair.planned(pair.own(), (5, 2), (9, 2))
    with pytest.raises(ConsumerBoundError, match="allowNewCheckpoint=true"):
        pair.commit(pair.batch("new", 0, offset, ids=None, stateful=True))
    assert (pair.offsets(), len(rows_of(pair.sink))) == ([5, 2], 7)
    pair.commit(pair.batch("new", 0, offset, ids=None, stateful=True, rebind=True))
    assert (pair.offsets(), pair.registration().app_id) == ([9, 2], "new")


def test_a_seek_makes_the_commit_of_a_planned_micro_batch_fail(pair: Pair) -> None:
    owner = pair.own()
    batch = pair.batch("app", 0, pair.planned(owner, (0, 0), (5, 2)), ids=None)
    owner.release()
    pair.store.consumer("billing").seek("orders", to="earliest")
    with pytest.raises(CheckpointMismatchError, match="moved by a seek"):
        pair.commit(batch)
    assert rows_of(pair.sink) == []


def test_a_seek_unbinds_a_stateful_consumer_from_its_checkpoint(pair: Pair) -> None:
    owner = pair.own()
    pair.commit(pair.batch("app", 0, pair.planned(owner, (0, 0), (5, 2)), ids=None, stateful=True))
    owner.release()
    pair.store.consumer("billing").seek("orders", to="earliest")
    pair.commit(pair.batch("new", 0, pair.planned(pair.own(), (0, 0), (9, 2)), ids=None, stateful=True))
    assert (pair.offsets(), pair.registration().app_id) == ([9, 2], "new")


@pytest.mark.parametrize("what", ["consumer", "registration"])
def test_a_recreated_consumer_is_not_mistaken_for_the_old_one(pair: Pair, what: str) -> None:
    owner = pair.own()
    batch = pair.batch("app", 0, pair.planned(owner, (0, 0), (5, 2)), ids=None)
    owner.release()
    if what == "consumer":
        pair.store.drop_consumer("billing")
        pair.store.create_consumer("billing")
    else:
        pair.store.consumer("billing").unregister("orders")
    with pytest.raises(NotRegisteredError):
        pair.commit(batch)
    pair.store.consumer("billing").register("orders")
    # Move the consumer as far as its own owner has, so that only the generation differs.
    pair.own()
    with pytest.raises(CheckpointMismatchError):
        pair.commit(batch)
    assert (rows_of(pair.sink), pair.offsets()) == ([], [0, 0])


def test_a_recreated_source_queue_is_not_mistaken_for_the_old_one(pair: Pair) -> None:
    owner = pair.own()
    batch = pair.batch("app", 0, pair.planned(owner, (0, 0), (5, 2)), ids=None)
    owner.release()
    pair.store.drop_queue("orders", force=True)
    again = make_source(pair)
    with pytest.raises(CheckpointMismatchError):
        pair.commit(batch)
    assert (rows_of(pair.sink), again.offsets()) == ([], [0, 0])


def make_source(pair: Pair) -> Pair:
    source = pair.store.create_queue("orders", pair.source.schema, partitions=2)
    pair.store.consumer("billing").register("orders")
    return replace(pair, source=source)


def test_a_dropped_sink_refuses_commits(pair: Pair) -> None:
    owner = pair.own()
    offset = pair.planned(owner, (0, 0), (5, 2))
    batch = pair.batch("app", 0, offset, ids=None)
    empty = with_attempts(batch, {})
    pair.store.drop_queue("big")
    for each in (batch, empty):
        with pytest.raises((CommitRefusedError, QueueNotFoundError)):
            commit_batch(pair.store.database, each)
    pair.store.create_queue("big", pair.source.schema)
    for each in (batch, empty):
        with pytest.raises(CommitRefusedError):
            commit_batch(pair.store.database, each)
    assert pair.offsets() == [0, 0]


def test_a_sink_whose_retention_changed_is_still_the_same_sink(pair: Pair) -> None:
    batch = pair.batch("app", 0, pair.planned(pair.own(), (0, 0), (5, 2)), ids=None)
    pair.sink.set_retention(Retention(rows=1_000_000))
    assert pair.commit(batch).rows == 7


def test_a_sink_without_a_key_may_grow_before_the_commit(pair: Pair) -> None:
    batch = pair.batch("app", 0, pair.planned(pair.own(), (0, 0), (5, 2)), ids=None)
    pair.sink.add_partitions(2)
    assert pair.commit(batch).rows == 7


def test_a_keyed_sink_that_grew_refuses_rows_staged_before(store: penstock.Store) -> None:
    pair = make_pair(store, key=["id"])
    owner = pair.own()
    offset = pair.planned(owner, (0, 0), (5, 2))
    batch = pair.batch("app", 0, offset, ids=None)
    pair.sink.add_partitions(2)
    with pytest.raises(CommitRefusedError, match="got more partitions"):
        pair.commit(batch)
    assert (rows_of(pair.sink), pair.offsets()) == ([], [0, 0])
    assert pair.commit(pair.batch("app", 0, offset, ids=None)).rows == 7


def test_two_sources_move_together_or_not_at_all(pair: Pair) -> None:
    other = pair.store.create_queue("returns", pair.source.schema)
    other.append([{"id": 1}, {"id": 2}])
    pair.store.consumer("billing").register("returns")
    second = replace(pair, source=other)
    one = pair.planned(pair.own(), (0, 0), (5, 2))
    two = second.planned(second.own(), (0,), (2,))
    wrong = replace(two, end=(1,))
    with pytest.raises(PlanMismatchError):
        pair.commit(pair.batch("app", 0, one, wrong, ids=[1]))
    assert (pair.offsets(), second.offsets(), rows_of(pair.sink)) == ([0, 0], [0], [])
    pair.commit(pair.batch("app", 0, two, one, ids=[1]))
    assert (pair.offsets(), second.offsets(), rows_of(pair.sink)) == ([5, 2], [2], [1])


def test_sources_that_are_not_queues_rely_on_the_ledger_alone(pair: Pair) -> None:
    assert pair.commit(pair.batch("app", 0, ids=[1], others=["5"])).rows == 1
    assert pair.commit(pair.batch("app", 0, ids=[1], others=["5"])) is None
    assert pair.commit(pair.batch("app", 1, ids=[2], others=["6"])).rows == 1
    assert rows_of(pair.sink) == [1, 2]


def test_a_read_without_a_consumer_moves_no_consumer(pair: Pair) -> None:
    free = replace(pair.offset(pair.own(), (0, 0), (5, 2)), consumer=None)
    assert pair.commit(pair.batch("app", 0, free, ids=None)).rows == 7
    assert pair.offsets() == [0, 0]


def test_the_ledger_keeps_a_bounded_number_of_micro_batches(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ledger, "KEPT_BATCHES", 3)
    monkeypatch.setattr(ledger, "PRUNE_EVERY", 1)
    for batch_id in range(5):
        pair.commit(pair.batch("app", batch_id, ids=[batch_id]))
    key = pair.batch("app", 0).key
    kept = [
        batch_id
        for batch_id in range(5)
        if pair.store.database.run(
            lambda tx, n=batch_id: ledger.find_entry(tx, replace(key, batch_id=n)), write=False
        )
    ]
    assert kept == [1, 2, 3, 4]
    with pytest.raises(CheckpointRewoundError, match="the checkpoint is an old copy"):
        pair.commit(pair.batch("app", 0, ids=[0]))
    assert pair.commit(pair.batch("app", 1, ids=[1])) is None
    assert pair.commit(pair.batch("other", 0, ids=[9])).rows == 1
    assert rows_of(pair.sink) == [0, 1, 2, 3, 4, 9]


def test_old_entries_are_deleted_from_time_to_time(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ledger, "KEPT_BATCHES", 3)
    monkeypatch.setattr(ledger, "PRUNE_EVERY", 4)
    counts, offsets = [], []
    for number in range(9):
        batch = replace(pair.batch("app", number, ids=[number]), logged=f"offset {number}")
        pair.commit(batch)
        keys = [replace(batch.key, batch_id=each) for each in range(9)]
        entries = pair.store.database.run(
            lambda tx: [ledger.find_entry(tx, key) for key in keys],  # noqa: B023 - it runs now
            write=False,
        )
        counts.append(sum(each is not None for each in entries))
        offsets.append([each.logged for each in entries if each is not None and each.logged])
    assert counts == [1, 2, 3, 4, 4, 5, 6, 7, 4]
    assert [len(each) for each in offsets] == [1, 2, 3, 4, 2, 3, 4, 5, 2]
    assert offsets[-1] == ["offset 7", "offset 8"]


def test_a_micro_batch_is_refused_if_the_previous_one_is_missing(pair: Pair) -> None:
    """The sink's store was restored from an older backup, or the query has a different sink now."""
    for number in range(2):
        pair.commit(pair.batch("app", number, ids=[number]))
    with pytest.raises(CheckpointMismatchError, match=r"queue 'big' has .*up to 1: if") as caught:
        pair.commit(pair.batch("app", 3, ids=[3]))
    assert caught.value.condition == "CHECKPOINT_MISMATCH.SINK_BEHIND"
    with pytest.raises(CheckpointMismatchError, match="nothing of this query"):
        pair.commit(pair.batch("other", 3, ids=[3]))
    assert rows_of(pair.sink) == [0, 1]


def test_a_sink_new_to_a_query_accepts_its_next_micro_batch_with_new_sink(pair: Pair) -> None:
    pair.commit(pair.batch("app", 3, ids=[3], new_sink=True))
    pair.commit(pair.batch("app", 4, ids=[4]))
    with pytest.raises(CheckpointMismatchError, match="up to 4"):
        pair.commit(pair.batch("app", 6, ids=[6], new_sink=True))
    assert rows_of(pair.sink) == [3, 4]


def test_an_at_least_once_sink_also_detects_lost_micro_batches(pair: Pair) -> None:
    database, key = pair.into.database, pair.batch("app", 0).key
    for number in (0, 0, 1):
        record_batch(database, replace(key, batch_id=number), "app", 1, new_sink=False)
    with pytest.raises(CheckpointMismatchError, match="up to 1"):
        record_batch(database, replace(key, batch_id=3), "app", 1, new_sink=False)


def test_an_at_least_once_sink_accepts_an_old_copy_of_the_checkpoint(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The copy may even be older than the ledger: the sink has more rows than the checkpoint knows of, not
    fewer.
    """
    monkeypatch.setattr(ledger, "KEPT_BATCHES", 2)
    database, key = pair.into.database, pair.batch("app", 0).key
    for number in (0, 1, 2, 3, 4, 1, 2, 3, 4, 5):
        record_batch(database, replace(key, batch_id=number), "app", 1, new_sink=False)


@pytest.mark.parametrize("exactly_once", [True, False])
def test_only_an_exactly_once_record_identifies_the_rows_of_a_micro_batch(
    pair: Pair, store_url: str, exactly_once: bool
) -> None:
    batch = pair.batch("app", 0, pair.planned(pair.own(), (0, 0), (5, 2)), ids=None)
    if exactly_once:
        pair.commit(batch)
    else:
        record_batch(pair.into.database, batch.key, batch.origin, 7, new_sink=False)
    commits = LedgerCommits(store_url, batch.origin, "app", rebind=False, new_sink=False)
    newest = commits.newest(batch.key.sink)
    assert (newest.number, newest.identifies_rows) == (0, exactly_once)


def test_a_commit_with_an_unknown_outcome_is_retried_and_happens_once(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The connection breaks after the database has committed but before it responds."""
    owner = pair.own()
    batch = pair.batch("app", 0, pair.planned(owner, (0, 0), (5, 2)), ids=None)
    database = pair.store.database
    commit, broken = database._commit, []

    def break_after(connection: object) -> None:
        commit(connection)
        if not broken:
            broken.append(True)
            raise CommitOutcomeUnknownError("gone")

    monkeypatch.setattr(database, "_commit", break_after)
    monkeypatch.setattr(database, "_commit_error", lambda error: error)
    assert pair.commit(batch) is None
    assert broken
    assert len(rows_of(pair.sink)) == 7
    assert pair.offsets() == [5, 2]


def test_the_ledger_records_what_a_micro_batch_read(pair: Pair) -> None:
    batch = pair.batch("app", 0, pair.planned(pair.own(), (0, 0), (5, 2)), ids=None)
    pair.commit(batch)
    entry = pair.store.database.run(lambda tx: ledger.find_entry(tx, batch.key), write=False)
    origin, [line] = json.loads(entry.ranges)
    assert (origin, line[1:3], line[4:], entry.rows) == ("app", ["orders", "billing"], [[0, 0], [5, 2]], 7)


def test_a_driver_that_mistook_anothers_micro_batch_for_its_own_cannot_continue(pair: Pair) -> None:
    """The driver was suspended before its commit. Another driver committed fewer rows, and this one reads the
    other's entry of the checkpoint.
    """
    offset = replace(pair.offset(pair.own(), (0, 0), (5, 5)), consumer=None)
    pair.commit(pair.batch("app", 0, offset, ids=None))
    assert pair.commit(pair.batch("app", 0, offset, ids=None)) is None, "it passes for a repeat"
    with pytest.raises(CheckpointMismatchError) as caught:
        pair.commit(pair.batch("app", 1, replace(offset, start=(9, 5), end=(12, 5)), ids=None))
    assert caught.value.condition == "CHECKPOINT_MISMATCH.OTHER_INPUT"
    pair.commit(pair.batch("app", 1, replace(offset, start=(5, 5), end=(12, 5)), ids=None))
