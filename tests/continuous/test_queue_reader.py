"""What a task of a continuous query says of the rows that it has read from a queue."""

from __future__ import annotations

import pytest

from penstock import Store
from penstock.continuous.connectors.queue import QueueReaderFactory
from penstock.store.log.trim import time_of
from tests.support.spark_queues import SCHEMA, fill, make_queue


@pytest.mark.parametrize("compacted", [False, True])
@pytest.mark.parametrize("rows", [1, 2, 3, 6])
def test_the_time_of_the_last_row_is_its_own(
    store: Store, store_url: str, compacted: bool, rows: int
) -> None:
    """Not that of its segment, which may have rows from before and after it."""
    queue = make_queue(store, partitions=1)
    fill(queue, range(6), each=2)
    if compacted:
        queue.compact()
    reader = QueueReaderFactory(store_url, queue.record, SCHEMA).open({0: 0})
    try:
        reader.read(rows)
        assert reader.offsets() == {0: rows}
        appended = store.database.run(lambda tx: time_of(tx, queue.record, 0, rows - 1), write=False)
        assert reader.last_times() == {0: appended}
    finally:
        reader.close()
