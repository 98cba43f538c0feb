"""Cost of exactly_once compared with at_least_once, in small and in large micro-batches."""

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
    """Compare the median time of micro-batches of 1,000 rows."""
    return _compare(
        f"exactly_once / at_least_once, trigger of 1,000 rows, {name}",
        url,
        SMALL_ROWS,
        SMALL_ROWS * SMALL_BATCHES,
        statistics.median,
    )


def over_floor(url: str, name: str) -> list[Result]:
    """Compare micro-batches of 1,000 rows with Spark's sources and sinks.

    The peers are ``rate`` into ``noop``, and a Python source and sink that do nothing.
    """
    with scratch() as folder, penstock.connect(store_url := url.format(folder=folder)) as store:
        total = SMALL_ROWS * FLOOR_BATCHES
        source = store.create_queue("in", SCHEMA, partitions=2)
        for partition in range(2):
            source.append(rows(total).slice(partition * total // 2, total // 2), partition=partition)
        rate, idle = _rate_frame(), idle_source.frame(spark(), SMALL_ROWS)
        rounds = [
            (
                run(store, store_url, folder / str(number), "exactly_once", SMALL_ROWS, statistics.median),
                _peer_seconds(rate, "noop", folder / f"noop-{number}"),
                _peer_seconds(idle, idle_source.NAME, folder / f"idle-{number}"),
            )
            for number in range(FLOOR_ROUNDS)
        ]
        store.drop_queue("in", force=True)
    our_ms, spark_ms, python_ms = (1e3 * statistics.median(seconds) for seconds in zip(*rounds, strict=True))
    note = f"{our_ms:.0f} ms against {spark_ms:.0f} ms"
    return [
        bounded(f"trigger of 1,000 rows, over Spark's own, {name}", our_ms - spark_ms, 15, "ms", note=note),
        bounded(f"the same / an idle Python source and sink, {name}", our_ms, None, "ms", peer=python_ms),
    ]


def _rate_frame() -> DataFrame:
    source = spark().readStream.format("rate-micro-batch")
    source = source.option("rowsPerBatch", SMALL_ROWS).option("numPartitions", 2)
    return source.load().withColumnRenamed("value", "id")


def _peer_seconds(frame: DataFrame, sink: str, checkpoint: Path) -> float:
    """Return the median seconds of the micro-batches of a query."""
    writer = frame.where("id % 10 != 3").writeStream.format(sink)
    query = writer.option("checkpointLocation", str(checkpoint)).start()
    while len(query.recentProgress) <= FLOOR_BATCHES:
        time.sleep(0.1)
    query.stop()
    return statistics.median(_trigger_seconds(query))


def _trigger_seconds(query: StreamingQuery | penstock.Query) -> list[float]:
    """Return the seconds of a query's micro-batches, without the first one."""
    return [progress["durationMs"]["triggerExecution"] / 1000 for progress in query.recentProgress[1:]]


def large(url: str, name: str) -> Result:
    """Compare the time of 1.5 million rows in micro-batches of 500,000 rows."""
    return _compare(f"exactly_once / at_least_once, 500,000 rows, {name}", url, LARGE_ROWS, 2_000_000, sum)


def _compare(
    name: str, url: str, batch: int, total: int, summarize: Callable[[list[float]], float]
) -> Result:
    with scratch() as folder:
        store_url = url.format(folder=folder)
        with penstock.connect(store_url) as store:
            store.create_queue("in", SCHEMA, partitions=2).append(
                rows(total).slice(0, total // 2), partition=0
            )
            store.queue("in").append(rows(total).slice(total // 2), partition=1)
            runs = iter(range(1000))
            try:
                return speed(
                    name,
                    lambda: run(store, store_url, folder / str(next(runs)), "exactly_once", batch, summarize),
                    lambda: run(
                        store, store_url, folder / str(next(runs)), "at_least_once", batch, summarize
                    ),
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
    summarize: Callable[[list[float]], float],
) -> float:
    """Run a query over the whole queue.

    Return `summarize` of the seconds of its micro-batches, without the first one.
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
    return summarize(times)
