"""Staging as compressed segments, beside those of queues, which the driver unpacks into a temporary relation.

SQLite stages everything so, since rows become SQL values once. PostgreSQL stages the epochs of continuous queries so: a
relation for each of them, as micro-batches have, would cost more than its rows.
"""

from __future__ import annotations

import hashlib
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import pyarrow as pa

from penstock.arrow.segments import decode
from penstock.store import staging
from penstock.store.database import Database, Transaction
from penstock.store.log.segmenting import Segment, to_segments
from penstock.store.postgres import staging_relations
from penstock.store.staging import Attempt
from penstock.tables.columns import Layout
from penstock.tables.loading import clear, defined, load
from penstock.tables.stages import Source, Stage, chunked

_LAST = 2**62


@dataclass(frozen=True)
class Place:
    """A table among the queues that segments are staged for."""

    sink: str
    """Its name in the ledger."""

    @property
    def queue_id(self) -> int:
        """A number that no queue has, and no other table."""
        return -1 - int.from_bytes(hashlib.sha256(self.sink.encode()).digest()[:7])


@dataclass(frozen=True)
class SegmentStage(Stage):
    """Rows wait as Arrow, and become SQL values in the transaction that publishes them."""

    defined: tuple[str, ...]
    """The columns of the temporary relation."""

    @classmethod
    def of(cls, layout: Layout, columns: pa.Schema, app_id: str, batch_id: int) -> SegmentStage:
        return cls(columns, layout.name.ledger_name, app_id, batch_id, defined(layout, columns.names))

    def put(
        self, database: Database, task: int, attempt: int, chunks: Iterator[pa.RecordBatch]
    ) -> dict[str, int]:
        mine = Attempt(self.app_id, self.batch_id, task, str(uuid.uuid4()))
        staged = 0
        for chunk in chunks:
            staged += self.add(database, mine, chunk, staged)
        return {mine.attempt: staged} if staged else {}

    def add(self, database: Database, mine: Attempt, chunk: pa.RecordBatch, staged: int) -> int:
        """Stage rows; how many segments they are.

        Parameters
        ----------
        staged
            How many the attempt has staged before.
        """
        segments: list[Segment] = to_segments(chunk, 0)
        place = Place(self.sink)
        database.run(lambda tx: staging.stage(tx, place, mine, segments, staged), idempotent=True)
        return len(segments)

    def take(self, tx: Transaction, attempts: Mapping[str, int]) -> Source:
        staged = staging.take(tx, Place(self.sink), self.app_id, self.batch_id)
        rows = [row for row in staged if row.batch_id == self.batch_id and row.attempt in attempts]
        if len(rows) != sum(attempts.values()):
            raise self.swept()
        rows.sort(key=lambda row: (row.task, row.attempt, row.ordinal))
        found = load(tx, self.defined, chunked(self._payload(tx, row.payload_id) for row in rows))
        staging.drop_payloads(tx, [row.payload_id for row in staged])
        return found

    def _payload(self, tx: Transaction, payload_id: int) -> pa.RecordBatch:
        return decode(tx.one("read_payload", payload_id=payload_id).data, self.columns)

    def drop(self, tx: Transaction) -> None:
        clear(tx, self.defined)
        staging.discard(tx, Place(self.sink), self.app_id, self.batch_id)


def drop_earlier(database: Database, sink: str, app_id: str) -> None:
    """Drop what earlier tries of an app have staged for a table, in whichever way."""
    staging_relations.drop_of(database, sink, app_id)
    database.run(lambda tx: staging.discard(tx, Place(sink), app_id, _LAST), idempotent=True)
