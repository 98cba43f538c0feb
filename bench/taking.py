"""First rows of a backlog with ``penstock.take``, compared with a limit into the memory sink."""

from __future__ import annotations

from uuid import uuid4

from pyspark.sql import DataFrame

import penstock
from bench.data import SCHEMA, rows
from bench.harness import Result, scratch, speed, timed
from bench.spark_session import spark

BACKLOG = 5_000_000
TAKE_ROWS = 1_000
_APPEND_ROWS = 500_000


def queue() -> list[Result]:
    """Measure taking 1,000 of 5 million rows of a SQLite queue with two partitions.

    The rows are the first ones, those of a filter, and those of a filter that few rows pass.
    """
    with scratch() as folder:
        url = f"sqlite:///{folder}/store.db"
        with penstock.connect(url) as store:
            backlog = store.create_queue("backlog", SCHEMA, partitions=2)
            for number in range(BACKLOG // _APPEND_ROWS):
                backlog.append(rows(_APPEND_ROWS), partition=number % 2)
        frame = spark().readStream.format("penstock").option("url", url).load("backlog")
        cases = {
            "the first": frame,
            "1 in 7": frame.where("id % 7 = 3"),
            "1 in 2,500": frame.where("id % 2500 = 3"),
        }
        return [
            speed(
                f"take {TAKE_ROWS:,} of {BACKLOG:,} rows, {name} / limit, memory sink",
                lambda frame=df: timed(lambda: _take(frame)),  # type: ignore[misc] # mypy ignores the default
                lambda frame=df: timed(lambda: _limit_into_memory(frame)),  # type: ignore[misc] # as above
                least=3.0,
                rounds=5,
            )
            for name, df in cases.items()
        ]


def _take(frame: DataFrame) -> None:
    _require(len(list(penstock.take(frame, TAKE_ROWS))))


def _limit_into_memory(frame: DataFrame) -> None:
    name = f"taken_{uuid4().hex}"
    query = (
        frame.limit(TAKE_ROWS).writeStream.format("memory").queryName(name).trigger(availableNow=True).start()
    )
    query.awaitTermination()
    rows = spark().table(name).collect()
    spark().catalog.dropTempView(name)
    _require(len(rows))


def _require(count: int) -> None:
    if count != TAKE_ROWS:
        raise SystemExit(f"took {count} rows, not {TAKE_ROWS}")
