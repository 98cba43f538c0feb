"""Queues that change under a continuous query: a source that is recreated, an owner that changes."""

from __future__ import annotations

import pytest

from penstock.continuous import queues, reader
from tests.continuous.copying import Copy
from tests.support.waiting import wait_until


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
