"""Small queues, and shortcuts to read and write them with Spark."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.errors import StreamingQueryException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming import StreamingQuery

from penstock import Queue, Store
from penstock.json_text import Json

# For tests that do not depend on the kind of database.
one_store = pytest.mark.parametrize("store_url", ["sqlite"], indirect=True)

SCHEMA = pa.schema([("id", pa.int64()), ("name", pa.string())])


def make_queue(store: Store, name: str = "orders", *, partitions: int = 1, **options: object) -> Queue:
    return store.create_queue(name, SCHEMA, partitions=partitions, **options)


def table(ids: Iterable[int]) -> pa.Table:
    numbers = list(ids)
    return pa.table({"id": numbers, "name": [f"n{number}" for number in numbers]}, schema=SCHEMA)


def fill(queue: Queue, ids: Iterable[int], *, partition: int = 0, each: int | None = None) -> None:
    """Append rows with these ids, `each` of them in one append."""
    numbers = list(ids)
    step = each or len(numbers) or 1
    for start in range(0, len(numbers), step):
        queue.append(table(numbers[start : start + step]), partition=partition)


def ids_in(queue: Queue, column: str = "id") -> list[Any]:
    """Return the values of a column of a queue, partition by partition."""
    queue.refresh()
    partitions = queue.info().partitions
    return [
        value
        for part in partitions
        for value in queue.read(part.partition, part.first_index)[column].to_pylist()
    ]


def batch(spark: SparkSession, url: str, queue: str = "orders", **options: object) -> DataFrame:
    return spark.read.format("penstock").options(url=url, **options).load(queue)


def stream(spark: SparkSession, url: str, queue: str = "orders", **options: object) -> DataFrame:
    return spark.readStream.format("penstock").options(url=url, **options).load(queue)


def start(
    frame: DataFrame,
    url: str,
    queue: str,
    checkpoint: Path | str,
    *,
    trigger: Json | None = None,
    **options: object,
) -> StreamingQuery:
    """Start a query into a queue. Unless a trigger is given, it ends after the available rows."""
    writer = frame.writeStream.format("penstock").options(
        url=url, checkpointLocation=str(checkpoint), **options
    )
    return writer.trigger(**(trigger or {"availableNow": True})).start(queue)


def run(frame: DataFrame, url: str, queue: str, checkpoint: Path | str, **options: object) -> StreamingQuery:
    """Run a query to its end."""
    query = start(frame, url, queue, checkpoint, **options)
    query.awaitTermination()
    return query


def column(frame: DataFrame, name: str = "id") -> list[Any]:
    return [row[name] for row in frame.select(name).collect()]


def batches(query: StreamingQuery) -> Sequence[int]:
    """Return the number of rows of each non-empty micro-batch."""
    return [progress.numInputRows for progress in query.recentProgress if progress.numInputRows]


def failure(query: StreamingQuery, timeout: float = 60) -> str:
    """Wait until a query fails, and return its error message."""
    try:
        ended = query.awaitTermination(int(timeout))
    except StreamingQueryException as error:
        return str(error)
    raise AssertionError("the query ended without an error" if ended else "the query is still running")


def refusal(action: Callable[[], Any]) -> str:
    """Return the message with which Penstock refuses an action."""
    with pytest.raises(Exception, match=r"penstock\.\w+[.\w]*: \[") as caught:
        action()
    return str(caught.value)
