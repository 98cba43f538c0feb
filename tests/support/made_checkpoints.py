"""Checkpoints of real queries over a few small files, and the state metrics that the queries reported."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as fn

ROCKSDB = {
    "spark.sql.streaming.stateStore.providerClass": (
        "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider"
    )
}
CHANGELOG = {**ROCKSDB, "spark.sql.streaming.stateStore.rocksdb.changelogCheckpointing.enabled": "true"}
START = datetime(2026, 1, 1, 12, tzinfo=UTC)
LATE = 4_102_444_800_000
"""A time in milliseconds for timers that never expire."""
Event = tuple[int, str]
BATCHES: list[list[Event]] = [
    [(0, "a"), (1, "b"), (61, "a")],
    [(62, "c"), (125, "a")],
    [(200, "d"), (201, "a"), (202, "a")],
]
Frame = Callable[[SparkSession, Path], DataFrame]


@dataclass(frozen=True)
class Made:
    """Checkpoint, and the progress of each batch of the query that wrote it."""

    path: Path
    progress: list[dict[str, Any]]

    @property
    def last(self) -> int:
        """The id of the last batch."""
        return int(self.progress[-1]["batchId"])

    @property
    def operators(self) -> list[dict[str, Any]]:
        """The metrics of each stateful operator in the last batch."""
        return list(self.progress[-1]["stateOperators"])


@dataclass(frozen=True)
class Case:
    """Query, and the settings that it runs with."""

    frame: Frame
    settings: dict[str, str]


def write_events(folder: Path) -> None:
    """Write a file for each batch, with increasing modification times."""
    folder.mkdir()
    for number, events in enumerate(BATCHES):
        path = folder / f"{number}.json"
        rows = [{"ts": (START + timedelta(seconds=second)).isoformat(), "key": key} for second, key in events]
        path.write_text("\n".join(map(json.dumps, rows)))
        os.utime(path, (1_700_000_000 + number, 1_700_000_000 + number))


def make(spark: SparkSession, case: Case, events: Path, path: Path) -> Made:
    """Run a query over the events, one file in each batch."""
    with settings(spark, case.settings):
        writer = case.frame(spark, events).writeStream.format("noop").option("checkpointLocation", str(path))
        query = writer.trigger(availableNow=True).start()
        query.awaitTermination()
        return Made(path, [json.loads(progress.json) for progress in query.recentProgress])


@contextmanager
def settings(spark: SparkSession, values: dict[str, str]) -> Iterator[None]:
    for key, value in values.items():
        spark.conf.set(key, value)
    try:
        yield
    finally:
        for key in values:
            spark.conf.unset(key)


def events_of(spark: SparkSession, folder: Path) -> DataFrame:
    reader = spark.readStream.schema("ts timestamp, key string").option("maxFilesPerTrigger", 1)
    return reader.json(str(folder)).withWatermark("ts", "10 seconds")


def windows(spark: SparkSession, folder: Path) -> DataFrame:
    return events_of(spark, folder).groupBy(fn.window("ts", "1 minute"), "key").count()


def windows_of_windows(spark: SparkSession, folder: Path) -> DataFrame:
    return windows(spark, folder).groupBy(fn.window("window", "2 minutes")).count()


def sessions(spark: SparkSession, folder: Path) -> DataFrame:
    return events_of(spark, folder).groupBy(fn.session_window("ts", "30 seconds"), "key").count()


def distinct(spark: SparkSession, folder: Path) -> DataFrame:
    return events_of(spark, folder).dropDuplicates(["key"])


def join_self(spark: SparkSession, folder: Path) -> DataFrame:
    left, right = events_of(spark, folder).alias("l"), events_of(spark, folder).alias("r")
    near = "l.key = r.key and l.ts >= r.ts and l.ts <= r.ts + interval 1 minute"
    return left.join(right, fn.expr(near), "leftOuter")


def limit_rows(spark: SparkSession, folder: Path) -> DataFrame:
    return events_of(spark, folder).limit(4)


def select_keys(spark: SparkSession, folder: Path) -> DataFrame:
    return events_of(spark, folder).select("key")


def count_with_state_variables(spark: SparkSession, folder: Path) -> DataFrame:
    import pandas as pd
    from pyspark.sql.streaming import StatefulProcessor

    class Counting(StatefulProcessor):
        def init(self, handle: Any) -> None:
            self.handle = handle
            self.count = handle.getValueState("count", "n long")
            self.times = handle.getListState("times", "ts timestamp")
            self.minutes = handle.getMapState("minutes", "minute int", "n long")

        def handleInputRows(self, key: Any, rows: Iterator[Any], timerValues: Any) -> Iterator[Any]:  # noqa: N802, N803
            (count,) = self.count.get() or (0,)
            for frame in rows:
                for timestamp in frame["ts"]:
                    count += 1
                    self.times.appendValue((timestamp.to_pydatetime(),))
                    self.minutes.updateValue((timestamp.minute,), (count,))
            self.count.update((count,))
            self.handle.registerTimer(LATE)
            yield pd.DataFrame({"key": [key[0]], "n": [count]})

        def close(self) -> None:
            pass

    keyed = events_of(spark, folder).groupBy("key")
    return keyed.transformWithStateInPandas(Counting(), "key string, n long", "append", "eventTime")


CASES = {
    "windows": Case(windows, {}),
    "windows in RocksDB": Case(windows, ROCKSDB),
    "windows with state ids": Case(
        windows, {**CHANGELOG, "spark.sql.streaming.stateStore.checkpointFormatVersion": "2"}
    ),
    "windows of windows": Case(windows_of_windows, {}),
    "sessions": Case(sessions, {}),
    "distinct": Case(distinct, {}),
    "join": Case(join_self, {}),
    "join in one store": Case(join_self, {**ROCKSDB, "spark.sql.streaming.join.stateFormatVersion": "3"}),
    "limit": Case(limit_rows, {}),
    "variables": Case(count_with_state_variables, CHANGELOG),
    "stateless": Case(select_keys, {}),
}
