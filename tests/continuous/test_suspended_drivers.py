"""A driver is suspended around the commit of an epoch, and resumes after another driver has taken over."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.continuous.connectors.protocol import Epoch
from penstock.continuous.connectors.queue import QueueSinkDriver
from penstock.continuous.driver import execution
from penstock.continuous.driver.checkpoint_log import CheckpointLog
from penstock.continuous.driver.execution import ContinuousExecution, State
from penstock.errors import OwnerFencedError, PlanMismatchError
from penstock.store import staging
from tests.continuous.queue_copy import TIMEOUT, Copy, Pause
from tests.support.waiting import wait_until

STEPS = {
    "before the plan": ("source", "plan", False),
    "before the sink's commit": ("sink", "commit", False),
    "after the sink's commit": ("sink", "commit", True),
    "after writing the offset": ("checkpoint", "write_offset", True),
}
steps = pytest.mark.parametrize("step", STEPS)
consumers = pytest.mark.parametrize("consumer", ["c", None])


def start_and_suspend(
    copy: Copy, monkeypatch: pytest.MonkeyPatch, step: str
) -> tuple[ContinuousExecution, Pause]:
    """Start a query, and suspend its driver in the epoch after the first one."""
    component, method, after = STEPS[step]
    query = copy.add().create_query()
    copy.wait_until_committed(query)
    pause = Pause(monkeypatch, getattr(query, component), method, after=after)
    copy.add()
    pause.wait_until_suspended()
    return query, pause


def check_fenced(query: ContinuousExecution) -> None:
    """Check that a query has ended because another driver took over."""
    assert query.join(TIMEOUT)
    assert isinstance(query.failure, OwnerFencedError | PlanMismatchError), query.failure


def check_continues(copy: Copy, query: ContinuousExecution) -> None:
    """Check that a query continues, and that each row is copied once."""
    copy.wait_until_committed(copy.add() and query)
    assert copy.ids() == copy.expected_ids()
    assert query.state is State.ACTIVE


@pytest.mark.few(12)
@steps
@consumers
@pytest.mark.parametrize("added_rows", [0, 4])
@pytest.mark.parametrize("stores_plans", [False, True])
def test_a_driver_that_resumes_after_another_has_taken_over_is_fenced(
    copy: Copy,
    monkeypatch: pytest.MonkeyPatch,
    step: str,
    consumer: str | None,
    added_rows: int,
    stores_plans: bool,
) -> None:
    copy.consumer, copy.stores_plans = consumer, stores_plans
    first, pause = start_and_suspend(copy, monkeypatch, step)
    second = copy.create_query()
    copy.wait_until_committed(copy.add(added_rows) and second)
    pause.resume()
    check_fenced(first)
    check_continues(copy, second)


@steps
def test_a_driver_that_resumes_before_its_successor_has_committed_anything_is_fenced(
    copy: Copy, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    first, pause = start_and_suspend(copy, monkeypatch, step)
    second = copy.create_query(start=False)
    second_pause = Pause(monkeypatch, second.sink, "commit")
    second.start()
    copy.add()
    second_pause.wait_until_suspended()
    pause.resume()
    check_fenced(first)
    second_pause.resume()
    check_continues(copy, second)


@steps
def test_of_two_drivers_without_a_consumer_one_continues_whichever_commits_first(
    copy: Copy, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    copy.consumer = None
    first, pause = start_and_suspend(copy, monkeypatch, step)
    second = copy.create_query(start=False)
    second_pause = Pause(monkeypatch, second.sink, "commit")
    second.start()
    copy.add()
    second_pause.wait_until_suspended()
    pause.resume()
    wait_until(
        lambda: first.failure or max(copy.logged_epochs("commits")) > 0,
        TIMEOUT,
        "the first driver commits or ends",
    )
    second_pause.resume()
    fenced = wait_until(lambda: [query for query in (first, second) if query.failure], TIMEOUT)
    (survivor,) = {first, second} - set(fenced)
    check_fenced(*fenced)
    check_continues(copy, survivor)


@consumers
def test_a_driver_that_resumes_while_its_successor_recovers_does_not_stop_it(
    copy: Copy, monkeypatch: pytest.MonkeyPatch, consumer: str | None
) -> None:
    """Both log the epoch that is in the sink, so their entries are equal."""
    copy.consumer = consumer
    first, pause = start_and_suspend(copy, monkeypatch, "after the sink's commit")
    second = copy.create_query(start=False)
    write = second.checkpoint.write_offset

    def resume_first_and_write(number: int, *args: object, **kwargs: object) -> None:
        pause.resume()
        wait_until(
            lambda: number in copy.logged_epochs("commits"), TIMEOUT, "the first driver has logged the epoch"
        )
        write(number, *args, **kwargs)

    monkeypatch.setattr(second.checkpoint, "write_offset", resume_first_and_write)
    second.start()
    monkeypatch.setattr(second.checkpoint, "write_offset", write)
    assert second.failure is None
    copy.add()
    fenced = wait_until(lambda: [query for query in (first, second) if query.failure], TIMEOUT)
    (survivor,) = {first, second} - set(fenced)
    check_fenced(*fenced)
    check_continues(copy, survivor)


@consumers
def test_a_resumed_driver_whose_tasks_have_ended_does_not_take_over_again(
    copy: Copy, monkeypatch: pytest.MonkeyPatch, consumer: str | None
) -> None:
    """It would repeat its run, but another driver has committed meanwhile."""
    copy.consumer = consumer
    first = copy.add().create_query()
    copy.wait_until_committed(first)
    coordinator = first.coordinator
    assert coordinator is not None
    pause = Pause(monkeypatch, coordinator, "next_complete")
    pause.wait_until_suspended()
    second = copy.create_query()
    copy.wait_until_committed(copy.add() and second)
    coordinator.close()
    pause.resume()
    check_fenced(first)
    check_continues(copy, second)


def test_a_resumed_driver_without_a_successor_repeats_its_run(
    copy: Copy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(execution, "_FIRST_BACK_OFF_SECONDS", 0.001)
    write, failed_epochs = CheckpointLog.write_commit, set[int]()

    def write_and_fail(self: CheckpointLog, number: int) -> None:
        write(self, number)
        if len(failed_epochs) < 2 and number not in failed_epochs:
            failed_epochs.add(number)
            raise OSError("connection lost after the entry was written")

    monkeypatch.setattr(CheckpointLog, "write_commit", write_and_fail)
    query = copy.create_query()
    for _ in range(3):
        copy.wait_until_committed(copy.add() and query)
    check_continues(copy, query)
    assert len(failed_epochs) == 2


def test_an_epoch_whose_staged_rows_were_deleted_is_read_again(
    copy: Copy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Maintenance deleted them because it took the suspended driver for dead."""
    monkeypatch.setattr(execution, "_FIRST_BACK_OFF_SECONDS", 0.001)
    commit, lost_epochs = QueueSinkDriver.commit, list[int]()

    def discard_and_commit(self: QueueSinkDriver, writers: Any, epoch: Epoch, offset: Any) -> None:
        if not lost_epochs:
            lost_epochs.append(epoch.number)
            copy.store.database.run(
                lambda tx: staging.discard(tx, copy.out.record, writers.app_id, epoch.number)
            )
        commit(self, writers, epoch, offset)

    monkeypatch.setattr(QueueSinkDriver, "commit", discard_and_commit)
    query = copy.create_query()
    copy.wait_until_committed(copy.add() and query)
    check_continues(copy, query)
    assert lost_epochs
