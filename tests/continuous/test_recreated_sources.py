"""A source queue that is dropped and recreated under a continuous query, or between its runs."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest

from penstock.continuous.driver import execution as module
from penstock.continuous.driver.execution import ContinuousExecution
from penstock.errors import CheckpointMismatchError, PenstockError, SchemaMismatchError
from tests.continuous.copying import PATIENCE, SCHEMA, Copy


@pytest.fixture
def free(copy: Copy) -> Copy:
    """A copy that reads without a consumer, whose registration would be dropped with the queue."""
    copy.consumer = None
    copy.store.consumer("c").unregister("in")
    return copy


def recreate(copy: Copy, count: int = 20) -> None:
    """Recreate the source queue with more rows than the old one had: ids from 1000 on."""
    copy.store.drop_queue("in")
    copy.queue = copy.store.create_queue("in", SCHEMA, partitions=2)
    for partition in range(2):
        first = 1_000 + partition * count
        copy.queue.append([{"id": number} for number in range(first, first + count)], partition=partition)


def check_refused(copy: Copy, query: ContinuousExecution) -> None:
    """Check that a query ends as the queue is another one, without any of its rows."""
    assert query.join(PATIENCE)
    assert isinstance(query.failure, CheckpointMismatchError), query.failure
    assert "was dropped and recreated" in str(query.failure)
    assert query.failure.parameters["field"] == "generation"
    assert all(number < 1_000 for number in copy.ids())


def test_a_queue_recreated_between_two_runs_is_refused(free: Copy) -> None:
    query = free.add().query()
    free.through(query)
    assert query.stop()
    recreate(free)
    for _ in range(2):
        check_refused(free, free.query())
    assert free.ids() == free.all()


def test_a_queue_recreated_before_an_epoch_is_planned_is_refused(
    free: Copy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its rows were read from a queue that is gone."""
    monkeypatch.setattr(module, "_FIRST_BACK_OFF_SECONDS", 0.001)
    generation = free.queue.record.generation
    query = free.query(start=False)
    plan = query.source.plan

    def late(*arguments: object) -> Any:
        if free.queue.record.generation == generation:
            recreate(free)
        return plan(*arguments)

    monkeypatch.setattr(query.source, "plan", late)
    free.add()
    query.start()
    assert query.join(PATIENCE), query.state
    assert isinstance(query.failure, PenstockError)
    assert query.failure.condition == "CHECKPOINT_MISMATCH.OTHER_SOURCE"
    assert free.ids() == []


def test_a_queue_recreated_before_a_run_is_repeated_is_refused(
    free: Copy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A task fails, and the queue is recreated before its run is repeated."""
    monkeypatch.setattr(module, "_FIRST_BACK_OFF_SECONDS", 0.001)
    query = free.add().query()
    free.through(query)
    own = query.source.take_ownership

    def late() -> None:
        recreate(free)
        own()

    monkeypatch.setattr(query.source, "take_ownership", late)
    assert query.coordinator is not None
    query.coordinator.close()
    check_refused(free, query)
    assert free.ids() == free.all()


@pytest.mark.parametrize(
    "fields", [[("other", pa.int64())], [("id", pa.string())]], ids=["another column", "another type"]
)
def test_a_queue_recreated_with_other_columns_while_the_query_starts_is_refused_by_name(
    free: Copy, fields: list[tuple[str, pa.DataType]]
) -> None:
    query = free.query(start=False)
    assert query.source.schema == SCHEMA
    free.store.drop_queue("in")
    free.queue = free.store.create_queue("in", pa.schema(fields))
    free.queue.append([{fields[0][0]: None}])
    query.start()
    assert query.join(PATIENCE)
    assert isinstance(query.failure, SchemaMismatchError), query.failure
    assert query.failure.condition == "SCHEMA_MISMATCH.QUEUE_RECREATED"
    assert query.failure.parameters["column"] == "id"
