"""Append times that a continuous query without a consumer logs, to recognize the rows before its offsets."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from penstock import Queue, Store
from penstock.commit.offsets import QueueOffset
from penstock.commit.source_rows import TRIMMED
from penstock.continuous.connectors.queue import QueueSourceDriver
from penstock.errors import CheckpointMismatchError
from penstock.spark.options import SourceOptions
from penstock.store.log.trim import append_time_of
from tests.support.queues import backdate
from tests.support.spark_queues import fill, make_queue


@pytest.fixture
def queue(store: Store) -> Queue:
    """Queue of two partitions with three rows each."""
    queue = make_queue(store, partitions=2)
    for partition in range(2):
        fill(queue, range(3), partition=partition)
    return queue


@pytest.fixture
def source(store_url: str, queue: Queue) -> Iterator[QueueSourceDriver]:
    """Source of a query that starts at the end of the queue."""
    source = QueueSourceDriver(SourceOptions(store_url, "orders", starting_offsets="latest"))
    assert source.start(None) == {0: 3, 1: 3}
    yield source
    source.release(None)


def append_time(store: Store, queue: Queue, partition: int, row: int) -> int:
    return store.database.run(lambda tx: append_time_of(tx, queue.record, partition, row), write=False)


def test_a_partition_that_was_not_read_keeps_the_append_time_of_its_last_row(
    store: Store, queue: Queue, source: QueueSourceDriver
) -> None:
    fill(queue, [3])
    read = append_time(store, queue, 0, 3)
    offset = QueueOffset.of(source.plan({0: 3, 1: 3}, {0: 4, 1: 3}, {0: read}))
    assert offset is not None
    assert offset.times == (read, append_time(store, queue, 1, 2))


@pytest.mark.parametrize("epochs", [0, 1])
def test_replaced_rows_before_an_offset_are_refused_whichever_epoch_has_read_them(
    store: Store, queue: Queue, source: QueueSourceDriver, epochs: int
) -> None:
    offsets = {0: 3, 1: 3}
    for _ in range(epochs):
        source.plan(offsets, offsets, {})
    backdate(store, 1)
    with pytest.raises(CheckpointMismatchError) as caught:
        source.plan(offsets, offsets, {})
    assert caught.value.condition == "CHECKPOINT_MISMATCH.SOURCE_BEHIND"


def test_an_epoch_that_skipped_lost_rows_logs_them_as_trimmed(
    store: Store, queue: Queue, source: QueueSourceDriver
) -> None:
    fill(queue, [3, 4])
    queue.trim(before=5, partition=0)
    offset = QueueOffset.of(source.plan({0: 3, 1: 3}, {0: 5, 1: 3}, {}))
    assert offset is not None
    assert offset.times[0] == TRIMMED
