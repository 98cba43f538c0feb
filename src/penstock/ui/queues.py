"""Queues on the page: what they hold, and how fast they grow."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import Any

from penstock.store.records.catalog import QueueRecord
from penstock.ui.history import History
from penstock.ui.reading import Seen, iso, seconds


@dataclass
class _Known:
    """What was seen of a queue before."""

    total: int
    at: int
    history: History


class Queues:
    """All queues of a store, from one look to the next."""

    def __init__(self) -> None:
        self._known: dict[int, _Known] = {}

    @property
    def count(self) -> int:
        """How many histories there are."""
        return len(self._known)

    def told(self, seen: Seen) -> list[dict[str, Any]]:
        """The queues as the page gets them, without histories, by name."""
        by_queue: dict[int, list[Any]] = defaultdict(list)
        for row in seen.partitions:
            by_queue[row.queue_id].append(row)
        found = [self._told(record, by_queue[record.queue_id], seen.now) for record in seen.queues]
        there = {record.queue_id for record in seen.queues}
        self._known = {key: known for key, known in self._known.items() if key in there}
        return found

    def histories(self, seen: Seen, step: int) -> list[list[Any]]:
        """The history of each queue, in the order of :meth:`told`."""
        return [self._known[record.queue_id].history.every(step) for record in seen.queues]

    def _told(self, record: QueueRecord, partitions: list[Any], now: int) -> dict[str, Any]:
        rows = sum(row.next_index - row.first_index for row in partitions)
        size = sum(row.bytes for row in partitions)
        rate = self._rate(record.queue_id, sum(row.next_index for row in partitions), now)
        oldest = min((row.oldest for row in partitions if row.oldest is not None), default=None)
        appended = max((row.last_timestamp for row in partitions), default=0) or None
        keeps = record.retention
        return {
            "name": record.name,
            "rows": rows,
            "bytes": size,
            "rows_per_second": rate,
            "bytes_per_second": None if rate is None or not rows else round(rate * size / rows, 1),
            "oldest_at": iso(oldest),
            "oldest_seconds": seconds(oldest, now),
            "last_append_at": iso(appended),
            "key": list(record.key),
            "keeps": {
                "rows": keeps.rows,
                "age_seconds": None if keeps.age is None else keeps.age / 1e6,
                "bytes": keeps.bytes,
            },
            "partitions": [_partition(row) for row in partitions],
        }

    def _rate(self, queue_id: int, total: int, now: int) -> float | None:
        """Rows per second since the look before; None at the first one."""
        known = self._known.get(queue_id)
        if known is None:
            self._known[queue_id] = _Known(total, now, History())
            return None
        if now <= known.at:
            return None
        rate = round(max(total - known.total, 0) / ((now - known.at) / 1e6), 3)
        known.total, known.at = total, now
        known.history.add({"at": iso(now), "rows_per_second": rate})
        return rate


def _partition(row: Any) -> dict[str, Any]:
    return {
        "partition": row.partition,
        "first_index": row.first_index,
        "next_index": row.next_index,
        "rows": row.next_index - row.first_index,
        "bytes": row.bytes,
        "segments": row.segments,
        "oldest_at": iso(row.oldest),
    }
