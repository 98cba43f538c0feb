"""What a write task holds in memory, whatever the size of its rows."""

from __future__ import annotations

from collections.abc import Iterator

import pyarrow as pa
import pytest

import penstock
from penstock.queue.queue import placement_of
from penstock.spark import queue_writers
from penstock.spark.queue_writers import SegmentGroups
from tests.support.spark_queues import SCHEMA, make_queue, one_store

MIB = 1 << 20


def heavy(rows: int) -> pa.RecordBatch:
    """Rows of 1 MiB each."""
    return pa.RecordBatch.from_pydict({"id": list(range(rows)), "name": ["x" * MIB] * rows}, schema=SCHEMA)


def pieces(store: penstock.Store, max_rows: int = 65_536) -> SegmentGroups:
    queue = make_queue(store).record
    return SegmentGroups(queue, placement_of(store.database, queue), 0, max_rows)


@one_store
def test_large_rows_are_stored_before_many_accumulate(
    store: penstock.Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(queue_writers, "FLUSH_BYTES", 6 * MIB)
    drawn = 0

    def batches() -> Iterator[pa.RecordBatch]:
        nonlocal drawn
        for _ in range(8):
            drawn += 1
            yield heavy(2)

    seen = []
    for group in pieces(store).groups(batches()):
        seen.append((drawn, sum(segment.rows for segment in group)))
    assert seen == [(3, 6), (6, 6), (8, 4)]


@one_store
def test_small_rows_are_stored_by_their_number(store: penstock.Store) -> None:
    light = pa.RecordBatch.from_pydict({"id": [1, 2], "name": ["a", "b"]}, schema=SCHEMA)
    groups = list(pieces(store, max_rows=1).groups(iter([light] * 6)))
    assert [sum(segment.rows for segment in group) for group in groups] == [8, 4]


@one_store
def test_segments_keep_only_the_compressed_rows(store: penstock.Store) -> None:
    before = pa.total_allocated_bytes()
    groups = list(pieces(store).groups(heavy(4) for _ in range(5)))
    assert sum(segment.rows for group in groups for segment in group) == 20
    assert pa.total_allocated_bytes() - before < MIB
