"""Times before which a reader of a server's log has all commits."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from penstock.feeds.postgres.times_of_log import TimesOfLog

MOST = 1024


def test_a_time_counts_once_its_end_of_the_log_is_reached() -> None:
    times = TimesOfLog()
    assert times.before(5) is None
    for position, time in ((10, 1), (20, 2), (20, 3), (30, 4)):
        times.record(position, time)
    assert [times.before(position) for position in (9, 10, 19, 20, 29, 30)] == [None, 1, 1, 3, 3, 4]


def test_times_from_before_the_clock_was_set_back_do_not_count() -> None:
    times = TimesOfLog()
    times.record(10, 100)
    times.record(20, 50)
    assert times.before(10) is None
    assert times.before(20) == 50


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3), st.integers(0, 2)), max_size=200))
def test_a_time_is_never_later_than_what_is_reached(steps: list[tuple[int, int, int]]) -> None:
    times = TimesOfLog()
    noted: list[tuple[int, int]] = []
    position = time = reached = 0
    for written, passed, read in steps:
        position, time, reached = position + written, time + passed, min(reached + read, position + written)
        times.record(position, time)
        noted.append((position, time))
        assert times.before(reached) == max((at for end, at in noted if end <= reached), default=None)


def test_a_reader_far_behind_keeps_few_times() -> None:
    times = TimesOfLog()
    for step in range(100 * MOST):
        times.record(step, step)
    assert len(times._pairs) <= MOST
    # The more time it is behind, the rarer they are.
    for reached in (1_000, 50_000, 90_000, 100 * MOST - 1):
        assert 0 <= reached - (times.before(reached) or 0) < 1_000
    assert times.before(100 * MOST) == 100 * MOST - 1
    for step in range(100 * MOST, 100 * MOST + 10):
        times.record(step, step)
        assert times.before(step) == step
