"""Reading ranges of a queue."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import penstock
from penstock.errors import (
    DataLostError,
    InvalidInputError,
    InvalidPositionError,
    PartitionNotFoundError,
    SchemaMismatchError,
    StoreError,
)
from penstock.store.log import reading
from penstock.store.log.reading import Range
from tests.support.queues import SCHEMA, numbers


@pytest.fixture
def queue(store: penstock.Store) -> penstock.Queue:
    """A queue with the rows 0 to 29 in partition 0, in appends of 1, 2, …, 7 and 2 rows. Partition 1 is
    empty.
    """
    queue = store.create_queue("q", SCHEMA, partitions=2)
    start = 0
    for count in (1, 2, 3, 4, 5, 6, 7, 2):
        queue.append([{"n": n, "s": str(n)} for n in range(start, start + count)], 0)
        start += count
    return queue


@pytest.mark.parametrize("merged", [False, True])
@pytest.mark.parametrize(
    "range_", [(0, 30), (0, 1), (1, 3), (2, 17), (14, 15), (29, 30), (0, 0), (30, 30), (7, 7)]
)
def test_reading_a_range_returns_exactly_its_rows(
    queue: penstock.Queue, range_: tuple[int, int], merged: bool
) -> None:
    if merged:
        queue.compact()
    start, end = range_
    found = queue.read(0, start, end)
    assert numbers(found) == list(range(start, end))
    assert found.schema.equals(SCHEMA)


def test_a_range_without_an_end_goes_to_the_newest_row(queue: penstock.Queue) -> None:
    assert numbers(queue.read(0, 25)) == [25, 26, 27, 28, 29]
    assert numbers(queue.read(0, 25, 10**12)) == [25, 26, 27, 28, 29]
    assert queue.read(1, 0).num_rows == 0


@pytest.mark.parametrize(
    ("range_", "problem"),
    [
        ((31, None), ".PAST_END"),
        ((-1, None), ""),
        ((5, 4), ".BACKWARDS"),
        ((31, 30), ".BACKWARDS"),
        ((31, 40), ".PAST_END"),
    ],
)
def test_an_invalid_range_is_refused(queue: penstock.Queue, range_: tuple[int, Any], problem: str) -> None:
    with pytest.raises(InvalidPositionError, match="has rows 0 to 30") as caught:
        queue.read(0, *range_)
    assert caught.value.condition == f"INVALID_POSITION{problem}"


def test_an_unknown_partition_is_refused(queue: penstock.Queue) -> None:
    with pytest.raises(PartitionNotFoundError, match="has partitions 0 to 1, not 2"):
        queue.read(2, 0)


@pytest.mark.parametrize("limit", [1, 2, 5, 29, 30, 31])
def test_max_rows_is_an_upper_bound(queue: penstock.Queue, limit: int) -> None:
    assert numbers(queue.read(0, 0, max_rows=limit)) == list(range(min(limit, 30)))
    assert numbers(queue.read(0, 28, max_rows=limit)) == list(range(28, min(28 + limit, 30)))


def test_max_bytes_is_an_upper_bound_except_for_a_single_row(queue: penstock.Queue) -> None:
    whole = queue.read(0, 0)
    assert queue.read(0, 0, max_bytes=whole.nbytes * 2).num_rows == 30
    assert queue.read(0, 0, max_bytes=1).num_rows == 1
    for limit in (50, 100, 200, 400):
        found = queue.read(0, 0, max_bytes=limit)
        assert numbers(found) == list(range(found.num_rows))
        assert found.num_rows == 1 or found.combine_chunks().nbytes <= limit * 1.5
    sizes = [queue.read(0, 0, max_bytes=limit).num_rows for limit in range(10, 500, 10)]
    assert sizes == sorted(sizes)


def test_reading_can_continue_where_a_limit_stopped(queue: penstock.Queue) -> None:
    found: list[int] = []
    while len(found) < 30:
        found += numbers(queue.read(0, len(found), max_bytes=60, max_rows=4))
    assert found == list(range(30))


@pytest.mark.parametrize(
    "limit", [{"max_rows": 0}, {"max_rows": -1}, {"max_bytes": 0}, {"max_rows": "1"}, {"max_bytes": 1.5}]
)
def test_a_limit_below_one_is_refused(queue: penstock.Queue, limit: dict[str, int]) -> None:
    with pytest.raises(InvalidInputError, match="is 1 or more"):
        queue.read(0, 0, **limit)


@pytest.mark.parametrize(("start", "end"), [("0", None), (0, "1"), (None, 1), (2**70, None), (0.0, 1)])
def test_an_invalid_row_index_is_refused(queue: penstock.Queue, start: Any, end: Any) -> None:
    with pytest.raises(InvalidPositionError):
        queue.read(0, start, end)
    assert queue.read(0, 0, 2**70).num_rows == 30


def test_columns_are_returned_in_the_requested_order(queue: penstock.Queue) -> None:
    assert queue.read(0, 0, 2, columns=["s", "n"]).to_pydict() == {"s": ["0", "1"], "n": [0, 1]}
    assert queue.read(0, 0, 2, columns=["s"]).to_pydict() == {"s": ["0", "1"]}
    assert queue.read(1, 0, columns=["s"]).schema.names == ["s"]


def test_an_unknown_column_is_reported_with_the_nearest_one(queue: penstock.Queue) -> None:
    for range_ in ((0, 0), (0, 5)):
        with pytest.raises(
            SchemaMismatchError,
            match=r"\[SCHEMA_MISMATCH.UNKNOWN_COLUMN\] there is no column 'm'; the columns are n, s",
        ):
            queue.read(0, *range_, columns=["n", "m"])


def test_reading_trimmed_rows_is_an_error(queue: penstock.Queue) -> None:
    queue.trim(0, 4)
    with pytest.raises(
        DataLostError, match=r"rows \[0, 4\) of queue 'q', partition 0, have been trimmed"
    ) as caught:
        queue.read(0, 0)
    assert caught.value.parameters == {"queue": "q", "partition": 0, "start": 0, "end": 4}
    with pytest.raises(DataLostError):
        queue.read(0, 3, 4)
    assert numbers(queue.read(0, 4)) == list(range(4, 30))
    assert queue.read(0, 3, 3).num_rows == 0


def test_a_long_range_is_read_page_by_page(store: penstock.Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "PAGE_SEGMENTS", 3)
    queue = store.create_queue("long", SCHEMA)
    for n in range(20):
        queue.append([{"n": n, "s": "x" * 50}])
    assert numbers(queue.read(0, 0)) == list(range(20))
    assert numbers(queue.read(0, 5, 16)) == list(range(5, 16))
    for page_bytes in (1, 300, 10**6):
        asked = [reading.Range(0, 2, 19)]
        chunks = list(reading.read(store.database, queue.record, asked, page_bytes=page_bytes))
        assert [chunk.start for chunk in chunks] == list(range(2, 19))
        assert [chunk.end for chunk in chunks] == list(range(3, 20))


def test_a_reader_may_skip_trimmed_rows(store: penstock.Store, queue: penstock.Queue) -> None:
    queue.trim(0, 8)
    chunks = list(reading.read(store.database, queue.record, [reading.Range(0, 0, 30)], on_lost="skip"))
    assert numbers(pa.Table.from_batches([chunk.batch for chunk in chunks])) == list(range(8, 30))


@pytest.mark.parametrize("page_bytes", [1, 700, 10**6])
@pytest.mark.parametrize("payloads", [None, "objects"])
def test_several_ranges_are_read_one_after_another(
    store: penstock.Store, tmp_path: Path, page_bytes: int, payloads: str | None
) -> None:
    where = None if payloads is None else tmp_path / payloads
    queue = store.create_queue("many", SCHEMA, partitions=80, payloads=where)
    for partition in range(0, 80, 2):
        for first in (0, 3):
            rows = [{"n": 100 * partition + n, "s": os.urandom(50).hex()} for n in range(first, first + 3)]
            queue.append(rows, partition)
    queue.append([{"n": 400 + n, "s": os.urandom(50_000).hex()} for n in (6, 7)], 4)
    ranges = [
        Range(4, 1, 8),
        Range(5, 0, 0),
        *(Range(each, 2, 5) for each in range(6, 80, 2)),
        Range(2, 0, 1),
    ]
    chunks = list(reading.read(store.database, queue.record, ranges, page_bytes=page_bytes))
    found = [100 * chunk.partition + n for chunk in chunks for n in range(chunk.start, chunk.end)]
    assert found == [100 * each + n for each, start, end in ranges for n in range(start, end)]
    assert found == [n for chunk in chunks for n in chunk.batch.column("n").to_pylist()]


def test_trimmed_rows_in_one_of_several_ranges_are_skipped_or_refused(store: penstock.Store) -> None:
    queue = store.create_queue("many", SCHEMA, partitions=4)
    for partition in range(4):
        for n in range(4):
            queue.append([{"n": n, "s": ""}], partition)
    queue.trim(1, 2)
    queue.trim(2, 4)
    ranges = [Range(partition, 0, 4) for partition in range(4)]
    with pytest.raises(DataLostError) as caught:
        list(reading.read(store.database, queue.record, ranges))
    assert caught.value.parameters == {"queue": "many", "partition": 1, "start": 0, "end": 2}
    chunks = reading.read(store.database, queue.record, ranges, on_lost="skip")
    assert [(chunk.partition, chunk.start) for chunk in chunks] == [
        *((0, n) for n in range(4)),
        *((1, n) for n in (2, 3)),
        *((3, n) for n in range(4)),
    ]
    with pytest.raises(StoreError, match="past the newest row") as past:
        list(reading.read(store.database, queue.record, [ranges[0], Range(1, 2, 9), ranges[3]]))
    assert past.value.condition == "STORE_ERROR.PAST_END"
