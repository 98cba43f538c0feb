"""Life cycle of a continuous query on the driver: epochs, restarts, crashes at every step, and shutdown."""

from __future__ import annotations

import json
import logging
import threading
from typing import Any

import pyarrow as pa
import pytest

from penstock.continuous import tasks
from penstock.continuous.connectors import queue as queue_connector
from penstock.continuous.driver import execution
from penstock.continuous.driver.execution import Settings, State
from penstock.errors import ContinuousFailedError, OwnerFencedError
from penstock.store.records.catalog import QueueChanged
from tests.continuous.queue_copy import TIMEOUT, Copy, run_until_crash_after, stop_reading_once_behind
from tests.support.waiting import wait_until


def test_rows_are_written_once_and_the_consumer_has_caught_up_when_the_query_stops(
    copy: Copy, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "penstock.continuous")
    query = copy.add().create_query()
    copy.wait_until_committed(query)
    assert query.state is State.ACTIVE
    copy.add()
    copy.wait_until_committed(query)
    assert query.stop()
    assert query.state is State.TERMINATED
    assert copy.ids() == copy.expected_ids()
    assert copy.ids_by_partition() == [copy.expected_ids()[::2], copy.expected_ids()[1::2]], (
        "rows are in order"
    )
    assert copy.store.consumer("c").lag("in").rows == 0
    assert f"query copy [id = {query.id}, runId = {query.run_id}] has ended" in caplog.text


@pytest.mark.parametrize("guarantee", ["exactly_once", "at_least_once"])
def test_progress_contains_the_duration_of_an_epoch(copy: Copy, guarantee: str) -> None:
    copy.guarantee = guarantee
    query = copy.create_query()
    for number in range(2):
        copy.add(1)
        assert query.await_epoch(number, TIMEOUT)
    first, second = query.progress.recent
    assert first["durationMs"].keys() == {"queryPlanning", "runContinuous", "epochCommit"}
    assert second["durationMs"].keys() == {"runContinuous", "epochCommit"}
    assert second["sources"][0]["startOffset"] == first["sources"][0]["endOffset"]
    assert second.numInputRows == second.sink.numOutputRows == 1
    latency = second["latencyMs"]
    assert 0 < latency["p50"] <= latency["p90"] <= latency["p99"] <= latency["max"] < TIMEOUT * 1000


def test_a_query_that_does_not_stop_in_time_is_interrupted_and_ends(
    copy: Copy, caplog: pytest.LogCaptureFixture
) -> None:
    """It releases its consumer, so that the next query need not take it over."""
    reached, resume = threading.Event(), threading.Event()

    def hang(batch: pa.RecordBatch) -> pa.RecordBatch:
        reached.set()
        resume.wait(TIMEOUT)
        return batch

    query = copy.add().create_query(transform=hang)
    assert reached.wait(TIMEOUT)
    assert not query.stop(0.2)
    resume.set()
    assert query.join(TIMEOUT)
    assert (query.state, query.failure) == (State.TERMINATED, None)
    assert "the epoch in flight is not complete 0.2 s after the run should have ended" in caplog.text
    assert copy.ids() == []
    copy.wait_until_committed(copy.create_query())
    assert copy.ids() == copy.expected_ids()
    assert "fenced" not in caplog.text


def test_no_epoch_is_committed_without_rows(copy: Copy) -> None:
    query = copy.add().create_query()
    copy.wait_until_committed(query)
    last = query.progress.last
    assert last is not None
    assert not query.await_epoch(last["batchId"] + 1, 0.2)
    copy.add(1)
    assert query.await_epoch(last["batchId"] + 1, TIMEOUT)


def test_the_checkpoint_has_sparks_format_and_keeps_the_last_epochs(copy: Copy) -> None:
    query = copy.create_query()
    for _ in range(5):
        copy.add(1)
        copy.wait_until_committed(query)
    query.stop()
    assert copy.logged_epochs("offsets") == copy.logged_epochs("commits") == [2, 3, 4]
    version, about, offset = (copy.folder / "ck/offsets/4").read_text().split("\n")
    assert version == "v1"
    assert json.loads(about)["batchWatermarkMs"] == 0
    assert json.loads(offset)["to"] == [3, 2]
    assert json.loads((copy.folder / "ck/metadata").read_text()) == {"id": query.id}


def test_a_query_continues_where_it_ended(copy: Copy) -> None:
    for _ in range(3):
        query = copy.add().create_query()
        copy.wait_until_committed(query)
        query.stop()
    assert copy.ids() == copy.expected_ids()


def test_a_failing_task_repeats_the_run_from_the_last_epoch(copy: Copy) -> None:
    failing_ids = {1, 7}

    def fail(batch: pa.RecordBatch) -> pa.RecordBatch:
        if failed_ids := failing_ids.intersection(batch["id"].to_pylist()):
            failing_ids.difference_update(failed_ids)
            raise RuntimeError("transform failed")
        return batch

    query = copy.create_query(transform=fail)
    for _ in range(3):
        copy.add(3)
        copy.wait_until_committed(query)
    assert copy.ids() == copy.expected_ids()
    assert len(copy.engine.jobs) == 3


def test_a_run_that_fails_each_time_ends_the_query_with_its_error(
    copy: Copy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(execution, "_FIRST_BACK_OFF_SECONDS", 0.001)

    def fail(batch: pa.RecordBatch) -> pa.RecordBatch:
        raise RuntimeError("permanent failure")

    query = copy.add().create_query(transform=fail)
    assert query.join(TIMEOUT)
    assert str(query.failure) == "permanent failure"
    assert query.state is State.TERMINATED
    assert copy.ids() == []


@pytest.mark.parametrize("step", ["plan", "offset", "sink", "commit", "notify"])
@pytest.mark.parametrize("guarantee", ["exactly_once", "at_least_once"])
def test_a_driver_that_dies_at_any_step_of_an_epoch_loses_nothing(
    copy: Copy, step: str, guarantee: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With exactly_once, nothing is repeated either."""
    copy.guarantee = guarantee
    query = copy.add().create_query(start=False)
    component_and_method = {
        "plan": (query.source, "plan"),
        "offset": (query.checkpoint, "write_offset"),
        "sink": (query.sink, "commit"),
        "commit": (query.checkpoint, "write_commit"),
        "notify": (query.source, "notify_logged"),
    }[step]
    run_until_crash_after(monkeypatch, query, *component_and_method)
    successor = copy.add().create_query()
    copy.wait_until_committed(successor)
    successor.stop()
    if guarantee == "exactly_once":
        assert copy.ids() == copy.expected_ids()
    assert sorted(set(copy.ids())) == copy.expected_ids()
    offsets, commits = copy.logged_epochs("offsets"), copy.logged_epochs("commits")
    assert set(commits) <= set(offsets)
    assert offsets[-1] == commits[-1], "no epoch is open"
    assert copy.store.consumer("c").lag("in").rows == 0


def test_a_query_stopped_while_its_run_fails_ends_and_repeats_the_rest_when_restarted(
    copy: Copy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run fails because partitions were added to the keyed sink."""
    query = copy.add().create_query(start=False)

    def stop_and_fail(*_: object) -> None:
        query.stopping = True
        raise QueueChanged("the queue has more partitions")

    monkeypatch.setattr(query.sink, "commit", stop_and_fail)
    query.start()
    assert query.join(TIMEOUT)
    assert (query.failure, query.state) == (None, State.TERMINATED)
    assert copy.ids() == []
    successor = copy.create_query()
    copy.wait_until_committed(successor)
    assert copy.ids() == copy.expected_ids()


def test_a_query_that_takes_over_fences_its_predecessor(copy: Copy) -> None:
    first = copy.add().create_query()
    copy.wait_until_committed(first)
    second = copy.create_query()
    copy.add()
    assert first.join(TIMEOUT)
    assert isinstance(first.failure, OwnerFencedError)
    copy.wait_until_committed(second)
    assert copy.ids() == copy.expected_ids()


def test_an_idle_query_detects_that_another_one_has_taken_over(
    copy: Copy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No new rows arrive that would reveal it."""
    monkeypatch.setattr(execution, "_CHECK_SECONDS", 0.05)
    first = copy.add().create_query()
    copy.wait_until_committed(first)
    second = copy.create_query()
    assert first.join(TIMEOUT)
    assert isinstance(first.failure, OwnerFencedError)
    copy.wait_until_committed(copy.add() and second)
    assert copy.ids() == copy.expected_ids()


def test_rows_after_a_pause_do_not_wait_for_the_end_of_an_interval(copy: Copy) -> None:
    query = copy.add(1).create_query(interval=3600.0)
    copy.wait_until_committed(query)
    copy.add(1)
    ends = {part.partition: part.next_index for part in copy.queue.info().partitions}
    query.await_epoch(query.committed.last + 1, 0.5)
    assert query.committed.positions != ends, "the new rows wait for the end of the interval"


def test_an_idle_query_polls_its_source_rarely(copy: Copy, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(execution, "_CHECK_SECONDS", 3600.0)
    monkeypatch.setattr(execution, "_POLL_SECONDS", 0.01)
    query = copy.add().create_query()
    copy.wait_until_committed(query)
    notified: list[Any] = []
    checks, check_source = [], query.check_source

    def count_check() -> None:
        check_source()
        checks.append(len(notified))

    monkeypatch.setattr(query, "check_source", count_check)
    # By the first check, the source has been notified of the last commit.
    wait_until(lambda: checks, TIMEOUT, "the query is idle")
    monkeypatch.setattr(query.source, "notify_logged", notified.append)
    before = len(checks)
    wait_until(lambda: len(checks) > before + 5, TIMEOUT, "more checks of an idle query")
    assert notified == []


def test_partitions_that_are_added_are_read(copy: Copy) -> None:
    query = copy.add().create_query()
    copy.wait_until_committed(query)
    copy.queue.add_partitions(2)
    copy.add(8)
    copy.wait_until_committed(query)
    assert copy.ids() == copy.expected_ids()
    assert [len(job.groups) for job in copy.engine.jobs] == [2, 4]


def test_a_query_far_behind_catches_up_with_a_job_that_ends(
    copy: Copy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tasks, "BEHIND_ROWS", 8)
    monkeypatch.setattr(queue_connector, "_AHEAD_ROWS", 2)
    monkeypatch.setattr(execution, "MIN_CATCH_UP_ROWS", 8)
    stop_reading_once_behind(monkeypatch)
    query = copy.add(60).create_query()
    copy.wait_until_committed(query)
    wait_until(lambda: [job.catches_up for job in copy.engine.jobs] == [False, True, False])
    copy.wait_until_committed(copy.add() and query)
    assert copy.ids() == copy.expected_ids()
    assert len(copy.engine.jobs) == 3


def test_a_query_that_starts_far_behind_catches_up_first(copy: Copy, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(execution, "BEHIND_ROWS", 30)
    query = copy.add(60).create_query()
    copy.wait_until_committed(query)
    wait_until(lambda: [job.catches_up for job in copy.engine.jobs] == [True, False])
    query.stop()
    copy.wait_until_committed(copy.add() and copy.create_query())
    assert copy.engine.jobs[-1].catches_up is False
    assert copy.ids() == copy.expected_ids()


def test_a_query_stops_after_the_current_epoch_however_many_rows_there_are(
    copy: Copy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tasks, "BATCH_ROWS", 1)
    for partition in range(2):
        copy.queue.append(pa.table({"id": range(8_000)}), partition=partition)
    query = copy.create_query()
    assert query.await_epoch(0, TIMEOUT)
    assert query.stop()
    assert sum(map(len, copy.ids_by_partition())) < 16_000
    monkeypatch.undo()
    copy.wait_until_committed(copy.create_query())
    assert copy.ids_by_partition() == [list(range(8_000))] * 2


def test_partitions_share_the_available_slots(copy: Copy) -> None:
    query = copy.add().create_query(slots=1)
    copy.wait_until_committed(query)
    assert [sorted(group) for group in copy.engine.jobs[0].groups] == [[0, 1]]
    assert copy.ids() == copy.expected_ids()


def test_tasks_that_do_not_start_are_an_error(copy: Copy, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(execution, "_FIRST_BACK_OFF_SECONDS", 0.001)
    query = copy.create_query(start=False)
    query.settings = Settings(0.01, start_timeout=0.05)
    monkeypatch.setattr(copy.engine, "job", lambda *_, **__: _UnstartedJob())
    query.start()
    assert query.join(TIMEOUT)
    assert isinstance(query.failure, ContinuousFailedError)
    assert query.failure.condition == "CONTINUOUS_FAILED.NOT_STARTED"


class _UnstartedJob:
    def start(self) -> None: ...

    def alive(self) -> bool:
        return True

    def join(self, timeout: float) -> bool:
        return True

    def cancel(self) -> None: ...

    def failure(self) -> None: ...
