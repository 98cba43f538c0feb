"""The totals of an append in each partition, and the positions of its segments."""

from __future__ import annotations

from itertools import groupby

from hypothesis import given
from hypothesis import strategies as st

from penstock.store.log.partition_log import _PartitionTotals
from penstock.store.records.staged import StoredSegments

SEGMENTS = st.lists(st.tuples(st.integers(0, 9), st.integers(1, 99), st.integers(0, 999)), min_size=1)
"""The partition, the rows and the bytes of each segment."""


@given(SEGMENTS | SEGMENTS.map(lambda found: [*{each[0]: each for each in found}.values()]))
def test_each_segment_follows_the_earlier_ones_of_its_partition(
    segments: list[tuple[int, int, int]],
) -> None:
    segments = sorted(segments, key=lambda segment: segment[0])
    ids = range(len(segments))
    parts = _PartitionTotals.of(StoredSegments(*zip(*segments, strict=True), ids, ids, ids, ids, ids))
    groups = {key: list(group) for key, group in groupby(segments, lambda segment: segment[0])}
    assert list(parts.partitions) == list(groups)
    assert list(parts.rows) == [sum(rows for _, rows, _ in group) for group in groups.values()]
    assert list(parts.bytes) == [sum(size for _, _, size in group) for group in groups.values()]
    assert list(parts.segments) == [len(group) for group in groups.values()]
    assert list(parts.partition_numbers) == [
        place for place, group in enumerate(groups.values(), 1) for _ in range(len(group))
    ]
    assert list(parts.rows_before) == [
        sum(rows for _, rows, _ in group[:number])
        for group in groups.values()
        for number in range(len(group))
    ]
