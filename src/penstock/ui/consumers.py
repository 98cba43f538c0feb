"""Consumers on the monitor page: their lag, and whether they are stuck."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from penstock.json_text import Json, unreadable_record
from penstock.ui.history import History
from penstock.ui.reading import PositionRow, RegistrationRow, StoreState, iso, seconds_between
from penstock.ui.unreadable import UnreadableRecords, record_name

STUCK_SECONDS = 60.0

Key = tuple[int, int]
"""Consumer and queue."""


@dataclass(frozen=True)
class _Offset:
    """A consumer's offset in a partition."""

    position: PositionRow

    def require_reachable(self) -> None:
        """Refuse an offset past the newest row, since the consumer would seem to have caught up."""
        position = self.position
        if not 0 <= position.next_index <= position.log_end:
            raise unreadable_record(
                f"its offset in partition {position.partition}",
                ValueError(f"it is {position.next_index}, and the next row is {position.log_end}"),
            )

    @property
    def lag(self) -> int:
        return max(int(self.position.log_end) - int(self.position.next_index), 0)

    @property
    def lag_bytes(self) -> float:
        """The waiting rows' share of the partition's bytes."""
        position = self.position
        rows = position.log_end - position.log_start
        waiting = position.log_end - self._first_waiting
        return float(position.log_bytes * max(waiting, 0) / rows) if rows else 0.0

    def lag_seconds(self, now: int) -> float:
        """Return the age of the first waiting row, interpolated within a compacted segment."""
        position = self.position
        if not self.lag or position.first_timestamp is None:
            return 0.0
        segment_micros = position.last_timestamp - position.first_timestamp
        rows = position.end_index - position.start_index
        rows_before = max(self._first_waiting - position.start_index, 0)
        appended = position.first_timestamp + segment_micros * rows_before // rows
        return seconds_between(int(appended), now) or 0.0

    @property
    def _first_waiting(self) -> int:
        return max(int(self.position.next_index), int(self.position.log_start))


@dataclass
class _TrackedConsumer:
    """The state of a consumer on a queue at earlier snapshots."""

    waiting: dict[int, tuple[int, float]] = field(default_factory=dict)
    """For each partition with waiting rows: the offset, and the time since which it has not moved."""
    history: History = field(default_factory=History)


class Consumers:
    """Tracker of all registrations of a store across snapshots."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._tracked: dict[Key, _TrackedConsumer] = {}

    def update(self, state: StoreState, unreadable: UnreadableRecords) -> list[Json]:
        """Return the consumers for the page: stuck ones first, then by descending lag."""
        query_names = state.queries.names
        offsets = _offsets(state.consumers.positions)
        previous, self._tracked = self._tracked, {}

        def build_row(registration: RegistrationRow) -> Json:
            key = (registration.consumer_id, registration.queue_id)
            for offset in offsets[key]:
                offset.require_reachable()
            self._tracked[key] = previous.get(key, _TrackedConsumer())
            return {
                "consumer": registration.consumer,
                "queue": registration.queue,
                "vital": bool(registration.vital),
                "owner": _owner_json(registration, query_names, alive=key in state.consumers.owned),
                **self._lag_json(self._tracked[key], offsets[key], state.now),
            }

        registrations = state.consumers.registrations
        rows = unreadable.build_rows(
            registrations, build_row, lambda each: record_name("consumer", each.consumer)
        )
        rows.sort(
            key=lambda build_row: (
                not build_row["stuck"],
                -build_row["lag_seconds"],
                build_row["consumer"],
                build_row["queue"],
            )
        )
        return rows

    def _lag_json(self, tracked: _TrackedConsumer, offsets: list[_Offset], now: int) -> Json:
        lag = sum(offset.lag for offset in offsets)
        waiting_since = self._waiting_since(tracked, offsets)
        waiting_seconds = 0.0 if waiting_since is None else self._clock() - waiting_since
        is_stuck = waiting_seconds > STUCK_SECONDS
        tracked.history.add({"at": iso(now), "lag_rows": lag})
        return {
            "lag_rows": lag,
            "lag_bytes": round(sum(offset.lag_bytes for offset in offsets)),
            "lag_seconds": max((offset.lag_seconds(now) for offset in offsets), default=0.0),
            "stuck": is_stuck,
            "stuck_seconds": round(waiting_seconds, 1) if is_stuck else None,
            "partitions": [
                {
                    "partition": offset.position.partition,
                    "offset": offset.position.next_index,
                    "safe_offset": offset.position.safe_index,
                    "next_index": offset.position.log_end,
                    "lag_rows": offset.lag,
                }
                for offset in offsets
            ],
            "history": tracked.history,
        }

    def _waiting_since(self, tracked: _TrackedConsumer, offsets: list[_Offset]) -> float | None:
        """Return the earliest time since which a partition with waiting rows has not moved."""
        now, previous = self._clock(), tracked.waiting
        tracked.waiting = {}
        for offset in offsets:
            if offset.lag > 0:
                position = offset.position
                last_index, waiting_since = previous.get(position.partition, (None, now))
                current_since = waiting_since if last_index == position.next_index else now
                tracked.waiting[position.partition] = (position.next_index, current_since)
        return min((waiting_since for _, waiting_since in tracked.waiting.values()), default=None)


def _offsets(positions: Sequence[PositionRow]) -> defaultdict[Key, list[_Offset]]:
    offsets: defaultdict[Key, list[_Offset]] = defaultdict(list)
    for position in positions:
        offsets[position.consumer_id, position.queue_id].append(_Offset(position))
    return offsets


def _owner_json(row: RegistrationRow, query_names: dict[str, str | None], *, alive: bool) -> Json | None:
    if not row.epoch:
        return None
    query = None if row.app_id is None else query_names.get(row.app_id)
    return {"app_id": row.app_id, "query": query, "epoch": row.epoch, "alive": alive}
