"""Queues that change under a continuous query: a source that is recreated, an owner that changes."""

from __future__ import annotations

import pytest

from penstock.continuous import execution, queues, reader
from penstock.errors import OwnerFenced
from tests.continuous.copying import PATIENCE, Copy
from tests.support.waiting import wait_until


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
