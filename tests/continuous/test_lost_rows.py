"""Rows that are trimmed before a continuous query has read them."""

from __future__ import annotations

import logging
import re
import threading
from collections.abc import Iterator

import pyarrow as pa
import pytest

from penstock.continuous.connectors import queue as queue_connector
from penstock.continuous.driver import execution
from penstock.continuous.driver.execution import ContinuousExecution, State
from penstock.errors import DataLostError
from tests.continuous.copying import PATIENCE, Copy

consumers = pytest.mark.parametrize("consumer", ["c", None])


@pytest.fixture
def lossy(copy: Copy, caplog: pytest.LogCaptureFixture) -> Copy:
    """A copy whose queries skip rows that are lost."""
    caplog.set_level(logging.WARNING, "penstock.spark")
    copy.fail_on_data_loss = False
    return copy


@pytest.fixture
def gate() -> Iterator[threading.Event]:
    """Gate that a transformation waits for before its first rows."""
    opened = threading.Event()
    yield opened
    opened.set()


def append(copy: Copy, ids: range) -> None:
    """Append rows to the first partition, as one segment."""
    copy.queue.append([copy.row(number) for number in ids], partition=0)


def append_to_both(copy: Copy, ids: range) -> None:
    """Append rows to the first partition, and as many with ids that are higher by 100 to the second one."""
    append(copy, ids)
    copy.queue.append([copy.row(100 + number) for number in ids], partition=1)


def losses(caplog: pytest.LogCaptureFixture) -> set[tuple[int, int, int]]:
    """Return the partition and the rows [start, end) of each loss in the log."""
    found = set()
    for record in caplog.records:
        if getattr(record, "action", "") == "data_lost":
            text = record.getMessage()
            match = re.search(r"rows \[(\d+), (\d+)\) of queue 'in', partition (\d+), were trimmed", text)
            assert match, text
            start, end, partition = map(int, match.groups())
            found.add((partition, start, end))
    return found


def trim_while_down(copy: Copy, before: int) -> None:
    """Copy the first four rows of both partitions.

    Of the next six, which come when the query is down, trim those before an index.
    """
    append_to_both(copy, range(4))
    query = copy.query()
    copy.through(query)
    assert query.stop()
    append_to_both(copy, range(4, 10))
    for partition in range(2):
        copy.queue.trim(partition, before=before)


@consumers
def test_rows_trimmed_while_a_query_was_down_are_skipped_and_named(
    lossy: Copy, caplog: pytest.LogCaptureFixture, consumer: str | None
) -> None:
    lossy.consumer = consumer
    trim_while_down(lossy, before=7)
    for number in range(10, 13):
        query = lossy.query()
        append_to_both(lossy, range(number, number + 1))
        lossy.through(query)
        assert query.stop()
    assert lossy.ids() == [*range(4), *range(7, 13), *range(100, 104), *range(107, 113)]
    assert losses(caplog) == {(0, 4, 7), (1, 4, 7)}
    if consumer:
        assert lossy.store.consumer("c").lag("in").rows == 0


@consumers
def test_a_query_becomes_idle_although_the_last_rows_are_lost(
    lossy: Copy, caplog: pytest.LogCaptureFixture, consumer: str | None
) -> None:
    lossy.consumer = consumer
    trim_while_down(lossy, before=10)
    for _ in range(2):
        query = lossy.query()
        lossy.through(query)
        assert query.state is State.ACTIVE
        if consumer:
            assert lossy.store.consumer("c").lag("in").rows == 0
        assert query.stop()
    assert losses(caplog) == {(0, 4, 10), (1, 4, 10)}
    query = lossy.query()
    lossy.through(query)
    append_to_both(lossy, range(10, 12))
    lossy.through(query)
    assert lossy.ids() == [*range(4), 10, 11, *range(100, 104), 110, 111]


def start_lagging(copy: Copy, monkeypatch: pytest.MonkeyPatch, gate: threading.Event) -> ContinuousExecution:
    """Start a query that has read the first four of ten rows and waits for the gate."""
    monkeypatch.setattr(queue_connector, "_AHEAD_ROWS", 4)
    read = threading.Event()

    def waits(batch: pa.RecordBatch) -> pa.RecordBatch:
        read.set()
        assert gate.wait(PATIENCE)
        return batch

    append(copy, range(4))
    append(copy, range(4, 10))
    query = copy.query(transform=waits)
    assert read.wait(PATIENCE)
    return query


@consumers
@pytest.mark.parametrize(
    ("before", "lost"), [(7, {(0, 4, 7)}), (8, {(0, 4, 8)}), (10, {(0, 4, 8), (0, 8, 10)})]
)
def test_rows_trimmed_while_a_query_lags_are_skipped_and_named(
    lossy: Copy,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    gate: threading.Event,
    consumer: str | None,
    before: int,
    lost: set[tuple[int, int, int]],
) -> None:
    lossy.consumer = consumer
    query = start_lagging(lossy, monkeypatch, gate)
    lossy.queue.trim(0, before=before)
    gate.set()
    lossy.through(query)
    assert losses(caplog) == lost
    append(lossy, range(10, 12))
    lossy.through(query)
    assert query.stop()
    append(lossy, range(12, 14))
    lossy.through(lossy.query())
    assert lossy.ids() == [*range(4), *range(before, 14)]
    assert losses(caplog) == lost


@consumers
def test_a_query_that_may_not_lose_rows_does_not_start_without_them(copy: Copy, consumer: str | None) -> None:
    copy.consumer = consumer
    trim_while_down(copy, before=7)
    before = copy.ids()
    query = copy.query()
    assert query.join(PATIENCE)
    assert isinstance(query.failure, DataLostError)
    assert query.failure.condition == "DATA_LOST.TRIMMED"
    assert "rows [4, 7) of queue 'in', partition 0" in str(query.failure)
    assert copy.ids() == before


@consumers
def test_a_query_that_may_not_lose_rows_ends_when_they_are_trimmed_while_it_runs(
    copy: Copy, monkeypatch: pytest.MonkeyPatch, gate: threading.Event, consumer: str | None
) -> None:
    # The other task waits for rows until the run is given up.
    monkeypatch.setattr(execution, "_JOB_FAILURE_SECONDS", 0.1)
    copy.consumer = consumer
    query = start_lagging(copy, monkeypatch, gate)
    copy.queue.trim(0, before=7)
    gate.set()
    assert query.join(PATIENCE)
    assert isinstance(query.failure, DataLostError)
    assert "rows [4, 7) of queue 'in', partition 0" in str(query.failure)
    assert set(copy.ids()) <= set(range(4))
