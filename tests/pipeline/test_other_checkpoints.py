"""Queries whose checkpoint does not go with their consumer are refused before they take the consumer over."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest
from pyspark.sql import DataFrame, SparkSession

import penstock
from penstock.errors import CheckpointMismatchError, ConsumerBoundError
from penstock.pipeline.query import Query
from tests.support.spark_queues import fill, ids_in, make_queue, one_store


def distinct(rows: DataFrame) -> DataFrame:
    return rows.select("id").dropDuplicates(["id"])


@pytest.fixture(params=["one store", "two stores"])
def sink_url(request: pytest.FixtureRequest, store_url: str, tmp_path: Path) -> str:
    if request.param == "one store":
        return store_url
    url = f"sqlite:///{tmp_path}/sink.db"
    penstock.connect(url, create=True).close()
    return url


@pytest.fixture
def out(sink_url: str) -> penstock.Queue:
    return penstock.connect(sink_url).create_queue("out", pa.schema([("id", pa.int64())]))


class Starts:
    """Starts queries of one consumer, each with a checkpoint of its own."""

    def __init__(self, spark: SparkSession, source_url: str, sink_url: str, folder: Path) -> None:
        self._spark, self._source, self._sink, self._folder = spark, source_url, sink_url, folder

    def __call__(
        self,
        checkpoint: str,
        *,
        stateful: bool = True,
        trigger: penstock.Trigger | None = None,
        **options: object,
    ) -> Query:
        stream = penstock.stream(self._spark, penstock.QueueSource("in", "c", self._source))
        stream = stream.transform(distinct if stateful else lambda rows: rows.select("id"))
        pipeline = stream.write(penstock.QueueSink("out", self._sink, options))
        return pipeline.start(checkpoint=self._folder / checkpoint, trigger=trigger, check=False)


@pytest.fixture
def start(
    spark: SparkSession, store: penstock.Store, store_url: str, sink_url: str, tmp_path: Path
) -> Starts:
    make_queue(store, "in")
    store.create_consumer("c").register("in", vital=True)
    return Starts(spark, store_url, sink_url, tmp_path)


def test_the_query_that_has_the_consumer_runs_on(
    start: Starts, store: penstock.Store, out: penstock.Queue
) -> None:
    fill(store.queue("in"), [1, 2])
    running = start("first")
    running.processAllAvailable()
    epoch = store.consumer("c").registration("in").epoch
    with pytest.raises(ConsumerBoundError, match="allow_new_checkpoint=True"):
        start("second")
    assert store.consumer("c").registration("in").epoch == epoch
    fill(store.queue("in"), [2, 3])
    running.processAllAvailable()
    assert running.isActive
    running.stop()
    again = start("first")
    again.processAllAvailable()
    again.stop()
    assert sorted(ids_in(out)) == [1, 2, 3]


@one_store
@pytest.mark.parametrize("sink_url", ["one store"], indirect=True)
@pytest.mark.parametrize("trigger", [None, penstock.Trigger.continuous("50 ms")], ids=str)
def test_a_checkpoint_from_before_a_seek_does_not_disturb_the_query_that_has_the_consumer(
    trigger: penstock.Trigger | None, start: Starts, store: penstock.Store, out: penstock.Queue
) -> None:
    fill(store.queue("in"), [1])
    before = start("before", stateful=False, trigger=trigger)
    before.processAllAvailable()
    before.stop()
    store.consumer("c").seek("in", to="earliest")
    running = start("after", stateful=False, trigger=trigger)
    running.processAllAvailable()
    with pytest.raises(CheckpointMismatchError, match="moved by a seek"):
        start("before", stateful=False, trigger=trigger)
    fill(store.queue("in"), [2])
    running.processAllAvailable()
    assert running.isActive
    running.stop()
    assert sorted(ids_in(out)) == [1, 1, 2]


@one_store
def test_a_new_checkpoint_may_be_allowed(start: Starts, store: penstock.Store, out: penstock.Queue) -> None:
    fill(store.queue("in"), [1, 2])
    first = start("first")
    first.processAllAvailable()
    first.stop()
    fill(store.queue("in"), [2, 3])
    second = start("second", allowNewCheckpoint=True)
    second.processAllAvailable()
    second.stop()
    assert sorted(ids_in(out)) == [1, 2, 2, 3]


@one_store
@pytest.mark.parametrize("sink_url", ["one store"], indirect=True)
def test_a_stateless_query_may_have_a_new_checkpoint(
    start: Starts, store: penstock.Store, out: penstock.Queue
) -> None:
    for checkpoint, ids in (("first", [1, 2]), ("second", [3])):
        fill(store.queue("in"), ids)
        query = start(checkpoint, stateful=False)
        query.processAllAvailable()
        query.stop()
    assert sorted(ids_in(out)) == [1, 2, 3]
