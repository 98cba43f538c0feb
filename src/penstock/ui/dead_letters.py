"""Dead letters on the monitor page: the newest ones of each queue that holds them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from penstock.changes.dead_letters import DEAD_LETTERS, REASON, VALUE
from penstock.errors import PenstockError
from penstock.json_text import Json
from penstock.redaction import sentence
from penstock.store.database import Database
from penstock.store.log import partition_log
from penstock.store.records.catalog import QueueRecord
from penstock.ui.queues import last_append
from penstock.ui.reading import PartitionRow, StoreState, iso

NEWEST = 5
CHARACTERS = 200


@dataclass(frozen=True)
class _Newest:
    """The newest letters of a queue whose partitions ended at ``ends``."""

    ends: tuple[int, ...]
    letters: list[Json]


class DeadLetters:
    """The queues of dead letters. Their rows are read only when new ones have been appended.

    Parameters
    ----------
    secrets
        Texts to remove from reasons.
    """

    def __init__(self, secrets: Sequence[str] = ()) -> None:
        self._secrets = secrets
        self._newest: dict[int, _Newest] = {}

    def update(self, state: StoreState, database: Database) -> list[Json]:
        """Return the queues for the page, by name."""
        all_partitions = state.partitions_by_queue()
        rows, newest = [], {}
        for record in state.queues:
            if record.schema.equals(DEAD_LETTERS):
                partitions = all_partitions[record.queue_id]
                newest[record.queue_id] = self._read(database, record, partitions)
                rows.append(
                    {
                        "queue": record.name,
                        "rows": sum(row.next_index - row.first_index for row in partitions),
                        "last_append_at": last_append(partitions),
                        "newest": newest[record.queue_id].letters,
                    }
                )
        self._newest = newest
        return rows

    def _read(self, database: Database, record: QueueRecord, partitions: Sequence[PartitionRow]) -> _Newest:
        ends = tuple(row.next_index for row in partitions)
        newest = self._newest.get(record.queue_id)
        if newest is not None and newest.ends == ends:
            return newest
        try:
            letters = [letter for row in partitions for letter in _last(database, record, row)]
        except PenstockError:
            # Trimmed or dropped meanwhile: the next snapshot shows it.
            return _Newest((), [] if newest is None else newest.letters)
        letters.sort(key=lambda letter: letter[0], reverse=True)
        return _Newest(ends, [self._letter(*letter) for letter in letters[:NEWEST]])

    def _letter(self, at: int, reason: str, value: str | None) -> Json:
        """Return a letter with its value as it is, and its reason without passwords, keys and tokens."""
        reason = sentence(reason, CHARACTERS, self._secrets)
        return {"at": iso(at), "reason": reason, "value": None if value is None else value[:CHARACTERS]}


def _last(
    database: Database, record: QueueRecord, partition: PartitionRow
) -> list[tuple[int, str, str | None]]:
    """Return the last letters of a partition: when each was appended, its reason and its value."""
    start = max(partition.first_index, partition.next_index - NEWEST)
    letters = []
    chunks = partition_log.read(
        database,
        record,
        partition.partition,
        start,
        partition.next_index,
        columns=[REASON, VALUE],
        with_runs=True,
    )
    for chunk in chunks:
        for place, values in enumerate(chunk.batch.to_pylist()):
            at = chunk.first_timestamp if chunk.runs is None else chunk.runs.timestamp_at(place)
            letters.append((at, values[REASON], values[VALUE]))
    return letters
