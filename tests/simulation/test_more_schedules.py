"""More schedules than in ``test_schedules``. ``make simulate`` runs as many as you like."""

from __future__ import annotations

import pytest

from tests.simulation import schedules

pytestmark = pytest.mark.soak


@pytest.mark.parametrize("first", range(600, 2_000, schedules.PART_SIZE))
def test_nothing_is_lost_repeated_or_stuck(first: int) -> None:
    part = schedules.run_part(first)
    assert part.failure is None, part.failure
