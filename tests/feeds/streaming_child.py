"""Streams every feed into a queue of its own, one commit at a time, until none is left. Its parent
usually kills it.

Arguments: a folder for Spark and the checkpoints, the store's URL, and a queue's name and a feed's URL in
turn; the URL of a topic of Debezium's is `topic:FOLDER`.
"""

from __future__ import annotations

import sys
from pathlib import Path

from pyspark.sql import DataFrame, SparkSession

import penstock
from tests.support.sparks import make_spark
from tests.support.warm import warm_workers

COLUMNS = ["id", "_change_type as change", "_commit_version as version"]


TOPIC = "topic:"
LETTERS = "letters"
"""The queue of the topic's dead letters."""


def changes(spark: SparkSession, store: str, feed: str) -> DataFrame:
    if feed.startswith(TOPIC):
        topic = spark.readStream.schema("value string, offset bigint").option("maxFilesPerTrigger", 1)
        letters = penstock.QueueSink(LETTERS, url=store)
        return penstock.DebeziumFeed("id bigint not null, data string", "id", dead_letters=letters).unwrap(
            topic.parquet(feed.removeprefix(TOPIC))
        )
    return penstock.changes.read_stream(
        spark, feed, deduplication_mode="none", options={"maxCommitsPerTrigger": 1, "rowsPerTask": 2}
    )


def start(spark: SparkSession, folder: Path, store: str, queue: str, feed: str) -> penstock.Query:
    rows = changes(spark, store, feed)
    sink = penstock.QueueSink(queue, url=store)
    return (
        penstock.stream(spark, rows.selectExpr(*COLUMNS))
        .write(sink, guarantee="exactly_once")
        .start(checkpoint=folder / queue, trigger=penstock.Trigger.available_now())
    )


def main(folder: str, store: str, *feeds: str) -> None:
    with warm_workers():
        spark = make_spark(Path(folder) / "spark")
    for queue, feed in zip(feeds[::2], feeds[1::2], strict=True):
        start(spark, Path(folder), store, queue, feed)
    print("STARTED", flush=True)
    spark.streams.awaitAnyTermination()
    print("ENDED", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
