"""Dispatch of a continuous query's events to listeners, without Spark."""

from __future__ import annotations

import json
import logging
import threading

import pytest

from penstock.continuous.driver.progress import MAX_WAITING_EVENTS, ListenerDispatch
from penstock.errors import TableRefusedError

PATIENCE = 30


class Heard:
    """Listeners that record events, and may block or fail."""

    def __init__(self) -> None:
        self.events: list[object] = []
        self.free = threading.Event()
        self.free.set()
        self.fails = False

    def started(self, name: str | None, timestamp: str) -> None:
        self._hear(("started", name, timestamp))

    def progressed(self, progress: str) -> None:
        self._hear(json.loads(progress)["batchId"])

    def terminated(self, exception: str | None, condition: str | None) -> None:
        self._hear(("terminated", exception, condition))

    def _hear(self, event: object) -> None:
        assert self.free.wait(PATIENCE)
        self.events.append(event)
        if self.fails:
            raise RuntimeError(f"not {event}")


@pytest.fixture
def heard() -> Heard:
    return Heard()


@pytest.fixture
def telling(heard: Heard) -> ListenerDispatch:
    return ListenerDispatch("copy", heard)


def test_events_arrive_in_order(telling: ListenerDispatch, heard: Heard) -> None:
    telling.started("copy", "now")
    for number in range(5):
        telling.progressed({"batchId": number})
    telling.terminated(None, PATIENCE)
    assert heard.events == [("started", "copy", "now"), 0, 1, 2, 3, 4, ("terminated", None, None)]


def test_a_hanging_listener_blocks_nobody_and_misses_the_oldest_epochs(
    telling: ListenerDispatch, heard: Heard
) -> None:
    heard.free.clear()
    telling.started("copy", "now")
    for number in range(3 * MAX_WAITING_EVENTS):
        telling.progressed({"batchId": number})
    telling.terminated(None, 0.0)
    heard.free.set()
    telling.terminated(None, PATIENCE)
    kept = list(range(2 * MAX_WAITING_EVENTS, 3 * MAX_WAITING_EVENTS))
    assert heard.events == [("started", "copy", "now"), *kept, ("terminated", None, None)]


def test_failing_listeners_get_further_events_and_are_logged_once(
    telling: ListenerDispatch, heard: Heard, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "penstock.continuous")
    heard.fails = True
    telling.started("copy", "now")
    telling.progressed({"batchId": 0})
    telling.terminated(None, PATIENCE)
    assert len(heard.events) == 3
    (record,) = caplog.records
    assert "listeners of query copy have missed events: not ('started'" in record.getMessage()


def test_the_error_that_ended_the_query_is_reported_with_its_condition(heard: Heard) -> None:
    error = TableRefusedError("it is gone", condition="TABLE_REFUSED.TABLE_GONE")
    telling = ListenerDispatch("copy", heard, lambda _: error)
    telling.started(None, "now")
    telling.terminated(ValueError("some other"), PATIENCE)
    message = "penstock.errors.TableRefusedError: [TABLE_REFUSED.TABLE_GONE] it is gone"
    assert heard.events[-1] == ("terminated", message, "TABLE_REFUSED.TABLE_GONE")


def test_nothing_is_dispatched_without_listeners() -> None:
    telling = ListenerDispatch("copy", None)
    telling.started("copy", "now")
    telling.progressed({"batchId": 0})
    telling.terminated(None, PATIENCE)
    assert not [each for each in threading.enumerate() if each.name == "continuous listeners"]
