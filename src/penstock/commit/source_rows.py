"""Whether a queue still has the rows that an offset names.

A store that was restored from an older backup and has grown again has other rows under the same indexes.
They were appended at other times, so an offset has the time of the last row of each partition.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import zip_longest

from penstock.commit.offsets import QueueOffset
from penstock.errors import CheckpointMismatchError
from penstock.store.database import Transaction
from penstock.store.records import catalog
from penstock.store.records.catalog import PartitionRecord, QueueRecord


def require_rows(tx: Transaction, queue_id: int, offset: QueueOffset) -> None:
    """Refuse an offset if the queue lacks its rows, or has others in their place: the queue's store was
    restored from an older backup.
    """
    last_rows = json.dumps(list(zip_longest(offset.end, offset.times)))
    if not tx.all("other_rows", queue_id=queue_id, last_rows=last_rows):
        return
    queue = catalog.find_queue(tx, offset.queue)
    if offset.consumer is None:
        offset.require(offset.store, queue.name, None, queue.generation)
    offset.require_reached([part.next_index for part in catalog.partitions(tx, queue)])
    raise CheckpointMismatchError(
        f"queue {offset.queue!r} has other rows than this query has read, up to {list(offset.end)}: its "
        "store was restored from an older backup. Restore the checkpoint of the same moment, or use a new "
        "one; a query that ran meanwhile only has to be restarted",
        condition="CHECKPOINT_MISMATCH.SOURCE_BEHIND",
        queue=offset.queue,
        offsets=list(offset.end),
    )


def row_times(
    tx: Transaction, queue: QueueRecord, partitions: Sequence[PartitionRecord], ends: Sequence[int]
) -> tuple[int | None, ...]:
    """When the last row before each end was appended; None where there is no such row any more."""
    known = [
        part.last_timestamp if part.first_index < end == part.next_index else None
        for part, end in zip(partitions, ends, strict=True)
    ]
    asked = [
        [part.partition, end]
        for part, end in zip(partitions, ends, strict=True)
        if part.first_index < end < part.next_index
    ]
    if asked:
        for row in tx.all("row_times", queue_id=queue.queue_id, ends=json.dumps(asked)):
            known[row.partition] = row.time
    return tuple(known)
