"""The newest commits on the page."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from penstock.changes.dead_letters import DEAD_LETTERS, REASON, VALUE
from penstock.errors import PenstockError
from penstock.redaction import sentence
from penstock.store.database import Database
from penstock.store.log import partition_log
from penstock.store.records.catalog import QueueRecord
from penstock.ui.reading import Seen, iso


def told(seen: Seen) -> list[dict[str, Any]]:
    """The newest commits of the ledger as the page gets them, newest first."""
    names = seen.names
    return [
        {
            "sink": _sink(row.sink),
            "app_id": row.app_id,
            "query": names.get(row.app_id),
            "batch": row.batch_id,
            "rows": row.row_count,
            "committed_at": iso(row.committed_at),
        }
        for row in seen.commits
    ]


def _sink(name: str) -> str:
    """What people call a sink: the ledger has ``queue:name:generation``, or ``table:"schema"."name"``."""
    kind, _, rest = name.partition(":")
    if kind == "queue":
        return rest.rpartition(":")[0]
    return rest if kind == "table" else name


# ---- letters: Dead letters on the page: the newest ones of each queue that is for them.

NEWEST = 5
CHARACTERS = 200


@dataclass(frozen=True)
class _Known:
    """The newest letters of a queue that ended there."""

    ends: tuple[int, ...]
    newest: list[dict[str, Any]]


class Letters:
    """The queues of dead letters, whose rows are read when there are new ones.

    Parameters
    ----------
    secrets
        What no reason shows.
    """

    def __init__(self, secrets: Sequence[str] = ()) -> None:
        self._secrets = secrets
        self._known: dict[int, _Known] = {}

    def told(self, seen: Seen, database: Database) -> list[dict[str, Any]]:
        """The queues as the page gets them, by name."""
        partitions: dict[int, list[Any]] = defaultdict(list)
        for row in seen.partitions:
            partitions[row.queue_id].append(row)
        queues = [record for record in seen.queues if record.schema.equals(DEAD_LETTERS)]
        self._known = {
            record.queue_id: self._newest(database, record, partitions[record.queue_id]) for record in queues
        }
        return [
            {
                "queue": record.name,
                "rows": sum(row.next_index - row.first_index for row in partitions[record.queue_id]),
                "last_append_at": iso(
                    max((row.last_timestamp for row in partitions[record.queue_id]), default=0) or None
                ),
                "newest": self._known[record.queue_id].newest,
            }
            for record in queues
        ]

    def _newest(self, database: Database, record: QueueRecord, partitions: list[Any]) -> _Known:
        ends = tuple(row.next_index for row in partitions)
        known = self._known.get(record.queue_id)
        if known is not None and known.ends == ends:
            return known
        try:
            found = [letter for row in partitions for letter in _last(database, record, row)]
        except PenstockError:
            # Trimmed or dropped meanwhile: the next look has it.
            return _Known((), [] if known is None else known.newest)
        found.sort(key=lambda letter: letter[0], reverse=True)
        return _Known(ends, [self._told(*letter) for letter in found[:NEWEST]])

    def _told(self, at: int, reason: str, value: str | None) -> dict[str, Any]:
        """The value as it came, and the reason without what looks like a password, a key or a token."""
        why = sentence(reason, CHARACTERS, self._secrets)
        return {"at": iso(at), "reason": why, "value": None if value is None else value[:CHARACTERS]}


def _last(database: Database, record: QueueRecord, row: Any) -> list[tuple[int, str, str | None]]:
    """The last letters of a partition: when each was appended, why, and what it says."""
    start = max(row.first_index, row.next_index - NEWEST)
    found = []
    columns = [REASON, VALUE]
    for chunk in partition_log.read(
        database, record, row.partition, start, row.next_index, columns=columns, with_runs=True
    ):
        for place, values in enumerate(chunk.batch.to_pylist()):
            at = chunk.first_timestamp if chunk.runs is None else chunk.runs.timestamp_at(place)
            found.append((at, values[REASON], values[VALUE]))
    return found
