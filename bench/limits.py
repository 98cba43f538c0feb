"""Limits, against what one would do by hand.

A query that stops with its rows, against Spark's limit stopped by hand; the first rows of each key, against
the plain way.
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
    """Of one query, from its start to its end."""

    rows: int
    """Read."""
    cpu: float
    """Seconds of all processes together."""
    seconds: float


def stop() -> Result:
    """The first 1,000 rows of 5 million, in triggers of 100,000.

    The time runs until the result is complete and the query has ended.
    """
    with scratch() as folder:
        bench = _Stopping(f"sqlite:///{folder}/store.db?synchronous=normal", folder)
        costs: dict[str, list[_Cost]] = {"ours": [], "peer": []}

        def run(which: str) -> float:
            costs[which].append(getattr(bench, which)())
            return costs[which][-1].seconds

        try:
            ours, peer = pairs(lambda: run("ours"), lambda: run("peer"), STOP_ROUNDS)
        finally:
            bench.store.close()
    read, cpu = (
        {
            which: statistics.median(getattr(cost, what) for cost in found[1:])
            for which, found in costs.items()
        }
        for what in ("rows", "cpu")
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


class _Stopping:
    def __init__(self, url: str, folder: Path) -> None:
        self.url, self.folder, self.runs = url, folder, 0
        self.store = penstock.connect(url, create=True)
        queue = self.store.create_queue("in", _SCHEMA, partitions=2)
        for partition in range(2):
            for start in range(0, ROWS // 2, 500_000):
                queue.append(_rows(start, start + 500_000), partition=partition)

    def _anew(self) -> tuple[str, Path]:
        self.runs += 1
        consumer = f"bench-{self.runs}"
        self.store.create_consumer(consumer)
        self.store.queue("in").register(consumer)
        self.store.create_queue(consumer, _SCHEMA)
        return consumer, self.folder / f"ck-{self.runs}"

    def ours(self) -> _Cost:
        name, checkpoint = self._anew()
        source = penstock.QueueSource(
            "in", consumer=name, url=self.url, options={"maxRowsPerTrigger": TRIGGER_ROWS}
        )
        pipeline = penstock.stream(spark(), source).limit(LIMIT).write(penstock.QueueSink(name, url=self.url))

        def work() -> Any:
            query = pipeline.start(checkpoint=checkpoint)
            query.awaitTermination()
            return query

        return self._measured(work, name)

    def peer(self) -> _Cost:
        """Spark's limit over the same source into the same sink, and somebody who watches the progress."""
        name, checkpoint = self._anew()
        options = {"url": self.url, "consumer": name, "maxRowsPerTrigger": str(TRIGGER_ROWS)}
        frame = spark().readStream.format("penstock").options(**options).load("in").limit(LIMIT)
        counted = frame.observe(_METRIC, F.count(F.lit(1)).alias("n"))
        writer = counted.writeStream.format("penstock").options(
            url=self.url, checkpointLocation=str(checkpoint)
        )

        def work() -> Any:
            query = writer.start(name)
            while _passed(query) < LIMIT:
                time.sleep(0.01)
            query.stop()
            return query

        return self._measured(work, name)

    def _measured(self, work: Any, name: str) -> _Cost:
        cpu, start = _cpu(), time.perf_counter()
        work()
        seconds, cpu = time.perf_counter() - start, _cpu() - cpu
        found = sum(part.rows for part in self.store.queue(name).info().partitions)
        assert found == LIMIT, f"{found} rows of {LIMIT} are in the sink"
        read = self.store.consumer(name).offsets("in")
        return _Cost(sum(read.values()), cpu, seconds)


def _passed(query: Any) -> int:
    observed = [progress.observedMetrics.get(_METRIC) for progress in query.recentProgress]
    return sum(row["n"] for row in observed if row is not None)


def _cpu() -> float:
    """Of this process, Spark's JVM and all Python workers, those that have ended included."""
    own = psutil.Process()
    total = 0.0
    for process in (own, *own.children(recursive=True)):
        try:
            total += sum(process.cpu_times()[:4])
        except psutil.NoSuchProcess:
            continue
    return total


def per_key() -> Result:
    """The first 3 rows of each of 50,000 keys in 400,000 rows, in two micro-batches."""
    with scratch() as folder:
        bench = _PerKey(f"sqlite:///{folder}/store.db?synchronous=normal", folder)
        try:
            name = f"first {PER_KEY} rows of {KEYS:,} keys / applyInPandasWithState"
            return speed(name, bench.ours, bench.peer, least=3, rounds=KEY_ROUNDS)
        finally:
            bench.store.close()


class _PerKey:
    def __init__(self, url: str, folder: Path) -> None:
        self.url, self.folder, self.runs = url, folder, 0
        self.store = penstock.connect(url, create=True)
        queue = self.store.create_queue("in", _SCHEMA, partitions=2)
        for partition in range(2):
            first = partition * KEYED_ROWS // 2
            queue.append(_keyed(first, first + KEYED_ROWS // 2), partition=partition)

    def ours(self) -> float:
        return self._run(lambda frame: penstock.limits.first_rows(frame, PER_KEY, per=["name"]))

    def peer(self) -> float:
        return self._run(_plain)

    def _run(self, transform: Any) -> float:
        """What Spark says that the micro-batches took."""
        self.runs += 1
        options = {"url": self.url, "maxRowsPerTrigger": str(KEYED_ROWS // 2)}
        frame = transform(spark().readStream.format("penstock").options(**options).load("in"))
        counted = frame.observe(_METRIC, F.count(F.lit(1)).alias("n"))
        writer = counted.writeStream.format("noop").option(
            "checkpointLocation", str(self.folder / f"ck-{self.runs}")
        )
        query = writer.trigger(availableNow=True).start()
        query.awaitTermination()
        assert _passed(query) == PER_KEY * KEYS, f"{_passed(query)} rows of {PER_KEY * KEYS}"
        seconds: float = sum(progress.durationMs["triggerExecution"] for progress in query.recentProgress)
        return seconds / 1000


def _plain(frame: DataFrame) -> DataFrame:
    """As one writes it with PySpark alone."""

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


def _keyed(start: int, end: int) -> pa.Table:
    """Each key about equally often, spread over all micro-batches."""
    numbers = np.arange(start, end)
    return _table(numbers, numbers * 7919 % KEYS)


def _table(numbers: Any, names: Any) -> pa.Table:
    texts = pa.array([f"name {number}" for number in names.tolist()])
    return pa.table([pa.array(numbers, pa.int64()), texts, pa.array(numbers.astype(float))], schema=_SCHEMA)
