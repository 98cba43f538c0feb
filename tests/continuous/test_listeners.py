"""Spark's streaming listeners receive events of continuous queries as they do of Spark's own queries."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql import SparkSession
from pyspark.sql.streaming import StreamingQueryListener

import penstock
from tests.support.spark_queues import one_store
from tests.support.sql_tables import NOW, Feed
from tests.support.waiting import wait_until

SCHEMA = pa.schema([("id", pa.int64())])
SOON = penstock.Trigger.continuous("50 ms")
TIMEOUT = 60

pytestmark = one_store


class Listener(StreamingQueryListener):
    def __init__(self, *, fails: bool = False) -> None:
        self.fails = fails
        self.events: list[Any] = []

    def onQueryStarted(self, event: Any) -> None:  # noqa: N802 - Spark's name
        self._record(event)

    def onQueryProgress(self, event: Any) -> None:  # noqa: N802 - Spark's name
        self._record(event)

    def onQueryTerminated(self, event: Any) -> None:  # noqa: N802 - Spark's name
        self._record(event)

    def _record(self, event: Any) -> None:
        self.events.append(event)
        if self.fails:
            raise RuntimeError("the listener failed")

    @property
    def progress(self) -> list[Any]:
        return [event.progress for event in self.events if hasattr(event, "progress")]

    @property
    def kinds(self) -> list[str]:
        return [type(event).__name__ for event in self.events]


@pytest.fixture
def listen(spark: SparkSession) -> Iterator[Any]:
    listeners: list[Listener] = []

    def add_listener(**options: object) -> Listener:
        listeners.append(Listener(**options))
        spark.streams.addListener(listeners[-1])
        return listeners[-1]

    yield add_listener
    for listener in listeners:
        spark.streams.removeListener(listener)


@pytest.fixture
def feed(spark: SparkSession, store_url: str, tmp_path: Path) -> Feed:
    return Feed(spark, store_url, tmp_path, SCHEMA)


def _start(feed: Feed, transform: Any = None, **options: object) -> Any:
    pipeline = feed.pipeline(feed.table("t"), transform)
    return pipeline.start(name="copy", checkpoint=feed.folder / "ck", **{"trigger": SOON, **options})


def test_a_listener_is_notified_of_the_start_each_epoch_and_the_end(feed: Feed, listen: Any) -> None:
    listener = listen()
    query = _start(feed, lambda frame: frame.where("id > 0"))
    for _ in range(3):
        feed.add({"id": 0}, {"id": 1})
        query.processAllAvailable()
    query.stop()
    wait_until(lambda: "QueryTerminatedEvent" in listener.kinds, TIMEOUT, "a QueryTerminatedEvent")
    first, *_, last = listener.events
    assert (str(first.id), str(first.runId), first.name) == (query.id, query.runId, "copy")
    assert listener.kinds == ["QueryStartedEvent", *["QueryProgressEvent"] * 3, "QueryTerminatedEvent"]
    assert (str(last.id), last.exception, last.errorClassOnException) == (query.id, None, None)
    assert [progress.batchId for progress in listener.progress] == [0, 1, 2]
    assert [progress.numInputRows for progress in listener.progress] == [2, 2, 2]
    assert [progress.sink.numOutputRows for progress in listener.progress] == [1, 1, 1]
    reported, last_progress = listener.progress[-1], query.lastProgress
    assert (reported.id, reported.runId, reported.durationMs) == (
        last_progress.id,
        last_progress.runId,
        last_progress.durationMs,
    )
    assert reported.sources[0].description == "queue 'in'"
    assert float(reported.sink.metrics["latencyMs.p50"]) == last_progress["latencyMs"]["p50"] > 0
    assert 0 < reported.batchDuration < TIMEOUT * 1000


def test_an_error_that_ends_the_query_is_reported(
    feed: Feed, listen: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from penstock.continuous.driver import execution

    monkeypatch.setattr(execution, "_MAX_RESTARTS", 0)
    listener = listen()
    query = _start(feed, lambda frame: frame.selectExpr("assert_true(id > 5, 'too small') as id"))
    feed.add({"id": 1})
    with pytest.raises(Exception, match="too small"):
        query.awaitTermination(TIMEOUT)
    wait_until(lambda: "QueryTerminatedEvent" in listener.kinds, TIMEOUT, "a QueryTerminatedEvent")
    assert "too small" in listener.events[-1].exception


def test_a_failing_listener_does_not_affect_the_query(feed: Feed, listen: Any) -> None:
    broken, other = listen(fails=True), listen()
    feed.add({"id": 1}, {"id": 2})
    query = _start(feed)
    query.processAllAvailable()
    assert query.stop()
    for listener in (broken, other):
        wait_until(lambda heard=listener: len(heard.events) == 3, TIMEOUT, "three events")


def test_progress_has_sparks_format(feed: Feed) -> None:
    progresses = []
    for trigger in (NOW, SOON):
        feed.add({"id": 1})
        query = _start(feed, trigger=trigger)
        query.awaitTermination() if trigger is NOW else query.processAllAvailable()
        progresses.append(query.lastProgress)
    query.stop()
    spark_progress, penstock_progress = progresses
    assert set(penstock_progress) == {*spark_progress, "latencyMs"}
    assert {
        key for key in spark_progress if type(spark_progress[key]) is not type(penstock_progress[key])
    } == set()
    assert set(penstock_progress.sources[0]) == set(spark_progress.sources[0])
    assert set(penstock_progress.sink) == set(spark_progress.sink)
    assert penstock_progress.batchId == spark_progress.batchId + 1
