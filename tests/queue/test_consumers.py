"""Consumers: pull, advance, registration, lag."""

from __future__ import annotations

import threading
from datetime import UTC, datetime, timedelta
from typing import Any, Literal

import pytest

import penstock
from penstock.errors import (
    DataLostError,
    InvalidInputError,
    InvalidPositionError,
    NotRegisteredError,
    OffsetConflictError,
    PartitionNotFoundError,
)
from penstock.store.records import catalog, consumers
from tests.support.queues import SCHEMA, backdate, numbers, rows


@pytest.fixture
def queue(store: penstock.Store) -> penstock.Queue:
    queue = store.create_queue("q", SCHEMA, partitions=2)
    for n in range(5):
        queue.append(rows(2 * n, 2 * n + 1), 0)
    queue.append(rows(100), 1)
    return queue


@pytest.fixture
def consumer(store: penstock.Store, queue: penstock.Queue) -> penstock.Consumer:
    store.create_consumer("c")
    return queue.register("c")


def test_rows_are_pulled_again_until_the_consumer_advances(consumer: penstock.Consumer) -> None:
    for _ in range(2):
        pull = consumer.pull("q", 0, max_rows=3)
        assert (numbers(pull.table), pull.start, pull.end) == ([0, 1, 2], 0, 3)
    consumer.advance("q", 0, old=pull.start, new=pull.end)
    assert consumer.offsets("q") == {0: 3, 1: 0}
    pull = consumer.pull("q", 0)
    assert (numbers(pull.table), pull.start, pull.end) == ([3, 4, 5, 6, 7, 8, 9], 3, 10)
    consumer.advance("q", 0, old=3, new=10)
    pull = consumer.pull("q", 0)
    assert (pull.table.num_rows, pull.table.schema, pull.start, pull.end) == (0, SCHEMA, 10, 10)
    consumer.advance("q", 0, old=10, new=10)


def test_invalid_pulls_are_refused(consumer: penstock.Consumer, queue: penstock.Queue) -> None:
    for limit in (0, -1, 2.5, None):
        with pytest.raises(InvalidInputError, match="max_rows is 1 or more"):
            consumer.pull("q", 0, max_rows=limit)  # type: ignore[arg-type]
    with pytest.raises(PartitionNotFoundError):
        consumer.pull("q", 2)
    queue.trim(0, 3)
    with pytest.raises(DataLostError, match=r"rows \[0, 3\) of queue 'q', partition 0"):
        consumer.pull("q", 0)


def test_an_offset_moves_only_from_its_current_value(consumer: penstock.Consumer) -> None:
    consumer.advance("q", 0, old=0, new=4)
    with pytest.raises(OffsetConflictError, match="is at 4, not at 0") as caught:
        consumer.advance("q", 0, old=0, new=6)
    assert caught.value.parameters["found"] == 4
    assert consumer.offsets("q") == {0: 4, 1: 0}


def test_an_offset_does_not_move_past_rows_that_were_not_pulled(
    store: penstock.Store, consumer: penstock.Consumer
) -> None:
    """The indexes match the pulled rows, but the queue was recreated with different rows."""
    pull = consumer.pull("q", 0, max_rows=3)
    store.drop_queue("q", force=True)
    queue = store.create_queue("q", SCHEMA, partitions=2)
    queue.append(rows(7, 8, 9), 0)
    queue.register("c")
    with pytest.raises(
        OffsetConflictError, match="the queue was recreated, after the rows of partition 0 were pulled"
    ):
        consumer.advance("q", 0, old=pull.start, new=pull.end)
    again = consumer.pull("q", 0)
    assert numbers(again.table) == [7, 8, 9]
    consumer.advance("q", 0, old=again.start, new=again.end)


def test_rows_that_were_pulled_before_a_seek_are_pulled_again(consumer: penstock.Consumer) -> None:
    consumer.pull("q", 0)
    consumer.seek("q", to="earliest")
    with pytest.raises(OffsetConflictError, match="pull again"):
        consumer.advance("q", 0, old=0, new=3)
    # This object has not pulled from the partition, so it cannot detect the change there.
    consumer.advance("q", 1, old=0, new=1)


@pytest.mark.parametrize(
    ("old", "new", "problem"), [(0, 11, "PAST_END"), (0, -1, "BACKWARDS"), (4, 3, "BACKWARDS")]
)
def test_an_offset_moves_no_further_than_the_newest_row(
    consumer: penstock.Consumer, old: int, new: int, problem: str
) -> None:
    with pytest.raises(InvalidPositionError, match=rf"{problem}\].*To move elsewhere, use seek"):
        consumer.advance("q", 0, old=old, new=new)
    with pytest.raises(PartitionNotFoundError):
        consumer.advance("q", 2, old=0, new=0)
    assert consumer.offsets("q") == {0: 0, 1: 0}


@pytest.mark.parametrize(
    ("partition", "old", "new", "error"),
    [
        (2**70, 0, 1, PartitionNotFoundError),
        (-(2**70), 0, 1, PartitionNotFoundError),
        ("0", 0, 1, InvalidInputError),
        (None, 0, 1, InvalidInputError),
        (True, 0, 1, InvalidInputError),
        (0, "0", 1, InvalidPositionError),
        (0, 0, "1", InvalidPositionError),
        (0, 0.0, 1, InvalidPositionError),
        (0, None, 1, InvalidPositionError),
        (0, 0, 2**70, InvalidPositionError),
        (0, 2**70, 2**70, InvalidPositionError),
        (0, -(2**70), 1, InvalidPositionError),
        (0, -1, 1, InvalidPositionError),
    ],
)
def test_an_invalid_partition_or_row_index_is_refused(
    consumer: penstock.Consumer, partition: Any, old: Any, new: Any, error: type[Exception]
) -> None:
    with pytest.raises(error):
        consumer.advance("q", partition, old=old, new=new)
    if error is not InvalidPositionError:
        with pytest.raises(error):
            consumer.pull("q", partition)
    assert consumer.offsets("q") == {0: 0, 1: 0}


def test_only_one_of_many_concurrent_advances_from_an_offset_succeeds(consumer: penstock.Consumer) -> None:
    outcomes: list[str] = []

    def advance() -> None:
        try:
            consumer.advance("q", 0, old=0, new=5)
            outcomes.append("moved")
        except OffsetConflictError:
            outcomes.append("conflict")

    threads = [threading.Thread(target=advance) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(outcomes) == ["conflict"] * 7 + ["moved"]


def test_a_conflict_names_only_partitions_that_others_have_moved(
    store: penstock.Store, consumer: penstock.Consumer
) -> None:
    registration = consumer.registration("q")

    def move(end: int) -> None:
        moves = {"partition": [0, 1], "old": [0, 0], "new": [3, end]}
        store.database.run(lambda tx: consumers.advance(tx, registration, moves, safe=None))

    consumer.advance("q", 1, old=0, new=1)
    with pytest.raises(OffsetConflictError, match=r"has moved .* to the same offsets"):
        move(1)
    with pytest.raises(OffsetConflictError, match="partition 1, is at 1, not at 0"):
        move(2)
    with pytest.raises(OffsetConflictError, match="partition 1, is at 1, not at 0"):
        consumer.advance("q", 1, old=0, new=1)
    assert consumer.offsets("q") == {0: 0, 1: 1}


@pytest.mark.parametrize("safe", ["new", "old", None])
def test_the_store_moves_an_offset_only_from_its_current_value(
    store: penstock.Store, consumer: penstock.Consumer, safe: Literal["old", "new"] | None
) -> None:
    registration = consumer.registration("q")

    def move(old: int) -> dict[str, list[int]]:
        return {"partition": [0], "old": [old], "new": [5]}

    with pytest.raises(OffsetConflictError):
        store.database.run(lambda tx: consumers.advance(tx, registration, move(3), safe=safe))
    store.database.run(lambda tx: consumers.advance(tx, registration, move(0), safe=safe))
    offsets = store.database.run(lambda tx: consumers.read_offsets(tx, registration))
    assert offsets == ([5, 0], [5 if safe == "new" else 0, 0])


def test_becoming_vital_waits_for_a_running_trim(
    store: penstock.Store, queue: penstock.Queue, consumer: penstock.Consumer
) -> None:
    """The trim does not know yet that the consumer is vital, but has finished deleting rows when `register`
    returns.
    """
    with store.database.transaction() as tx:
        catalog.lock_partition(tx, queue.record, 1)
        thread = threading.Thread(target=consumer.register, args=("q",), kwargs={"vital": True})
        thread.start()
        thread.join(0.3)
        assert thread.is_alive()
    thread.join(20)
    assert consumer.registration("q").vital


def test_registering_again_keeps_the_offsets(store: penstock.Store, consumer: penstock.Consumer) -> None:
    consumer.advance("q", 0, old=0, new=4)
    before = consumer.registration("q")
    consumer.register("q", start="latest")
    assert consumer.offsets("q") == {0: 4, 1: 0}
    assert consumer.registration("q") == before
    assert not consumer.registration("q").vital


def test_registering_again_changes_vital_only_if_it_is_passed(
    queue: penstock.Queue, consumer: penstock.Consumer
) -> None:
    for vital, found in ((True, True), (None, True), (False, False), (None, False)):
        consumer.register("q", vital=vital)
        assert consumer.registration("q").vital == found
    consumer.register("q", vital=True)
    queue.register("c")
    assert consumer.registration("q").vital


def test_concurrent_registrations_share_one_registration(
    store: penstock.Store, queue: penstock.Queue
) -> None:
    store.create_consumer("c")
    failures: list[BaseException] = []

    def register() -> None:
        try:
            queue.register("c", start="latest")
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=register) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert store.consumer("c").offsets("q") == {0: 10, 1: 1}
    assert len(store.registrations()) == 1


def test_a_new_registration_is_not_mistaken_for_an_old_one(consumer: penstock.Consumer) -> None:
    before = consumer.registration("q").generation
    consumer.unregister("q")
    with pytest.raises(NotRegisteredError, match="is not registered on queue 'q'"):
        consumer.offsets("q")
    consumer.register("q")
    assert consumer.registration("q").generation != before


def test_a_consumer_can_read_many_queues_and_a_queue_can_have_many_consumers(
    store: penstock.Store, queue: penstock.Queue
) -> None:
    other = store.create_queue("r", SCHEMA)
    for name in ("b", "a"):
        store.create_consumer(name)
        queue.register(name)
    other.register("a", vital=True)
    store.consumer("a").advance("q", 0, old=0, new=2)
    assert store.consumer("a").queues() == ["q", "r"]
    assert queue.info().consumers == ("a", "b")
    assert store.consumer("b").offsets("q") == {0: 0, 1: 0}
    assert store.consumer("a").offsets("r") == {0: 0}
    store.drop_queue("q")
    assert store.consumer("a").queues() == ["r"]
    with pytest.raises(penstock.errors.QueueNotFoundError):
        store.consumer("a").offsets("q")


def test_lag_is_counted_in_rows_bytes_and_seconds(
    store: penstock.Store, queue: penstock.Queue, consumer: penstock.Consumer
) -> None:
    lag = consumer.lag("q")
    assert (lag.rows, lag.bytes) == (11, queue.info().bytes)
    assert 0 < lag.seconds < 60
    assert [(part.partition, part.offset, part.next_index, part.rows) for part in lag.partitions] == [
        (0, 0, 10, 10),
        (1, 0, 1, 1),
    ]
    consumer.seek("q", to="latest")
    lag = consumer.lag("q")
    assert (lag.rows, lag.bytes, lag.seconds) == (0, 0, 0.0)


def test_lag_in_seconds_is_the_age_of_the_oldest_row_even_in_a_compacted_segment(
    store: penstock.Store, queue: penstock.Queue, consumer: penstock.Consumer
) -> None:
    backdate(store, 1000)
    queue.append(rows(99), 0)
    queue.compact()
    assert consumer.lag("q").partitions[0].seconds > 1000
    consumer.advance("q", 0, old=0, new=10)
    assert consumer.lag("q").partitions[0].seconds < 60


def test_lag_of_a_consumer_behind_a_trim_counts_the_rows_it_missed(
    queue: penstock.Queue, consumer: penstock.Consumer
) -> None:
    queue.trim(0, 4)
    lag = consumer.lag("q").partitions[0]
    assert (lag.offset, lag.rows) == (0, 10)
    assert lag.seconds > 0


def test_a_consumer_may_start_at_any_position(store: penstock.Store, queue: penstock.Queue) -> None:
    now = datetime.now(UTC)
    starts: dict[str, tuple[object, dict[int, int]]] = {
        "a": ("earliest", {0: 2, 1: 0}),
        "b": ("latest", {0: 10, 1: 1}),
        "c": ({0: 7}, {0: 7, 1: 0}),
        "d": (now - timedelta(days=1), {0: 2, 1: 0}),
        "e": (now + timedelta(days=1), {0: 10, 1: 1}),
    }
    queue.trim(0, 2)
    for name, (start, expected) in starts.items():
        store.create_consumer(name)
        assert queue.register(name, start=start).offsets("q") == expected
    for start in (
        {2: 0},
        {0: 11},
        {0: 1},
        {0: -1},
        {"0": 3},
        {0: "3"},
        {0: True},
        "newest",
        5,
        None,
        datetime(2020, 1, 1),  # noqa: DTZ001 - that is the mistake
    ):
        store.create_consumer(str(start))
        with pytest.raises(InvalidPositionError):
            queue.register(str(start), start=start)
        with pytest.raises(NotRegisteredError):
            store.consumer(str(start)).offsets("q")
