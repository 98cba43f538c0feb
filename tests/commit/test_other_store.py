"""A source in one store and its sink in another: the sink's mark decides, and the consumer follows it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import penstock
from penstock import connect
from penstock.errors import CheckpointMismatchError, ConsumerBoundError, OffsetConflictError
from tests.commit.protocol import Pair, make_pair, rows_of


@pytest.fixture
def pair(store: penstock.Store, tmp_path: Path) -> Iterator[Pair]:
    with connect(f"sqlite:///{tmp_path}/source.db") as source:
        yield make_pair(source, into=store)


def test_the_consumer_follows_the_committed_rows_once_spark_has_logged_them(pair: Pair) -> None:
    owner = pair.own()
    offset = pair.planned(owner, (0, 0), (5, 2))
    assert pair.commit(pair.batch("app", 0, offset, ids=None)).rows == 7
    assert pair.offsets() == [0, 0]
    owner.observe(offset)
    assert (pair.offsets(), pair.safe()) == ([5, 2], [5, 2])


def test_a_replay_changes_nothing(pair: Pair) -> None:
    offset = pair.planned(pair.own(), (0, 0), (5, 2))
    pair.commit(pair.batch("app", 0, offset, ids=None))
    assert pair.commit(pair.batch("app", 0, offset, ids=None)) is None
    assert len(rows_of(pair.sink)) == 7


def test_another_checkpoint_that_would_repeat_rows_is_refused_with_where_to_seek(pair: Pair) -> None:
    """The first query died between the sink's commit and Spark's commit log, and its checkpoint was lost."""
    pair.commit(pair.batch("app", 0, pair.planned(pair.own(), (0, 0), (5, 0)), ids=None))
    owner = pair.own()
    with pytest.raises(OffsetConflictError, match=r"seek the consumer to \{0: 5\}"):
        pair.commit(pair.batch("new", 0, pair.planned(owner, (0, 0), (9, 9)), ids=None))
    assert len(rows_of(pair.sink)) == 5
    owner.release()
    pair.store.consumer("billing").seek("orders", to={0: 5})
    pair.commit(pair.batch("new", 0, pair.planned(pair.own(), (5, 0), (9, 9)), ids=None))
    assert sorted(rows_of(pair.sink)) == [*range(9), *range(1000, 1009)]


def test_one_seek_fixes_all_partitions_in_which_the_sink_is_ahead(pair: Pair) -> None:
    pair.commit(pair.batch("app", 0, pair.planned(pair.own(), (0, 0), (5, 2)), ids=None))
    with pytest.raises(OffsetConflictError, match=r"seek the consumer to \{0: 5, 1: 2\}"):
        pair.commit(pair.batch("new", 0, pair.planned(pair.own(), (0, 0), (9, 9)), ids=None))


def test_the_advised_seek_leaves_partitions_unchanged_that_start_where_the_sink_ends(pair: Pair) -> None:
    owner = pair.own()
    first = pair.planned(owner, (0, 0), (5, 0))
    pair.commit(pair.batch("app", 0, first, ids=None))
    owner.observe(first)
    pair.commit(pair.batch("app", 1, pair.planned(owner, (5, 0), (5, 2)), ids=None))
    with pytest.raises(OffsetConflictError, match=r"seek the consumer to \{1: 2\}"):
        pair.commit(pair.batch("new", 0, pair.planned(pair.own(), (5, 0), (9, 9)), ids=None))


def test_a_stateful_query_does_not_take_over_another_checkpoints_mark(pair: Pair) -> None:
    owner = pair.own()
    offset = pair.planned(owner, (0, 0), (5, 2))
    pair.commit(pair.batch("app", 0, offset, ids=None, stateful=True))
    owner.observe(offset)
    later = pair.planned(pair.own(), (5, 2), (9, 9))
    with pytest.raises(ConsumerBoundError):
        pair.commit(pair.batch("new", 0, later, ids=None, stateful=True))
    assert len(rows_of(pair.sink)) == 7
    assert pair.commit(pair.batch("new", 0, later, ids=None, stateful=True, rebind=True)).rows == 11


def test_each_sink_has_its_own_mark(pair: Pair) -> None:
    owner = pair.own()
    offset = pair.planned(owner, (0, 0), (5, 2))
    pair.commit(pair.batch("app", 0, offset, ids=None))
    second = Pair(pair.store, pair.source, pair.into.create_queue("copy", pair.source.schema), pair.into)
    second.commit(second.batch("copier", 0, offset, ids=None))
    assert len(rows_of(second.sink)) == len(rows_of(pair.sink)) == 7


def test_rows_are_committed_again_after_a_seek(pair: Pair) -> None:
    owner = pair.own()
    offset = pair.planned(owner, (0, 0), (5, 2))
    pair.commit(pair.batch("app", 0, offset, ids=None))
    owner.release()
    pair.store.consumer("billing").seek("orders", to="earliest")
    again = pair.own()
    with pytest.raises(CheckpointMismatchError):
        again.observe(offset)
    assert pair.commit(pair.batch("new", 0, pair.planned(again, (0, 0), (5, 2)), ids=None)).rows == 7


def seek_to_the_same_place(pair: Pair) -> None:
    pair.store.consumer("billing").seek("orders", to=dict(enumerate(pair.offsets())))


def register_again(pair: Pair) -> None:
    consumer, offsets = pair.store.consumer("billing"), dict(enumerate(pair.offsets()))
    consumer.unregister("orders")
    consumer.register("orders", start=offsets)


def plus(offsets: tuple[int, int], rows: tuple[int, int]) -> tuple[int, int]:
    return offsets[0] + rows[0], offsets[1] + rows[1]


@pytest.mark.parametrize("move", [seek_to_the_same_place, register_again])
@pytest.mark.parametrize(
    ("zombie_rows", "rows"), [((4, 0), (4, 0)), ((0, 4), (4, 0)), ((4, 4), (4, 0)), ((4, 4), (0, 4))]
)
@pytest.mark.parametrize("start", [(0, 0), (5, 2)], ids=["the first commit", "a later commit"])
def test_a_query_that_lost_its_lock_cannot_commit_after_its_successor(
    pair: Pair,
    move: Callable[[Pair], None],
    zombie_rows: tuple[int, int],
    rows: tuple[int, int],
    start: tuple[int, int],
) -> None:
    """The query cannot know that its consumer was moved, but the sink's store has seen a newer generation."""
    lost, number = pair.own(), 0
    if start != (0, 0):
        offset = pair.planned(lost, (0, 0), start)
        pair.commit(pair.batch("zombie", 0, offset, ids=None))
        lost.observe(offset)
        number = 1
    zombie = pair.batch("zombie", number, pair.planned(lost, start, plus(start, zombie_rows)), ids=None)
    lost.release()
    move(pair)
    follower = pair.own()
    offset = pair.planned(follower, start, plus(start, rows))
    assert pair.commit(pair.batch("new", 0, offset, ids=None)).rows == 4
    before = rows_of(pair.sink)
    for _ in range(2):
        with pytest.raises(CheckpointMismatchError, match="moved by a seek or registered again") as caught:
            pair.commit(zombie)
        assert caught.value.condition == "CHECKPOINT_MISMATCH.CONSUMER_MOVED"
    assert rows_of(pair.sink) == before
    follower.observe(offset)
    pair.commit(pair.batch("new", 1, pair.planned(follower, offset.end, (20, 20)), ids=None))
    assert sorted(rows_of(pair.sink)) == [*range(20), *range(1000, 1020)], "each row once"


def test_a_store_restored_to_before_a_registration_is_refused_until_a_seek(pair: Pair) -> None:
    """A seek gets a generation above those of all marks in other stores, so the error's advice works."""
    earlier = pair.registration()
    register_again(pair)
    owner = pair.own()
    pair.commit(pair.batch("app", 0, pair.planned(owner, (0, 0), (5, 2)), ids=None))
    owner.release()
    name = "penstock_registration" if pair.store.database.dialect == "sqlite" else "penstock.registration"
    pair.store.database.run(lambda tx: tx.execute(f"update {name} set generation = {earlier.generation}"))
    restored = pair.own()
    batch = pair.batch("new", 0, pair.planned(restored, (0, 0), (5, 2)), ids=None)
    with pytest.raises(CheckpointMismatchError, match="seek the consumer to where") as caught:
        pair.commit(batch)
    assert caught.value.condition == "CHECKPOINT_MISMATCH.CONSUMER_MOVED"
    restored.release()
    pair.store.consumer("billing").seek("orders", to={0: 5, 1: 2})
    again = pair.own()
    assert pair.commit(pair.batch("new", 0, pair.planned(again, (5, 2), (7, 2)), ids=None)).rows == 2


def test_rows_are_delivered_again_after_a_consumer_is_moved_back(pair: Pair) -> None:
    """Marks from before the seek are ignored, also for partitions that the first commit after it does not
    read.
    """
    owner = pair.own()
    offset = pair.planned(owner, (0, 0), (5, 2))
    pair.commit(pair.batch("app", 0, offset, ids=None))
    owner.observe(offset)
    owner.release()
    pair.store.consumer("billing").seek("orders", to="earliest")
    again = pair.own()
    for number, (start, end) in enumerate([((0, 0), (3, 0)), ((3, 0), (3, 7))]):
        offset = pair.planned(again, start, end)
        pair.commit(pair.batch("new", number, offset, ids=None))
        again.observe(offset)
    assert pair.offsets() == [3, 7]
    assert sorted(rows_of(pair.sink)) == sorted([*range(5), *range(3), 1000, 1001, *range(1000, 1007)])
