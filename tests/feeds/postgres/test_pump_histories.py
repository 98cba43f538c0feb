"""Tables that change at random while pumps read them: the queues make the source's tables, or the pump has
ended before with a named error.
"""

from __future__ import annotations

import os

import pytest

from tests.feeds.postgres.pump_histories import play_pumps


def test_queues_follow_changing_tables(logical_pg_url: str) -> None:
    play_pumps(logical_pg_url, 3, longest=8)


@pytest.mark.soak
@pytest.mark.timeout(0)
def test_many_queues_follow_changing_tables(logical_pg_url: str) -> None:
    """PENSTOCK_PUMP_HISTORIES sets their number."""
    play_pumps(logical_pg_url, int(os.environ.get("PENSTOCK_PUMP_HISTORIES", "1000")))
