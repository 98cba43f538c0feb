"""Program: run continuous queries with Python stages, and print the rows of each as JSON.

Arguments: a folder.
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
"""Begin of the names of queries for which all rows are a backlog."""


def doubled(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    for batch in batches:
        yield pa.RecordBatch.from_arrays([pc.multiply(batch["id"], 2)], names=["value"])


def counted(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Yield how many rows there were, once there are no more of them for now."""
    count = sum(batch.num_rows for batch in batches)
    yield pa.RecordBatch.from_pydict({"value": pa.array([count], pa.int64())})


def in_pandas(frames: Iterable[Any]) -> Iterator[Any]:
    for frame in frames:
        yield frame.rename(columns={"id": "value"}) * 2


def two_times(value: int) -> int:
    return 2 * value


def work(name: str) -> Any:
    twice: Any = F.udf(two_times, "long", useArrow=name == "arrow udf")
    return {
        "mapInArrow": lambda frame: frame.mapInArrow(doubled, "value long"),
        "counts": lambda frame: frame.mapInArrow(counted, "value long"),
        "arrow udf": lambda frame: frame.select(twice("id").alias("value")),
        "pickled udf": lambda frame: frame.select(twice("id").alias("value")),
        "pandas udf": lambda frame: frame.select(
            F.pandas_udf(lambda values: values * 2, "long")("id").alias("value")
        ),
        "mapInPandas": lambda frame: frame.mapInPandas(in_pandas, "value long"),
        "exploded": lambda frame: frame.select(F.explode(F.array(twice("id"), F.lit(-1))).alias("value")),
    }[name]


def run(
    spark: SparkSession, store: penstock.Store, url: str, folder: Path, name: str, behind: int
) -> list[int]:
    """Return what comes, where so many rows are a backlog."""
    execution.BEHIND_ROWS = behind
    out = store.create_queue(name, SINK)
    stream = penstock.stream(
        spark, penstock.QueueSource("in", url=url, options={"startingOffsets": "earliest"})
    ).transform(work(name.removeprefix(CAUGHT_UP)))
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
            came = run(spark, store, url, Path(folder), name, behind)
            print("CAME", json.dumps([name, came]), flush=True)
    spark.stop()


if __name__ == "__main__":
    main(*sys.argv[1:])
