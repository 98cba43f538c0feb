"""Limits, compared with handwritten code.

A query that stops at its limit is compared with Spark's limit and a query that is stopped by hand. The first
rows of each key are compared with `applyInPandasWithState`.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import psutil
import pyarrow as pa
from pyspark.sql import DataFrame
from pyspark.sql import functions as F  # noqa: N812 - its usual name
from pyspark.sql.streaming.state import GroupState, GroupStateTimeout

import penstock
from bench.harness import Result, pairs, scratch, speed
from bench.spark_session import spark

ROWS = 5_000_000
LIMIT = 1_000
TRIGGER_ROWS = 100_000
STOP_ROUNDS = 5
KEYED_ROWS = 400_000
KEYS = 20_000
PER_KEY = 3
KEY_ROUNDS = 2
_SCHEMA = pa.schema([("id", pa.int64()), ("name", pa.string()), ("amount", pa.float64())])
_METRIC = "rows"


@dataclass(frozen=True)
class _Cost:
    """Cost of a query from its start to its end."""

    rows: int
    """Rows that were read."""
    cpu: float
    """CPU seconds of all processes."""
    seconds: float


def stop() -> Result:
    """Measure a query for the first 1,000 of 5 million rows, with micro-batches of 100,000 rows.

    The time ends when the result is complete and the query has ended.
    """
    with scratch() as folder:
        bench = _StopBenchmark(f"sqlite:///{folder}/store.db?synchronous=normal", folder)
        costs: dict[str, list[_Cost]] = {"ours": [], "peer": []}

        def run(side: str) -> float:
            costs[side].append(getattr(bench, side)())
            return costs[side][-1].seconds

        try:
            ours, peer = pairs(lambda: run("ours"), lambda: run("peer"), STOP_ROUNDS)
        finally:
            bench.store.close()
    read, cpu = (
        {
            side: statistics.median(getattr(cost, attribute) for cost in side_costs[1:])
            for side, side_costs in costs.items()
        }
        for attribute in ("rows", "cpu")
    )
    return Result(
        f"limit {LIMIT:,} of {ROWS:,}: rows read / Spark's limit",
        read["ours"],
        read["peer"],
        read["peer"] / read["ours"],
        ">= 5",
        read["peer"] >= 5 * read["ours"],
        f"CPU {cpu['ours']:.1f} and {cpu['peer']:.1f} s, wall {ours:.1f} and {peer:.1f} s",
        "rows",
    )


class _StopBenchmark:
    def __init__(self, url: str, folder: Path) -> None:
        self.url, self.folder, self.runs = url, folder, 0
        self.store = penstock.connect(url, create=True)
        queue = self.store.create_queue("in", _SCHEMA, partitions=2)
        for partition in range(2):
            for start in range(0, ROWS // 2, 500_000):
                queue.append(_rows(start, start + 500_000), partition=partition)

    def _create_run(self) -> tuple[str, Path]:
        self.runs += 1
        consumer = f"bench-{self.runs}"
        self.store.create_consumer(consumer)
        self.store.queue("in").register(consumer)
        self.store.create_queue(consumer, _SCHEMA)
        return consumer, self.folder / f"ck-{self.runs}"

    def ours(self) -> _Cost:
        name, checkpoint = self._create_run()
        source = penstock.QueueSource(
            "in", consumer=name, url=self.url, options={"maxRowsPerTrigger": TRIGGER_ROWS}
        )
        pipeline = penstock.stream(spark(), source).limit(LIMIT).write(penstock.QueueSink(name, url=self.url))

        def run_query() -> Any:
            query = pipeline.start(checkpoint=checkpoint)
            query.awaitTermination()
            return query

        return self._measure(run_query, name)

    def peer(self) -> _Cost:
        """Run Spark's limit with the same source and sink, and stop the query once it has the rows."""
        name, checkpoint = self._create_run()
        options = {"url": self.url, "consumer": name, "maxRowsPerTrigger": str(TRIGGER_ROWS)}
        frame = spark().readStream.format("penstock").options(**options).load("in").limit(LIMIT)
        counted = frame.observe(_METRIC, F.count(F.lit(1)).alias("n"))
        writer = counted.writeStream.format("penstock").options(
            url=self.url, checkpointLocation=str(checkpoint)
        )

        def run_query() -> Any:
            query = writer.start(name)
            while _output_rows(query) < LIMIT:
                time.sleep(0.01)
            query.stop()
            return query

        return self._measure(run_query, name)

    def _measure(self, run_query: Any, name: str) -> _Cost:
        cpu, start = _cpu(), time.perf_counter()
        run_query()
        seconds, cpu = time.perf_counter() - start, _cpu() - cpu
        sink_rows = sum(part.rows for part in self.store.queue(name).info().partitions)
        assert sink_rows == LIMIT, f"{sink_rows} rows of {LIMIT} are in the sink"
        read = self.store.consumer(name).offsets("in")
        return _Cost(sum(read.values()), cpu, seconds)


def _output_rows(query: Any) -> int:
    observed = [progress.observedMetrics.get(_METRIC) for progress in query.recentProgress]
    return sum(row["n"] for row in observed if row is not None)


def _cpu() -> float:
    """Return the CPU seconds of this process, Spark's JVM and all Python workers, including ended ones."""
    own = psutil.Process()
    total = 0.0
    for process in (own, *own.children(recursive=True)):
        try:
            total += sum(process.cpu_times()[:4])
        except psutil.NoSuchProcess:
            continue
    return total


def per_key() -> Result:
    """Measure the first 3 rows of each of 20,000 keys in 400,000 rows, in two micro-batches."""
    with scratch() as folder:
        bench = _PerKeyBenchmark(f"sqlite:///{folder}/store.db?synchronous=normal", folder)
        try:
            name = f"first {PER_KEY} rows of {KEYS:,} keys / applyInPandasWithState"
            return speed(name, bench.ours, bench.peer, least=3, rounds=KEY_ROUNDS)
        finally:
            bench.store.close()


class _PerKeyBenchmark:
    def __init__(self, url: str, folder: Path) -> None:
        self.url, self.folder, self.runs = url, folder, 0
        self.store = penstock.connect(url, create=True)
        queue = self.store.create_queue("in", _SCHEMA, partitions=2)
        for partition in range(2):
            first = partition * KEYED_ROWS // 2
            queue.append(_keyed_rows(first, first + KEYED_ROWS // 2), partition=partition)

    def ours(self) -> float:
        return self._run(lambda frame: penstock.limits.first_rows(frame, PER_KEY, per=["name"]))

    def peer(self) -> float:
        return self._run(_first_rows_with_pyspark)

    def _run(self, transform: Any) -> float:
        """Run a transformation, and return the seconds of the micro-batches that Spark reports."""
        self.runs += 1
        options = {"url": self.url, "maxRowsPerTrigger": str(KEYED_ROWS // 2)}
        frame = transform(spark().readStream.format("penstock").options(**options).load("in"))
        counted = frame.observe(_METRIC, F.count(F.lit(1)).alias("n"))
        writer = counted.writeStream.format("noop").option(
            "checkpointLocation", str(self.folder / f"ck-{self.runs}")
        )
        query = writer.trigger(availableNow=True).start()
        query.awaitTermination()
        assert _output_rows(query) == PER_KEY * KEYS, f"{_output_rows(query)} rows of {PER_KEY * KEYS}"
        seconds: float = sum(progress.durationMs["triggerExecution"] for progress in query.recentProgress)
        return seconds / 1000


def _first_rows_with_pyspark(frame: DataFrame) -> DataFrame:
    """Return the first rows of each key with PySpark alone."""

    def first(_: Any, groups: Iterator[pd.DataFrame], state: GroupState) -> Iterator[pd.DataFrame]:
        passed = state.get[0] if state.exists else 0
        for group in groups:
            rows = group.head(PER_KEY - passed)
            passed += len(rows)
            if len(rows):
                yield rows
        state.update((passed,))

    return frame.groupBy("name").applyInPandasWithState(
        first, frame.schema, "passed int", "append", GroupStateTimeout.NoTimeout
    )


def _rows(start: int, end: int) -> pa.Table:
    return _table(np.arange(start, end), np.arange(start, end))


def _keyed_rows(start: int, end: int) -> pa.Table:
    """Return rows in which all keys are about equally frequent, in all micro-batches."""
    numbers = np.arange(start, end)
    return _table(numbers, numbers * 7919 % KEYS)


def _table(numbers: Any, names: Any) -> pa.Table:
    name_column = pa.array([f"name {number}" for number in names.tolist()])
    return pa.table(
        [pa.array(numbers, pa.int64()), name_column, pa.array(numbers.astype(float))], schema=_SCHEMA
    )
