"""A continuous query over a checkpoint whose newest epoch was begun and never committed.

The micro-batch engine leaves such an epoch, and the driver that has begun it may be suspended and resume.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from penstock.continuous.driver.checkpoint_log import CheckpointLog
from penstock.continuous.driver.execution import ContinuousExecution
from penstock.errors import OwnerFencedError
from tests.continuous.copying import PATIENCE, Copy, Pause, die_behind


def from_latest(query: ContinuousExecution) -> None:
    source: Any = query.source
    source.options = replace(source.options, starting_offsets="latest")


def begun(copy: Copy, *, latest: bool = False) -> Copy:
    """Begin an epoch of the first rows, and append more; its driver is gone."""
    query = copy.query(start=False)
    if latest:
        from_latest(query)
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


def entry(copy: Copy) -> bytes | None:
    return CheckpointLog(str(copy.folder / "ck")).offset_entry(0)


@pytest.mark.parametrize("consumer", ["c", None])
def test_it_stays_until_an_epoch_is_committed_in_its_place(
    copy: Copy, monkeypatch: pytest.MonkeyPatch, consumer: str | None
) -> None:
    copy.consumer = consumer
    before = entry(begun(copy))
    assert before is not None
    query = copy.query(start=False)
    die_behind(monkeypatch, query, query.sink, "commit")
    assert entry(copy) == before
    copy.through(copy.query())
    assert entry(copy) != before
    assert copy.ids() == copy.all()


def test_a_query_that_reads_from_the_end_on_begins_where_it_has_begun(copy: Copy) -> None:
    copy.consumer = None
    copy.add()
    first = copy.next_id
    begun(copy, latest=True)
    query = copy.query(start=False)
    from_latest(query)
    query.start()
    copy.through(query)
    assert copy.ids() == copy.all()[first:]


@pytest.mark.parametrize("consumer", ["c", None])
def test_its_driver_may_resume_and_commit_it(
    copy: Copy, monkeypatch: pytest.MonkeyPatch, consumer: str | None
) -> None:
    """It wrote to a sink that may repeat rows, and was suspended before it logged the commit."""
    copy.consumer, copy.guarantee = consumer, "at_least_once"
    begun(copy)
    query = copy.query(start=False)
    pause = Pause(monkeypatch, query.checkpoint, "write_commit")
    query.start()
    pause.reached()
    query.checkpoint.add_entry("commits/0", "v1\n{}")
    pause.wake()
    assert query.join(PATIENCE)
    assert isinstance(query.failure, OwnerFencedError), query.failure
    again = copy.query()
    copy.through(copy.add() and again)
    assert sorted(set(copy.ids())) == copy.all()
