"""The garbage collector does not scan a worker's imports after each task."""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator

import pyarrow as pa
from pyspark.sql import SparkSession

import penstock
from penstock.spark.internals.python_workers import freeze_imports
from penstock.spark.queue_readers import RangePartition, Scan
from tests.support.spark_queues import fill, make_queue


def looked_at(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """How many objects a worker's garbage collector tracks, before and after Penstock's freeze."""
    held = [[] for _ in range(100_000)]  # type: ignore[var-annotated] # of nothing
    before = len(gc.get_objects())
    freeze_imports.__globals__["_freeze"].cache_clear()
    for batch in batches:
        freeze_imports()
        counts = [before, len(gc.get_objects())]
        yield pa.RecordBatch.from_pydict({"n": counts[: batch.num_rows + 1]})
    assert held


def test_the_garbage_collector_of_a_worker_ignores_imported_objects(spark: SparkSession) -> None:
    frame = spark.range(0, 1, 1, 1).mapInArrow(looked_at, "n long")
    before, behind = [row.n for row in frame.collect()]
    assert before > 100_000
    assert behind < 10_000


def test_nothing_is_frozen_outside_a_task() -> None:
    before = gc.get_freeze_count()
    freeze_imports()
    assert gc.get_freeze_count() == before


def test_a_task_that_reads_a_queue_freezes_its_imports(
    spark: SparkSession, store: penstock.Store, store_url: str
) -> None:
    fill(make_queue(store), range(3))

    def frozen(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        freeze = freeze_imports.__globals__["_freeze"]
        freeze.cache_clear()
        record = penstock.connect(store_url).queue("orders").record
        rows = sum(
            part.num_rows
            for _ in batches
            for part in Scan(store_url, record, record.schema).read(RangePartition(0, 0, 3))
        )
        yield pa.RecordBatch.from_pydict({"n": [rows, freeze.cache_info().currsize]})

    assert [row.n for row in spark.range(0, 1, 1, 1).mapInArrow(frozen, "n long").collect()] == [3, 1]
