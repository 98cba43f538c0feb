"""A micro-batch that is repeated has the tasks that it had, whatever the options say by then."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.spark.options import SourceOptions
from penstock.spark.schemas import source_schema
from penstock.spark.stream_reader import QueueStreamReader
from tests.spark.support import fill, make_queue


@pytest.mark.parametrize("consumer", ["billing", None])
def test_the_tasks_of_a_micro_batch_follow_from_its_offset(
    store: Any, store_url: str, consumer: str | None
) -> None:
    queue = make_queue(store)
    fill(queue, range(10))
    if consumer is not None:
        queue.register(store.create_consumer(consumer).name)

    def reader(rows_per_task: int) -> QueueStreamReader:
        options = SourceOptions(store_url, queue.name, consumer, rows_per_task=rows_per_task)
        return QueueStreamReader(options, queue.record, source_schema(queue.schema, False))

    first = reader(4)
    start = first.initialOffset()
    end = first.latestOffset(start, None)  # type: ignore[arg-type]  # it has limits of its own
    tasks = [repr(task) for task in first.partitions(start, end)]
    first.stop()
    assert len(tasks) > 1
    for rows_per_task in (2, 3, 100):
        again = reader(rows_per_task)
        assert [repr(task) for task in again.partitions(start, end)] == tasks
        again.stop()
    fill(queue, range(10, 20))
    later = reader(100)
    next_end = later.latestOffset(end, None)  # type: ignore[arg-type]  # as above
    assert len(later.partitions(end, next_end)) < len(tasks), "the next one is divided as the options say"
    later.stop()
