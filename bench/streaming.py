"""Streaming: what exactly_once costs over at_least_once, in small micro-batches and in large ones."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from pathlib import Path

from pyspark.sql import DataFrame
from pyspark.sql.streaming.query import StreamingQuery

import penstock
from bench import idle_source
from bench.data import SCHEMA, rows
from bench.harness import Result, bounded, scratch, speed
from bench.spark_session import spark

SMALL_ROWS = 1_000
SMALL_BATCHES = 20
FLOOR_BATCHES, FLOOR_ROUNDS = 40, 3
LARGE_ROWS = 500_000


def small(url: str, name: str) -> Result:
    """The median time of a trigger of 1,000 rows."""
    return _compare(
        f"exactly_once / at_least_once, trigger of 1,000 rows, {name}",
        url,
        SMALL_ROWS,
        SMALL_ROWS * SMALL_BATCHES,
        statistics.median,
    )


def over_floor(url: str, name: str) -> list[Result]:
    """A trigger of 1,000 rows against one of Spark's own, from ``rate`` to ``noop``, and against one of a
    Python source and sink that do nothing.
    """
    with scratch() as folder, penstock.connect(where := url.format(folder=folder)) as store:
        total = SMALL_ROWS * FLOOR_BATCHES
        source = store.create_queue("in", SCHEMA, partitions=2)
        for partition in range(2):
            source.append(rows(total).slice(partition * total // 2, total // 2), partition=partition)
        made, idle = _made_by_spark(), idle_source.frame(spark(), SMALL_ROWS)
        rounds = [
            (
                run(store, where, folder / str(number), "exactly_once", SMALL_ROWS, statistics.median),
                _floor(made, "noop", folder / f"noop-{number}"),
                _floor(idle, idle_source.NAME, folder / f"idle-{number}"),
            )
            for number in range(FLOOR_ROUNDS)
        ]
        store.drop_queue("in", force=True)
    ours, least, python = (1e3 * statistics.median(each) for each in zip(*rounds, strict=True))
    note = f"{ours:.0f} ms against {least:.0f} ms"
    return [
        bounded(f"trigger of 1,000 rows, over Spark's own, {name}", ours - least, 15, "ms", note=note),
        bounded(f"the same / an idle Python source and sink, {name}", ours, None, "ms", peer=python),
    ]


def _made_by_spark() -> DataFrame:
    source = spark().readStream.format("rate-micro-batch")
    source = source.option("rowsPerBatch", SMALL_ROWS).option("numPartitions", 2)
    return source.load().withColumnRenamed("value", "id")


def _floor(frame: DataFrame, sink: str, checkpoint: Path) -> float:
    """The median seconds of the micro-batches of a query."""
    writer = frame.where("id % 10 != 3").writeStream.format(sink)
    query = writer.option("checkpointLocation", str(checkpoint)).start()
    while len(query.recentProgress) <= FLOOR_BATCHES:
        time.sleep(0.1)
    query.stop()
    return statistics.median(_trigger_seconds(query))


def _trigger_seconds(query: StreamingQuery | penstock.Query) -> list[float]:
    """The seconds of a query's micro-batches, the first one left out."""
    return [progress["durationMs"]["triggerExecution"] / 1000 for progress in query.recentProgress[1:]]


def large(url: str, name: str) -> Result:
    """The time of 1.5 million rows in triggers of 500,000: rows a second, the other way round."""
    return _compare(f"exactly_once / at_least_once, 500,000 rows, {name}", url, LARGE_ROWS, 2_000_000, sum)


def _compare(name: str, url: str, batch: int, total: int, taken: Callable[[list[float]], float]) -> Result:
    with scratch() as folder:
        where = url.format(folder=folder)
        with penstock.connect(where) as store:
            store.create_queue("in", SCHEMA, partitions=2).append(
                rows(total).slice(0, total // 2), partition=0
            )
            store.queue("in").append(rows(total).slice(total // 2), partition=1)
            runs = iter(range(1000))
            try:
                return speed(
                    name,
                    lambda: run(store, where, folder / str(next(runs)), "exactly_once", batch, taken),
                    lambda: run(store, where, folder / str(next(runs)), "at_least_once", batch, taken),
                    least=0.8,
                    rounds=5,
                )
            finally:
                store.drop_queue("in", force=True)


def run(
    store: penstock.Store,
    url: str,
    checkpoint: Path,
    guarantee: str,
    batch: int,
    taken: Callable[[list[float]], float],
) -> float:
    """One run over the whole queue.

    It gives what is made of the seconds of its micro-batches, the first one left out.
    """
    consumer = f"bench-{checkpoint.name}"
    store.create_consumer(consumer)
    store.queue("in").register(consumer)
    store.create_queue("out", SCHEMA, partitions=2)
    query = (
        penstock.stream(
            spark(),
            penstock.QueueSource("in", consumer=consumer, url=url, options={"maxRowsPerTrigger": batch}),
        )
        .transform(lambda frame: frame.where("id % 10 != 3"))
        .write(penstock.QueueSink("out", url=url), guarantee=guarantee)
        .start(checkpoint=checkpoint, trigger=penstock.Trigger.available_now())
    )
    query.awaitTermination()
    times = _trigger_seconds(query)
    store.drop_queue("out")
    store.drop_consumer(consumer)
    return taken(times)
