"""What a task of a continuous query says of the rows that it has read from a queue."""

from __future__ import annotations

import pytest

from penstock import Store
from penstock.continuous.connectors.queue import QueueReaderFactory
from penstock.errors import CheckpointMismatchError
from penstock.store.log.trim import time_of
from tests.support.queues import backdate
from tests.support.spark_queues import SCHEMA, fill, make_queue
from tests.support.waiting import wait_until


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


def test_an_epoch_whose_first_rows_were_replaced_before_its_last_were_read_is_refused(
    store: Store, store_url: str
) -> None:
    """The store was restored in between. The commit checks the last row alone, which is there."""
    queue = make_queue(store, partitions=1)
    fill(queue, range(3))
    reader = QueueReaderFactory(store_url, queue.record, SCHEMA).open({0: 0})
    try:
        wait_until(lambda: reader.read(10) is not None, 10, "the first rows")
        backdate(store, 1)
        fill(queue, range(3, 6))
        wait_until(lambda: reader.read(10) is not None, 10, "the other rows")
        with pytest.raises(CheckpointMismatchError, match="partition 0, up to 3"):
            reader.offsets()
    finally:
        reader.close()
