"""Streams a PostgreSQL feed into a queue until its parent kills it.

Arguments: a folder for Spark and the checkpoint, the feed's URL, the store's URL.
"""

from __future__ import annotations

import sys
from pathlib import Path

from pyspark.sql import SparkSession

import penstock
from tests.support.sparks import make_spark

COLUMNS = ("id", "v", "_commit_sequence", "_change_type", "_commit_version")


def start(
    spark: SparkSession, folder: Path, feed: str, store: str, trigger: penstock.Trigger
) -> penstock.Query:
    stream = penstock.stream(spark, penstock.changes.parse(feed)).transform(
        lambda frame: frame.select(*COLUMNS)
    )
    sink = penstock.QueueSink("changes", url=store)
    return stream.write(sink).start(checkpoint=folder / "checkpoint", name="feed", trigger=trigger)


def main(folder: str, feed: str, store: str) -> None:
    spark = make_spark(Path(folder) / "spark")
    trigger = penstock.Trigger.processing_time("50 milliseconds")
    start(spark, Path(folder), feed, store, trigger).awaitTermination()


if __name__ == "__main__":
    main(*sys.argv[1:])
