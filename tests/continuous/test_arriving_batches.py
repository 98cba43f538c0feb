"""A task takes batches while it writes the ones before them."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pyarrow as pa
import pytest

from penstock.continuous.arriving import ArrivingBatches
from tests.support.waiting import wait_until

TIMEOUT = 30


def batch(*ids: int) -> pa.RecordBatch:
    return pa.record_batch({"id": list(ids)})


def ids(group: list[pa.RecordBatch]) -> list[int]:
    return [number for batch in group for number in batch.column(0).to_pylist()]


class Source:
    """Iterator that counts the batches that were taken, and ends or fails when the test allows it."""

    def __init__(self, batches: list[pa.RecordBatch], failure: Exception | None = None) -> None:
        self._batches, self._failure = batches, failure
        self.taken = 0
        self.may_end = threading.Event()

    def __iter__(self) -> Iterator[pa.RecordBatch]:
        for batch in self._batches:
            self.taken += 1
            yield batch
        assert self.may_end.wait(TIMEOUT)
        if self._failure is not None:
            raise self._failure


def test_batches_that_arrive_during_a_write_are_one_group() -> None:
    source = Source([batch(1), batch(2), batch(3)])
    arriving = ArrivingBatches(iter(source), 1 << 20)
    wait_until(lambda: source.taken == 3)
    source.may_end.set()
    groups = list(arriving)
    assert [number for group in groups for number in ids(group)] == [1, 2, 3]
    assert len(groups) <= 2, "the last batch may have arrived separately"


def test_no_more_batches_are_taken_than_may_wait() -> None:
    source = Source([batch(*range(100)) for _ in range(10)])
    arriving = ArrivingBatches(iter(source), 2 * batch(*range(100)).nbytes)
    wait_until(lambda: source.taken == 3)
    source.may_end.set()
    assert len(next(arriving)) == 2
    assert sum(len(group) for group in arriving) == 8


def test_a_failure_is_raised_after_the_batches_before_it() -> None:
    source = Source([batch(1)], ValueError("the JVM exited"))
    source.may_end.set()
    arriving = ArrivingBatches(iter(source), 1 << 20)
    assert ids(next(arriving)) == [1]
    with pytest.raises(ValueError, match="the JVM exited"):
        next(arriving)


def test_no_batch_is_taken_after_the_end_of_a_task() -> None:
    source = Source([batch(number) for number in range(10)])
    arriving = ArrivingBatches(iter(source), 1)
    wait_until(lambda: source.taken == 2)
    arriving.close()
    wait_until(lambda: not any(thread.name == "arriving batches" for thread in threading.enumerate()))
    assert source.taken == 2
