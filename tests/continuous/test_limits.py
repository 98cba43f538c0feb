"""Limits of continuous queries: exactly that many rows, across tasks, restarts and crashes."""

from __future__ import annotations

import threading

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.continuous.channel import READER, WRITER
from penstock.continuous.driver import execution as module
from penstock.continuous.driver.coordinator import EpochCoordinator, Limit, Quota
from penstock.continuous.driver.epochs import Epochs
from penstock.continuous.driver.execution import State
from penstock.errors import CheckpointMismatchError
from penstock.json_text import Json
from penstock.spark.driver_endpoint import LOOPBACK, DriverNetwork
from tests.continuous.copying import PATIENCE, Copy, die_behind
from tests.support.waiting import wait_until


def check(copy: Copy, rows: int) -> None:
    """Check that there are so many rows, the first ones of each partition."""
    assert len(copy.ids()) == rows
    places = [part.partition for part in copy.queue.info().partitions]
    there = [copy.queue.read(place, 0)["id"].to_pylist() for place in places]
    for before in there:
        of_it = [row for found in copy.by_partition() for row in found if row in set(before)]
        assert of_it == before[: len(of_it)]


def ended(copy: Copy, rows: int) -> None:
    """Run a query with a limit until it ends on its own."""
    query = copy.query(limit=Limit(rows))
    assert query.join(PATIENCE)
    assert query.failure is None
    assert query.state is State.TERMINATED


def test_a_query_ends_by_itself_with_exactly_the_rows_of_its_limit(copy: Copy) -> None:
    ended(copy.add(40), 11)
    check(copy, 11)


def test_a_limit_may_be_reached_before_the_driver_is_informed_of_the_rows(
    copy: Copy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Readers and writers have separate connections."""
    hear, settled, looked = EpochCoordinator.receive, EpochCoordinator.is_drained, threading.Event()

    def late(self: EpochCoordinator, role: str, task: int, message: Json) -> bool:
        if message["kind"] == "sent":
            looked.wait(PATIENCE)
        return hear(self, role, task, message)

    def look(self: EpochCoordinator) -> bool:
        found = settled.fget(self)  # type: ignore[attr-defined] # it is a property
        looked.set()
        return bool(found)

    monkeypatch.setattr(EpochCoordinator, "receive", late)
    monkeypatch.setattr(EpochCoordinator, "is_drained", property(look))
    ended(copy.add(40), 11)
    check(copy, 11)


def test_a_query_that_continues_after_its_limit_drops_further_rows(copy: Copy) -> None:
    query = copy.add(40).query(limit=Limit(11, stops=False))
    copy.through(query)
    copy.add(4)
    copy.through(query)
    assert query.state is State.ACTIVE
    check(copy, 11)


def test_the_count_continues_across_restarts_and_with_another_limit(copy: Copy) -> None:
    query = copy.add(6).query(limit=Limit(10))
    copy.through(query)
    assert query.stop()
    ended(copy.add(30), 10)
    check(copy, 10)
    ended(copy, 10)
    ended(copy, 4)
    assert len(copy.ids()) == 10
    ended(copy.add(30), 15)
    assert len(copy.ids()) == 15


def test_a_checkpoint_that_began_without_a_limit_is_refused(copy: Copy) -> None:
    query = copy.add().query()
    copy.through(query)
    query.stop()
    limited = copy.query(limit=Limit(10))
    assert limited.join(PATIENCE)
    assert isinstance(limited.failure, CheckpointMismatchError)


def test_the_share_of_a_failed_task_is_written_by_the_next_run(
    copy: Copy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_FIRST_BACK_OFF_SECONDS", 0.001)
    failures: list[bool] = []

    def fails(batch: pa.RecordBatch) -> pa.RecordBatch:
        if failures and failures.pop():
            raise RuntimeError("now and then")
        return batch

    query = copy.add().query(limit=Limit(30), transform=fails)
    copy.through(query)
    failures += [True, False, True]
    copy.add(40)
    assert query.join(PATIENCE)
    assert query.failure is None
    assert not failures
    check(copy, 30)


@pytest.mark.parametrize("step", ["offset", "sink", "commit"])
def test_a_driver_that_dies_at_any_step_of_an_epoch_changes_nothing(
    copy: Copy, step: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    query = copy.add(20).query(start=False, limit=Limit(12))
    where = {
        "offset": (query.checkpoint, "write_offset"),
        "sink": (query.sink, "commit"),
        "commit": (query.checkpoint, "write_commit"),
    }[step]
    die_behind(monkeypatch, query, *where)
    ended(copy.add(20), 12)
    check(copy, 12)


def test_rows_of_an_epoch_are_counted_after_those_of_the_previous_one() -> None:
    """If the run ended in between, rows dropped in the first epoch would be the last of their partition."""
    coordinator = EpochCoordinator(DriverNetwork(LOOPBACK, LOOPBACK), Epochs(2, 0, 10))
    coordinator.quota = Quota(10)
    (slow, slow_writer), (fast, fast_writer) = (
        [coordinator.address.open(role, task) for role in (READER, WRITER)] for task in range(2)
    )
    coordinator.await_tasks(PATIENCE, lambda: True)
    slow.send("sent")
    wait_until(lambda: coordinator.begin() is not None, PATIENCE, "rows were sent")
    slow.send("read", number=0, offsets={"0": 6}, rows=6, times=[], last_times={})
    fast.send("read", number=0, offsets={"1": 0}, rows=0, times=[], last_times={})
    fast_writer.send("want", number=1, rows=6)
    assert fast_writer.receive(0.2) is None
    slow_writer.send("want", number=0, rows=6)
    assert slow_writer.receive(PATIENCE) == {"kind": "granted", "rows": 6}
    assert fast_writer.receive(0.2) is None
    slow_writer.send("wrote", number=0, attempts={}, rows=6, written=[])
    assert fast_writer.receive(PATIENCE) == {"kind": "granted", "rows": 4}
    coordinator.close()


@given(
    left=st.integers(0, 50),
    wanted=st.lists(st.integers(1, 20), max_size=20),
)
@settings(max_examples=50, deadline=None)
def test_a_quota_grants_no_more_than_what_is_left(left: int, wanted: list[int]) -> None:
    quota = Quota(left)
    given_out = [quota.take(rows) for rows in wanted]
    assert sum(given_out) == min(left, sum(wanted))
    assert all(0 <= rows <= most for rows, most in zip(given_out, wanted, strict=True))
    assert quota.exhausted == (sum(wanted) >= left)
