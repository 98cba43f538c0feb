"""Continuous queries over a checkpoint whose newest epoch was begun but not committed.

The micro-batch engine may leave such an epoch, and so does a driver that is suspended and may resume.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from penstock.continuous.driver.checkpoint_log import CheckpointLog
from penstock.continuous.driver.execution import ContinuousExecution
from penstock.errors import OwnerFencedError
from tests.continuous.queue_copy import TIMEOUT, Copy, Pause, run_until_crash_after


def start_from_latest(query: ContinuousExecution) -> None:
    source: Any = query.source
    source.options = replace(source.options, starting_offsets="latest")


def begin_epoch(copy: Copy, *, latest: bool = False) -> Copy:
    """Begin an epoch with the first rows, lose its driver, and append more rows."""
    query = copy.create_query(start=False)
    if latest:
        start_from_latest(query)
    source = query.source
    source.take_ownership()
    start = source.start(None)
    copy.add()
    offset = source.plan(start, source.end_offsets(), {})
    source.release(None)
    copy.running.remove(query)
    query.checkpoint.write_offset(0, offset)
    copy.add()
    return copy


def offset_entry(copy: Copy) -> bytes | None:
    return CheckpointLog(str(copy.folder / "ck")).offset_entry(0)


@pytest.mark.parametrize("consumer", ["c", None])
def test_a_begun_epoch_stays_in_the_checkpoint_until_another_one_replaces_it(
    copy: Copy, monkeypatch: pytest.MonkeyPatch, consumer: str | None
) -> None:
    copy.consumer = consumer
    before = offset_entry(begin_epoch(copy))
    assert before is not None
    query = copy.create_query(start=False)
    run_until_crash_after(monkeypatch, query, query.sink, "commit")
    assert offset_entry(copy) == before
    copy.wait_until_committed(copy.create_query())
    assert offset_entry(copy) != before
    assert copy.ids() == copy.expected_ids()


def test_a_query_that_reads_from_latest_starts_where_the_begun_epoch_starts(copy: Copy) -> None:
    copy.consumer = None
    copy.add()
    first = copy.next_id
    begin_epoch(copy, latest=True)
    query = copy.create_query(start=False)
    start_from_latest(query)
    query.start()
    copy.wait_until_committed(query)
    assert copy.ids() == copy.expected_ids()[first:]


@pytest.mark.parametrize("consumer", ["c", None])
def test_the_driver_of_a_begun_epoch_may_resume_and_commit_it(
    copy: Copy, monkeypatch: pytest.MonkeyPatch, consumer: str | None
) -> None:
    """The driver wrote to an at-least-once sink, and was suspended before it logged the commit."""
    copy.consumer, copy.guarantee = consumer, "at_least_once"
    begin_epoch(copy)
    query = copy.create_query(start=False)
    pause = Pause(monkeypatch, query.checkpoint, "write_commit")
    query.start()
    pause.wait_until_suspended()
    query.checkpoint.add_entry("commits/0", "v1\n{}")
    pause.resume()
    assert query.join(TIMEOUT)
    assert isinstance(query.failure, OwnerFencedError), query.failure
    successor = copy.create_query()
    copy.wait_until_committed(copy.add() and successor)
    assert sorted(set(copy.ids())) == copy.expected_ids()
