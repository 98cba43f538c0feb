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
from penstock.ui.unreadable import UnreadableRecords, record_name


@dataclass
class _TrackedQueue:
    """A queue's total of appended rows at the last snapshot."""

    total: int
    at: int
    history: History = field(default_factory=History)


class Queues:
    """Tracker of all queues of a store across snapshots."""

    def __init__(self) -> None:
        self._tracked: dict[int, _TrackedQueue] = {}

    def update(self, state: StoreState, unreadable: UnreadableRecords) -> list[Json]:
        records, partitions = state.queues.records, state.queues.partitions_by_queue()
        for error in state.queues.unreadable:
            unreadable.add("a queue", error)
        rows = unreadable.build_rows(
            records,
            lambda record: self._queue_row(record, partitions[record.queue_id], state.now),
            lambda record: record_name("queue", record.name),
        )
        ids = {record.queue_id for record in records}
        self._tracked = {queue: tracked for queue, tracked in self._tracked.items() if queue in ids}
        return rows

    def _queue_row(self, record: QueueRecord, partitions: Sequence[PartitionRow], now: int) -> Json:
        require_numbered(sorted(row.partition for row in partitions), f"queue {record.name!r}")
        rows = sum(row.next_index - row.first_index for row in partitions)
        size = sum(row.bytes for row in partitions)
        rate = self._rate(record.queue_id, sum(row.next_index for row in partitions), now)
        oldest = min((row.oldest for row in partitions if row.oldest is not None), default=None)
        retention = record.retention
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
                "rows": retention.rows,
                "age_seconds": None if retention.age is None else retention.age / 1e6,
                "bytes": retention.bytes,
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
            self._tracked[queue_id] = _TrackedQueue(total, now)
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


MAX_LETTERS = 5
MAX_CHARACTERS = 200


@dataclass(frozen=True)
class _NewestLetters:
    """The newest dead letters of a queue whose partitions ended at ``ends``."""

    ends: tuple[int, ...]
    letters: list[Json]
    error: Exception | None = None
    """The error if they cannot be read; they are read again only when there are new letters."""


class DeadLetters:
    """Tracker of the queues of dead letters. Their rows are read only when rows have been appended."""

    def __init__(self, secrets: Sequence[str] = ()) -> None:
        self._secrets = secrets
        self._newest: dict[int, _NewestLetters] = {}

    def update(self, state: StoreState, database: Database, unreadable: UnreadableRecords) -> list[Json]:
        records, partitions = state.queues.records, state.queues.partitions_by_queue()
        previous, self._newest = self._newest, {}

        def build_row(record: QueueRecord) -> Json | None:
            # Long schemas were not read, and are not the schema of dead letters.
            if not record.columns.first or not record.schema.equals(DEAD_LETTERS):
                return None
            queue_partitions = partitions[record.queue_id]
            newest = self._read(database, record, queue_partitions, previous.get(record.queue_id))
            self._newest[record.queue_id] = newest
            if newest.error is not None:
                unreadable.add(record_name("the newest rows of queue", record.name), newest.error)
            return {
                "queue": record.name,
                "rows": sum(build_row.next_index - build_row.first_index for build_row in queue_partitions),
                "last_append_at": last_append(queue_partitions),
                "newest": newest.letters,
            }

        return unreadable.build_rows(records, build_row, lambda record: record_name("queue", record.name))

    def _read(
        self,
        database: Database,
        record: QueueRecord,
        partitions: Sequence[PartitionRow],
        previous: _NewestLetters | None,
    ) -> _NewestLetters:
        ends = tuple(row.next_index for row in partitions)
        if previous is not None and previous.ends == ends:
            return previous
        try:
            # The newest letters are in the most recently appended partitions.
            latest_partitions = sorted(partitions, key=lambda row: row.last_timestamp, reverse=True)[
                :MAX_LETTERS
            ]
            letters = [letter for row in latest_partitions for letter in _last_letters(database, record, row)]
            letters.sort(key=lambda letter: letter[0], reverse=True)
            return _NewestLetters(ends, [self._letter(*letter) for letter in letters[:MAX_LETTERS]])
        except PenstockError as error:
            if error.condition == "SEGMENT_UNREADABLE":
                return _NewestLetters(ends, [], error)
            # The queue was trimmed or dropped in the meantime; the next snapshot shows it.
            return _NewestLetters((), [] if previous is None else previous.letters)
        except Exception as error:
            return _NewestLetters(ends, [], error)

    def _letter(self, at: int, reason: str, value: str | None) -> Json:
        """Return a letter with its value unchanged, and its reason without passwords, keys and tokens."""
        reason = sentence(reason, MAX_CHARACTERS, self._secrets)
        return {"at": iso(at), "reason": reason, "value": value}


def _last_letters(
    database: Database, record: QueueRecord, partition: PartitionRow
) -> list[tuple[int, str, str | None]]:
    """Return the last letters of a partition: the time of the append, the reason and the value of each."""
    start = max(partition.first_index, partition.next_index - MAX_LETTERS)
    letters: list[tuple[int, str, str | None]] = []
    row_range = reading.Range(partition.partition, start, partition.next_index)
    chunks = reading.read(database, record, [row_range], columns=[REASON, VALUE], with_runs=True)
    for chunk in chunks:
        # Truncate rows before converting them to Python objects, since they can be long.
        reasons, values = (
            pc.utf8_slice_codeunits(chunk.batch.column(name), 0, max_characters).to_pylist()
            for name, max_characters in ((REASON, SEARCHED_CHARACTERS + 1), (VALUE, MAX_CHARACTERS))
        )
        times = map(chunk.timestamp_of, range(chunk.start, chunk.end))
        letters += zip(times, reasons, values, strict=True)
    return letters
