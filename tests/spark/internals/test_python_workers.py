"""The garbage collector does not scan a worker's imports after each task."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterable, Iterator
from types import ModuleType

import pyarrow as pa
import pytest
from pyspark.sql import SparkSession

from penstock.spark.error_boundary import iterate_in_worker
from penstock.spark.internals.python_workers import freeze_imports


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


def test_a_stage_of_penstock_freezes_its_imports_and_again_those_that_come_later(spark: SparkSession) -> None:
    def frozen(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        freeze = freeze_imports.__globals__["_freeze"]
        freeze.cache_clear()
        counts = []
        for _ in iterate_in_worker(iter(batches)):
            for name in ("penstock_first", "penstock_first", "penstock_second"):
                sys.modules[name] = ModuleType(name)
                freeze_imports()
                counts.append(freeze.cache_info().misses)
        yield pa.RecordBatch.from_pydict({"n": counts})

    found = [row.n for row in spark.range(0, 1, 1, 1).mapInArrow(frozen, "n long").collect()]
    assert found == [2, 2, 3]


def test_a_worker_that_commits_freezes_its_imports(monkeypatch: pytest.MonkeyPatch) -> None:
    """It runs no task."""
    called = []
    monkeypatch.setattr(gc, "freeze", lambda: called.append(True))
    freeze_imports.__globals__["_freeze"].cache_clear()
    freeze_imports()
    assert not called
    monkeypatch.setenv("SPARK_REUSE_WORKER", "1")
    freeze_imports()
    assert called
