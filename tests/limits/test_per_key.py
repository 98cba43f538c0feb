"""The first rows of each key, of a stream and of a batch."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql import SparkSession

import penstock
from penstock.errors import (
    CheckpointMismatchError,
    CommitRefusedError,
    InvalidInputError,
    InvalidOptionError,
    NotFoundError,
    UnsupportedTypeError,
)
from penstock.testing import replay_last_batch
from tests.support.limited_feeds import NOW
from tests.support.spark_queues import one_store

SCHEMA = pa.schema(
    [
        ("k", pa.string()),
        ("x", pa.float64()),
        ("id", pa.int64()),
        ("at", pa.timestamp("us", tz="UTC")),
        ("tags", pa.list_(pa.int32())),
    ]
)


def row(number: int) -> dict[str, Any]:
    """Keys with nulls, both zeros and NaN among them; values that pandas would change."""
    return {
        "k": ["a", "b", None][number % 3],
        "x": [0.0, -0.0, float("nan"), None][number % 4],
        "id": None if number % 5 == 0 else 2**60 + number,
        "at": None if number % 7 == 0 else number,
        "tags": [number, None],
    }


class Keyed:
    """A queue of such rows, and pipelines over it."""

    def __init__(self, spark: SparkSession, url: str, folder: Path) -> None:
        self.spark, self.url, self.folder = spark, url, folder
        self.store = penstock.connect(url, create=True)
        self.queue = self.store.create_queue("in", SCHEMA, partitions=2)
        self.out = self.store.create_queue("out", SCHEMA)
        self.store.create_consumer("c").register("in")

    def add(self, numbers: range) -> None:
        for partition in range(2):
            rows = [row(number) for number in numbers if number % 2 == partition]
            self.queue.append(pa.Table.from_pylist(rows, SCHEMA), partition=partition)

    def run(self, n: int, per: list[str], **options: Any) -> None:
        source = penstock.QueueSource("in", consumer="c", url=self.url, options=options)
        stream = penstock.stream(self.spark, source).limit(n, per=per)
        query = stream.write(penstock.QueueSink("out", url=self.url)).start(
            checkpoint=self.folder / "ck", trigger=NOW
        )
        query.awaitTermination()

    def rows(self) -> Counter[str]:
        self.out.refresh()
        return Counter(map(repr, self.out.read(0, 0).to_pylist()))

    def batch(self, n: int, per: list[str]) -> Counter[str]:
        frame = self.spark.read.format("penstock").options(url=self.url).load("in")
        found = penstock.limits.first_rows(frame, n, per=per)
        assert found.schema == frame.schema
        return Counter(map(repr, found.toArrow().to_pylist()))


def expected(numbers: range, n: int) -> int:
    keys = Counter((row(number)["k"], number % 4 // 2 + number % 4 // 3) for number in numbers)
    return sum(min(n, count) for count in keys.values())


@one_store
def test_the_first_rows_of_each_key_pass_as_in_a_batch(
    spark: SparkSession, store_url: str, tmp_path: Path
) -> None:
    """In one or several micro-batches, with a restart, and with a repeated micro-batch."""
    keyed = Keyed(spark, store_url, tmp_path)
    keyed.add(range(60))
    keyed.run(2, ["k", "x"])
    keyed.add(range(60, 90))
    keyed.run(2, ["k", "x"], maxRowsPerTrigger=16)
    replay_last_batch(tmp_path / "ck")
    keyed.run(2, ["k", "x"])
    assert sum(keyed.rows().values()) == expected(range(90), 2)
    assert keyed.rows() == keyed.batch(2, ["k", "x"])


@one_store
def test_each_partition_gives_its_first_rows_and_a_higher_limit_continues(
    spark: SparkSession, store_url: str, tmp_path: Path
) -> None:
    keyed = Keyed(spark, store_url, tmp_path)
    keyed.add(range(12))
    keyed.run(1, ["K"])
    assert keyed.rows() == keyed.batch(1, ["k"])
    keyed.add(range(12, 36))
    keyed.run(5, ["k"], maxRowsPerTrigger=6)
    # Of key "a" the first row came with the first limit, and four with the second one.
    assert sum(keyed.rows().values()) == 15
    with pytest.raises(CheckpointMismatchError, match=r"has counted rows per="):
        keyed.run(5, ["id"])


@one_store
def test_a_micro_batch_planned_with_one_limit_is_not_repeated_with_another(
    spark: SparkSession, store_url: str, tmp_path: Path
) -> None:
    keyed = Keyed(spark, store_url, tmp_path)
    keyed.add(range(12))
    keyed.run(1, ["k"])
    assert sum(keyed.rows().values()) == 3
    replay_last_batch(tmp_path / "ck")
    with pytest.raises(CommitRefusedError, match=r"start the query once with limit\(1, per=\['k'\]\)"):
        keyed.run(3, ["k"])
    keyed.run(1, ["k"])
    keyed.run(3, ["k"])
    keyed.add(range(12, 24))
    keyed.run(3, ["k"])
    # What the first limit dropped stays dropped: it let one row of each key in, the second one two more.
    assert sum(keyed.rows().values()) == 9


@one_store
def test_a_checkpoint_of_another_limit_is_refused_before_anything_is_planned(
    spark: SparkSession, store_url: str, tmp_path: Path
) -> None:
    keyed = Keyed(spark, store_url, tmp_path)
    keyed.add(range(12))
    pipeline = penstock.stream(spark, penstock.QueueSource("in", consumer="c", url=store_url)).limit(2)
    plain = pipeline.write(penstock.QueueSink("out", url=store_url))
    plain.start(checkpoint=tmp_path / "ck", trigger=NOW).awaitTermination()
    begun = sorted((tmp_path / "ck/offsets").iterdir())
    with pytest.raises(CheckpointMismatchError, match=r"with limit\(2\) before"):
        keyed.run(1, ["k"])
    assert sorted((tmp_path / "ck/offsets").iterdir()) == begun


@one_store
def test_an_overall_limit_is_refused_if_keys_were_counted(
    spark: SparkSession, store_url: str, tmp_path: Path
) -> None:
    keyed = Keyed(spark, store_url, tmp_path)
    keyed.add(range(12))
    keyed.run(1, ["k"])
    with pytest.raises(NotFoundError, match=r"has limit\(1, per=\['k'\]\), which counts each key separately"):
        penstock.limits.limit_progress(tmp_path / "ck")
    stream = penstock.stream(spark, penstock.QueueSource("in", consumer="c", url=store_url)).limit(2)
    with pytest.raises(
        CheckpointMismatchError, match=r"MISMATCH.LIMIT\].*has run with limit\(1, per=\['k'\]\) before"
    ):
        stream.write(penstock.QueueSink("out", url=store_url)).start(checkpoint=tmp_path / "ck", trigger=NOW)
    unlimited = penstock.stream(spark, penstock.QueueSource("in", consumer="c", url=store_url))
    with pytest.raises(CheckpointMismatchError, match=r"with limit\(1, per=\['k'\]\) before, but now has no"):
        unlimited.write(penstock.QueueSink("out", url=store_url)).start(
            checkpoint=tmp_path / "ck", trigger=NOW
        )


@one_store
def test_keys_of_a_widened_column_keep_their_counts_and_those_of_another_type_are_refused(
    spark: SparkSession, store: penstock.Store, store_url: str, tmp_path: Path
) -> None:
    queue = store.create_queue("narrow", pa.schema([("u", pa.int32())]))
    store.create_consumer("c").register("narrow")
    out = store.create_queue("wide", pa.schema([("u", pa.int64())]))

    def run(key: str) -> None:
        stream = penstock.stream(spark, penstock.QueueSource("narrow", consumer="c", url=store_url))
        keyed = stream.transform(lambda df: df.selectExpr(f"{key} AS u")).limit(1, per=["u"])
        written = keyed.transform(lambda df: df.selectExpr("cast(u AS bigint) AS u"))
        query = written.write(penstock.QueueSink("wide", url=store_url))
        query.start(checkpoint=tmp_path / "ck", trigger=NOW).awaitTermination()

    queue.append([{"u": 7}])
    run("u")
    queue.widen_columns([pa.field("u", pa.int64())])
    queue.append([{"u": 7}, {"u": 3_000_000_000}])
    run("u")
    assert out.read(0, 0)["u"].to_pylist() == [7, 3_000_000_000]
    with pytest.raises(CheckpointMismatchError, match=r"as integer\. As string, their count would"):
        run("cast(u AS string)")


@one_store
def test_an_idle_key_is_forgotten_and_counted_from_the_start(
    spark: SparkSession, store_url: str, tmp_path: Path
) -> None:
    keyed = Keyed(spark, store_url, tmp_path)

    def run() -> int:
        stream = penstock.stream(spark, penstock.QueueSource("in", consumer="c", url=store_url))
        limited = stream.limit(1, per=["k"], ttl="1 ms").write(penstock.QueueSink("out", url=store_url))
        limited.start(checkpoint=tmp_path / "ck", trigger=NOW).awaitTermination()
        return sum(keyed.rows().values())

    keyed.add(range(6))
    assert run() == 3
    keyed.add(range(6))
    assert run() == 6, "more than a millisecond lies between two runs"


@one_store
def test_invalid_keys_are_refused(spark: SparkSession, store_url: str, tmp_path: Path) -> None:
    keyed = Keyed(spark, store_url, tmp_path)
    frame = spark.read.format("penstock").options(url=keyed.url).load("in")
    with pytest.raises(InvalidInputError, match=r"INPUT.UNKNOWN_COLUMN\].*Did you mean 'tags'"):
        penstock.limits.first_rows(frame, 1, per=["tag"])
    with pytest.raises(UnsupportedTypeError, match="tags"):
        penstock.limits.first_rows(frame, 1, per=["tags"])
    for wrong in ([], ["k", "k"], [1]):
        with pytest.raises(InvalidInputError, match="per"):
            penstock.limits.first_rows(frame, 1, per=wrong)  # type: ignore[list-item]
    for wrong_time in ("soon", "1 us", 5):
        with pytest.raises(InvalidOptionError, match=r"OPTION.VALUE\].*ttl is text such as"):
            penstock.limits.first_rows(frame, 1, per=["k"], ttl=wrong_time)  # type: ignore[arg-type]
