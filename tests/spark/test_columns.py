"""Spark on a queue that gets columns: running queries keep the old ones, restarted ones see the new ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as fn

import penstock
from penstock import Queue, Store
from penstock.errors import SchemaMismatchError
from penstock.json_text import Json
from penstock.queue.checks import METADATA_COLUMNS
from penstock.spark.schemas import QUEUE_METADATA, source_schema
from penstock.testing import replay_last_batch
from tests.support.spark_queues import (
    SCHEMA,
    batch,
    failure,
    fill,
    make_queue,
    one_store,
    refusal,
    run,
    start,
    stream,
)
from tests.support.waiting import wait_until

NOTE = pa.field("note", pa.string())


def noted(queue: Queue, ids: Any) -> None:
    """Rows with the new column."""
    queue.append([{"id": n, "name": f"n{n}", "note": f"note {n}"} for n in ids], partition=0)


def rows(queue: Queue) -> list[Json]:
    queue.refresh()
    return queue.read(0, 0).to_pylist()


def plain(*ids: int) -> list[Json]:
    return [{"id": n, "name": f"n{n}"} for n in ids]


def test_metadata_columns_are_reserved_names() -> None:
    assert tuple(field.name for field in QUEUE_METADATA) == METADATA_COLUMNS
    older = pa.schema([("_Partition", pa.int64())])
    assert source_schema(older, False) == older
    with pytest.raises(
        SchemaMismatchError, match=r"RESERVED_COLUMN\].*includeMetadataColumns adds _partition"
    ):
        source_schema(older, True)


def test_a_running_query_keeps_its_columns_and_sees_new_ones_after_a_restart(
    spark: SparkSession, store: Store, store_url: str, tmp_path: Path
) -> None:
    queue, out = make_queue(store), make_queue(store, "out")
    store.create_consumer("c").register("orders")
    old = store.queue("orders")
    fill(queue, range(3))
    frame = stream(spark, store_url, consumer="c", maxRowsPerTrigger=2)
    query = start(frame, store_url, "out", tmp_path / "ck", trigger={"processingTime": "0 seconds"})
    query.processAllAvailable()
    queue.add_columns(NOTE)
    out.add_columns(NOTE)
    noted(queue, range(3, 6))
    fill(old, [6])
    wait_until(lambda: len(rows(out)) == 7)
    assert query.exception() is None
    query.stop()
    assert rows(out) == [row | {"note": None} for row in plain(*range(7))]
    noted(queue, [7])
    fill(old, [8])
    again = run(stream(spark, store_url, consumer="c"), store_url, "out", tmp_path / "ck")
    assert again.id == query.id
    assert rows(out)[7:] == [
        {"id": 7, "name": "n7", "note": "note 7"},
        {"id": 8, "name": "n8", "note": None},
    ]
    replay_last_batch(tmp_path / "ck")
    run(stream(spark, store_url, consumer="c"), store_url, "out", tmp_path / "ck")
    assert len(rows(out)) == 9
    assert store.consumer("c").lag("orders").rows == 0


@pytest.mark.parametrize("guarantee", ["exactly_once", "idempotent", "at_least_once"])
@one_store
def test_a_sink_can_get_columns_in_the_middle_of_a_micro_batch(
    spark: SparkSession, store: Store, store_url: str, tmp_path: Path, guarantee: str
) -> None:
    queue = make_queue(store, partitions=2)
    out = make_queue(store, "out")
    fill(queue, range(3))
    fill(queue, range(3, 6), partition=1)

    def add_meanwhile(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        from penstock.queue.store import open_store

        for each in batches:
            open_store(store_url).queue("out").add_columns(pa.field("note", pa.string()))
            yield each

    frame = stream(spark, store_url).mapInArrow(add_meanwhile, "id bigint, name string")
    run(frame, store_url, "out", tmp_path / "ck", guarantee=guarantee)
    assert sorted(rows(out), key=lambda row: row["id"]) == [row | {"note": None} for row in plain(*range(6))]
    assert store.info().staged_segments == 0


@one_store
def test_a_batch_reads_rows_from_before_and_after_a_new_column(
    spark: SparkSession, store: Store, store_url: str
) -> None:
    queue, old = make_queue(store), store.queue("orders")
    fill(queue, range(2))
    queue.add_columns([NOTE, ("tags", pa.list_(pa.string()))])
    noted(queue, [2])
    fill(old, [3])
    frame = batch(spark, store_url)
    assert frame.columns == ["id", "name", "note", "tags"]
    assert [tuple(row) for row in frame.orderBy("id").collect()] == [
        (0, "n0", None, None),
        (1, "n1", None, None),
        (2, "n2", "note 2", None),
        (3, "n3", None, None),
    ]
    assert [row.id for row in frame.where("note = 'note 2'").collect()] == [2]
    assert sorted(row.id for row in frame.where("note is null").collect()) == [0, 1, 3]
    assert [row.note for row in frame.select("note").orderBy("id").collect()] == [None, None, "note 2", None]
    served = batch(spark, store_url, includeMetadataColumns=True).orderBy("_row_index")
    assert [(row.note, row._row_index) for row in served.collect()] == [
        (None, 0),
        (None, 1),
        ("note 2", 2),
        (None, 3),
    ]
    chosen = (
        spark.read.format("penstock")
        .options(url=store_url)
        .schema("tags array<string>, id bigint")
        .load("orders")
    )
    assert sorted(tuple(row) for row in chosen.collect()) == [(None, n) for n in range(4)]
    planned = frame.select("id", "name")
    queue.add_columns(pa.field("later", pa.int64()))
    assert planned.count() == 4
    assert len(frame.collect()) == 4
    assert frame.columns == ["id", "name", "note", "tags"]


@one_store
def test_rows_are_written_with_and_without_a_new_column(
    spark: SparkSession, store: Store, store_url: str
) -> None:
    queue = make_queue(store)
    both = spark.createDataFrame([(1, "n1", "note 1")], "id bigint, name string, note string")

    def write(frame: DataFrame) -> None:
        frame.write.format("penstock").options(url=store_url).mode("append").save("orders")

    assert "Drop or rename it, or add it to the queue with add_columns" in refusal(lambda: write(both))
    queue.add_columns(NOTE)
    write(both)
    write(both.drop("note").selectExpr("id + 1 as id", "name"))
    assert rows(queue) == [
        {"id": 1, "name": "n1", "note": "note 1"},
        {"id": 2, "name": "n1", "note": None},
    ]
    assert "column 'note' of queue 'orders' is string" in refusal(
        lambda: write(both.selectExpr("1L as id", "true as note"))
    )


STATEFUL: dict[str, Callable[[DataFrame], DataFrame]] = {
    "counts": lambda df: df.groupBy("name").agg(fn.count("*").alias("id")).select("id", "name"),
    "one of each id": lambda df: df.dropDuplicates(["id"]).select("id", "name"),
}


@pytest.mark.parametrize("kind", list(STATEFUL))
@one_store
def test_state_without_all_columns_continues(
    spark: SparkSession, store: Store, store_url: str, tmp_path: Path, kind: str
) -> None:
    queue = make_queue(store)
    fill(queue, range(2))
    output = "complete" if kind == "counts" else "append"

    def go(folder: Path) -> list[Any]:
        found: list[Any] = []
        frame = STATEFUL[kind](stream(spark, store_url))
        writer = frame.writeStream.outputMode(output).option("checkpointLocation", str(folder))
        query = (
            writer.foreachBatch(lambda df, _: found.extend(map(tuple, df.collect())))
            .trigger(availableNow=True)
            .start()
        )
        query.awaitTermination()
        return sorted(found)

    go(tmp_path / "ck")
    queue.add_columns(NOTE)
    noted(queue, range(1, 3))
    assert go(tmp_path / "ck") == ([(1, "n0"), (1, "n2"), (2, "n1")] if kind == "counts" else [(2, "n2")])


@one_store
def test_state_of_whole_rows_requires_reading_only_the_old_columns(
    spark: SparkSession, store: Store, store_url: str, tmp_path: Path
) -> None:
    queue, out = make_queue(store), make_queue(store, "out")
    fill(queue, range(2))
    run(stream(spark, store_url).dropDuplicates(), store_url, "out", tmp_path / "ck")
    queue.add_columns(NOTE)
    out.add_columns(NOTE)
    noted(queue, range(1, 3))
    again = start(stream(spark, store_url).dropDuplicates(), store_url, "out", tmp_path / "ck")
    assert "STATE_STORE" in failure(again)
    reader = spark.readStream.format("penstock").options(url=store_url)
    run(
        reader.schema("id bigint, name string").load("orders").dropDuplicates(),
        store_url,
        "out",
        tmp_path / "ck",
    )
    assert sorted(row["id"] for row in rows(out)) == [0, 1, 2]


@one_store
def test_a_limit_and_take_continue_after_columns_are_added(
    spark: SparkSession, store: Store, store_url: str, tmp_path: Path
) -> None:
    queue, out = make_queue(store), store.create_queue("out", pa.schema([*SCHEMA, NOTE]))
    store.create_consumer("c").register("orders")
    fill(queue, range(3))

    def limited() -> penstock.Query:
        source = penstock.QueueSource("orders", consumer="c", url=store_url)
        pipeline = penstock.stream(spark, source).limit(5).write(penstock.QueueSink("out", url=store_url))
        return pipeline.start(checkpoint=tmp_path / "ck", trigger=penstock.Trigger.available_now())

    assert limited().awaitTermination(60)
    frame = stream(spark, store_url)
    queue.add_columns(NOTE)
    noted(queue, range(3, 9))
    assert limited().awaitTermination(60)
    assert [(row["id"], row["note"]) for row in rows(out)] == [
        (0, None), (1, None), (2, None), (3, "note 3"), (4, "note 4"),
    ]  # fmt: skip
    assert [tuple(row) for row in penstock.take(frame, 5, timeout=60)] == [(n, f"n{n}") for n in range(5)]
    assert [row.note for row in penstock.take(stream(spark, store_url), 5, timeout=60)][2:] == [
        None,
        "note 3",
        "note 4",
    ]
