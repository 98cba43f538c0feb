"""Queues whose rows are in objects, read and written by Spark: tasks write without the database."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.functions import col, sha2

import penstock
from penstock.errors import CommitRefusedError
from penstock.spark import queue_writers
from penstock.spark.options import SinkOptions
from penstock.spark.queue_writers import ObjectWrites, QueueWriter, write_objects
from penstock.store.log import payloads
from tests.support.object_proxy import object_proxy
from tests.support.object_store import object_store, settings
from tests.support.raw_sql import run_sql
from tests.support.spark_queues import batch, ids_in, make_queue, run, stream

SCHEMA = pa.schema([("id", pa.int64()), ("text", pa.string())])
LARGE = 40_000
"""Rows of which each task has enough for an object."""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "rows"


@pytest.fixture
def queue(store: penstock.Store, folder: Path) -> penstock.Queue:
    return store.create_queue("out", SCHEMA, partitions=4, key=["id"], payloads=folder)


def objects(folder: Path) -> list[Path]:
    return sorted(folder.glob("**/*.segments"))


def rows(spark: SparkSession, first: int, end: int, tasks: int = 2) -> DataFrame:
    text = sha2(col("id").cast("string"), 256)
    return spark.range(first, end, numPartitions=tasks).withColumn("text", text)


def test_a_batch_write_is_one_append(
    spark: SparkSession, store: penstock.Store, store_url: str, queue: penstock.Queue, folder: Path
) -> None:
    frame = rows(spark, 0, LARGE)
    frame.write.format("penstock").option("url", store_url).mode("append").save("out")
    assert sorted(ids_in(queue)) == list(range(LARGE))
    assert len(objects(folder)) == 2
    assert run_sql(store.database, "select count(*) from penstock.payload where data is not null") == [(0,)]
    assert run_sql(store.database, "select count(distinct first_append) from penstock.segment") == [(1,)]
    read = batch(spark, store_url, "out")
    assert sorted(row.id for row in read.select("id").collect()) == list(range(LARGE))
    assert read.where("id = 7").collect()[0].text == rows(spark, 7, 8).collect()[0].text


def test_few_rows_come_with_the_commit(
    spark: SparkSession, store_url: str, queue: penstock.Queue, folder: Path
) -> None:
    frame = rows(spark, 0, 10)
    frame.write.format("penstock").option("url", store_url).mode("append").save("out")
    assert sorted(ids_in(queue)) == list(range(10))
    assert objects(folder) == []


@pytest.mark.few(1)
@pytest.mark.parametrize("guarantee", ["exactly_once", "idempotent", "at_least_once"])
def test_a_stream_moves_rows_from_objects_to_objects(
    spark: SparkSession,
    store: penstock.Store,
    store_url: str,
    queue: penstock.Queue,
    folder: Path,
    tmp_path: Path,
    guarantee: str,
) -> None:
    source = store.create_queue("in", SCHEMA, partitions=2, payloads=folder)
    store.create_consumer("c").register("in")
    for part in range(2):
        ids = list(range(part * LARGE, (part + 1) * LARGE))
        source.append(pa.table({"id": ids, "text": [os.urandom(8).hex() for _ in ids]}), part)
    before = len(objects(folder))
    for _ in range(2):
        frame = stream(spark, store_url, "in", consumer="c")
        run(frame, store_url, "out", tmp_path / "checkpoint", guarantee=guarantee)
    assert sorted(ids_in(queue)) == list(range(2 * LARGE))
    assert len(objects(folder)) == before + 2
    assert [each.missing for each in store.check_objects()] == [[], []]


def test_tasks_write_without_the_database(
    store: penstock.Store, store_url: str, queue: penstock.Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = SinkOptions(store_url, "out")
    writer = QueueWriter(options, queue.record)

    def no_store(*_: object, **__: object) -> None:
        raise AssertionError("a task has opened the store")

    with monkeypatch.context() as patched:
        patched.setattr(queue_writers, "open_store", no_store)
        done = [writer.write(batches(first)) for first in (0, LARGE)]
    assert sorted(ids_in(queue)) == []
    writer.commit(done)
    assert sorted(ids_in(queue)) == list(range(2 * LARGE))


def batches(first: int, count: int = LARGE) -> Iterator[pa.RecordBatch]:
    for start in range(first, first + count, 10_000):
        ids = list(range(start, start + 10_000))
        yield pa.record_batch({"id": ids, "text": [os.urandom(8).hex() for _ in ids]}, schema=SCHEMA)


def test_rows_of_tasks_keep_their_order(
    store: penstock.Store, store_url: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many objects they are in."""
    queue = store.create_queue("out", SCHEMA, payloads=folder)
    monkeypatch.setattr(payloads, "OBJECT_BYTES", 100_000)
    monkeypatch.setattr(queue_writers, "OBJECTS_FLUSH_BYTES", 500_000)
    writer = QueueWriter(SinkOptions(store_url, "out", max_rows_per_write=3000), queue.record)
    done = [writer.write(batches(first)) for first in (0, LARGE)]
    assert len(objects(folder)) > 10
    writer.commit(done[::-1])
    found = ids_in(queue)
    assert sorted(found) == list(range(2 * LARGE))
    # The tasks of this test have the same number.
    halves = found[:LARGE], found[LARGE:]
    assert [half == sorted(half) for half in halves] == [True, True]


def test_a_write_that_was_placed_before_the_queue_grew_is_refused(
    store: penstock.Store, store_url: str, queue: penstock.Queue
) -> None:
    writer = QueueWriter(SinkOptions(store_url, "out"), queue.record)
    done = [writer.write(batches(0))]
    queue.add_partitions(1)
    with pytest.raises(CommitRefusedError) as refused:
        writer.commit(done)
    assert refused.value.condition == "COMMIT_REFUSED.QUEUE_CHANGED"
    assert ids_in(queue) == []


def test_a_commit_of_rows_that_were_begun_long_ago_is_refused(
    store: penstock.Store, store_url: str, queue: penstock.Queue
) -> None:
    """Their objects may have been deleted as those of a dead process."""
    objects = ObjectWrites.of(SinkOptions(store_url, "out"), queue.record)
    assert objects is not None
    late = ObjectWrites(
        objects.store_uuid, objects.location, objects.begun_at - payloads.ORPHAN_AGE, objects.placement
    )
    writer = QueueWriter(SinkOptions(store_url, "out"), queue.record)
    done = [write_objects(SinkOptions(store_url, "out"), queue.record, late, batches(0))]
    with pytest.raises(CommitRefusedError) as refused:
        writer.commit(done)
    assert refused.value.condition == "COMMIT_REFUSED.OBJECT_TOO_OLD"
    assert ids_in(queue) == []


def test_a_bucket(spark: SparkSession, store: penstock.Store, store_url: str, tmp_path: Path) -> None:
    """Executors of a local session have the driver's environment."""
    with (
        object_store() as server,
        object_proxy(server.endpoint) as proxy,
        pytest.MonkeyPatch.context() as patched,
    ):
        server.bucket("rows")
        for name, value in settings(proxy.endpoint).items():
            patched.setenv(name, value)
        # Clients keep the endpoint that they were made with.
        location = f"s3://rows/{tmp_path.name}"
        queue = store.create_queue("out", SCHEMA, partitions=2, payloads=location)
        writer = QueueWriter(SinkOptions(store_url, "out"), queue.record)
        writer.commit([writer.write(batches(first)) for first in (0, LARGE)])
        assert sorted(ids_in(queue)) == list(range(2 * LARGE))
        assert "PUT" in proxy.requests


def test_other_queues_are_staged_as_before(
    spark: SparkSession, store: penstock.Store, store_url: str
) -> None:
    queue = make_queue(store, "plain")
    assert ObjectWrites.of(SinkOptions(store_url, "plain"), queue.record) is None
