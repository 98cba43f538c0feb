"""The first rows of a backlog: ``penstock.take`` against a limit, the memory sink and ``availableNow``."""

from __future__ import annotations

from uuid import uuid4

from pyspark.sql import DataFrame

import penstock
from bench.data import SCHEMA, rows
from bench.harness import Result, scratch, speed, timed
from bench.spark_session import spark

BACKLOG = 5_000_000
TAKEN = 1_000
_APPEND = 500_000


def queue() -> list[Result]:
    """1,000 rows of 5 million in a SQLite queue of two partitions.

    The first ones, those of a filter, and those of a filter that few rows pass.
    """
    with scratch() as folder:
        url = f"sqlite:///{folder}/store.db"
        with penstock.connect(url) as store:
            backlog = store.create_queue("backlog", SCHEMA, partitions=2)
            for number in range(BACKLOG // _APPEND):
                backlog.append(rows(_APPEND), partition=number % 2)
        frame = spark().readStream.format("penstock").option("url", url).load("backlog")
        cases = {
            "the first": frame,
            "1 in 7": frame.where("id % 7 = 3"),
            "1 in 2,500": frame.where("id % 2500 = 3"),
        }
        return [
            speed(
                f"take {TAKEN:,} of {BACKLOG:,} rows, {name} / limit, memory sink",
                lambda frame=df: timed(lambda: _taken(frame)),  # type: ignore[misc] # mypy does not see the default
                lambda frame=df: timed(lambda: _limited(frame)),  # type: ignore[misc] # as above
                least=3.0,
                rounds=5,
            )
            for name, df in cases.items()
        ]


def _taken(frame: DataFrame) -> None:
    _require(len(list(penstock.take(frame, TAKEN))))


def _limited(frame: DataFrame) -> None:
    name = f"taken_{uuid4().hex}"
    query = frame.limit(TAKEN).writeStream.format("memory").queryName(name).trigger(availableNow=True).start()
    query.awaitTermination()
    found = spark().table(name).collect()
    spark().catalog.dropTempView(name)
    _require(len(found))


def _require(found: int) -> None:
    if found != TAKEN:
        raise SystemExit(f"took {found} rows, not {TAKEN}")
