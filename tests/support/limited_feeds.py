"""Queue whose row ids encode their positions, and pipelines over it with a limit."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any

from pyspark.sql import SparkSession

import penstock
from tests.support.spark_queues import fill, ids_in, make_queue

NOW = penstock.Trigger.available_now()
STRIDE = 10_000
"""Row i of partition p has the id p * STRIDE + i."""


class Feed:
    """Queue ``in`` with its consumer ``c``, and the queue ``out``."""

    def __init__(self, spark: SparkSession, url: str, folder: Path, partitions: int = 2) -> None:
        self.spark, self.url, self.folder, self.partitions = spark, url, folder, partitions
        self.store = penstock.connect(url, create=True)
        self.queue = make_queue(self.store, "in", partitions=partitions)
        self.out = make_queue(self.store, "out")
        self.store.create_consumer("c").register("in")
        self._next = [0] * partitions

    def add(self, *rows: int) -> Feed:
        """Append a number of rows to each partition."""
        for partition, count in enumerate(rows):
            first = partition * STRIDE + self._next[partition]
            fill(self.queue, range(first, first + count), partition=partition)
            self._next[partition] += count
        return self

    def stream(self, where: str | None = None, **options: Any) -> penstock.Stream:
        stream = penstock.stream(
            self.spark, penstock.QueueSource("in", consumer="c", url=self.url, options=options)
        )
        return stream if where is None else stream.transform(lambda df: df.where(where))

    def start(
        self,
        n: int,
        where: str | None = None,
        *,
        trigger: penstock.Trigger | None = None,
        on_limit: str | None = None,
        checkpoint: str = "ck",
        **options: Any,
    ) -> penstock.Query:
        sink = penstock.QueueSink("out", url=self.url)
        limited = self.stream(where, **options).limit(n, on_limit=on_limit)
        return limited.write(sink).start(checkpoint=self.folder / checkpoint, trigger=trigger)

    def run(self, n: int, where: str | None = None, **options: Any) -> penstock.Query:
        """Run a pipeline until its limit ends it."""
        query = self.start(n, where, **options)
        assert query.awaitTermination(60), "the query did not end"
        return query

    def progress(self, checkpoint: str = "ck") -> str:
        return str(penstock.limits.limit_progress(self.folder / checkpoint))

    def taken(self) -> dict[int, list[int]]:
        """Return the row indexes in the sink, by source partition."""
        rows = defaultdict(list)
        for number in ids_in(self.out):
            rows[number // STRIDE].append(number % STRIDE)
        return dict(rows)

    def offsets(self) -> list[int]:
        return list(self.store.consumer("c").offsets("in").values())


def is_prefix(indexes: list[int], passes: Any = lambda index: True) -> bool:
    """Return whether these are the first row indexes of a partition that pass a filter."""
    return sorted(indexes) == [index for index in range(max(indexes) + 1) if passes(index)]
