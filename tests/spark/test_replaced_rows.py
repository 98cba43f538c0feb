"""A query notices when its queue has other rows than those in its checkpoint: the store was restored from an
older backup and has grown again, or the queue was recreated.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
from pyspark.sql.datasource import InputPartition
from pyspark.sql.streaming.datasource import ReadAllAvailable

import penstock
from penstock import Store
from penstock.errors import CheckpointMismatchError
from penstock.json_text import Json
from penstock.spark.options import SourceOptions
from penstock.spark.stream_reader import QueueStreamReader
from penstock.store.log.segmenting import Runs
from tests.support.spark_queues import SCHEMA, fill, make_queue

consumers = pytest.mark.parametrize("consumer", ["billing", None])
Open = Callable[..., QueueStreamReader]


@pytest.fixture
def reader(store: Store, store_url: str, consumer: str | None) -> Iterator[Open]:
    """Open the reader of the query's next run."""
    opened: list[QueueStreamReader] = []

    def open_reader(**options: Any) -> QueueStreamReader:
        for earlier in opened:
            earlier.stop()
        queue = store.queue("orders")
        opened.append(
            QueueStreamReader(SourceOptions(store_url, "orders", consumer, **options), queue.record, SCHEMA)
        )
        return opened[-1]

    yield open_reader
    for each in opened:
        each.stop()


@pytest.fixture
def orders(store: Store) -> penstock.Queue:
    queue = make_queue(store, partitions=2)
    store.create_consumer("billing").register("orders")
    fill(queue, range(6), each=2)
    return queue


def next_offset(reader: QueueStreamReader, start: Json | None = None) -> tuple[Json, Json]:
    """The offsets between which the next micro-batch reads, as they come back from Spark's log."""
    begin = reader.initialOffset() if start is None else start
    end = reader.latestOffset(begin, ReadAllAvailable())
    return json.loads(json.dumps(begin)), json.loads(json.dumps(end))


def of_other_rows(offset: Json) -> Json:
    """The offset as it would be if the queue had had other rows then, which were appended a minute before."""
    return {**offset, "times": [None if time is None else time - 60_000_000 for time in offset["times"]]}


def refusal(action: Callable[[], object]) -> str:
    with pytest.raises(CheckpointMismatchError) as caught:
        action()
    return caught.value.condition


@consumers
def test_a_micro_batch_is_not_repeated_with_other_rows(orders: penstock.Queue, reader: Open) -> None:
    begin, end = next_offset(reader())
    assert (
        refusal(lambda: reader().partitions(begin, of_other_rows(end))) == "CHECKPOINT_MISMATCH.SOURCE_BEHIND"
    )
    assert len(reader().partitions(begin, end)) == 1


def ids_read(reader: QueueStreamReader, tasks: Sequence[InputPartition]) -> list[int]:
    return [each for task in tasks for batch in reader.read(task) for each in batch["id"].to_pylist()]


@consumers
@pytest.mark.parametrize("rows_per_task", [2, 100])
@pytest.mark.parametrize("compacted", [False, True])
def test_tasks_refuse_rows_that_were_replaced_after_they_were_planned(
    orders: penstock.Queue, reader: Open, rows_per_task: int, compacted: bool
) -> None:
    """The driver runs on while the store is restored, and its tasks read under the same indexes."""
    opened = reader(rows_per_task=rows_per_task, max_rows_per_trigger=5)
    begin, end = next_offset(opened)
    tasks = opened.partitions(begin, end)
    if compacted:
        orders.compact()
    assert ids_read(opened, tasks) == [0, 1, 2, 3, 4]
    last = end["times"][0]
    for part in tasks:
        assert part.last_row_times == {(0, 5): last}, "the last row of the micro-batch, not of the task"
        part.last_row_times = {(0, 5): last - 60_000_000}
        assert refusal(lambda part=part: list(opened.read(part))) == "CHECKPOINT_MISMATCH.SOURCE_BEHIND"


@pytest.mark.parametrize("consumer", [None])
def test_tasks_do_not_miss_rows_that_were_trimmed_after_they_were_planned(
    orders: penstock.Queue, reader: Open
) -> None:
    opened = reader(fail_on_data_loss=False)
    begin, end = next_offset(opened)
    tasks = opened.partitions(begin, end)
    orders.trim(0, 6)
    assert ids_read(opened, tasks) == []


@pytest.mark.parametrize("consumer", [None])
def test_a_query_does_not_resume_after_rows_that_were_replaced(orders: penstock.Queue, reader: Open) -> None:
    _, end = next_offset(reader())
    fill(orders, [9])
    replaced = refusal(lambda: next_offset(reader(), of_other_rows(end)))
    assert replaced == "CHECKPOINT_MISMATCH.SOURCE_BEHIND"
    assert next_offset(reader(), end)[1]["to"] == [7, 0]


@pytest.mark.parametrize("consumer", [None])
def test_a_planned_micro_batch_of_a_recreated_queue_is_refused(
    store: Store, orders: penstock.Queue, reader: Open
) -> None:
    begin, end = next_offset(reader())
    store.drop_queue("orders")
    fill(make_queue(store, partitions=2), range(10, 16))
    assert refusal(lambda: reader().partitions(begin, end)) == "CHECKPOINT_MISMATCH.OTHER_SOURCE"


@pytest.mark.parametrize("consumer", [None])
@pytest.mark.parametrize("change", ["compact", "trim"])
def test_rows_that_were_compacted_or_trimmed_meanwhile_are_the_same_rows(
    orders: penstock.Queue, reader: Open, change: str
) -> None:
    begin, end = next_offset(reader(max_rows_per_trigger=3, fail_on_data_loss=False))
    assert end["to"] == [3, 0]
    if change == "compact":
        orders.compact()
    else:
        orders.trim(0, 6)
    again = reader(max_rows_per_trigger=3, fail_on_data_loss=False)
    assert next_offset(again, end)[1]["to"] == [6, 0]
    assert again.partitions(begin, end)


@pytest.mark.parametrize("consumer", [None])
def test_a_micro_batch_that_ends_inside_a_compacted_segment_is_repeated(
    orders: penstock.Queue, reader: Open
) -> None:
    _, before = next_offset(reader(max_rows_per_trigger=3))
    orders.compact()
    begin, end = next_offset(reader(max_rows_per_trigger=3))
    assert end["times"] == before["times"], "of the row itself, not of the segment"
    assert reader().partitions(begin, end)


@consumers
def test_other_rows_in_a_compacted_segment_are_not_taken_for_those_that_were_read(
    orders: penstock.Queue, reader: Open
) -> None:
    """Their segment was compacted from rows that were appended before and after those that are gone."""
    begin, end = next_offset(reader(max_rows_per_trigger=3))
    orders.compact()
    replaced = {**end, "times": [end["times"][0] + 1, None]}
    assert refusal(lambda: reader().partitions(begin, replaced)) == "CHECKPOINT_MISMATCH.SOURCE_BEHIND"
    assert reader().partitions(begin, end)


@pytest.mark.parametrize("consumer", [None])
def test_a_compacted_segment_is_looked_into_once(
    orders: penstock.Queue, reader: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, end = next_offset(reader())
    fill(orders, [9])
    orders.compact()
    looked = []
    timestamp_at = Runs.timestamp_at
    monkeypatch.setattr(Runs, "timestamp_at", lambda runs, row: looked.append(row) or timestamp_at(runs, row))
    again = reader()
    for _ in range(3):
        next_offset(again, end)
    assert looked == [5]
