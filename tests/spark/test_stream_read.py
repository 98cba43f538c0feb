"""Streaming reads: where they start, how much they take, whose consumer it is, what they refuse."""

from __future__ import annotations

import shutil
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

import penstock
from penstock import Store
from penstock.commit.owner import request_drain
from penstock.json_text import Json
from penstock.spark.checkpoint import Checkpoint
from penstock.spark.ranges import MAX_TASKS
from penstock.testing import replay_last_batch
from tests.support.raw_sql import run_sql
from tests.support.spark_queues import (
    batches,
    failure,
    fill,
    ids_in,
    make_queue,
    one_store,
    refusal,
    run,
    start,
    stream,
    table,
)
from tests.support.waiting import wait_until

# Starting positions.


@one_store
def test_a_query_without_a_consumer_starts_at_its_starting_position(
    spark: SparkSession, store: Store, store_url: str, tmp_path: Path
) -> None:
    queue = make_queue(store, partitions=2)
    fill(queue, range(4), each=2)
    fill(queue, range(10, 14), partition=1)
    later = datetime.now(UTC)
    wait_until(lambda: datetime.now(UTC) > later)
    fill(queue, [20], partition=1)
    expected: dict[str, list[int]] = {}
    for name, options, ids in [
        ("default", {}, [0, 1, 2, 3, 10, 11, 12, 13, 20]),
        ("latest", {"startingOffsets": "latest"}, []),
        ("json", {"startingOffsets": '{"1": 3}'}, [0, 1, 2, 3, 13, 20]),
        ("time", {"startingTimestamp": later.isoformat()}, [20]),
    ]:
        make_queue(store, name)
        run(stream(spark, store_url, **options), store_url, name, tmp_path / name)
        assert sorted(ids_in(store.queue(name))) == ids, name
        expected[name] = ids
    fill(queue, [30])
    for name, ids in expected.items():
        # With a checkpoint the options for the start say nothing any more.
        run(stream(spark, store_url), store_url, name, tmp_path / name)
        assert sorted(ids_in(store.queue(name))) == [*ids, 30], name


def test_a_query_starts_at_its_consumers_offsets(
    spark: SparkSession, store: Store, store_url: str, tmp_path: Path
) -> None:
    queue, out = make_queue(store, partitions=2), make_queue(store, "out")
    fill(queue, range(10))
    consumer = queue.register(store.create_consumer("billing").name, start={0: 6})
    frame = stream(spark, store_url, consumer="billing")
    run(frame, store_url, "out", tmp_path / "ck")
    assert ids_in(out) == [6, 7, 8, 9]
    fill(queue, [50, 51], partition=1)
    run(frame, store_url, "out", tmp_path / "ck")
    assert ids_in(out) == [6, 7, 8, 9, 50, 51]
    assert consumer.offsets("orders") == {0: 10, 1: 2}
    assert consumer.lag("orders").rows == 0


@one_store
def test_a_projection_and_metadata_columns_can_be_read(
    spark: SparkSession, store: Store, store_url: str, tmp_path: Path
) -> None:
    import pyarrow as pa

    fill(make_queue(store, partitions=2), [7, 8], partition=1)
    out = store.create_queue("out", pa.schema([("_row_index", pa.int64()), ("_partition", pa.int32())]))
    reader = spark.readStream.format("penstock").options(url=store_url, includeMetadataColumns=True)
    frame = reader.schema("_partition int, _row_index bigint").load("orders")
    run(frame, store_url, "out", tmp_path / "ck")
    assert out.read(0, 0).to_pylist() == [
        {"_row_index": 0, "_partition": 1},
        {"_row_index": 1, "_partition": 1},
    ]


# Admission.


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"maxRowsPerTrigger": 4}, [4, 4, 4]),
        ({"maxRowsPerPartition": 4}, [8, 4]),
        ({"maxBytesPerTrigger": 1}, [1] * 12),
        ({"maxRowsPerTrigger": 5, "alignToAppends": True}, [4, 4, 4]),
        ({}, [12]),
    ],
)
@one_store
def test_micro_batches_respect_the_limits(
    spark: SparkSession,
    store: Store,
    store_url: str,
    tmp_path: Path,
    options: Json,
    expected: list[int],
) -> None:
    queue, out = make_queue(store, partitions=2), make_queue(store, "out")
    fill(queue, range(8), each=4)
    fill(queue, range(8, 12), partition=1, each=4)
    query = run(stream(spark, store_url, **options), store_url, "out", tmp_path / "ck")
    assert batches(query) == expected
    assert sorted(ids_in(out)) == list(range(12))


@one_store
def test_a_micro_batch_of_very_many_tasks_is_refused_before_it_is_logged(
    spark: SparkSession, store: Store, store_url: str, tmp_path: Path
) -> None:
    fill(make_queue(store), range(MAX_TASKS + 1))
    out = make_queue(store, "out")
    with pytest.raises(Exception, match=r"INVALID_OPTION.TOO_MANY_TASKS\].*raise rowsPerTask"):
        run(stream(spark, store_url, rowsPerTask=1), store_url, "out", tmp_path / "ck")
    run(stream(spark, store_url), store_url, "out", tmp_path / "ck")
    assert len(ids_in(out)) == MAX_TASKS + 1


@one_store
def test_a_segment_without_rows_is_an_error_by_name(
    spark: SparkSession, store: Store, store_url: str, tmp_path: Path
) -> None:
    """Whoever may append could plant one."""
    fill(make_queue(store), range(4), each=2)
    make_queue(store, "out")
    columns = "first_append, last_append, first_timestamp, last_timestamp, bytes, columns_id, payload_id"
    run_sql(
        store.database,
        f"insert into penstock.segment (queue_id, partition, start_index, end_index, {columns}) "
        f"select queue_id, 0, 1, 1, {columns} from penstock.segment where end_index = 2",
    )
    with pytest.raises(Exception, match="SEGMENT_MISSING"):
        run(stream(spark, store_url, maxBytesPerTrigger=1 << 20), store_url, "out", tmp_path / "ck")


def test_available_now_leaves_rows_that_arrive_later(
    spark: SparkSession, store: Store, store_url: str, tmp_path: Path
) -> None:
    queue, out = make_queue(store), make_queue(store, "out")
    queue.register(store.create_consumer("billing").name)
    fill(queue, range(6), each=2)
    frame = stream(spark, store_url, consumer="billing", maxRowsPerTrigger=1)
    query = start(frame, store_url, "out", tmp_path / "ck")
    wait_until(lambda: out.info().rows, message="the first micro-batch")
    fill(queue, [90, 91])
    query.awaitTermination()
    assert ids_in(out) == list(range(6))
    run(frame, store_url, "out", tmp_path / "ck")
    assert ids_in(out) == [*range(6), 90, 91]


@one_store
def test_large_partitions_are_split_into_tasks(
    spark: SparkSession, store: Store, store_url: str, tmp_path: Path
) -> None:
    queue, out = make_queue(store), make_queue(store, "out", partitions=8)
    fill(queue, range(10))
    run(stream(spark, store_url, rowsPerTask=3), store_url, "out", tmp_path / "ck")
    assert [part.rows for part in out.info().partitions] == [2, 3, 2, 3, 0, 0, 0, 0]


def test_a_running_query_reads_new_partitions(
    spark: SparkSession, store: Store, store_url: str, tmp_path: Path
) -> None:
    queue, out = make_queue(store), make_queue(store, "out")
    consumer = queue.register(store.create_consumer("billing").name)
    fill(queue, [0, 1])
    frame = stream(spark, store_url, consumer="billing")
    query = start(frame, store_url, "out", tmp_path / "ck", trigger={"processingTime": "0 seconds"})
    query.processAllAvailable()
    queue.add_partitions(2)
    fill(queue, [2], partition=2)
    fill(queue, [3])
    query.processAllAvailable()
    assert sorted(ids_in(out)) == [0, 1, 2, 3]
    query.stop()
    queue.add_partitions(1)
    fill(queue, [4], partition=3)
    run(frame, store_url, "out", tmp_path / "ck")
    replay_last_batch(tmp_path / "ck")
    run(frame, store_url, "out", tmp_path / "ck")
    assert sorted(ids_in(out)) == [0, 1, 2, 3, 4]
    assert consumer.offsets("orders") == {0: 3, 1: 0, 2: 1, 3: 1}


# Owners and checkpoints.


@one_store
def test_two_queries_with_their_own_consumers_are_independent(
    spark: SparkSession, store: Store, store_url: str, tmp_path: Path
) -> None:
    queue = make_queue(store)
    queries = []
    for name in ("one", "two"):
        queue.register(store.create_consumer(name).name)
        make_queue(store, f"out-{name}")
        frame = stream(spark, store_url, consumer=name, maxRowsPerTrigger=2)
        queries.append(
            start(frame, store_url, f"out-{name}", tmp_path / name, trigger={"processingTime": "0 seconds"})
        )
    fill(queue, range(7))
    for query in queries:
        query.processAllAvailable()
        query.stop()
    for name in ("one", "two"):
        assert ids_in(store.queue(f"out-{name}")) == list(range(7))


def test_a_second_query_on_a_consumer_fences_the_first(
    spark: SparkSession, store: Store, store_url: str, tmp_path: Path
) -> None:
    queue, out = make_queue(store), make_queue(store, "out")
    queue.register(store.create_consumer("billing").name)
    frame = stream(spark, store_url, consumer="billing")
    every = {"processingTime": "0 seconds"}
    fill(queue, [0])
    first = start(frame, store_url, "out", tmp_path / "ck1", trigger=every)
    first.processAllAvailable()
    second = start(frame, store_url, "out", tmp_path / "ck2", trigger=every)
    fill(queue, [1, 2])
    said = failure(first)
    # While it plans, or while it commits what it planned before.
    planning = "OWNER_FENCED" in said and "use each consumer in only one query" in said
    assert planning or ("PLAN_MISMATCH" in said and "another query took over the consumer" in said)
    second.processAllAvailable()
    assert ids_in(out) == [0, 1, 2]
    second.stop()


def _refused(frame: Any, url: str, checkpoint: Path, **options: object) -> str:
    return refusal(lambda: run(frame, url, "out", checkpoint, **options))


def test_an_old_checkpoint_is_refused_after_a_seek(
    spark: SparkSession, store: Store, store_url: str, tmp_path: Path
) -> None:
    queue, out = make_queue(store), make_queue(store, "out")
    consumer = queue.register(store.create_consumer("billing").name)
    fill(queue, range(4))
    frame = stream(spark, store_url, consumer="billing")
    run(frame, store_url, "out", tmp_path / "ck")
    wait_until(lambda: consumer.seek("orders", to={0: 2}, dry_run=True))
    _seek(consumer, {0: 2})
    for _ in range(2):
        assert "CHECKPOINT_MISMATCH" in _refused(frame, store_url, tmp_path / "ck")
    replay_last_batch(tmp_path / "ck")
    assert "CHECKPOINT_MISMATCH" in _refused(frame, store_url, tmp_path / "ck")
    assert ids_in(out) == [0, 1, 2, 3]
    run(frame, store_url, "out", tmp_path / "ck2")
    assert ids_in(out) == [0, 1, 2, 3, 2, 3], "a new checkpoint resumes at the consumer's offset"


def _seek(consumer: Any, to: Any) -> None:
    """Spark ends the process that owns the consumer a moment after the query."""

    def sought() -> bool:
        try:
            consumer.seek("orders", to=to)
        except penstock.errors.ConsumerInUseError:
            return False
        return True

    wait_until(sought, message="the owner is gone")


@one_store
def test_a_checkpoint_of_another_source_is_refused(
    spark: SparkSession, store: Store, store_url: str, tmp_path: Path
) -> None:
    queue, other = make_queue(store), make_queue(store, "other")
    make_queue(store, "out")
    for name in ("billing", "shipping"):
        queue.register(store.create_consumer(name).name)
    other.register("billing")
    fill(queue, [1])
    run(stream(spark, store_url, consumer="billing"), store_url, "out", tmp_path / "ck")
    for frame, field in (
        (stream(spark, store_url, "other", consumer="billing"), "queue"),
        (stream(spark, store_url, consumer="shipping"), "consumer"),
        (stream(spark, store_url), "consumer"),
    ):
        said = _refused(frame, store_url, tmp_path / "ck")
        assert "CHECKPOINT_MISMATCH" in said
        assert f"offset has {field}" in said
    rates = spark.readStream.format("rate").load().selectExpr("value as id")
    run(rates.limit(0), store_url, "out", tmp_path / "ck-rate", trigger={"once": True})
    assert "not an offset of a queue" in _refused(stream(spark, store_url), store_url, tmp_path / "ck-rate")


@one_store
def test_a_recreated_queue_is_refused_with_an_old_checkpoint(
    spark: SparkSession, store: Store, store_url: str, tmp_path: Path
) -> None:
    queue = make_queue(store)
    out = make_queue(store, "out")
    fill(queue, [1, 2])
    run(stream(spark, store_url), store_url, "out", tmp_path / "ck")
    store.drop_queue("orders")
    fill(make_queue(store), [3, 4, 5])
    said = _refused(stream(spark, store_url), store_url, tmp_path / "ck")
    assert "CHECKPOINT_MISMATCH" in said
    assert "recreated" in said
    assert ids_in(out) == [1, 2]


@one_store
def test_a_query_fails_when_its_queue_is_dropped(
    spark: SparkSession, store: Store, store_url: str, tmp_path: Path
) -> None:
    queue = make_queue(store)
    make_queue(store, "out")
    fill(queue, [1, 2])
    query = start(
        stream(spark, store_url), store_url, "out", tmp_path / "ck", trigger={"processingTime": "0 seconds"}
    )
    query.processAllAvailable()
    store.drop_queue("orders")
    assert "QUEUE_NOT_FOUND" in failure(query)


def test_another_store_at_the_same_url_is_detected(
    spark: SparkSession, store: Store, store_url: str, tmp_path: Path
) -> None:
    """Spark keeps its Python workers; they notice that their open store is not the one that exists now."""
    queue = make_queue(store)
    make_queue(store, "out")
    fill(queue, [1, 2])
    run(stream(spark, store_url), store_url, "out", tmp_path / "ck")
    _replace(store, store_url)
    with penstock.connect(store_url) as again:
        fill(make_queue(again), [7])
        out = make_queue(again, "out")
        assert "CHECKPOINT_MISMATCH" in _refused(stream(spark, store_url), store_url, tmp_path / "ck")
        run(stream(spark, store_url), store_url, "out", tmp_path / "ck2")
        assert ids_in(out) == [7]


def _replace(store: Store, url: str) -> None:
    store.close()
    if url.startswith("sqlite"):
        path = Path(url.removeprefix("sqlite:///"))
        for suffix in ("", "-wal", "-shm"):
            Path(f"{path}{suffix}").unlink(missing_ok=True)
        shutil.rmtree(f"{path}-owners", ignore_errors=True)
    else:
        from penstock.testing.stores import drop_schema

        drop_schema(url.split("?")[0], url.rsplit("=", 1)[1])


# Trimmed ranges.


@one_store
@pytest.mark.parametrize("named", [True, False], ids=["consumer", "none"])
def test_rows_trimmed_while_the_query_was_stopped_are_reported(
    spark: SparkSession, store: Store, store_url: str, tmp_path: Path, named: bool
) -> None:
    queue, out = make_queue(store), make_queue(store, "out")
    source = {"consumer": queue.register(store.create_consumer("billing").name).name} if named else {}
    fill(queue, range(4))
    run(stream(spark, store_url, **source), store_url, "out", tmp_path / "ck")
    fill(queue, range(4, 10), each=2)
    queue.trim(0, before=7)
    said = _refused(stream(spark, store_url, **source), store_url, tmp_path / "ck")
    assert "DATA_LOST" in said
    assert "rows [4, 7) of queue 'orders', partition 0" in said
    run(stream(spark, store_url, failOnDataLoss=False, **source), store_url, "out", tmp_path / "ck")
    assert ids_in(out) == [0, 1, 2, 3, 7, 8, 9]
    if named:
        assert store.consumer("billing").offsets("orders") == {0: 10}


@one_store
def test_a_new_query_whose_consumer_has_lost_rows_is_refused(
    spark: SparkSession, store: Store, store_url: str, tmp_path: Path
) -> None:
    queue, out = make_queue(store), make_queue(store, "out")
    queue.register(store.create_consumer("billing").name)
    fill(queue, range(6))
    queue.trim(0, before=2)
    said = _refused(stream(spark, store_url, consumer="billing"), store_url, tmp_path / "ck")
    assert "rows [0, 2)" in said
    frame = stream(spark, store_url, consumer="billing", failOnDataLoss=False)
    run(frame, store_url, "out", tmp_path / "ck")
    assert ids_in(out) == [2, 3, 4, 5]
    assert store.consumer("billing").lag("orders").rows == 0


@one_store
def test_a_query_continues_after_every_row_was_trimmed(
    spark: SparkSession, store: Store, store_url: str, tmp_path: Path
) -> None:
    queue, out = make_queue(store), make_queue(store, "out")
    fill(queue, range(3))
    run(stream(spark, store_url), store_url, "out", tmp_path / "ck")
    fill(queue, range(3, 9))
    queue.trim(0, before=9)
    frame = stream(spark, store_url, failOnDataLoss=False, maxRowsPerTrigger=2, alignToAppends=True)
    run(frame, store_url, "out", tmp_path / "ck")
    fill(queue, [9])
    run(frame, store_url, "out", tmp_path / "ck")
    assert ids_in(out) == [0, 1, 2, 9]


# Draining.


@one_store
def test_a_drained_consumer_receives_no_new_rows(
    spark: SparkSession, store: Store, store_url: str, tmp_path: Path
) -> None:
    queue, out = make_queue(store), make_queue(store, "out")
    queue.register(store.create_consumer("billing").name)
    frame = stream(spark, store_url, consumer="billing")
    query = start(frame, store_url, "out", tmp_path / "ck", trigger={"processingTime": "0 seconds"})
    fill(queue, [1])
    query.processAllAvailable()
    checkpoint = Checkpoint(str(tmp_path / "ck"))
    [planned] = checkpoint.ranges(checkpoint.last_planned())
    request_drain(store.database, planned)
    queue.append(table([2]))
    query.processAllAvailable()
    assert ids_in(out) == [1]
    query.stop()
    run(frame, store_url, "out", tmp_path / "ck")
    assert ids_in(out) == [1, 2], "the next owner is not drained"
