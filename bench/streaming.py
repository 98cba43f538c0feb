"""Streaming: what exactly_once costs over at_least_once, in small micro-batches and in large ones."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from pathlib import Path

import penstock
from bench.data import SCHEMA, rows
from bench.harness import Result, scratch, speed
from bench.spark_session import spark

SMALL_ROWS = 1_000
SMALL_BATCHES = 20
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
    times = [progress["durationMs"]["triggerExecution"] / 1000 for progress in query.recentProgress[1:]]
    store.drop_queue("out")
    store.drop_consumer(consumer)
    return taken(times)
