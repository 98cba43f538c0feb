"""Continuous queries write exactly as many rows as their limit, across tasks, restarts and crashes."""

from __future__ import annotations

import threading

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.continuous.channel import READER, WRITER
from penstock.continuous.driver import execution
from penstock.continuous.driver.coordinator import EpochCoordinator, Limit, Quota
from penstock.continuous.driver.epochs import Epochs
from penstock.continuous.driver.execution import State
from penstock.errors import CheckpointMismatchError
from penstock.json_text import Json
from penstock.spark.driver_endpoint import LOOPBACK, DriverNetwork
from tests.continuous.queue_copy import TIMEOUT, Copy, run_until_crash_after
from tests.support.waiting import wait_until


def check_rows(copy: Copy, rows: int) -> None:
    """Check the number of rows, and that they are the first ones of each partition."""
    assert len(copy.ids()) == rows
    partitions = [part.partition for part in copy.queue.info().partitions]
    source_ids = [copy.queue.read(partition, 0)["id"].to_pylist() for partition in partitions]
    for expected in source_ids:
        copied = [row_id for ids in copy.ids_by_partition() for row_id in ids if row_id in set(expected)]
        assert copied == expected[: len(copied)]


def run_until_limit(copy: Copy, rows: int) -> None:
    """Run a query until its limit ends it."""
    query = copy.create_query(limit=Limit(rows))
    assert query.join(TIMEOUT)
    assert query.failure is None
    assert query.state is State.TERMINATED


def test_a_query_ends_when_it_has_written_exactly_the_rows_of_its_limit(copy: Copy) -> None:
    run_until_limit(copy.add(40), 11)
    check_rows(copy, 11)


def test_a_limit_may_be_reached_before_the_driver_is_informed_of_the_rows(
    copy: Copy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Readers and writers have separate connections."""
    receive, is_drained, checked = EpochCoordinator.receive, EpochCoordinator.is_drained, threading.Event()

    def receive_sent_late(self: EpochCoordinator, role: str, task: int, message: Json) -> bool:
        if message["kind"] == "sent":
            checked.wait(TIMEOUT)
        return receive(self, role, task, message)

    def check_drained(self: EpochCoordinator) -> bool:
        result = is_drained.fget(self)  # type: ignore[attr-defined] # is_drained is a property
        checked.set()
        return bool(result)

    monkeypatch.setattr(EpochCoordinator, "receive", receive_sent_late)
    monkeypatch.setattr(EpochCoordinator, "is_drained", property(check_drained))
    run_until_limit(copy.add(40), 11)
    check_rows(copy, 11)


def test_a_query_that_continues_after_its_limit_drops_further_rows(copy: Copy) -> None:
    query = copy.add(40).create_query(limit=Limit(11, stops=False))
    copy.wait_until_committed(query)
    copy.add(4)
    copy.wait_until_committed(query)
    assert query.state is State.ACTIVE
    check_rows(copy, 11)


def test_the_count_continues_across_restarts_and_with_another_limit(copy: Copy) -> None:
    query = copy.add(6).create_query(limit=Limit(10))
    copy.wait_until_committed(query)
    assert query.stop()
    run_until_limit(copy.add(30), 10)
    check_rows(copy, 10)
    run_until_limit(copy, 10)
    run_until_limit(copy, 4)
    assert len(copy.ids()) == 10
    run_until_limit(copy.add(30), 15)
    assert len(copy.ids()) == 15


def test_a_checkpoint_that_began_without_a_limit_is_refused(copy: Copy) -> None:
    query = copy.add().create_query()
    copy.wait_until_committed(query)
    query.stop()
    limited = copy.create_query(limit=Limit(10))
    assert limited.join(TIMEOUT)
    assert isinstance(limited.failure, CheckpointMismatchError)


def test_the_share_of_a_failed_task_is_written_by_the_next_run(
    copy: Copy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(execution, "_FIRST_BACK_OFF_SECONDS", 0.001)
    failures: list[bool] = []

    def fail(batch: pa.RecordBatch) -> pa.RecordBatch:
        if failures and failures.pop():
            raise RuntimeError("transient failure")
        return batch

    query = copy.add().create_query(limit=Limit(30), transform=fail)
    copy.wait_until_committed(query)
    failures += [True, False, True]
    copy.add(40)
    assert query.join(TIMEOUT)
    assert query.failure is None
    assert not failures
    check_rows(copy, 30)


@pytest.mark.parametrize("step", ["offset", "sink", "commit"])
def test_a_driver_that_dies_at_any_step_of_an_epoch_changes_nothing(
    copy: Copy, step: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    query = copy.add(20).create_query(start=False, limit=Limit(12))
    component_and_method = {
        "offset": (query.checkpoint, "write_offset"),
        "sink": (query.sink, "commit"),
        "commit": (query.checkpoint, "write_commit"),
    }[step]
    run_until_crash_after(monkeypatch, query, *component_and_method)
    run_until_limit(copy.add(20), 12)
    check_rows(copy, 12)


def test_rows_of_an_epoch_are_counted_after_those_of_the_previous_one() -> None:
    """If the run ended in between, rows dropped in the first epoch would be the last of their partition."""
    coordinator = EpochCoordinator(DriverNetwork(LOOPBACK, LOOPBACK), Epochs(2, 0, 10))
    coordinator.quota = Quota(10)
    (slow, slow_writer), (fast, fast_writer) = (
        [coordinator.address.open(role, task) for role in (READER, WRITER)] for task in range(2)
    )
    coordinator.await_tasks(TIMEOUT, lambda: True)
    slow.send("sent")
    wait_until(lambda: coordinator.begin() is not None, TIMEOUT, "rows were sent")
    slow.send("read", number=0, offsets={"0": 6}, rows=6, times=[], last_times={})
    fast.send("read", number=0, offsets={"1": 0}, rows=0, times=[], last_times={})
    fast_writer.send("want", number=1, rows=6)
    assert fast_writer.receive(0.2) is None
    slow_writer.send("want", number=0, rows=6)
    assert slow_writer.receive(TIMEOUT) == {"kind": "granted", "rows": 6}
    assert fast_writer.receive(0.2) is None
    slow_writer.send("wrote", number=0, attempts={}, rows=6, written=[])
    assert fast_writer.receive(TIMEOUT) == {"kind": "granted", "rows": 4}
    coordinator.close()


@given(
    left=st.integers(0, 50),
    wanted=st.lists(st.integers(1, 20), max_size=20),
)
@settings(max_examples=50, deadline=None)
def test_a_quota_grants_no_more_than_what_is_left(left: int, wanted: list[int]) -> None:
    quota = Quota(left)
    granted = [quota.take(rows) for rows in wanted]
    assert sum(granted) == min(left, sum(wanted))
    assert all(0 <= rows <= wanted_rows for rows, wanted_rows in zip(granted, wanted, strict=True))
    assert quota.exhausted == (sum(wanted) >= left)
