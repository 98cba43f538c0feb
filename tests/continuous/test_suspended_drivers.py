"""Drivers that are suspended around the commit of an epoch, and resume when another one has taken over."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.continuous.connectors.protocol import Epoch
from penstock.continuous.connectors.queue import QueueSinkDriver
from penstock.continuous.driver import execution as module
from penstock.continuous.driver.checkpoint_log import CheckpointLog
from penstock.continuous.driver.execution import ContinuousExecution, State
from penstock.errors import OwnerFencedError, PlanMismatchError
from penstock.store import staging
from tests.continuous.copying import PATIENCE, Copy, Pause
from tests.support.waiting import wait_until

STEPS = {
    "before the plan": ("source", "plan", False),
    "before the sink's commit": ("sink", "commit", False),
    "behind the sink's commit": ("sink", "commit", True),
    "behind the entry of its offset": ("checkpoint", "write_offset", True),
}
steps = pytest.mark.parametrize("step", STEPS)
consumers = pytest.mark.parametrize("consumer", ["c", None])


def standing(copy: Copy, monkeypatch: pytest.MonkeyPatch, step: str) -> tuple[ContinuousExecution, Pause]:
    """Start a query that has committed an epoch, and whose driver is suspended in the next one."""
    part, method, after = STEPS[step]
    query = copy.add().query()
    copy.through(query)
    pause = Pause(monkeypatch, getattr(query, part), method, after=after)
    copy.add()
    pause.reached()
    return query, pause


def check_fenced(query: ContinuousExecution) -> None:
    """Check that it has ended because another driver took over."""
    assert query.join(PATIENCE)
    assert isinstance(query.failure, OwnerFencedError | PlanMismatchError), query.failure


def check_goes_on(copy: Copy, query: ContinuousExecution) -> None:
    """Check that all rows are there once, later ones included."""
    copy.through(copy.add() and query)
    assert copy.ids() == copy.all()
    assert query.state is State.ACTIVE


@pytest.mark.few(12)
@steps
@consumers
@pytest.mark.parametrize("more", [0, 4])
@pytest.mark.parametrize("plans", [False, True])
def test_a_driver_that_resumes_after_another_has_taken_over_is_fenced(
    copy: Copy, monkeypatch: pytest.MonkeyPatch, step: str, consumer: str | None, more: int, plans: bool
) -> None:
    copy.consumer, copy.plans = consumer, plans
    first, pause = standing(copy, monkeypatch, step)
    second = copy.query()
    copy.through(copy.add(more) and second)
    pause.wake()
    check_fenced(first)
    check_goes_on(copy, second)


@steps
def test_a_driver_that_resumes_before_its_successor_has_committed_anything_is_fenced(
    copy: Copy, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    first, pause = standing(copy, monkeypatch, step)
    second = copy.query(start=False)
    later = Pause(monkeypatch, second.sink, "commit")
    second.start()
    copy.add()
    later.reached()
    pause.wake()
    check_fenced(first)
    later.wake()
    check_goes_on(copy, second)


@steps
def test_of_two_drivers_without_a_consumer_one_continues_whichever_commits_first(
    copy: Copy, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    copy.consumer = None
    first, pause = standing(copy, monkeypatch, step)
    second = copy.query(start=False)
    later = Pause(monkeypatch, second.sink, "commit")
    second.start()
    copy.add()
    later.reached()
    pause.wake()
    wait_until(
        lambda: first.failure or max(copy.files("commits")) > 0, PATIENCE, "the first one commits or ends"
    )
    later.wake()
    ended = wait_until(lambda: [query for query in (first, second) if query.failure], PATIENCE)
    (other,) = {first, second} - set(ended)
    check_fenced(*ended)
    check_goes_on(copy, other)


@consumers
def test_a_driver_that_resumes_while_its_successor_recovers_does_not_stop_it(
    copy: Copy, monkeypatch: pytest.MonkeyPatch, consumer: str | None
) -> None:
    """Both log the epoch that is in the sink: it is the same one."""
    copy.consumer = consumer
    first, pause = standing(copy, monkeypatch, "behind the sink's commit")
    second = copy.query(start=False)
    write = second.checkpoint.write_offset

    def late(number: int, *given: object, **named: object) -> None:
        pause.wake()
        wait_until(lambda: number in copy.files("commits"), PATIENCE, "the first one has logged it")
        write(number, *given, **named)

    monkeypatch.setattr(second.checkpoint, "write_offset", late)
    second.start()
    monkeypatch.setattr(second.checkpoint, "write_offset", write)
    assert second.failure is None
    copy.add()
    ended = wait_until(lambda: [query for query in (first, second) if query.failure], PATIENCE)
    (other,) = {first, second} - set(ended)
    check_fenced(*ended)
    check_goes_on(copy, other)


@consumers
def test_a_resumed_driver_whose_tasks_have_ended_does_not_take_over_again(
    copy: Copy, monkeypatch: pytest.MonkeyPatch, consumer: str | None
) -> None:
    """Its run is to be repeated, and another driver has committed meanwhile."""
    copy.consumer = consumer
    first = copy.add().query()
    copy.through(first)
    coordinator = first.coordinator
    assert coordinator is not None
    pause = Pause(monkeypatch, coordinator, "next_complete")
    pause.reached()
    second = copy.query()
    copy.through(copy.add() and second)
    coordinator.close()
    pause.wake()
    check_fenced(first)
    check_goes_on(copy, second)


def test_a_resumed_driver_without_a_successor_repeats_its_run(
    copy: Copy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_FIRST_BACK_OFF_SECONDS", 0.001)
    write, failed = CheckpointLog.write_commit, set[int]()

    def fails(self: CheckpointLog, number: int) -> None:
        write(self, number)
        if len(failed) < 2 and number not in failed:
            failed.add(number)
            raise OSError("the network is gone, and the entry is there")

    monkeypatch.setattr(CheckpointLog, "write_commit", fails)
    query = copy.query()
    for _ in range(3):
        copy.through(copy.add() and query)
    check_goes_on(copy, query)
    assert len(failed) == 2


def test_an_epoch_whose_staged_rows_are_gone_is_read_again(
    copy: Copy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Maintenance took the driver for dead while it was suspended."""
    monkeypatch.setattr(module, "_FIRST_BACK_OFF_SECONDS", 0.001)
    commit, lost = QueueSinkDriver.commit, list[int]()

    def commits_later(self: QueueSinkDriver, writers: Any, epoch: Epoch, offset: Any) -> None:
        if not lost:
            lost.append(epoch.number)
            copy.store.database.run(
                lambda tx: staging.discard(tx, copy.out.record, writers.app_id, epoch.number)
            )
        commit(self, writers, epoch, offset)

    monkeypatch.setattr(QueueSinkDriver, "commit", commits_later)
    query = copy.query()
    copy.through(copy.add() and query)
    check_goes_on(copy, query)
    assert lost
