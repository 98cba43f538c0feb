"""Queues on the monitor page: what they hold, and how fast they grow."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from penstock.json_text import Json
from penstock.store.records.catalog import QueueRecord
from penstock.ui.history import History
from penstock.ui.reading import PartitionRow, StoreState, iso, seconds_between


@dataclass
class _Tracked:
    """A queue's total of appended rows at the last snapshot."""

    total: int
    at: int
    history: History = field(default_factory=History)


class Queues:
    """All queues of a store, from one snapshot to the next."""

    def __init__(self) -> None:
        self._tracked: dict[int, _Tracked] = {}

    @property
    def count(self) -> int:
        """How many histories there are."""
        return len(self._tracked)

    def update(self, state: StoreState) -> list[Json]:
        """Return the queues for the page, by name and without histories."""
        partitions = state.partitions_by_queue()
        rows = [self._row(record, partitions[record.queue_id], state.now) for record in state.queues]
        self._tracked = {record.queue_id: self._tracked[record.queue_id] for record in state.queues}
        return rows

    def histories(self, state: StoreState, step: int) -> list[list[Json]]:
        """Return the history of each queue, in the order of :meth:`update`."""
        return [self._tracked[record.queue_id].history.every(step) for record in state.queues]

    def _row(self, record: QueueRecord, partitions: Sequence[PartitionRow], now: int) -> Json:
        rows = sum(row.next_index - row.first_index for row in partitions)
        size = sum(row.bytes for row in partitions)
        rate = self._rate(record.queue_id, sum(row.next_index for row in partitions), now)
        oldest = min((row.oldest for row in partitions if row.oldest is not None), default=None)
        keeps = record.retention
        return {
            "name": record.name,
            "rows": rows,
            "bytes": size,
            "rows_per_second": rate,
            "bytes_per_second": None if rate is None or not rows else round(rate * size / rows, 1),
            "oldest_at": iso(oldest),
            "oldest_seconds": seconds_between(oldest, now),
            "last_append_at": last_append(partitions),
            "key": list(record.key),
            "keeps": {
                "rows": keeps.rows,
                "age_seconds": None if keeps.age is None else keeps.age / 1e6,
                "bytes": keeps.bytes,
            },
            "partitions": [
                {
                    "partition": row.partition,
                    "first_index": row.first_index,
                    "next_index": row.next_index,
                    "rows": row.next_index - row.first_index,
                    "bytes": row.bytes,
                    "segments": row.segments,
                    "oldest_at": iso(row.oldest),
                }
                for row in partitions
            ],
        }

    def _rate(self, queue_id: int, total: int, now: int) -> float | None:
        """Return the rows per second since the snapshot before; None for the first one."""
        tracked = self._tracked.get(queue_id)
        if tracked is None:
            self._tracked[queue_id] = _Tracked(total, now)
            return None
        if now <= tracked.at:
            return None
        rate = round(max(total - tracked.total, 0) / ((now - tracked.at) / 1e6), 3)
        tracked.total, tracked.at = total, now
        tracked.history.add({"at": iso(now), "rows_per_second": rate})
        return rate


def last_append(partitions: Sequence[PartitionRow]) -> str | None:
    """Return the time of the newest row; None where no row was ever appended."""
    return iso(max((row.last_timestamp for row in partitions), default=0) or None)
