"""Consumers on the page: how far they are behind, and whether they move."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from penstock.ui.history import History
from penstock.ui.reading import Seen, iso, seconds

STUCK_SECONDS = 60.0

Key = tuple[int, int]
"""Consumer and queue."""


@dataclass
class _Known:
    """What was seen of a consumer on a queue before."""

    waiting: dict[int, tuple[int, float]] = field(default_factory=dict)
    """By partition in which rows wait: the offset, and since when it stands there."""
    history: History = field(default_factory=History)


class Consumers:
    """All registrations of a store, from one look to the next.

    Parameters
    ----------
    clock
        Seconds, from anywhere.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._known: dict[Key, _Known] = {}
        self._order: list[Key] = []

    @property
    def count(self) -> int:
        """How many histories there are."""
        return len(self._known)

    def told(self, seen: Seen) -> list[dict[str, Any]]:
        """The consumers as the page gets them, without histories: stuck ones first, then those that are most behind."""
        names = {record.queue_id: record.name for record in seen.queues}
        queries = seen.names
        there = {(row.queue_id, row.partition): row for row in seen.partitions}
        positions: dict[Key, list[Any]] = defaultdict(list)
        for row in seen.positions:
            positions[row.consumer_id, row.queue_id].append(row)
        found = []
        for row in seen.registrations:
            key = (row.consumer_id, row.queue_id)
            # A queue that is being dropped may lack the one or the other.
            if row.queue_id in names:
                pairs = [
                    (each, there[row.queue_id, each.partition])
                    for each in positions[key]
                    if (row.queue_id, each.partition) in there
                ]
                about = {
                    "consumer": row.consumer,
                    "queue": names[row.queue_id],
                    "vital": bool(row.vital),
                    "owner": _owner(row, queries.get(row.app_id), key in seen.owned),
                }
                found.append((key, {**about, **self._told(key, pairs, seen)}))
        found.sort(key=lambda each: _order(each[1]))
        self._order = [key for key, _ in found]
        self._known = {key: self._known[key] for key in self._order}
        return [told for _, told in found]

    def histories(self, step: int) -> list[list[Any]]:
        """The history of each consumer, in the order of :meth:`told`."""
        return [self._known[key].history.every(step) for key in self._order]

    def _told(self, key: Key, pairs: list[tuple[Any, Any]], seen: Seen) -> dict[str, Any]:
        known = self._known.setdefault(key, _Known())
        lag = sum(_lag(position, partition) for position, partition in pairs)
        since = self._waiting_since(known, pairs)
        standing = None if since is None else self._clock() - since
        stuck = standing is not None and standing > STUCK_SECONDS
        known.history.add({"at": iso(seen.now), "lag_rows": lag})
        return {
            "lag_rows": lag,
            "lag_bytes": round(sum(_lag_bytes(position, partition) for position, partition in pairs)),
            "lag_seconds": max(
                (_lag_seconds(position, partition, seen.now) for position, partition in pairs), default=0.0
            ),
            "stuck": stuck,
            "stuck_seconds": round(standing, 1) if stuck and standing is not None else None,
            "partitions": [_partition(position, partition) for position, partition in pairs],
        }

    def _waiting_since(self, known: _Known, pairs: list[tuple[Any, Any]]) -> float | None:
        """Since when the partition that has stood still longest does so, of those in which rows wait."""
        now, before = self._clock(), known.waiting
        known.waiting = {}
        for position, partition in pairs:
            if _lag(position, partition) > 0:
                offset, since = before.get(position.partition, (None, now))
                at = since if offset == position.next_index else now
                known.waiting[position.partition] = (position.next_index, at)
        return min((since for _, since in known.waiting.values()), default=None)


def _order(told: dict[str, Any]) -> tuple[Any, ...]:
    return not told["stuck"], -told["lag_seconds"], told["consumer"], told["queue"]


def _first_waiting(position: Any, partition: Any) -> int:
    return max(int(position.next_index), int(partition.first_index))


def _lag(position: Any, partition: Any) -> int:
    return max(int(partition.next_index) - int(position.next_index), 0)


def _lag_bytes(position: Any, partition: Any) -> float:
    """The share of the partition's bytes that its rows that wait have."""
    rows = partition.next_index - partition.first_index
    waiting = partition.next_index - _first_waiting(position, partition)
    return float(partition.bytes * max(waiting, 0) / rows) if rows else 0.0


def _lag_seconds(position: Any, partition: Any, now: int) -> float:
    """The age of the first row that waits; inside a merged segment it is told by the row's place."""
    if not _lag(position, partition) or position.first_timestamp is None:
        return 0.0
    span = position.last_timestamp - position.first_timestamp
    rows = position.end_index - position.start_index
    place = max(_first_waiting(position, partition) - position.start_index, 0)
    appended = position.first_timestamp + span * place // rows
    return seconds(int(appended), now) or 0.0


def _owner(row: Any, query: str | None, alive: bool) -> dict[str, Any] | None:
    if not row.epoch:
        return None
    return {"app_id": row.app_id, "query": query, "epoch": row.epoch, "alive": alive}


def _partition(position: Any, partition: Any) -> dict[str, Any]:
    return {
        "partition": position.partition,
        "offset": position.next_index,
        "safe_offset": position.safe_index,
        "next_index": partition.next_index,
        "lag_rows": _lag(position, partition),
    }
