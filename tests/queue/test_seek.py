"""Seeking: the positions that a consumer can be moved to, and the effect on old checkpoints."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest

import penstock
from penstock.errors import ConsumerInUseError, InvalidPositionError, NotRegisteredError
from tests.support.queues import SCHEMA, backdate, numbers, rows


@pytest.fixture
def queue(store: penstock.Store) -> penstock.Queue:
    queue = store.create_queue("q", SCHEMA, partitions=3)
    for n in range(6):
        queue.append(rows(n), n % 2)
    return queue


@pytest.fixture
def consumer(store: penstock.Store, queue: penstock.Queue) -> penstock.Consumer:
    store.create_consumer("c")
    consumer = queue.register("c")
    consumer.advance("q", 0, old=0, new=1)
    return consumer


@pytest.mark.parametrize(
    ("to", "expected"),
    [
        ("earliest", {0: 0, 1: 0, 2: 0}),
        ("latest", {0: 3, 1: 3, 2: 0}),
        ({1: 2}, {0: 1, 1: 2, 2: 0}),
        ({0: 3, 1: 0}, {0: 3, 1: 0, 2: 0}),
        ({}, {0: 1, 1: 0, 2: 0}),
    ],
)
def test_a_seek_moves_to_the_requested_position(
    consumer: penstock.Consumer, to: penstock.queue.consumer.Position, expected: dict[int, int]
) -> None:
    assert consumer.seek("q", to=to, dry_run=True) == expected
    assert consumer.offsets("q") == {0: 1, 1: 0, 2: 0}
    assert consumer.seek("q", to=to) == expected
    assert consumer.offsets("q") == expected


def test_a_seek_also_moves_the_safe_offset(
    store: penstock.Store, queue: penstock.Queue, consumer: penstock.Consumer
) -> None:
    consumer.register("q", vital=True)
    consumer.seek("q", to="latest")
    assert queue.trim(0, 3) == 3
    consumer.seek("q", to={1: 1})
    assert queue.trim(1, 3) == 1


@pytest.mark.parametrize(
    ("to", "problem"),
    [
        ("newest", ""),
        ("", ""),
        (5, ".PARTITION_NEEDED"),
        (None, ""),
        ({3: 0}, ".UNKNOWN_PARTITION"),
        ({0: 4}, ".PAST_END"),
        ({0: -1}, ""),
        ({0: None}, ""),
        ({"0": 0}, ""),
        (datetime(2020, 1, 1), ".NO_TIME_ZONE"),  # noqa: DTZ001 - that is the mistake
        ([0, 0, 0], ""),
    ],
)
def test_an_invalid_seek_is_refused(consumer: penstock.Consumer, to: object, problem: str) -> None:
    before = consumer.registration("q")
    for dry_run in (True, False):
        with pytest.raises(InvalidPositionError) as caught:
            consumer.seek("q", to=to, dry_run=dry_run)  # type: ignore[arg-type]
        assert caught.value.condition == f"INVALID_POSITION{problem}"
    assert consumer.offsets("q") == {0: 1, 1: 0, 2: 0}
    assert consumer.registration("q") == before


def test_a_seek_invalidates_old_checkpoints_and_a_dry_run_does_not(consumer: penstock.Consumer) -> None:
    before = consumer.registration("q").generation
    consumer.seek("q", to="latest", dry_run=True)
    assert consumer.registration("q").generation == before
    consumer.seek("q", to="latest")
    assert consumer.registration("q").generation > before


def test_a_seek_stays_within_the_remaining_rows(queue: penstock.Queue, consumer: penstock.Consumer) -> None:
    queue.trim(0, 2)
    with pytest.raises(InvalidPositionError, match=r"POSITION.TRIMMED\].*has rows 2 to 3, not 1"):
        consumer.seek("q", to={0: 1})
    assert consumer.seek("q", to={1: 1}) == {0: 2, 1: 1, 2: 0}, "what is left of where it stood"
    assert consumer.seek("q", to="earliest") == {0: 2, 1: 0, 2: 0}


def test_only_a_registered_consumer_can_seek(store: penstock.Store, queue: penstock.Queue) -> None:
    consumer = store.create_consumer("d")
    with pytest.raises(NotRegisteredError):
        consumer.seek("q", to="latest")


@pytest.mark.parametrize("merged", [False, True])
def test_a_seek_to_a_time_goes_to_the_first_row_at_or_after_it(store: penstock.Store, merged: bool) -> None:
    queue = store.create_queue("times", SCHEMA, partitions=2)
    consumer = store.create_consumer("t")
    queue.register("t")
    for n in range(12):
        queue.append(rows(3 * n, 3 * n + 1, 3 * n + 2), 0)
        backdate(store, 10)
    # Append n is about 10 * (12 - n) seconds older than the last append.
    last = _time_of_append(store, 11)
    if merged:
        queue.compact()
    for n in range(12):
        exactly = last - timedelta(seconds=10 * (11 - n))
        assert consumer.seek("times", to=exactly - timedelta(seconds=5), dry_run=True)[0] == 3 * n
    assert consumer.seek("times", to=last, dry_run=True) == {0: 33, 1: 0}
    assert consumer.seek("times", to=last + timedelta(microseconds=1), dry_run=True) == {0: 36, 1: 0}
    assert consumer.seek("times", to=datetime(1970, 1, 1, tzinfo=UTC), dry_run=True)[0] == 0


def _time_of_append(store: penstock.Store, row_index: int) -> datetime:
    part = store.queue("times").info().partitions[0]
    assert part.last_append is not None
    return part.last_append


def test_a_time_inside_a_compacted_segment_finds_the_exact_row(
    store: penstock.Store,
) -> None:
    queue = store.create_queue("times", SCHEMA)
    consumer = store.create_consumer("t")
    queue.register("t")
    times = []
    for n in range(20):
        queue.append(rows(n, n))
        times.append(queue.info().partitions[0].last_append)
    queue.compact()
    for n, time in enumerate(times):
        assert time is not None
        first = times.index(time)
        assert consumer.seek("times", to=time, dry_run=True)[0] == 2 * first
        later = consumer.seek("times", to=time + timedelta(microseconds=1), dry_run=True)[0]
        assert later == 2 * (len(times) - times[::-1].index(time))
        assert n >= first


def test_a_time_is_found_in_a_partition_that_was_trimmed_inside_a_segment(store: penstock.Store) -> None:
    queue = store.create_queue("times", SCHEMA)
    consumer = store.create_consumer("t")
    for n in range(4):
        queue.append(rows(n, n))
    queue.compact()
    queue.trim(0, 3)
    queue.register("t", start=datetime(2000, 1, 1, tzinfo=UTC))
    assert consumer.offsets("times") == {0: 3}
    assert numbers(consumer.pull("times", 0).table) == [1, 2, 2, 3, 3]


def test_a_seek_is_refused_while_a_query_owns_the_consumer(
    store: penstock.Store, consumer: penstock.Consumer
) -> None:
    lock = store.database.owner_lock(consumer.registration("q").lock_name(store.uuid))
    assert lock.acquire()
    with pytest.raises(
        ConsumerInUseError, match="cannot seek consumer 'c' on queue 'q': a running query owns it"
    ):
        consumer.seek("q", to="latest")
    lock.release()


def test_an_offset_cannot_be_moved_manually_while_a_query_owns_the_consumer(
    store: penstock.Store, consumer: penstock.Consumer
) -> None:
    """This also holds between micro-batches, when no plan is open, since the query continues from its last
    offset.
    """
    assert not consumer.registration("q").plan_open
    lock = store.database.owner_lock(consumer.registration("q").lock_name(store.uuid))
    assert lock.acquire()
    with pytest.raises(
        ConsumerInUseError, match="cannot move consumer 'c' on queue 'q': a running query owns it"
    ):
        consumer.advance("q", 0, old=1, new=2)
    assert consumer.offsets("q") == {0: 1, 1: 0, 2: 0}
    lock.release()
    consumer.advance("q", 0, old=1, new=2)


def test_an_offset_can_be_moved_manually_after_its_query_has_died(
    store: penstock.Store, consumer: penstock.Consumer
) -> None:
    """A plan is open, but its owner is dead. Only a live owner prevents the move."""
    keys = consumer.registration("q").keys
    store.database.run(lambda tx: tx.run("open_plan", epoch=0, plan='{"from": [1, 0, 0]}', **keys))
    lock = store.database.owner_lock(consumer.registration("q").lock_name(store.uuid))
    assert lock.acquire()
    with pytest.raises(ConsumerInUseError, match="cannot move"):
        consumer.advance("q", 0, old=1, new=2)
    lock.release()
    consumer.advance("q", 0, old=1, new=2)
