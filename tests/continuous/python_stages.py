"""Program that runs continuous queries with Python stages, and prints the output rows of each as JSON.

Argument: a folder.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import SparkSession
from pyspark.sql import functions as F  # noqa: N812 - its usual name

import penstock
from penstock.continuous.driver import execution
from tests.support.sparks import make_spark

SOURCE, SINK = pa.schema([("id", pa.int64())]), pa.schema([("value", pa.int64())])
APPENDS, ROWS = 20, 50
NAMES = ("mapInArrow", "mapInPandas", "counts", "arrow udf", "pandas udf", "pickled udf", "exploded")
CATCHING_UP = ("mapInArrow", "counts", "pandas udf", "exploded")
CAUGHT_UP = "caught up "
"""Prefix of the names of queries for which all rows are a backlog."""


def double_batches(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    for batch in batches:
        yield pa.RecordBatch.from_arrays([pc.multiply(batch["id"], 2)], names=["value"])


def count_rows(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Yield the number of rows in one iterator."""
    count = sum(batch.num_rows for batch in batches)
    yield pa.RecordBatch.from_pydict({"value": pa.array([count], pa.int64())})


def double_frames(frames: Iterable[Any]) -> Iterator[Any]:
    for frame in frames:
        yield frame.rename(columns={"id": "value"}) * 2


def double(value: int) -> int:
    return 2 * value


def transform_of(name: str) -> Any:
    doubled: Any = F.udf(double, "long", useArrow=name == "arrow udf")
    return {
        "mapInArrow": lambda frame: frame.mapInArrow(double_batches, "value long"),
        "counts": lambda frame: frame.mapInArrow(count_rows, "value long"),
        "arrow udf": lambda frame: frame.select(doubled("id").alias("value")),
        "pickled udf": lambda frame: frame.select(doubled("id").alias("value")),
        "pandas udf": lambda frame: frame.select(
            F.pandas_udf(lambda values: values * 2, "long")("id").alias("value")
        ),
        "mapInPandas": lambda frame: frame.mapInPandas(double_frames, "value long"),
        "exploded": lambda frame: frame.select(F.explode(F.array(doubled("id"), F.lit(-1))).alias("value")),
    }[name]


def run(
    spark: SparkSession, store: penstock.Store, url: str, folder: Path, name: str, behind: int
) -> list[int]:
    """Return the output values of a query for which `behind` or more rows are a backlog."""
    execution.BEHIND_ROWS = behind
    out = store.create_queue(name, SINK)
    stream = penstock.stream(
        spark, penstock.QueueSource("in", url=url, options={"startingOffsets": "earliest"})
    ).transform(transform_of(name.removeprefix(CAUGHT_UP)))
    pipeline = stream.write(penstock.QueueSink(name, url), guarantee="exactly_once")
    query = pipeline.start(checkpoint=folder / name, trigger=penstock.Trigger.continuous("50 ms"))
    query.processAllAvailable()
    assert query.stop()
    return [row["value"] for row in out.read(0, 0, out.info().rows).to_pylist()]


def main(folder: str) -> None:
    spark = make_spark(Path(folder), "local[3]", spark__python__udf__pipelined__enabled="true")
    url = f"sqlite:///{folder}/store.db"
    with penstock.connect(url) as store:
        queue = store.create_queue("in", SOURCE)
        for first in range(0, APPENDS * ROWS, ROWS):
            queue.append([{"id": i} for i in range(first, first + ROWS)])
        queries = [(name, 10**9) for name in NAMES] + [(CAUGHT_UP + name, 1) for name in CATCHING_UP]
        for name, behind in queries:
            output = run(spark, store, url, Path(folder), name, behind)
            print("OUTPUT", json.dumps([name, output]), flush=True)
    spark.stop()


if __name__ == "__main__":
    main(*sys.argv[1:])
