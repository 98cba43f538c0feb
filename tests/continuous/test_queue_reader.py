"""Offsets and times that a task of a continuous query reports for the rows that it has read from a queue."""

from __future__ import annotations

import pyarrow as pa
import pytest

from penstock import Store
from penstock.continuous.connectors import queue as queue_connector
from penstock.continuous.connectors.queue import QueueReaderFactory
from penstock.errors import CheckpointMismatchError
from penstock.store.log.trim import append_time_of
from tests.support.queues import backdate
from tests.support.spark_queues import SCHEMA, fill, make_queue
from tests.support.waiting import wait_until


@pytest.mark.parametrize("compacted", [False, True])
@pytest.mark.parametrize("rows", [1, 2, 3, 6])
def test_the_time_of_the_last_row_is_its_own_append_time(
    store: Store, store_url: str, compacted: bool, rows: int
) -> None:
    """It is not the time of its segment, which may also have earlier and later rows."""
    queue = make_queue(store, partitions=1)
    fill(queue, range(6), each=2)
    if compacted:
        queue.compact()
    reader = QueueReaderFactory(store_url, queue.record, SCHEMA).open({0: 0})
    try:
        reader.read(rows)
        assert reader.offsets() == {0: rows}
        appended = store.database.run(lambda tx: append_time_of(tx, queue.record, 0, rows - 1), write=False)
        assert reader.last_times() == {0: appended}
    finally:
        reader.close()


def test_an_epoch_whose_first_rows_were_replaced_before_its_last_were_read_is_refused(
    store: Store, store_url: str
) -> None:
    """The store was restored in between. The commit checks only the last row, which exists."""
    queue = make_queue(store, partitions=1)
    fill(queue, range(3))
    reader = QueueReaderFactory(store_url, queue.record, SCHEMA).open({0: 0})
    try:
        wait_until(lambda: reader.read(10) is not None, 10, "the first rows")
        backdate(store, 1)
        fill(queue, range(3, 6))
        wait_until(lambda: reader.read(10) is not None, 10, "the remaining rows")
        with pytest.raises(CheckpointMismatchError, match="partition 0, up to 3"):
            reader.offsets()
    finally:
        reader.close()


def test_large_rows_are_read_a_few_at_a_time(store: Store, store_url: str) -> None:
    """A backlog of large rows neither fills a task's memory nor exceeds what fits into an Arrow batch."""
    schema = pa.schema([("id", pa.int64()), ("text", pa.string())])
    queue = store.create_queue("large", schema, partitions=2)
    for start in range(0, 80, 20):
        rows = [{"id": number, "text": f"{number:04}" * 500_000} for number in range(start, start + 20)]
        queue.append(rows, partition=start // 20 % 2)
    reader = QueueReaderFactory(store_url, queue.record, schema).open({0: 0, 1: 0})
    before, ids, largest, peak = pa.total_allocated_bytes(), [], 0, 0
    try:
        while (rows := reader.read(10_000)) is not None:
            ids += rows.column("id").to_pylist()
            largest = max(largest, rows.nbytes)
            peak = max(peak, pa.total_allocated_bytes() - before)
            del rows
        assert sorted(ids) == list(range(80))
        assert reader.offsets() == {0: 40, 1: 40}
    finally:
        reader.close()
    assert largest < 20 << 20
    # The rows have 160 MB.
    assert peak < 120 << 20


def test_an_epoch_whose_rows_were_replaced_between_two_parts_of_a_page_is_refused(
    store: Store, store_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(queue_connector, "_AHEAD_BYTES", 1)
    queue = make_queue(store, partitions=1)
    fill(queue, range(4), each=2)
    reader = QueueReaderFactory(store_url, queue.record, SCHEMA).open({0: 0})
    try:
        first = reader.read(10)
        assert first is not None
        assert first.num_rows == 2
        backdate(store, 1)
        second = reader.read(10)
        assert second is not None
        fill(queue, range(4, 6))
        with pytest.raises(CheckpointMismatchError, match="partition 0, up to 2"):
            reader.offsets()
    finally:
        reader.close()
