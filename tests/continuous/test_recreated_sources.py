"""The source queue is dropped and recreated while a continuous query runs, or between its runs."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest

from penstock.continuous.driver import execution
from penstock.continuous.driver.execution import ContinuousExecution
from penstock.errors import CheckpointMismatchError, PenstockError, SchemaMismatchError
from tests.continuous.queue_copy import SCHEMA, TIMEOUT, Copy


@pytest.fixture
def copy_without_consumer(copy: Copy) -> Copy:
    """Copy that reads without a consumer. A consumer's registration would be dropped with the queue."""
    copy.consumer = None
    copy.store.consumer("c").unregister("in")
    return copy


def recreate(copy: Copy, count: int = 20) -> None:
    """Recreate the source queue with more rows than it had. Their ids start at 1000."""
    copy.store.drop_queue("in")
    copy.queue = copy.store.create_queue("in", SCHEMA, partitions=2)
    for partition in range(2):
        first = 1_000 + partition * count
        copy.queue.append([{"id": number} for number in range(first, first + count)], partition=partition)


def check_refused(copy: Copy, query: ContinuousExecution) -> None:
    """Check that a query ends because its queue was recreated, and has written none of the new rows."""
    assert query.join(TIMEOUT)
    assert isinstance(query.failure, CheckpointMismatchError), query.failure
    assert "was dropped and recreated" in str(query.failure)
    assert query.failure.parameters["field"] == "generation"
    assert all(number < 1_000 for number in copy.ids())


def test_a_queue_recreated_between_two_runs_is_refused(copy_without_consumer: Copy) -> None:
    query = copy_without_consumer.add().create_query()
    copy_without_consumer.wait_until_committed(query)
    assert query.stop()
    recreate(copy_without_consumer)
    for _ in range(2):
        check_refused(copy_without_consumer, copy_without_consumer.create_query())
    assert copy_without_consumer.ids() == copy_without_consumer.expected_ids()


def test_a_queue_recreated_before_an_epoch_is_planned_is_refused(
    copy_without_consumer: Copy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rows of the epoch were read from the dropped queue."""
    monkeypatch.setattr(execution, "_FIRST_BACK_OFF_SECONDS", 0.001)
    generation = copy_without_consumer.queue.record.generation
    query = copy_without_consumer.create_query(start=False)
    plan = query.source.plan

    def recreate_and_plan(*args: object) -> Any:
        if copy_without_consumer.queue.record.generation == generation:
            recreate(copy_without_consumer)
        return plan(*args)

    monkeypatch.setattr(query.source, "plan", recreate_and_plan)
    copy_without_consumer.add()
    query.start()
    assert query.join(TIMEOUT), query.state
    assert isinstance(query.failure, PenstockError)
    assert query.failure.condition == "CHECKPOINT_MISMATCH.OTHER_SOURCE"
    assert copy_without_consumer.ids() == []


def test_a_queue_recreated_before_a_run_is_repeated_is_refused(
    copy_without_consumer: Copy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A task fails, and the queue is recreated before its run is repeated."""
    monkeypatch.setattr(execution, "_FIRST_BACK_OFF_SECONDS", 0.001)
    query = copy_without_consumer.add().create_query()
    copy_without_consumer.wait_until_committed(query)
    take_ownership = query.source.take_ownership

    def recreate_and_take_ownership() -> None:
        recreate(copy_without_consumer)
        take_ownership()

    monkeypatch.setattr(query.source, "take_ownership", recreate_and_take_ownership)
    assert query.coordinator is not None
    query.coordinator.close()
    check_refused(copy_without_consumer, query)
    assert copy_without_consumer.ids() == copy_without_consumer.expected_ids()


@pytest.mark.parametrize(
    "fields", [[("other", pa.int64())], [("id", pa.string())]], ids=["another column", "another type"]
)
def test_a_queue_recreated_with_other_columns_while_the_query_starts_is_refused_by_name(
    copy_without_consumer: Copy, fields: list[tuple[str, pa.DataType]]
) -> None:
    query = copy_without_consumer.create_query(start=False)
    assert query.source.schema == SCHEMA
    copy_without_consumer.store.drop_queue("in")
    copy_without_consumer.queue = copy_without_consumer.store.create_queue("in", pa.schema(fields))
    copy_without_consumer.queue.append([{fields[0][0]: None}])
    query.start()
    assert query.join(TIMEOUT)
    assert isinstance(query.failure, SchemaMismatchError), query.failure
    assert query.failure.condition == "SCHEMA_MISMATCH.QUEUE_RECREATED"
    assert query.failure.parameters["column"] == "id"
