"""Producer sessions: appends are applied once, however often they are retried, and one holder writes at a
time.
"""

from __future__ import annotations

import threading

import pytest

import penstock
from penstock.errors import InvalidInputError, ProducerFencedError, QueueNotFoundError, SchemaMismatchError
from tests.support.queues import SCHEMA, everything, numbers, rows
from tests.support.raw_sql import run_sql


@pytest.fixture
def queue(store: penstock.Store) -> penstock.Queue:
    return store.create_queue("q", SCHEMA)


def test_a_sequence_number_is_appended_once(store: penstock.Store, queue: penstock.Queue) -> None:
    producer = store.producer("q", session="web-1")
    assert (producer.epoch, producer.sequence) == (1, -1)
    first = producer.append(rows(1, 2), sequence=41)
    assert (first.ranges, first.skipped) == ({0: (0, 2)}, False)
    again = producer.append(rows(1, 2), sequence=41)
    assert (again.ranges, again.rows, again.skipped) == ({}, 0, True)
    assert producer.append(rows(9), sequence=40).skipped
    assert (producer.sequence, producer.skipped) == (41, 2)
    assert numbers(queue.read(0, 0)) == [1, 2]


def test_sequence_numbers_may_have_gaps_and_continue_by_default(
    store: penstock.Store, queue: penstock.Queue
) -> None:
    producer = store.producer("q", "s")
    producer.append(rows(1), sequence=10)
    producer.append(rows(2), sequence=1000)
    producer.append(rows(3))
    assert producer.sequence == 1001
    assert producer.append(rows(4), sequence=1001).skipped
    producer.append(rows(5), sequence=2**62 - 1)
    assert numbers(queue.read(0, 0)) == [1, 2, 3, 5]


@pytest.mark.parametrize("sequence", [-1, 1.0, "1", True, 2**62])
def test_an_invalid_sequence_number_is_refused(
    store: penstock.Store, queue: penstock.Queue, sequence: object
) -> None:
    producer = store.producer("q", "s")
    with pytest.raises(InvalidInputError, match="a whole number from 0"):
        producer.append(rows(1), sequence=sequence)  # type: ignore[arg-type]
    assert queue.info().rows == 0


def test_a_session_is_taken_over_with_its_sequence_number(
    store: penstock.Store, queue: penstock.Queue
) -> None:
    old = store.producer("q", "s")
    old.append(rows(1), sequence=5)
    new = store.producer("q", "s")
    assert (new.epoch, new.sequence) == (2, 5)
    with pytest.raises(ProducerFencedError, match="another program has opened producer session"):
        old.append(rows(2), sequence=6)
    with pytest.raises(ProducerFencedError):
        old.append(rows(1), sequence=5)
    assert new.append(rows(1), sequence=5).skipped
    new.append(rows(2), sequence=6)
    assert numbers(queue.read(0, 0)) == [1, 2]


def test_sessions_are_independent(store: penstock.Store, queue: penstock.Queue) -> None:
    other = store.create_queue("r", SCHEMA)
    producers = [store.producer("q", "a"), store.producer("q", "b"), store.producer("r", "a")]
    for producer in producers:
        assert not producer.append(rows(1), sequence=0).skipped
    assert (queue.info().rows, other.info().rows) == (2, 1)


def test_refused_rows_do_not_advance_the_sequence(store: penstock.Store, queue: penstock.Queue) -> None:
    producer = store.producer("q", "s")
    with pytest.raises(SchemaMismatchError):
        producer.append([{"n": "x"}], sequence=3)
    assert producer.sequence == -1
    assert not producer.append(rows(1), sequence=3).skipped


def test_an_append_of_no_rows_uses_its_sequence_number(store: penstock.Store, queue: penstock.Queue) -> None:
    producer = store.producer("q", "s")
    assert producer.append([], sequence=3).ranges == {}
    assert producer.append(rows(1), sequence=3).skipped
    assert queue.info().rows == 0


def test_threads_that_share_a_producer_lose_no_appends(store: penstock.Store, queue: penstock.Queue) -> None:
    producer = store.producer("q", "s")

    def work(number: int) -> None:
        for n in range(10):
            producer.append(rows(100 * number + n))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert producer.skipped == 0
    assert sorted(numbers(queue.read(0, 0))) == sorted(
        100 * number + n for number in range(4) for n in range(10)
    )


def test_one_of_two_concurrent_appends_with_one_number_is_skipped(
    store: penstock.Store, queue: penstock.Queue
) -> None:
    producer = store.producer("q", "s")
    twin = penstock.Producer.__new__(penstock.Producer)
    twin.__dict__.update(producer.__dict__ | {"_turn": threading.Lock()})
    skipped: list[bool] = []
    for number in range(20):
        barrier = threading.Barrier(2)

        def work(each: penstock.Producer, number: int = number, barrier: threading.Barrier = barrier) -> None:
            barrier.wait()
            skipped.append(each.append(rows(number), sequence=number).skipped)

        threads = [threading.Thread(target=work, args=(each,)) for each in (producer, twin)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert skipped.count(True) == 20
    assert numbers(queue.read(0, 0)) == list(range(20))


def test_a_producer_from_before_a_restore_is_fenced_even_if_its_epoch_is_assigned_again(
    store: penstock.Store, queue: penstock.Queue
) -> None:
    """Otherwise it would use up sequence numbers, and rows of the later producer would be skipped as
    repeats.
    """
    old, database = store.producer("q", "s"), store.database
    forget = "delete from penstock.producer"
    run_sql(database, forget)
    new = store.producer("q", "s")
    assert new.epoch == old.epoch
    with pytest.raises(ProducerFencedError):
        old.append(rows(1), sequence=0)
    assert not new.append(rows(2), sequence=0).skipped


def test_a_takeover_during_an_append_lets_only_one_of_the_two_append(
    store: penstock.Store, queue: penstock.Queue
) -> None:
    """The fenced producer appends nothing after the takeover."""
    for number in range(10):
        old = store.producer("q", f"s{number}")
        outcome: list[str] = []

        def append(old: penstock.Producer = old, outcome: list[str] = outcome) -> None:
            try:
                old.append(rows(1), sequence=0)
                outcome.append("appended")
            except ProducerFencedError:
                outcome.append("fenced")

        thread = threading.Thread(target=append)
        thread.start()
        new = store.producer("q", f"s{number}")
        result = new.append(rows(1), sequence=0)
        thread.join()
        assert result.skipped == (outcome == ["appended"])
    assert queue.info().rows == 10


def test_a_producer_of_a_keyed_queue_places_rows_by_key(store: penstock.Store) -> None:
    keyed = store.create_queue("k", SCHEMA, partitions=3, key=["n"])
    producer = store.producer("k", "s")
    producer.append(rows(*range(30)), sequence=0)
    plain = store.create_queue("l", SCHEMA, partitions=3, key=["n"])
    plain.append(rows(*range(30)))
    assert everything(keyed) == everything(plain)


def test_a_producer_continues_when_the_queue_grows(store: penstock.Store) -> None:
    keyed = store.create_queue("k", SCHEMA, partitions=2, key=["n"])
    producer = store.producer("k", "s")
    producer.append(rows(*range(30)), sequence=0)
    store.queue("k").add_partitions(2)
    assert not producer.append(rows(*range(30)), sequence=1).skipped
    keyed.refresh()
    assert keyed.info().rows == 60


def test_a_producer_of_a_dropped_queue_fails(store: penstock.Store, queue: penstock.Queue) -> None:
    producer = store.producer("q", "s")
    store.drop_queue("q")
    with pytest.raises(QueueNotFoundError, match="was dropped"):
        producer.append(rows(1), sequence=0)
