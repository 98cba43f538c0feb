"""Checks whether a queue still has the rows that an offset refers to, since its store may have been
restored.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

import penstock
from penstock.commit.offsets import QueueOffset
from penstock.commit.source_rows import TRIMMED, SourceRows, require_read, times_before
from penstock.errors import CheckpointMismatchError
from tests.support.spark_queues import fill, make_queue

Require = Callable[[Sequence[int], Sequence[int | None]], None]


@pytest.fixture
def queue(store: penstock.Store) -> penstock.Queue:
    """A queue with two partitions. The first has six rows in two segments, of which the first is trimmed."""
    queue = make_queue(store, "orders", partitions=2)
    fill(queue, range(6), each=3)
    queue.trim(before=3, partition=0)
    return queue


@pytest.fixture
def require(store: penstock.Store, queue: penstock.Queue) -> Require:
    """Check the rows of an offset without a consumer."""

    def asks(end: Sequence[int], times: Sequence[int | None]) -> None:
        generation = queue.record.generation
        offset = QueueOffset(
            store.uuid, "orders", None, generation, 0, (0,) * len(end), tuple(end), times=tuple(times)
        )
        store.database.run(lambda tx: SourceRows().require(tx, queue.record.queue_id, offset), write=False)

    return asks


def times(store: penstock.Store, queue: penstock.Queue, starts: Sequence[int]) -> tuple[int | None, ...]:
    return store.database.run(lambda tx: times_before(tx, queue.record, starts), write=False)


def test_an_offset_with_more_partitions_than_the_queue_is_refused(require: Require) -> None:
    """The queue got more partitions, and its store was restored from an earlier backup."""
    require((6, 0), ())
    with pytest.raises(CheckpointMismatchError) as caught:
        require((6, 0, 0), ())
    assert caught.value.condition == "CHECKPOINT_MISMATCH.SOURCE_BEHIND"


def test_a_start_after_trimmed_rows_is_refused_if_the_store_has_the_rows_again(
    store: penstock.Store, queue: penstock.Queue, require: Require
) -> None:
    assert times(store, queue, (3, 0)) == (TRIMMED, None)
    require((3, 0), (TRIMMED, None))
    with pytest.raises(CheckpointMismatchError, match="has other rows than this query has read"):
        require((6, 0), (TRIMMED, None))


def test_the_timestamp_of_the_row_before_a_start_identifies_the_row(
    store: penstock.Store, queue: penstock.Queue, require: Require
) -> None:
    (time, _) = times(store, queue, (5, 0))
    assert time is not None
    assert time > 0
    require((5, 0), (time, None))
    with pytest.raises(CheckpointMismatchError):
        require((5, 0), (time - 1, None))


def test_several_ends_of_a_partition_are_distinguished(store: penstock.Store, queue: penstock.Queue) -> None:
    fill(queue, range(6, 9))
    read = {(0, end): times(store, queue, (end, 0))[0] for end in (5, 8)}
    read[0, 2] = 1  # trimmed since
    known = {place: time for place, time in read.items() if time is not None}
    store.database.run(lambda tx: require_read(tx, queue.record, known), write=False)
    known[0, 5] -= 1
    with pytest.raises(CheckpointMismatchError, match="partition 0, up to 5"):
        store.database.run(lambda tx: require_read(tx, queue.record, known), write=False)
