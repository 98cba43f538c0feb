"""Ranges of an object are read in few requests, and little is read in vain."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import example, given
from hypothesis import strategies as st

from penstock.objects.ranges import join_ranges

RANGES = st.lists(
    st.tuples(st.one_of(st.integers(0, 100), st.integers(0, 1 << 24)), st.integers(1, 10_000)), max_size=30
)


@given(RANGES)
@example([(0, 10_000), *((20_000 + 10_001 * place, 1) for place in range(29))])
@example([(0, 1 << 20), *((place << 21, 1) for place in range(1, 40))])
def test_every_range_is_in_one_span_and_little_else_is_read(ranges: list[tuple[int, int]]) -> None:
    spans = join_ranges(ranges)
    assert sorted(place for span in spans for place in span.indexes) == list(range(len(ranges)))
    for span in spans:
        for place in span.indexes:
            start, length = ranges[place]
            assert span.start <= start
            assert start + length <= span.start + span.length
    wanted = sum(length for _, length in ranges)
    assert sum(span.length for span in spans) <= 2 * wanted + 4096 * len(ranges)
    ends = [(span.start, span.start + span.length) for span in spans]
    assert all(end <= start for (_, end), (start, _) in pairwise(ends))


def test_neighbours_are_joined_and_distant_ranges_are_not() -> None:
    assert [(span.start, span.length) for span in join_ranges([(10, 5), (0, 10), (1 << 20, 1)])] == [
        (0, 15),
        (1 << 20, 1),
    ]
    assert len(join_ranges([(0, 1 << 20), (2 << 20, 1 << 20)])) == 1
