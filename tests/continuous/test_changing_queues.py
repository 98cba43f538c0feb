"""Queues that change under a continuous query: a source that is recreated, an owner that changes."""

from __future__ import annotations

import pyarrow as pa
import pytest

from penstock.continuous import execution, queues, reader
from penstock.errors import CheckpointMismatch, OwnerFenced, PenstockError
from tests.continuous.copying import PATIENCE, SCHEMA, Copy
from tests.support.waiting import wait_until


def test_a_source_that_is_recreated_is_refused_and_not_read_from_its_middle(copy: Copy) -> None:
    copy.consumer = None
    query = copy.add(6).query()
    copy.through(query)
    query.stop()
    copy.store.drop_queue("in")
    copy.queue = copy.store.create_queue("in", SCHEMA, partitions=2)
    copy.queue.append(pa.table({"id": range(100, 110)}), partition=0)
    later = copy.query()
    assert later.join(PATIENCE)
    assert isinstance(later.failure, CheckpointMismatch)
    assert copy.ids() == list(range(6))


def test_an_epoch_is_planned_for_the_queue_that_its_rows_came_from(
    copy: Copy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The queue is dropped and recreated between the reading of rows and the plan."""
    copy.consumer = None
    query = copy.query(start=False)
    plan, seen = query._source.plan, []

    def planning(start: dict[int, int], end: dict[int, int]) -> object:
        if not seen:
            before = copy.queue.record.generation
            copy.store.drop_queue("in")
            copy.store.create_queue("in", SCHEMA, partitions=2).append([{"id": 100}], partition=0)
            seen.append(before)
        found: dict[str, object] = plan(start, end)
        seen.append(found["generation"])
        return found

    monkeypatch.setattr(query._source, "plan", planning)
    copy.add(4)
    query.start()
    assert query.join(PATIENCE)
    assert isinstance(query.failure, PenstockError)
    assert set(seen) == {seen[0]}
    assert copy.ids() in ([], list(range(4)))


def test_an_idle_query_notices_that_another_one_has_taken_over(
    copy: Copy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(execution, "_IDLE_SECONDS", 0.05)
    first = copy.add(2).query()
    copy.through(first)
    copy.query()
    assert first.join(PATIENCE)
    assert isinstance(first.failure, OwnerFenced)


def test_a_table_of_staged_rows_outlives_a_change_of_pace(
    copy: Copy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next run is prepared while epochs of this one are open: nothing of theirs may go."""
    monkeypatch.setattr(reader, "BEHIND_ROWS", 8)
    monkeypatch.setattr(queues, "_AHEAD_ROWS", 2)
    query = copy.add(80).query(start=False)
    cleared: list[bool] = []
    monkeypatch.setattr(query._sink, "clear", lambda: cleared.append(query._coordinator is None))
    query.start()
    copy.through(query)
    wait_until(lambda: len(copy.engine.jobs) >= 3)
    assert cleared
    assert all(cleared), "only where no run is at work"
    assert copy.ids() == copy.all()
