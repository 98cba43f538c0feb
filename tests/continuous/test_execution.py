"""A continuous query's life on the driver: epochs, restarts, crashes at every step, and its end."""

from __future__ import annotations

import json
import logging
import threading
from typing import Any

import pyarrow as pa
import pytest

from penstock.continuous import tasks
from penstock.continuous.connectors import queue as queue_connector
from penstock.continuous.driver import execution as module
from penstock.continuous.driver.execution import Settings, State
from penstock.errors import ContinuousFailedError, OwnerFencedError
from penstock.store.records.catalog import QueueChanged
from tests.continuous.copying import PATIENCE, Copy, die_behind, read_no_further_when_behind
from tests.support.waiting import wait_until


def test_rows_are_written_once_and_the_consumer_has_caught_up_at_the_end(
    copy: Copy, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "penstock.continuous")
    query = copy.add().query()
    copy.through(query)
    assert query.state is State.ACTIVE
    copy.add()
    copy.through(query)
    assert query.stop()
    assert query.state is State.TERMINATED
    assert copy.ids() == copy.all()
    assert copy.by_partition() == [copy.all()[::2], copy.all()[1::2]], "in order"
    assert copy.store.consumer("c").lag("in").rows == 0
    assert f"query copy [id = {query.id}, runId = {query.run_id}] has ended" in caplog.text


@pytest.mark.parametrize("guarantee", ["exactly_once", "at_least_once"])
def test_progress_contains_the_duration_of_an_epoch(copy: Copy, guarantee: str) -> None:
    copy.guarantee = guarantee
    query = copy.query()
    for number in range(2):
        copy.add(1)
        assert query.await_epoch(number, PATIENCE)
    first, second = query.progress.recent
    assert first["durationMs"].keys() == {"queryPlanning", "runContinuous", "epochCommit"}
    assert second["durationMs"].keys() == {"runContinuous", "epochCommit"}
    assert second["sources"][0]["startOffset"] == first["sources"][0]["endOffset"]
    assert second.numInputRows == second.sink.numOutputRows == 1
    latency = second["latencyMs"]
    assert 0 < latency["p50"] <= latency["p90"] <= latency["p99"] <= latency["max"] < PATIENCE * 1000


def test_a_query_that_does_not_stop_in_time_is_interrupted_and_ends(
    copy: Copy, caplog: pytest.LogCaptureFixture
) -> None:
    """It gives up its consumer, so that another start does not have to take it over."""
    reached, go_on = threading.Event(), threading.Event()

    def hangs(batch: pa.RecordBatch) -> pa.RecordBatch:
        reached.set()
        go_on.wait(PATIENCE)
        return batch

    query = copy.add().query(transform=hangs)
    assert reached.wait(PATIENCE)
    assert not query.stop(0.2)
    go_on.set()
    assert query.join(PATIENCE)
    assert (query.state, query.failure) == (State.TERMINATED, None)
    assert "the epoch in flight is not complete 0.2 s after the run should have ended" in caplog.text
    assert copy.ids() == []
    copy.through(copy.query())
    assert copy.ids() == copy.all()
    assert "fenced" not in caplog.text


def test_no_epoch_is_committed_without_rows(copy: Copy) -> None:
    query = copy.add().query()
    copy.through(query)
    last = query.progress.last
    assert last is not None
    assert not query.await_epoch(last["batchId"] + 1, 0.2)
    copy.add(1)
    assert query.await_epoch(last["batchId"] + 1, PATIENCE)


def test_the_checkpoint_has_sparks_format_and_keeps_the_last_epochs(copy: Copy) -> None:
    query = copy.query()
    for _ in range(5):
        copy.add(1)
        copy.through(query)
    query.stop()
    assert copy.files("offsets") == copy.files("commits") == [2, 3, 4]
    version, about, offset = (copy.folder / "ck/offsets/4").read_text().split("\n")
    assert version == "v1"
    assert json.loads(about)["batchWatermarkMs"] == 0
    assert json.loads(offset)["to"] == [3, 2]
    assert json.loads((copy.folder / "ck/metadata").read_text()) == {"id": query.id}


def test_a_query_continues_where_it_ended(copy: Copy) -> None:
    for _ in range(3):
        query = copy.add().query()
        copy.through(query)
        query.stop()
    assert copy.ids() == copy.all()


def test_a_failing_task_repeats_the_run_from_the_last_epoch(copy: Copy) -> None:
    unlucky = {1, 7}

    def fails(batch: pa.RecordBatch) -> pa.RecordBatch:
        if met := unlucky.intersection(batch["id"].to_pylist()):
            unlucky.difference_update(met)
            raise RuntimeError("out of luck")
        return batch

    query = copy.query(transform=fails)
    for _ in range(3):
        copy.add(3)
        copy.through(query)
    assert copy.ids() == copy.all()
    assert len(copy.engine.jobs) == 3


def test_a_run_that_fails_each_time_ends_the_query_with_its_error(
    copy: Copy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_FIRST_BACK_OFF_SECONDS", 0.001)

    def fails(batch: pa.RecordBatch) -> pa.RecordBatch:
        raise RuntimeError("never")

    query = copy.add().query(transform=fails)
    assert query.join(PATIENCE)
    assert str(query.failure) == "never"
    assert query.state is State.TERMINATED
    assert copy.ids() == []


@pytest.mark.parametrize("step", ["planned", "offset", "sink", "commit", "told"])
@pytest.mark.parametrize("guarantee", ["exactly_once", "at_least_once"])
def test_a_driver_that_dies_at_any_step_of_an_epoch_loses_nothing(
    copy: Copy, step: str, guarantee: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And under exactly_once it repeats nothing either."""
    copy.guarantee = guarantee
    query = copy.add().query(start=False)
    where = {
        "planned": (query.source, "plan"),
        "offset": (query.checkpoint, "write_offset"),
        "sink": (query.sink, "commit"),
        "commit": (query.checkpoint, "write_commit"),
        "told": (query.source, "notify_logged"),
    }[step]
    die_behind(monkeypatch, query, *where)
    later = copy.add().query()
    copy.through(later)
    later.stop()
    if guarantee == "exactly_once":
        assert copy.ids() == copy.all()
    assert sorted(set(copy.ids())) == copy.all()
    offsets, commits = copy.files("offsets"), copy.files("commits")
    assert set(commits) <= set(offsets)
    assert offsets[-1] == commits[-1], "no epoch is open"
    assert copy.store.consumer("c").lag("in").rows == 0


def test_a_query_stopped_while_its_run_fails_ends_and_repeats_the_rest_when_restarted(
    copy: Copy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For example after its keyed sink has got more partitions."""
    query = copy.add().query(start=False)

    def grown(*_: object) -> None:
        query.stopping = True
        raise QueueChanged("it has more partitions by now")

    monkeypatch.setattr(query.sink, "commit", grown)
    query.start()
    assert query.join(PATIENCE)
    assert (query.failure, query.state) == (None, State.TERMINATED)
    assert copy.ids() == []
    later = copy.query()
    copy.through(later)
    assert copy.ids() == copy.all()


def test_a_query_that_takes_over_fences_its_predecessor(copy: Copy) -> None:
    first = copy.add().query()
    copy.through(first)
    second = copy.query()
    copy.add()
    assert first.join(PATIENCE)
    assert isinstance(first.failure, OwnerFencedError)
    copy.through(second)
    assert copy.ids() == copy.all()


def test_an_idle_query_detects_that_another_one_has_taken_over(
    copy: Copy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No new row reveals it."""
    monkeypatch.setattr(module, "_CHECK_SECONDS", 0.05)
    first = copy.add().query()
    copy.through(first)
    second = copy.query()
    assert first.join(PATIENCE)
    assert isinstance(first.failure, OwnerFencedError)
    copy.through(copy.add() and second)
    assert copy.ids() == copy.all()


def test_rows_after_a_pause_do_not_wait_for_the_end_of_an_interval(copy: Copy) -> None:
    query = copy.add(1).query(interval=3600.0)
    copy.through(query)
    copy.add(1)
    ends = {part.partition: part.next_index for part in copy.queue.info().partitions}
    query.await_epoch(query.committed.last + 1, 0.5)
    assert query.committed.positions != ends, "these wait for the end of the interval"


def test_an_idle_query_polls_its_source_rarely(copy: Copy, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_CHECK_SECONDS", 3600.0)
    monkeypatch.setattr(module, "_POLL_SECONDS", 0.01)
    query = copy.add().query()
    copy.through(query)
    asked: list[Any] = []
    looks, look = [], query.check_source

    def looking() -> None:
        look()
        looks.append(len(asked))

    monkeypatch.setattr(query, "check_source", looking)
    # By the first one the last commit has told the source of its offset.
    wait_until(lambda: looks, PATIENCE, "it is idle")
    monkeypatch.setattr(query.source, "notify_logged", asked.append)
    before = len(looks)
    wait_until(lambda: len(looks) > before + 5, PATIENCE, "it has been idle for a while")
    assert asked == []


def test_partitions_that_are_added_are_read(copy: Copy) -> None:
    query = copy.add().query()
    copy.through(query)
    copy.queue.add_partitions(2)
    copy.add(8)
    copy.through(query)
    assert copy.ids() == copy.all()
    assert [len(job.groups) for job in copy.engine.jobs] == [2, 4]


def test_a_query_far_behind_catches_up_with_a_job_that_ends(
    copy: Copy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tasks, "BEHIND_ROWS", 8)
    monkeypatch.setattr(queue_connector, "_AHEAD_ROWS", 2)
    monkeypatch.setattr(module, "MIN_CATCH_UP_ROWS", 8)
    read_no_further_when_behind(monkeypatch)
    query = copy.add(60).query()
    copy.through(query)
    wait_until(lambda: [job.catches_up for job in copy.engine.jobs] == [False, True, False])
    copy.through(copy.add() and query)
    assert copy.ids() == copy.all()
    assert len(copy.engine.jobs) == 3


def test_a_query_that_starts_far_behind_catches_up_first(copy: Copy, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "BEHIND_ROWS", 30)
    query = copy.add(60).query()
    copy.through(query)
    wait_until(lambda: [job.catches_up for job in copy.engine.jobs] == [True, False])
    query.stop()
    copy.through(copy.add() and copy.query())
    assert copy.engine.jobs[-1].catches_up is False
    assert copy.ids() == copy.all()


def test_a_query_stops_after_the_current_epoch_however_many_rows_there_are(
    copy: Copy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tasks, "BATCH_ROWS", 1)
    for partition in range(2):
        copy.queue.append(pa.table({"id": range(8_000)}), partition=partition)
    query = copy.query()
    assert query.await_epoch(0, PATIENCE)
    assert query.stop()
    assert sum(map(len, copy.by_partition())) < 16_000
    monkeypatch.undo()
    copy.through(copy.query())
    assert copy.by_partition() == [list(range(8_000))] * 2


def test_partitions_share_the_available_slots(copy: Copy) -> None:
    query = copy.add().query(slots=1)
    copy.through(query)
    assert [sorted(group) for group in copy.engine.jobs[0].groups] == [[0, 1]]
    assert copy.ids() == copy.all()


def test_tasks_that_do_not_start_are_an_error(copy: Copy, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_FIRST_BACK_OFF_SECONDS", 0.001)
    query = copy.query(start=False)
    query.settings = Settings(0.01, start_timeout=0.05)
    monkeypatch.setattr(copy.engine, "job", lambda *_, **__: _Nothing())
    query.start()
    assert query.join(PATIENCE)
    assert isinstance(query.failure, ContinuousFailedError)
    assert query.failure.condition == "CONTINUOUS_FAILED.NOT_STARTED"


class _Nothing:
    def start(self) -> None: ...

    def alive(self) -> bool:
        return True

    def join(self, timeout: float) -> bool:
        return True

    def cancel(self) -> None: ...

    def failure(self) -> None: ...
