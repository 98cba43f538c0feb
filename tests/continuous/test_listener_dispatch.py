"""Events of a continuous query are dispatched to listeners, without Spark."""

from __future__ import annotations

import json
import logging
import threading

import pytest

from penstock.continuous.driver.progress import MAX_WAITING_EVENTS, ListenerDispatch
from penstock.errors import TableRefusedError

TIMEOUT = 30


class RecordingListeners:
    """Listeners that record events, and may block or fail."""

    def __init__(self) -> None:
        self.events: list[object] = []
        self.unblocked = threading.Event()
        self.unblocked.set()
        self.fails = False

    def started(self, name: str | None, timestamp: str) -> None:
        self._record(("started", name, timestamp))

    def progressed(self, progress: str) -> None:
        self._record(json.loads(progress)["batchId"])

    def terminated(self, exception: str | None, condition: str | None) -> None:
        self._record(("terminated", exception, condition))

    def _record(self, event: object) -> None:
        assert self.unblocked.wait(TIMEOUT)
        self.events.append(event)
        if self.fails:
            raise RuntimeError(f"failed on {event}")


@pytest.fixture
def listeners() -> RecordingListeners:
    return RecordingListeners()


@pytest.fixture
def dispatch(listeners: RecordingListeners) -> ListenerDispatch:
    return ListenerDispatch("copy", listeners)


def test_events_arrive_in_order(dispatch: ListenerDispatch, listeners: RecordingListeners) -> None:
    dispatch.started("copy", "now")
    for number in range(5):
        dispatch.progressed({"batchId": number})
    dispatch.terminated(None, TIMEOUT)
    assert listeners.events == [("started", "copy", "now"), 0, 1, 2, 3, 4, ("terminated", None, None)]


def test_a_hanging_listener_blocks_nobody_and_misses_the_oldest_epochs(
    dispatch: ListenerDispatch, listeners: RecordingListeners
) -> None:
    listeners.unblocked.clear()
    dispatch.started("copy", "now")
    for number in range(3 * MAX_WAITING_EVENTS):
        dispatch.progressed({"batchId": number})
    dispatch.terminated(None, 0.0)
    listeners.unblocked.set()
    dispatch.terminated(None, TIMEOUT)
    newest = list(range(2 * MAX_WAITING_EVENTS, 3 * MAX_WAITING_EVENTS))
    assert listeners.events == [("started", "copy", "now"), *newest, ("terminated", None, None)]


def test_failing_listeners_get_further_events_and_are_logged_once(
    dispatch: ListenerDispatch, listeners: RecordingListeners, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "penstock.continuous")
    listeners.fails = True
    dispatch.started("copy", "now")
    dispatch.progressed({"batchId": 0})
    dispatch.terminated(None, TIMEOUT)
    assert len(listeners.events) == 3
    (record,) = caplog.records
    assert "listeners of query copy have missed events: failed on ('started'" in record.getMessage()


def test_the_error_that_ended_the_query_is_reported_with_its_condition(listeners: RecordingListeners) -> None:
    error = TableRefusedError("the table is gone", condition="TABLE_REFUSED.TABLE_GONE")
    dispatch = ListenerDispatch("copy", listeners, lambda _: error)
    dispatch.started(None, "now")
    dispatch.terminated(ValueError("another error"), TIMEOUT)
    message = "penstock.errors.TableRefusedError: [TABLE_REFUSED.TABLE_GONE] the table is gone"
    assert listeners.events[-1] == ("terminated", message, "TABLE_REFUSED.TABLE_GONE")


def test_nothing_is_dispatched_without_listeners() -> None:
    dispatch = ListenerDispatch("copy", None)
    dispatch.started("copy", "now")
    dispatch.progressed({"batchId": 0})
    dispatch.terminated(None, TIMEOUT)
    assert not [thread for thread in threading.enumerate() if thread.name == "continuous listeners"]
