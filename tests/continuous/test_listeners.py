"""Spark's streaming listeners get events of continuous queries as they do of Spark's own."""

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
PATIENCE = 60

pytestmark = one_store


class Listener(StreamingQueryListener):
    def __init__(self, *, fails: bool = False) -> None:
        self.fails = fails
        self.events: list[Any] = []

    def onQueryStarted(self, event: Any) -> None:  # noqa: N802 - Spark's name
        self._hear(event)

    def onQueryProgress(self, event: Any) -> None:  # noqa: N802 - Spark's name
        self._hear(event)

    def onQueryTerminated(self, event: Any) -> None:  # noqa: N802 - Spark's name
        self._hear(event)

    def _hear(self, event: Any) -> None:
        self.events.append(event)
        if self.fails:
            raise RuntimeError("a listener that fails")

    @property
    def progress(self) -> list[Any]:
        return [event.progress for event in self.events if hasattr(event, "progress")]

    @property
    def kinds(self) -> list[str]:
        return [type(event).__name__ for event in self.events]


@pytest.fixture
def listen(spark: SparkSession) -> Iterator[Any]:
    there: list[Listener] = []

    def listening(**more: object) -> Listener:
        there.append(Listener(**more))
        spark.streams.addListener(there[-1])
        return there[-1]

    yield listening
    for each in there:
        spark.streams.removeListener(each)


@pytest.fixture
def feed(spark: SparkSession, store_url: str, tmp_path: Path) -> Feed:
    return Feed(spark, store_url, tmp_path, SCHEMA)


def _start(feed: Feed, transform: Any = None, **more: object) -> Any:
    pipeline = feed.pipeline(feed.table("t"), transform)
    return pipeline.start(name="copy", checkpoint=feed.folder / "ck", **{"trigger": SOON, **more})


def test_a_listener_is_notified_of_the_start_each_epoch_and_the_end(feed: Feed, listen: Any) -> None:
    listener = listen()
    query = _start(feed, lambda frame: frame.where("id > 0"))
    for _ in range(3):
        feed.add({"id": 0}, {"id": 1})
        query.processAllAvailable()
    query.stop()
    wait_until(lambda: "QueryTerminatedEvent" in listener.kinds, PATIENCE, "no event of the end")
    first, *_, last = listener.events
    assert (str(first.id), str(first.runId), first.name) == (query.id, query.runId, "copy")
    assert listener.kinds == ["QueryStartedEvent", *["QueryProgressEvent"] * 3, "QueryTerminatedEvent"]
    assert (str(last.id), last.exception, last.errorClassOnException) == (query.id, None, None)
    assert [each.batchId for each in listener.progress] == [0, 1, 2]
    assert [each.numInputRows for each in listener.progress] == [2, 2, 2]
    assert [each.sink.numOutputRows for each in listener.progress] == [1, 1, 1]
    reported, kept = listener.progress[-1], query.lastProgress
    assert (reported.id, reported.runId, reported.durationMs) == (kept.id, kept.runId, kept.durationMs)
    assert reported.sources[0].description == "queue 'in'"
    assert float(reported.sink.metrics["latencyMs.p50"]) == kept["latencyMs"]["p50"] > 0
    assert 0 < reported.batchDuration < PATIENCE * 1000


def test_an_error_that_ends_the_query_is_reported(
    feed: Feed, listen: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from penstock.continuous.driver import execution

    monkeypatch.setattr(execution, "_MAX_RESTARTS", 0)
    listener = listen()
    query = _start(feed, lambda frame: frame.selectExpr("assert_true(id > 5, 'too small') as id"))
    feed.add({"id": 1})
    with pytest.raises(Exception, match="too small"):
        query.awaitTermination(PATIENCE)
    wait_until(lambda: "QueryTerminatedEvent" in listener.kinds, PATIENCE, "no event of the end")
    assert "too small" in listener.events[-1].exception


def test_a_failing_listener_does_not_affect_the_query(feed: Feed, listen: Any) -> None:
    broken, other = listen(fails=True), listen()
    feed.add({"id": 1}, {"id": 2})
    query = _start(feed)
    query.processAllAvailable()
    assert query.stop()
    for listener in (broken, other):
        wait_until(lambda heard=listener: len(heard.events) == 3, PATIENCE, "fewer events than expected")


def test_progress_has_sparks_format(feed: Feed) -> None:
    forms = []
    for trigger in (NOW, SOON):
        feed.add({"id": 1})
        query = _start(feed, trigger=trigger)
        query.awaitTermination() if trigger is NOW else query.processAllAvailable()
        forms.append(query.lastProgress)
    query.stop()
    sparks, ours = forms
    assert set(ours) == {*sparks, "latencyMs"}
    assert {key for key in sparks if type(sparks[key]) is not type(ours[key])} == set()
    assert set(ours.sources[0]) == set(sparks.sources[0])
    assert set(ours.sink) == set(sparks.sink)
    assert ours.batchId == sparks.batchId + 1
