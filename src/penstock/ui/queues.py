"""Queues on the monitor page: their size and growth, and the newest dead letters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import pyarrow.compute as pc

from penstock.errors import PenstockError
from penstock.feeds.contract import DEAD_LETTERS, REASON, VALUE
from penstock.json_text import Json, require_numbered
from penstock.redaction import SEARCHED_CHARACTERS, sentence
from penstock.store.database import Database
from penstock.store.log import reading
from penstock.store.records.catalog import QueueRecord
from penstock.ui.history import History
from penstock.ui.reading import PartitionRow, StoreState, iso, seconds_between
from penstock.ui.unreadable import Unreadable, named


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

    def update(self, state: StoreState, unreadable: Unreadable) -> list[Json]:
        records, partitions = state.queues.records, state.queues.partitions_by_queue()
        for error in state.queues.unreadable:
            unreadable.add("a queue", error)
        rows = unreadable.each(
            records,
            lambda record: self._row(record, partitions[record.queue_id], state.now),
            lambda record: named("queue", record.name),
        )
        ids = {record.queue_id for record in records}
        self._tracked = {queue: tracked for queue, tracked in self._tracked.items() if queue in ids}
        return rows

    def _row(self, record: QueueRecord, partitions: Sequence[PartitionRow], now: int) -> Json:
        require_numbered(sorted(row.partition for row in partitions), f"queue {record.name!r}")
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
            "history": self._tracked[record.queue_id].history,
        }

    def _rate(self, queue_id: int, total: int, now: int) -> float | None:
        """Return the rows per second since the previous snapshot; None for the first one."""
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
    """Return the time of the newest row; None if no row was ever appended."""
    return iso(max((row.last_timestamp for row in partitions), default=0) or None)


NEWEST = 5
CHARACTERS = 200


@dataclass(frozen=True)
class _Newest:
    """The newest letters of a queue whose partitions ended at ``ends``."""

    ends: tuple[int, ...]
    letters: list[Json]
    error: Exception | None = None
    """The error if they cannot be read; they are read again only when there are new letters."""


class DeadLetters:
    """The queues of dead letters. Their rows are read only when new ones have been appended."""

    def __init__(self, secrets: Sequence[str] = ()) -> None:
        self._secrets = secrets
        self._newest: dict[int, _Newest] = {}

    def update(self, state: StoreState, database: Database, unreadable: Unreadable) -> list[Json]:
        records, partitions = state.queues.records, state.queues.partitions_by_queue()
        before, self._newest = self._newest, {}

        def row(record: QueueRecord) -> Json | None:
            # Long schemas were not read, and are not the schema of dead letters.
            if not record.columns.first or not record.schema.equals(DEAD_LETTERS):
                return None
            own = partitions[record.queue_id]
            newest = self._read(database, record, own, before.get(record.queue_id))
            self._newest[record.queue_id] = newest
            if newest.error is not None:
                unreadable.add(named("the newest rows of queue", record.name), newest.error)
            return {
                "queue": record.name,
                "rows": sum(row.next_index - row.first_index for row in own),
                "last_append_at": last_append(own),
                "newest": newest.letters,
            }

        return unreadable.each(records, row, lambda record: named("queue", record.name))

    def _read(
        self,
        database: Database,
        record: QueueRecord,
        partitions: Sequence[PartitionRow],
        before: _Newest | None,
    ) -> _Newest:
        ends = tuple(row.next_index for row in partitions)
        if before is not None and before.ends == ends:
            return before
        try:
            # The newest letters are in the most recently appended partitions.
            last = sorted(partitions, key=lambda row: row.last_timestamp, reverse=True)[:NEWEST]
            letters = [letter for row in last for letter in _last(database, record, row)]
            letters.sort(key=lambda letter: letter[0], reverse=True)
            return _Newest(ends, [self._letter(*letter) for letter in letters[:NEWEST]])
        except PenstockError as error:
            if error.condition == "SEGMENT_UNREADABLE":
                return _Newest(ends, [], error)
            # The queue was trimmed or dropped in the meantime; the next snapshot shows it.
            return _Newest((), [] if before is None else before.letters)
        except Exception as error:
            return _Newest(ends, [], error)

    def _letter(self, at: int, reason: str, value: str | None) -> Json:
        """Return a letter with its value unchanged, and its reason without passwords, keys and tokens."""
        reason = sentence(reason, CHARACTERS, self._secrets)
        return {"at": iso(at), "reason": reason, "value": value}


def _last(
    database: Database, record: QueueRecord, partition: PartitionRow
) -> list[tuple[int, str, str | None]]:
    """Return the last letters of a partition: the time of the append, the reason and the value of each."""
    start = max(partition.first_index, partition.next_index - NEWEST)
    letters: list[tuple[int, str, str | None]] = []
    newest = reading.Range(partition.partition, start, partition.next_index)
    chunks = reading.read(database, record, [newest], columns=[REASON, VALUE], with_runs=True)
    for chunk in chunks:
        # Truncate rows before converting them to Python objects, since they can be long.
        reasons, values = (
            pc.utf8_slice_codeunits(chunk.batch.column(name), 0, most).to_pylist()
            for name, most in ((REASON, SEARCHED_CHARACTERS + 1), (VALUE, CHARACTERS))
        )
        times = map(chunk.timestamp_of, range(chunk.start, chunk.end))
        letters += zip(times, reasons, values, strict=True)
    return letters
