"""``penstock.stream(…).transform(…).write(…).start(…)``."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import pyarrow as pa
import pytest
from pyspark.sql import SparkSession

import penstock
from penstock.errors import (
    CheckpointMismatchError,
    CommitRefusedError,
    ConsumerInUseError,
    InvalidInputError,
    InvalidOptionError,
    NotRegisteredError,
    OffsetConflictError,
    QueueNotFoundError,
    SchemaMismatchError,
    StoreNotFoundError,
)
from penstock.store.database import Transaction
from penstock.store.records import consumers
from tests.support.spark_queues import fill, ids_in, make_queue, one_store, stream
from tests.support.waiting import wait_until


def prepare(store: penstock.Store, rows: int = 30) -> None:
    make_queue(store, "in", partitions=2)
    make_queue(store, "out")
    store.create_consumer("c").register("in")
    for partition in range(2):
        fill(
            store.queue("in"), range(partition * rows // 2, (partition + 1) * rows // 2), partition=partition
        )


def even(spark: SparkSession, url: str) -> penstock.Pipeline:
    source = penstock.QueueSource("in", consumer="c", url=url, options={"maxRowsPerTrigger": 10})
    return (
        penstock.stream(spark, source)
        .transform(lambda df: df.where("id % 2 = 0"))
        .write(penstock.QueueSink("out", url=url))
    )


def test_an_unregistered_consumer_is_refused_at_the_start(
    spark: SparkSession, store: penstock.Store, store_url: str, tmp_path: Path
) -> None:
    make_queue(store, "in")
    make_queue(store, "out")
    store.create_consumer("c")
    with pytest.raises(NotRegisteredError, match=r"store.consumer\('c'\).register\('in'\)"):
        even(spark, store_url).start(name="even", checkpoint=tmp_path / "c")
    assert not spark.streams.active


def test_existing_rows_are_written_once_and_the_consumer_has_caught_up(
    spark: SparkSession, store: penstock.Store, store_url: str, tmp_path: Path
) -> None:
    prepare(store)
    for _ in range(2):
        query = even(spark, store_url).start(
            name="even", checkpoint=tmp_path / "c", trigger=penstock.Trigger.available_now()
        )
        query.awaitTermination()
    assert sorted(ids_in(store.queue("out"))) == list(range(0, 30, 2))
    assert store.consumer("c").lag("in").rows == 0
    assert (query.exception(), query.isActive, query.name) == (None, False, "even")


def test_a_running_query_owns_its_consumer_until_it_is_stopped(
    spark: SparkSession, store: penstock.Store, store_url: str, tmp_path: Path
) -> None:
    prepare(store)
    query = even(spark, store_url).start(checkpoint=tmp_path / "c")
    query.processAllAvailable()
    with pytest.raises(ConsumerInUseError):
        store.consumer("c").seek("in", to="earliest")
    fill(store.queue("in"), [100, 101])
    wait_until(lambda: 100 in ids_in(store.queue("out")), 60, "the new row")
    assert query.stop()
    assert store.consumer("c").lag("in").rows == 0
    assert store.consumer("c").seek("in", to="earliest") == {0: 0, 1: 0}


def test_rows_that_are_no_longer_needed_are_trimmed_automatically(
    spark: SparkSession, store: penstock.Store, store_url: str, tmp_path: Path
) -> None:
    """Also while nobody appends any more."""
    prepare(store)
    queue = store.queue("in")
    queue.set_retention(penstock.Retention(rows=0))
    store.consumer("c").register("in", vital=True)
    query = even(spark, store_url).start(checkpoint=tmp_path / "c")
    query.processAllAvailable()
    wait_until(lambda: queue.info().rows == 0, 30, "the rows are trimmed")
    store.queue("in").set_retention(penstock.Retention())
    fill(queue, [100, 101])
    query.processAllAvailable()
    assert queue.info().rows == 2
    queue.set_retention(penstock.Retention(rows=0))
    assert query.stop()
    assert queue.info().rows == 0, "a query that ends sees to it before it does"
    assert len(ids_in(store.queue("out"))) == 16


@one_store
def test_a_micro_batch_that_takes_too_long_is_aborted_and_repeated(
    spark: SparkSession, store: penstock.Store, store_url: str, tmp_path: Path
) -> None:
    prepare(store)
    begun, may_end = tmp_path / "begun", tmp_path / "may end"

    def slowly(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            begun.touch()
            while not may_end.exists():
                time.sleep(0.02)
            yield batch

    source = penstock.stream(spark, penstock.QueueSource("in", consumer="c", url=store_url))
    slow = source.transform(lambda df: df.mapInArrow(slowly, df.schema))
    pipeline = slow.write(penstock.QueueSink("out", url=store_url))
    query = pipeline.start(checkpoint=tmp_path / "c")
    wait_until(begun.exists, 60, "the micro-batch is in flight")
    assert query.stop(timeout=0.5) is False
    assert not query.isActive
    may_end.touch()
    assert ids_in(store.queue("out")) == []
    pipeline.start(checkpoint=tmp_path / "c", trigger=penstock.Trigger.available_now()).awaitTermination()
    assert sorted(ids_in(store.queue("out"))) == list(range(30))


@one_store
def test_an_old_checkpoint_is_refused_with_penstocks_own_error(
    spark: SparkSession, store: penstock.Store, store_url: str, tmp_path: Path
) -> None:
    prepare(store)
    now = penstock.Trigger.available_now()
    even(spark, store_url).start(checkpoint=tmp_path / "c", trigger=now).awaitTermination()
    store.consumer("c").seek("in", to="earliest")
    with pytest.raises(CheckpointMismatchError, match="moved by a seek"):
        even(spark, store_url).start(checkpoint=tmp_path / "c", trigger=now)


@one_store
@pytest.mark.parametrize(("back", "read_after"), [(False, [6, 7]), (True, [3, 4, 5, 6, 7])])
def test_a_query_can_be_repaired_after_a_program_moved_its_consumer(
    spark: SparkSession,
    store: penstock.Store,
    store_url: str,
    tmp_path: Path,
    back: bool,
    read_after: list[int],
) -> None:
    queue = make_queue(store, "in")
    make_queue(store, "out")
    consumer = store.create_consumer("c")
    consumer.register("in")
    pipeline = penstock.stream(spark, penstock.QueueSource("in", consumer="c", url=store_url)).write(
        penstock.QueueSink("out", url=store_url)
    )
    now = penstock.Trigger.available_now()
    fill(queue, range(3))
    pipeline.start(checkpoint=tmp_path / "c", trigger=now).awaitTermination()
    fill(queue, range(3, 6))
    consumer.advance("in", 0, old=3, new=6)
    fill(queue, [6, 7])
    with pytest.raises(OffsetConflictError) as caught:
        pipeline.start(checkpoint=tmp_path / "c", trigger=now).awaitTermination()
    assert "Start the query with a new checkpoint" in caught.value.message
    assert "seek the consumer to {0: 3}" in caught.value.message
    if back:
        consumer.seek("in", to={0: 3})
    pipeline.start(checkpoint=tmp_path / "new", trigger=now).awaitTermination()
    assert ids_in(store.queue("out")) == [0, 1, 2, *read_after]


@one_store
def test_any_streaming_frame_is_a_source(
    spark: SparkSession, store: penstock.Store, store_url: str, tmp_path: Path
) -> None:
    make_queue(store, "out")
    (tmp_path / "files").mkdir()
    (tmp_path / "files" / "a.json").write_text('{"id": 1, "name": "x"}\n{"id": 2, "name": "y"}\n')
    frame = spark.readStream.schema("id bigint, name string").json(str(tmp_path / "files"))
    pipeline = penstock.stream(spark, frame).write(penstock.QueueSink("out", url=store_url))
    pipeline.start(checkpoint=tmp_path / "c", trigger=penstock.Trigger.available_now()).awaitTermination()
    assert sorted(ids_in(store.queue("out"))) == [1, 2]


def safe(store: penstock.Store, consumer: str, queue: str) -> list[int]:
    """From where on nothing of a queue is read again."""

    def work(tx: Transaction) -> list[int]:
        return consumers.read_offsets(tx, consumers.find_registration(tx, consumer, queue))[1]

    return store.database.run(work, write=False)


@one_store
def test_consumers_of_queues_in_any_streaming_frame_are_advanced_too(
    spark: SparkSession, store: penstock.Store, store_url: str, tmp_path: Path
) -> None:
    prepare(store)
    make_queue(store, "more")
    store.create_consumer("d").register("more")
    fill(store.queue("more"), range(100, 110))
    both = stream(spark, store_url, "in", Consumer="c").union(stream(spark, store_url, "more", consumer="d"))
    pipeline = penstock.stream(spark, both).write(penstock.QueueSink("out", url=store_url))
    pipeline.start(checkpoint=tmp_path / "c", trigger=penstock.Trigger.available_now()).awaitTermination()
    assert (safe(store, "c", "in"), safe(store, "d", "more")) == ([15, 15], [10])
    query = pipeline.start(checkpoint=tmp_path / "c")
    fill(store.queue("more"), range(110, 115))
    query.processAllAvailable()
    assert query.stop()
    assert len(ids_in(store.queue("out"))) == 45
    assert (safe(store, "d", "more"), store.consumer("d").seek("more", to="latest")) == ([15], {0: 15})


@one_store
def test_a_source_with_endless_new_rows_does_not_prevent_a_query_from_stopping(
    spark: SparkSession, store: penstock.Store, store_url: str, tmp_path: Path
) -> None:
    prepare(store)
    rate = spark.readStream.format("rate").option("rowsPerSecond", 100).load()
    numbers = rate.selectExpr("value + 1000 as id", "'n' as name")
    source = penstock.stream(spark, penstock.QueueSource("in", consumer="c", url=store_url))
    pipeline = source.transform(lambda df: df.union(numbers)).write(penstock.QueueSink("out", url=store_url))
    query = pipeline.start(checkpoint=tmp_path / "c")
    wait_until(lambda: max(ids_in(store.queue("out")), default=0) > 1000, 60, "a row of the other source")
    query.stop(timeout=20)
    assert not query.isActive
    assert safe(store, "c", "in") == [15, 15]


@one_store
def test_idempotent_refuses_plans_whose_partitions_may_differ_in_a_repetition(
    spark: SparkSession, store: penstock.Store, store_url: str, tmp_path: Path
) -> None:
    prepare(store)
    source = penstock.stream(spark, penstock.QueueSource("in", consumer="c", url=store_url))
    shuffled = source.transform(lambda df: df.repartition(3))
    with pytest.raises(CommitRefusedError, match=r"NOT_IDEMPOTENT\].*Repartition"):
        shuffled.write(penstock.QueueSink("out", url=store_url), guarantee="idempotent").start(
            checkpoint=tmp_path / "c"
        )


@one_store
def test_wrong_arguments_are_refused_before_the_query_starts(
    spark: SparkSession, store: penstock.Store, store_url: str
) -> None:
    prepare(store)
    stream = penstock.stream(spark, penstock.QueueSource("in", consumer="c", url=store_url))
    sink = penstock.QueueSink("out", url=store_url)
    with pytest.raises(InvalidInputError, match=r"NOT_STREAMING\].*streaming"):
        penstock.stream(spark, spark.range(3))
    with pytest.raises(InvalidInputError, match=r"\[INVALID_INPUT\].*QueueSource"):
        penstock.stream(spark, "in")  # type: ignore[arg-type]  # on purpose
    with pytest.raises(InvalidInputError, match="function"):
        stream.transform("id > 3")  # type: ignore[arg-type]  # on purpose
    with pytest.raises(InvalidInputError, match=r"FUNCTION_RESULT\].*return"):
        stream.transform(lambda df: None).to_df()  # type: ignore[arg-type,return-value]  # on purpose
    with pytest.raises(InvalidOptionError, match=r"OPTION.VALUE\].*Did you mean 'exactly_once'"):
        stream.write(sink, guarantee="exactly_onse")
    with pytest.raises(InvalidOptionError, match="append"):
        stream.write(sink, output_mode="complete")
    for interval in ("soon", "10", "10 parsecs", "1 month"):
        with pytest.raises(InvalidOptionError, match="interval"):
            penstock.Trigger.processing_time(interval)


@pytest.mark.parametrize(
    ("interval", "milliseconds"),
    [("0 seconds", 0), ("10 seconds", 10_000), ("500 ms", 500), ("1 minute 30 seconds", 90_000)],
)
def test_an_interval_has_one_or_more_units(interval: str, milliseconds: int) -> None:
    arguments = penstock.Trigger.processing_time(interval).arguments()
    assert arguments == {"processingTime": f"{milliseconds} milliseconds"}


@one_store
def test_problems_with_the_source_raise_penstocks_own_error(
    spark: SparkSession, store: penstock.Store, store_url: str
) -> None:
    prepare(store)
    with pytest.raises(QueueNotFoundError, match="Did you mean 'in'") as error:
        penstock.stream(spark, penstock.QueueSource("inn", url=store_url)).to_df()
    assert "Traceback" not in str(error.value)
    with pytest.raises(InvalidOptionError, match=r"OPTION.UNKNOWN\].*Did you mean 'maxRowsPerTrigger'"):
        penstock.stream(
            spark, penstock.QueueSource("in", url=store_url, options={"maxRowsPerTriger": 1})
        ).to_df()


@one_store
def test_a_sink_that_cannot_take_the_rows_is_refused_at_the_start(
    spark: SparkSession, store: penstock.Store, store_url: str, tmp_path: Path
) -> None:
    """Whatever the trigger, and although there is no row yet."""
    prepare(store, rows=0)
    store.create_queue("narrow", pa.schema([("id", pa.int64())]))
    for trigger in (penstock.Trigger.processing_time(), penstock.Trigger.continuous()):

        def start(queue: str, url: str = store_url, trigger: penstock.Trigger = trigger) -> None:
            source = penstock.QueueSource("in", consumer="c", url=store_url)
            pipeline = penstock.stream(spark, source).write(penstock.QueueSink(queue, url=url))
            pipeline.start(checkpoint=tmp_path / trigger.kind, trigger=trigger)

        with pytest.raises(QueueNotFoundError, match=r"no queue 'oout'"):
            start("oout")
        with pytest.raises(SchemaMismatchError, match="queue 'narrow' has no column 'name'"):
            start("narrow")
        with pytest.raises(StoreNotFoundError):
            start("out", f"sqlite:///{tmp_path}/none.db")
    assert not spark.streams.active


def test_sources_and_sinks_do_not_show_their_url() -> None:
    secret = "postgresql://u:geheim@h/d"
    assert "geheim" not in repr(penstock.QueueSource("q", url=secret)) + repr(
        penstock.QueueSink("q", url=secret)
    )
