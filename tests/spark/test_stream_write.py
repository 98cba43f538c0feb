"""Streaming writes of stateless queries: what each guarantee keeps, and what is refused."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as fn

import penstock
from penstock import Store
from penstock.errors import CommitRefusedError
from penstock.spark.data_source import PenstockDataSource
from penstock.spark.options import SinkOptions
from penstock.spark.queue_writers import QueueStreamWriter
from penstock.spark.schemas import to_struct
from penstock.store import staging
from penstock.store.log.segmenting import to_segments
from penstock.testing import replay_last_batch, temporary_store_url
from tests.support.spark_queues import (
    SCHEMA,
    failure,
    fill,
    ids_in,
    make_queue,
    one_store,
    refusal,
    run,
    start,
    stream,
)
from tests.support.waiting import wait_until

GUARANTEES = ["exactly_once", "idempotent", "at_least_once"]


@pytest.mark.parametrize(
    ("store_url", "guarantee"),
    [
        ("sqlite", "exactly_once"),
        ("postgresql", "exactly_once"),
        pytest.param("sqlite", "idempotent", marks=pytest.mark.soak),
        ("postgresql", "idempotent"),
        ("sqlite", "at_least_once"),
        pytest.param("postgresql", "at_least_once", marks=pytest.mark.soak),
    ],
    indirect=["store_url"],
)
def test_a_replay_repeats_nothing(
    spark: SparkSession, store: Store, store_url: str, tmp_path: Path, guarantee: str
) -> None:
    queue, out = make_queue(store, partitions=2), make_queue(store, "out", partitions=2)
    consumer = queue.register(store.create_consumer("billing").name, vital=True)
    frame = stream(spark, store_url, consumer="billing", rowsPerTask=2).where("id % 10 != 3").select("id")
    fill(queue, range(5))
    for batch_id, ids in enumerate([range(5), range(10, 14), range(20, 23)]):
        if batch_id:
            fill(queue, ids, partition=1)
        run(frame, store_url, "out", tmp_path / "ck", guarantee=guarantee)
        if guarantee != "at_least_once":
            assert replay_last_batch(tmp_path / "ck") == batch_id
            # Another split of the range must not change what the tasks of a repeated micro-batch write.
            again = stream(spark, store_url, consumer="billing").where("id % 10 != 3").select("id")
            run(again, store_url, "out", tmp_path / "ck", guarantee=guarantee)
    assert sorted(ids_in(out)) == [0, 1, 2, 4, 10, 11, 12, 20, 21, 22]
    assert store.info().staged_segments == 0
    assert consumer.offsets("orders") == {0: 5, 1: 7}
    wait_until(lambda: queue.trim(1, before=7) or queue.info().partitions[1].first_index == 7)


def test_at_least_once_repeats_the_rows_of_a_replay(
    spark: SparkSession, store: Store, store_url: str, tmp_path: Path
) -> None:
    queue, out = make_queue(store), make_queue(store, "out")
    fill(queue, range(3))
    for _ in range(2):
        run(stream(spark, store_url), store_url, "out", tmp_path / "ck", guarantee="at_least_once")
        replay_last_batch(tmp_path / "ck")
    assert sorted(ids_in(out)) == [0, 0, 1, 1, 2, 2]


@pytest.mark.parametrize("guarantee", GUARANTEES[:2])
@pytest.mark.parametrize("kind", ["none", "files"])
@one_store
def test_a_replay_of_any_source_repeats_nothing(
    spark: SparkSession, store: Store, store_url: str, tmp_path: Path, kind: str, guarantee: str
) -> None:
    """For a queue without a consumer, or a source that is not Penstock's, the ledger alone makes a replay a
    no-op.
    """
    queue, out = make_queue(store), make_queue(store, "out")
    files = tmp_path / "files"
    files.mkdir()
    frame = (
        stream(spark, store_url)
        if kind == "none"
        else spark.readStream.schema("id bigint, name string").json(str(files))
    )
    for number in range(2):
        fill(queue, [number])
        (files / f"{number}.json").write_text(f'{{"id": {number}, "name": "n{number}"}}\n')
        run(frame, store_url, "out", tmp_path / "ck", guarantee=guarantee)
        replay_last_batch(tmp_path / "ck")
        run(frame, store_url, "out", tmp_path / "ck", guarantee=guarantee)
    assert ids_in(out) == [0, 1]


@pytest.mark.parametrize("direction", ["sqlite to postgresql", "postgresql to sqlite"])
def test_source_and_sink_can_be_in_two_stores(
    spark: SparkSession, tmp_path: Path, pg_url: str, direction: str
) -> None:
    with temporary_store_url() as sqlite, temporary_store_url(pg_url) as postgres:
        here, there = (sqlite, postgres) if direction.startswith("sqlite") else (postgres, sqlite)
        with penstock.connect(here) as source, penstock.connect(there) as sink:
            queue, out = make_queue(source, partitions=2), make_queue(sink, "out")
            consumer = queue.register(source.create_consumer("billing").name, vital=True)
            frame = stream(spark, here, consumer="billing")
            for number in range(2):
                fill(queue, [number], partition=number)
                run(frame, there, "out", tmp_path / "ck")
                replay_last_batch(tmp_path / "ck")
                run(frame, there, "out", tmp_path / "ck")
            assert ids_in(out) == [0, 1]
            assert consumer.offsets("orders") == {0: 1, 1: 1}, "the consumer follows"
            shutil.rmtree(tmp_path / "ck")
            fill(queue, [2])
            run(frame, there, "out", tmp_path / "ck")
            assert ids_in(out) == [0, 1, 2], "a new checkpoint resumes at the consumer's offset"


def test_a_keyed_sink_keeps_equal_keys_together(
    spark: SparkSession, store: Store, store_url: str, tmp_path: Path
) -> None:
    queue, out = make_queue(store), make_queue(store, "out", partitions=3, key=["name"])
    frame = stream(spark, store_url).select("id", fn.expr("concat('k', id % 5)").alias("name"))
    for ids in (range(20), range(20, 40)):
        fill(queue, ids)
        run(frame, store_url, "out", tmp_path / "ck")
        out.add_partitions(1)
    homes: dict[str, set[int]] = {}
    for part in out.info().partitions:
        for name in out.read(part.partition, 0)["name"].to_pylist():
            homes.setdefault(name, set()).add(part.partition)
    assert sorted(homes) == [f"k{i}" for i in range(5)]
    assert all(len(home) == 1 for home in homes.values())


@pytest.mark.parametrize("guarantee", GUARANTEES)
@one_store
def test_a_micro_batch_fails_and_is_repeated_if_its_keyed_sink_grows(
    spark: SparkSession, store: Store, store_url: str, tmp_path: Path, guarantee: str
) -> None:
    queue, out = make_queue(store), make_queue(store, "out", partitions=2, key=["id"])
    fill(queue, range(30))

    def grow(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        yield from batches
        with penstock.connect(store_url) as inside:
            if inside.queue("out").partitions == 2:
                inside.queue("out").add_partitions(1)

    frame = stream(spark, store_url).mapInArrow(grow, "id bigint, name string")
    said = refusal(lambda: run(frame, store_url, "out", tmp_path / "ck", guarantee=guarantee))
    assert "got more partitions" in said
    run(frame, store_url, "out", tmp_path / "ck", guarantee=guarantee)
    assert sorted(ids_in(out)) == list(range(30))


def test_many_small_segments_are_merged_in_the_background(
    spark: SparkSession, store: Store, store_url: str, tmp_path: Path
) -> None:
    queue, out = make_queue(store), make_queue(store, "out")
    fill(queue, range(70))
    run(stream(spark, store_url), store_url, "out", tmp_path / "ck", maxRowsPerWrite=1)
    wait_until(lambda: out.info().partitions[0].segments < 70, message="merged")
    assert ids_in(out) == list(range(70))


# What goes wrong on the way.


def test_a_failing_task_leaves_nothing_behind_and_is_repeated(
    spark: SparkSession, store: Store, store_url: str, tmp_path: Path
) -> None:
    queue, out = make_queue(store, partitions=2), make_queue(store, "out")
    for partition in (0, 1):
        fill(queue, range(partition * 10, partition * 10 + 3), partition=partition)
    flag = tmp_path / "mended"

    def fail(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for found in batches:
            yield found
            if 12 in found.column("id").to_pylist() and not flag.exists():
                raise ValueError("deliberately")

    frame = stream(spark, store_url).mapInArrow(fail, "id bigint, name string")
    query = start(frame, store_url, "out", tmp_path / "ck", maxRowsPerWrite=1)
    assert "deliberately" in failure(query)
    assert ids_in(out) == []
    flag.touch()
    run(frame, store_url, "out", tmp_path / "ck")
    assert sorted(ids_in(out)) == [0, 1, 2, 10, 11, 12]
    assert store.info().staged_segments == 0, "what the failed run staged went with the commit"


def test_abort_deletes_nothing(store: Store, store_url: str) -> None:
    """Spark also calls it when a commit fails after its transaction."""
    record = make_queue(store, "out").record
    attempt = staging.Attempt("app", 0, 0, "try")
    segments = _segments()
    store.database.run(lambda tx: staging.stage(tx, record, attempt, segments, 0))
    QueueStreamWriter(SinkOptions(store_url, "out"), record).abort([None], 0)
    assert store.info().staged_segments == 1


def _segments() -> Any:
    return to_segments(pa.table({"id": [1], "name": ["a"]}, schema=SCHEMA), 0)


@pytest.mark.parametrize(
    ("mode", "words"), [("complete", "append-only|Complete"), ("update", "does not support Update mode")]
)
@one_store
def test_other_output_modes_are_refused(
    spark: SparkSession, store: Store, store_url: str, tmp_path: Path, mode: str, words: str
) -> None:
    make_queue(store)
    out = store.create_queue("out", pa.schema([("id", pa.int64()), ("count", pa.int64())]))
    fill(store.queue("orders"), [1])
    frame = stream(spark, store_url).groupBy("id").count()
    writer = frame.writeStream.format("penstock").outputMode(mode).trigger(availableNow=True)
    with pytest.raises(Exception, match=words):
        writer.options(url=store_url, checkpointLocation=str(tmp_path / "ck")).start("out").awaitTermination()
    assert out.info().rows == 0


@one_store
def test_nothing_is_committed_under_the_continuous_trigger(
    spark: SparkSession, store: Store, store_url: str, tmp_path: Path
) -> None:
    """Spark passes no row to a Python sink; without a commit no row counts as done, and the log says why."""
    out = make_queue(store, "out")
    with pytest.raises(CommitRefusedError, match="continuous trigger, all rows"):
        QueueStreamWriter(SinkOptions(store_url, "out"), out.record).commit([None, None], 0)
    rates = spark.readStream.format("rate").load().selectExpr("value as id")
    query = start(rates, store_url, "out", tmp_path / "ck", trigger={"continuous": "100 milliseconds"})
    try:
        wait_until((tmp_path / "ck" / "offsets" / "4").exists)
        assert list((tmp_path / "ck" / "commits").iterdir()) == []
    finally:
        query.stop()


@one_store
def test_the_idempotent_guarantee_is_refused_for_stateful_queries(
    spark: SparkSession, store: Store, store_url: str, tmp_path: Path
) -> None:
    fill(make_queue(store), [1, 1, 2])
    out = make_queue(store, "out")
    frame = stream(spark, store_url).dropDuplicates(["id"])
    said = refusal(lambda: run(frame, store_url, "out", tmp_path / "ck", guarantee="idempotent"))
    assert "use guarantee=exactly_once" in said
    assert ids_in(out) == [], "tasks that write for themselves know it too"


@one_store
def test_a_checkpoint_that_the_sink_cannot_read_is_refused_before_the_query_runs(
    spark: SparkSession, store: Store, store_url: str, tmp_path: Path
) -> None:
    fill(make_queue(store), [1])
    out = make_queue(store, "out")
    away = "ftp://reader:s3cret@127.0.0.1:1/ck"
    with pytest.raises(CommitRefusedError, match=r"cannot be re(ached|ad)") as caught:
        stream_writer(SinkOptions(store_url, "out", checkpoint=away))
    assert "s3cret" not in str(caught.value)
    pipeline = penstock.stream(spark, stream(spark, store_url)).write(
        penstock.QueueSink("out", url=store_url)
    )
    with pytest.raises(CommitRefusedError) as caught:
        pipeline.start(checkpoint=away)
    assert "s3cret" not in str(caught.value)
    run(stream(spark, store_url), store_url, "out", tmp_path / "ck", guarantee="at_least_once")
    assert ids_in(out) == [1]


def stream_writer(options: SinkOptions) -> object:
    """What Spark asks for when it plans a micro-batch."""
    given = {"url": options.url, "queue": options.queue, "checkpointlocation": str(options.checkpoint)}
    return PenstockDataSource(given).streamWriter(to_struct(SCHEMA), overwrite=False)


@one_store
def test_a_stream_that_does_not_match_the_sink_is_refused(
    spark: SparkSession, store: Store, store_url: str, tmp_path: Path
) -> None:
    fill(make_queue(store), [1])
    make_queue(store, "out")

    def refused(frame: DataFrame) -> str:
        return refusal(lambda: run(frame, store_url, "out", tmp_path / "ck"))

    assert "Did you mean 'name'" in refused(stream(spark, store_url).withColumnRenamed("name", "names"))
    assert "cast it first" in refused(stream(spark, store_url).selectExpr("cast(id as string) as id"))


@one_store
def test_reading_a_consumer_in_two_dataframes_of_a_query_is_refused(
    spark: SparkSession, store: Store, store_url: str, tmp_path: Path
) -> None:
    queue, out = make_queue(store), make_queue(store, "out")
    queue.register(store.create_consumer("billing").name)
    fill(queue, [1, 2])
    once = stream(spark, store_url, consumer="billing")
    run(once.union(once), store_url, "out", tmp_path / "ck")
    assert sorted(ids_in(out)) == [1, 1, 2, 2], "one DataFrame, used twice, is read once"
    fill(queue, [3])
    twice = stream(spark, store_url, consumer="billing").union(stream(spark, store_url, consumer="billing"))
    assert "only once there" in refusal(lambda: run(twice, store_url, "out", tmp_path / "ck2"))
    assert sorted(ids_in(out)) == [1, 1, 2, 2]
