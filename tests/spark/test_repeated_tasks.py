"""A repeated micro-batch has the same tasks as before, even if the options have changed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession
from pyspark.sql.streaming.datasource import ReadAllAvailable

from penstock import Store
from penstock.json_text import Json
from penstock.spark.options import SourceOptions
from penstock.spark.stream_reader import QueueStreamReader
from penstock.testing import replay_last_batch
from tests.support.spark_queues import (
    SCHEMA,
    failure,
    fill,
    ids_in,
    make_queue,
    one_store,
    run,
    start,
    stream,
)

consumers = pytest.mark.parametrize("consumer", ["billing", None])


class Readers:
    """Readers of a queue, each of another run."""

    def __init__(self, store: Store, url: str, consumer: str | None) -> None:
        self.queue = make_queue(store, partitions=2)
        store.create_consumer("billing").register("orders")
        self._options = SourceOptions(url, "orders", consumer)
        self._opened: list[QueueStreamReader] = []

    def reader(self, rows_per_task: int) -> QueueStreamReader:
        """The reader of the next run; the one before ends."""
        self.stop()
        options = replace(self._options, rows_per_task=rows_per_task)
        self._opened.append(QueueStreamReader(options, self.queue.record, SCHEMA))
        return self._opened[-1]

    def stop(self) -> None:
        for reader in self._opened:
            reader.stop()


@pytest.fixture
def readers(store: Store, store_url: str, consumer: str | None) -> Iterator[Readers]:
    found = Readers(store, store_url, consumer)
    yield found
    found.stop()


def logged(offset: Json) -> Json:
    """An offset as it comes back from Spark's log."""
    return dict(json.loads(json.dumps(offset)))


def first_batch(reader: QueueStreamReader) -> tuple[Json, Json]:
    """The offsets that the first micro-batch of a query begins and ends with."""
    begin = logged(reader.initialOffset())
    return begin, logged(reader.latestOffset(begin, ReadAllAvailable()))


def tasks(reader: QueueStreamReader, begin: Json, end: Json) -> list[tuple[int, int, int]]:
    """The partition and the rows [start, end) of each task of a micro-batch."""
    found: Any = reader.partitions(begin, end)
    return [tuple(each) for task in found for each in task.ranges]


@consumers
def test_another_run_splits_a_logged_micro_batch_as_the_first_run_did(readers: Readers) -> None:
    fill(readers.queue, range(5))
    fill(readers.queue, range(10, 13), partition=1)
    first = readers.reader(2)
    begin, end = first_batch(first)
    divided = tasks(first, begin, end)
    assert divided == [(0, 0, 1), (0, 1, 3), (0, 3, 5), (1, 0, 1), (1, 1, 3)]
    for rows_per_task in (1, 3, 4, 1_000):
        assert tasks(readers.reader(rows_per_task), begin, end) == divided


@consumers
def test_the_next_micro_batch_is_split_by_the_current_options(readers: Readers) -> None:
    fill(readers.queue, range(4))
    first = readers.reader(2)
    begin, end = first_batch(first)
    assert tasks(first, begin, end) == [(0, 0, 2), (0, 2, 4)]
    fill(readers.queue, range(4, 9))
    second = readers.reader(3)
    next_end = logged(second.latestOffset(end, ReadAllAvailable()))
    assert tasks(second, end, next_end) == [(0, 4, 6), (0, 6, 9)]


@consumers
def test_an_offset_without_rows_per_task_is_split_by_the_current_options(readers: Readers) -> None:
    """An earlier version logged it."""
    fill(readers.queue, range(4))
    begin, end = first_batch(readers.reader(2))
    del end["rowsPerTask"]
    assert tasks(readers.reader(4), begin, end) == [(0, 0, 4)]


@one_store
@consumers
def test_a_partly_written_micro_batch_completes_once_with_other_options(
    spark: SparkSession, store: Store, store_url: str, tmp_path: Path, consumer: str | None
) -> None:
    queue, out = make_queue(store), make_queue(store, "out")
    queue.register(store.create_consumer("billing").name)
    source = {"consumer": consumer} if consumer else {}
    fill(queue, range(12))
    frame = stream(spark, store_url, rowsPerTask=2, **source)
    fails = frame.where("if(id = 11, raise_error('out of luck'), true)")
    said = failure(start(fails, store_url, "out", tmp_path / "ck", guarantee="idempotent"))
    assert "out of luck" in said
    written = ids_in(out)
    assert 0 < len(written) < 12
    assert len(written) % 2 == 0, "tasks of two rows"
    for number, rows_per_task in enumerate((5, 1_000, 1)):
        again = stream(spark, store_url, rowsPerTask=rows_per_task, **source)
        run(again, store_url, "out", tmp_path / "ck", guarantee="idempotent")
        assert sorted(ids_in(out)) == list(range(12))
        if number < 2:
            assert replay_last_batch(tmp_path / "ck") == 0
    if consumer:
        assert store.consumer("billing").lag("orders").rows == 0
