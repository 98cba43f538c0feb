"""Exactly-once queries that keep state: no row is lost or repeated, in the output or in the state, when Spark
repeats work.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pyarrow as pa
import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as fn

from penstock import Queue, Store
from penstock.testing import replay_last_batch
from tests.support.spark_queues import one_store, refusal, run, stream

EVENTS = pa.schema([("id", pa.int64()), ("key", pa.string()), ("ts", pa.timestamp("us", "UTC"))])
START = datetime(2024, 1, 1, tzinfo=UTC)
Row = tuple[int, str, datetime]


def event(second: int, key: str = "a") -> Row:
    return second, key, START + timedelta(seconds=second)


ROUNDS = [
    [event(0), event(1, "b"), event(12)],
    [event(13, "b"), event(25), event(25)],
    [event(40, "b"), event(41)],
]


def aggregate(left: DataFrame, _right: DataFrame) -> DataFrame:
    late = left.withWatermark("ts", "0 seconds")
    counted = late.groupBy(fn.window("ts", "10 seconds"), "key").agg(fn.count("*").alias("id"))
    return counted.select("id", "key", fn.col("window.start").alias("ts"))


def windows(rows: list[Row], _: list[Row]) -> list[Row]:
    """The windows that end at or before the newest event."""
    newest = max(row[2] for row in rows)
    found: dict[tuple[datetime, str], int] = {}
    for _id, key, ts in rows:
        window = ts - timedelta(seconds=ts.second % 10)
        if window + timedelta(seconds=10) <= newest:
            found[window, key] = found.get((window, key), 0) + 1
    return [(count, key, window) for (window, key), count in found.items()]


def distinct(left: DataFrame, _right: DataFrame) -> DataFrame:
    return left.dropDuplicates(["key"])


def first_of_each(rows: list[Row], _: list[Row]) -> list[Row]:
    found: dict[str, Row] = {}
    for row in rows:
        found.setdefault(row[1], row)
    return list(found.values())


def union(left: DataFrame, right: DataFrame) -> DataFrame:
    return left.union(right)


def join(left: DataFrame, right: DataFrame) -> DataFrame:
    mine = left.withWatermark("ts", "1 hour")
    theirs = right.withWatermark("ts", "1 hour").select("id", fn.col("ts").alias("then"))
    return mine.join(theirs, "id").select("id", "key", fn.col("then").alias("ts"))


def joined(left: list[Row], right: list[Row]) -> list[Row]:
    return [(one[0], one[1], other[2]) for one in left for other in right if one[0] == other[0]]


@dataclass(frozen=True)
class Case:
    """A query over two queues, and the output that it must have after some rows."""

    query: Callable[[DataFrame, DataFrame], DataFrame]
    expected: Callable[[list[Row], list[Row]], list[Row]]
    both: bool = False


CASES = {
    "aggregate": Case(aggregate, windows),
    "distinct": Case(distinct, first_of_each),
    "union": Case(union, lambda left, right: left + right, both=True),
    "join": Case(join, joined, both=True),
}


def rows_in(queue: Queue) -> list[Row]:
    queue.refresh()
    return sorted(
        tuple(row.values()) for part in range(queue.partitions) for row in queue.read(part, 0).to_pylist()
    )


def append(queue: Queue, rows: list[Row]) -> None:
    queue.append([dict(zip(EVENTS.names, row, strict=True)) for row in rows])


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("store_url", "name"),
    [
        ("sqlite", "aggregate"),
        pytest.param("postgresql", "aggregate", marks=pytest.mark.soak),
        pytest.param("sqlite", "distinct", marks=pytest.mark.soak),
        ("postgresql", "union"),
        ("sqlite", "join"),
        pytest.param("postgresql", "join", marks=pytest.mark.soak),
    ],
    indirect=["store_url"],
)
def test_a_replay_repeats_no_output_or_state(
    spark: SparkSession, store: Store, store_url: str, tmp_path: Path, name: str
) -> None:
    case = CASES[name]
    queues, frames = [], []
    for side in ("left", "right"):
        queues.append(store.create_queue(side, EVENTS, partitions=2))
        queues[-1].register(store.create_consumer(side).name, vital=True)
        frames.append(stream(spark, store_url, side, consumer=side))
    out = store.create_queue("out", EVENTS, partitions=2)
    seen: tuple[list[Row], list[Row]] = ([], [])
    for number, rows in enumerate(ROUNDS):
        append(queues[0], rows)
        seen[0].extend(rows)
        if case.both and number != 1:
            append(queues[1], rows[:2])
            seen[1].extend(rows[:2])
        run(case.query(*frames), store_url, "out", tmp_path / "ck")
        if number < 2:
            # The last entry is a no-data batch's where there is a watermark; the one before is of the rows.
            replay_last_batch(tmp_path / "ck")
            run(case.query(*frames), store_url, "out", tmp_path / "ck")
        assert rows_in(out) == sorted(case.expected(*seen)), f"after round {number}"
    assert store.consumer("left").lag("left").rows == 0
    assert store.info().staged_segments == 0


@one_store
def test_the_state_is_rebuilt_for_a_committed_batch(
    spark: SparkSession, store: Store, store_url: str, tmp_path: Path, without_no_data_batches: None
) -> None:
    """Spark does not log the start of batch 0, and the consumer has moved past it."""
    queue = store.create_queue("left", EVENTS)
    queue.register(store.create_consumer("left").name)
    out = store.create_queue("out", EVENTS)
    frame = stream(spark, store_url, "left", consumer="left")
    append(queue, ROUNDS[0])
    run(aggregate(frame, frame), store_url, "out", tmp_path / "ck")
    assert replay_last_batch(tmp_path / "ck") == 0
    for rows in ROUNDS[1:]:
        append(queue, rows)
        run(aggregate(frame, frame), store_url, "out", tmp_path / "ck")
    # The last watermark counts from the next micro-batch on.
    assert rows_in(out) == sorted(windows(ROUNDS[0] + ROUNDS[1], []))


@pytest.fixture
def without_no_data_batches(spark: SparkSession) -> Iterator[None]:
    spark.conf.set("spark.sql.streaming.noDataMicroBatches.enabled", "false")
    yield
    spark.conf.unset("spark.sql.streaming.noDataMicroBatches.enabled")


@one_store
def test_an_old_copy_of_a_checkpoint_is_refused(
    spark: SparkSession, store: Store, store_url: str, tmp_path: Path
) -> None:
    queue = store.create_queue("left", EVENTS)
    queue.register(store.create_consumer("left").name)
    out = store.create_queue("out", EVENTS)
    source = stream(spark, store_url, "left", consumer="left")
    frame = distinct(source, source)
    append(queue, ROUNDS[0][:1])
    run(frame, store_url, "out", tmp_path / "ck")
    shutil.copytree(tmp_path / "ck", tmp_path / "old")
    append(queue, ROUNDS[0][1:])
    run(frame, store_url, "out", tmp_path / "ck")
    before = rows_in(out)
    append(queue, ROUNDS[2])
    said = refusal(lambda: run(frame, store_url, "out", tmp_path / "old"))
    assert "CHECKPOINT_MISMATCH" in said
    assert rows_in(out) == before
    run(frame, store_url, "out", tmp_path / "ck")
    assert len(rows_in(out)) == 2
