"""Spark on a queue whose columns get wider types: running queries keep theirs until they are restarted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql import SparkSession

import penstock
from penstock import Queue, Store
from penstock.errors import SchemaMismatchError
from penstock.testing import replay_last_batch
from tests.support.spark_queues import batch, failure, refusal, run, start, stream
from tests.support.waiting import wait_until

NARROW = pa.schema([("id", pa.int32()), ("name", pa.string())])
LONG = pa.field("id", pa.int64())
BIG = 1 << 40


def fill(queue: Queue, *ids: int) -> None:
    queue.append([{"id": n, "name": f"n{n}"} for n in ids])


def ids(queue: Queue) -> list[Any]:
    queue.refresh()
    return queue.read(0, 0)["id"].to_pylist()


@pytest.mark.parametrize("guarantee", ["exactly_once", "idempotent"])
def test_a_running_query_goes_on_until_a_value_does_not_fit(
    spark: SparkSession, store: Store, store_url: str, tmp_path: Path, guarantee: str
) -> None:
    queue, out = store.create_queue("orders", NARROW), store.create_queue("out", NARROW)
    store.create_consumer("c").register("orders")
    fill(queue, 1, 2)

    def frame() -> Any:
        return stream(spark, store_url, consumer="c", maxRowsPerTrigger=2)

    options = {"guarantee": guarantee}
    query = start(
        frame(), store_url, "out", tmp_path / "ck", trigger={"processingTime": "0 seconds"}, **options
    )
    query.processAllAvailable()
    queue.widen_columns(LONG)
    out.widen_columns(LONG)
    fill(queue, 3)
    wait_until(lambda: ids(out) == [1, 2, 3])
    fill(queue, 4, BIG)
    assert "SCHEMA_MISMATCH.COLUMN_WIDENED" in failure(query)
    assert ids(out) == [1, 2, 3]
    run(frame(), store_url, "out", tmp_path / "ck", **options)
    assert ids(out) == [1, 2, 3, 4, BIG]
    replay_last_batch(tmp_path / "ck")
    run(frame(), store_url, "out", tmp_path / "ck", **options)
    assert ids(out) == [1, 2, 3, 4, BIG]
    assert store.consumer("c").lag("orders").rows == 0


def test_batches_read_and_write_the_new_type(spark: SparkSession, store: Store, store_url: str) -> None:
    queue, out = store.create_queue("orders", NARROW), store.create_queue("out", NARROW)
    fill(queue, 1)
    narrow = batch(spark, store_url)
    queue.widen_columns(LONG)
    fill(queue, 2)
    fill(queue, BIG)
    assert "has 'id' as int32, but the column is int64" in refusal(narrow.collect)
    wide = batch(spark, store_url)
    assert wide.schema["id"].dataType.simpleString() == "bigint"
    assert [row.id for row in wide.where(f"id > {BIG - 1}").collect()] == [BIG]
    writer = wide.write.format("penstock").mode("append").options(url=store_url)
    assert "SCHEMA_MISMATCH" in refusal(lambda: writer.save("out"))
    out.widen_columns(LONG)
    writer.save("out")
    assert sorted(ids(out)) == [1, 2, BIG]


def test_a_continuous_query_goes_on_until_a_value_does_not_fit(
    spark: SparkSession, store: Store, store_url: str, tmp_path: Path
) -> None:
    queue, out = store.create_queue("in", NARROW), store.create_queue("out", NARROW)
    fill(queue, 1)

    def begin() -> Any:
        pipeline = penstock.stream(spark, penstock.QueueSource("in", url=store_url)).write(
            penstock.QueueSink("out", url=store_url)
        )
        return pipeline.start(
            checkpoint=str(tmp_path / "ck"), trigger=penstock.Trigger.continuous("20 milliseconds")
        )

    query = begin()
    query.processAllAvailable()
    queue.widen_columns(LONG)
    # More partitions make another run, which is planned anew.
    queue.add_partitions(1)
    queue.append([{"id": 2, "name": "n2"}], partition=0)
    query.processAllAvailable()
    assert ids(out) == [1, 2]
    queue.append([{"id": BIG, "name": "big"}], partition=0)
    with pytest.raises(SchemaMismatchError, match="is now int64") as caught:
        query.processAllAvailable()
    assert caught.value.condition == "SCHEMA_MISMATCH.COLUMN_WIDENED"
    query.stop()
    out.widen_columns(LONG)
    again = begin()
    again.processAllAvailable()
    again.stop()
    assert ids(out) == [1, 2, BIG]
