"""Rows are trimmed before a continuous query has read them."""

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
from tests.continuous.queue_copy import TIMEOUT, Copy

consumers = pytest.mark.parametrize("consumer", ["c", None])


@pytest.fixture
def lossy(copy: Copy, caplog: pytest.LogCaptureFixture) -> Copy:
    """Copy whose queries skip lost rows."""
    caplog.set_level(logging.WARNING, "penstock.spark")
    copy.fail_on_data_loss = False
    return copy


@pytest.fixture
def gate() -> Iterator[threading.Event]:
    """Event that a transformation waits for before it passes on its first rows."""
    event = threading.Event()
    yield event
    event.set()


def append_to_first(copy: Copy, ids: range) -> None:
    """Append rows to the first partition as one segment."""
    copy.queue.append([copy.make_row(number) for number in ids], partition=0)


def append_to_both(copy: Copy, ids: range) -> None:
    """Append rows to the first partition, and rows whose ids are higher by 100 to the second one."""
    append_to_first(copy, ids)
    copy.queue.append([copy.make_row(100 + number) for number in ids], partition=1)


def losses(caplog: pytest.LogCaptureFixture) -> set[tuple[int, int, int]]:
    """Return the partition, the first lost row and the row after the last one, for each loss in the log."""
    lost = set()
    for record in caplog.records:
        if getattr(record, "action", "") == "data_lost":
            text = record.getMessage()
            match = re.search(r"rows \[(\d+), (\d+)\) of queue 'in', partition (\d+), were trimmed", text)
            assert match, text
            start, end, partition = map(int, match.groups())
            lost.add((partition, start, end))
    return lost


def append_and_trim_while_down(copy: Copy, before: int) -> None:
    """Copy the first four rows of both partitions, stop the query, append six more, and trim some of them."""
    append_to_both(copy, range(4))
    query = copy.create_query()
    copy.wait_until_committed(query)
    assert query.stop()
    append_to_both(copy, range(4, 10))
    for partition in range(2):
        copy.queue.trim(partition, before=before)


@consumers
def test_rows_trimmed_while_a_query_was_down_are_skipped_and_logged(
    lossy: Copy, caplog: pytest.LogCaptureFixture, consumer: str | None
) -> None:
    lossy.consumer = consumer
    append_and_trim_while_down(lossy, before=7)
    for number in range(10, 13):
        query = lossy.create_query()
        append_to_both(lossy, range(number, number + 1))
        lossy.wait_until_committed(query)
        assert query.stop()
    assert lossy.ids() == [*range(4), *range(7, 13), *range(100, 104), *range(107, 113)]
    assert losses(caplog) == {(0, 4, 7), (1, 4, 7)}
    if consumer:
        assert lossy.store.consumer("c").lag("in").rows == 0


@consumers
def test_a_query_becomes_idle_even_if_the_last_rows_are_lost(
    lossy: Copy, caplog: pytest.LogCaptureFixture, consumer: str | None
) -> None:
    lossy.consumer = consumer
    append_and_trim_while_down(lossy, before=10)
    for _ in range(2):
        query = lossy.create_query()
        lossy.wait_until_committed(query)
        assert query.state is State.ACTIVE
        if consumer:
            assert lossy.store.consumer("c").lag("in").rows == 0
        assert query.stop()
    assert losses(caplog) == {(0, 4, 10), (1, 4, 10)}
    query = lossy.create_query()
    lossy.wait_until_committed(query)
    append_to_both(lossy, range(10, 12))
    lossy.wait_until_committed(query)
    assert lossy.ids() == [*range(4), 10, 11, *range(100, 104), 110, 111]


def start_lagging(copy: Copy, monkeypatch: pytest.MonkeyPatch, gate: threading.Event) -> ContinuousExecution:
    """Start a query that reads the first four of ten rows, and then waits for the gate."""
    monkeypatch.setattr(queue_connector, "_AHEAD_ROWS", 4)
    read = threading.Event()

    def wait_for_gate(batch: pa.RecordBatch) -> pa.RecordBatch:
        read.set()
        assert gate.wait(TIMEOUT)
        return batch

    append_to_first(copy, range(4))
    append_to_first(copy, range(4, 10))
    query = copy.create_query(transform=wait_for_gate)
    assert read.wait(TIMEOUT)
    return query


@consumers
@pytest.mark.parametrize(
    ("before", "lost"), [(7, {(0, 4, 7)}), (8, {(0, 4, 8)}), (10, {(0, 4, 8), (0, 8, 10)})]
)
def test_rows_trimmed_while_a_query_lags_are_skipped_and_logged(
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
    lossy.wait_until_committed(query)
    assert losses(caplog) == lost
    append_to_first(lossy, range(10, 12))
    lossy.wait_until_committed(query)
    assert query.stop()
    append_to_first(lossy, range(12, 14))
    lossy.wait_until_committed(lossy.create_query())
    assert lossy.ids() == [*range(4), *range(before, 14)]
    assert losses(caplog) == lost


@consumers
def test_a_query_with_fail_on_data_loss_does_not_start_after_rows_were_lost(
    copy: Copy, consumer: str | None
) -> None:
    copy.consumer = consumer
    append_and_trim_while_down(copy, before=7)
    before = copy.ids()
    query = copy.create_query()
    assert query.join(TIMEOUT)
    assert isinstance(query.failure, DataLostError)
    assert query.failure.condition == "DATA_LOST.TRIMMED"
    assert "rows [4, 7) of queue 'in', partition 0" in str(query.failure)
    assert copy.ids() == before


@consumers
def test_a_query_with_fail_on_data_loss_ends_when_unread_rows_are_trimmed(
    copy: Copy, monkeypatch: pytest.MonkeyPatch, gate: threading.Event, consumer: str | None
) -> None:
    # The other task waits for rows until the run is cancelled.
    monkeypatch.setattr(execution, "_JOB_FAILURE_SECONDS", 0.1)
    copy.consumer = consumer
    query = start_lagging(copy, monkeypatch, gate)
    copy.queue.trim(0, before=7)
    gate.set()
    assert query.join(TIMEOUT)
    assert isinstance(query.failure, DataLostError)
    assert "rows [4, 7) of queue 'in', partition 0" in str(query.failure)
    assert set(copy.ids()) <= set(range(4))
