"""Staging in SQLite: compressed segments, beside those of queues, which the driver unpacks into a temporary table."""

from __future__ import annotations

import hashlib
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import pyarrow as pa

from penstock.arrow.segments import decode
from penstock.store import staging
from penstock.store.cutting import Segment, to_segments
from penstock.store.database import Database, Transaction
from penstock.store.staging import Attempt
from penstock.tables.stages import Source, Stage

_RELATION = "temp.penstock_rows"


@dataclass(frozen=True)
class SqliteStage(Stage):
    """Rows wait as Arrow, and become SQL values once, in the transaction that publishes them."""

    @property
    def queue_id(self) -> int:
        """A number that no queue has, and no other table."""
        return -1 - int.from_bytes(hashlib.sha256(self.sink.encode()).digest()[:7])

    def put(
        self, database: Database, task: int, attempt: int, chunks: Iterator[pa.RecordBatch]
    ) -> dict[str, int]:
        mine = Attempt(self.app_id, self.batch_id, task, str(uuid.uuid4()))
        staged = 0
        for chunk in chunks:
            segments = to_segments(chunk, 0)
            self._stage(database, mine, segments, staged)
            staged += len(segments)
        return {mine.attempt: staged} if staged else {}

    def _stage(self, database: Database, mine: Attempt, segments: list[Segment], ordinal: int) -> None:
        database.run(lambda tx: staging.stage(tx, self, mine, segments, ordinal), idempotent=True)

    def take(self, tx: Transaction, attempts: Mapping[str, int]) -> Source:
        staged = staging.take(tx, self, self.app_id, self.batch_id)
        rows = [row for row in staged if row.batch_id == self.batch_id and row.attempt in attempts]
        if len(rows) != sum(attempts.values()):
            raise self.swept()
        names = self.columns.names
        tx.execute(f"drop table if exists {_RELATION}")
        tx.execute(f"create temporary table {_RELATION.removeprefix('temp.')} ({', '.join(names)})")
        into = f"insert into {_RELATION} values ({', '.join('?' * len(names))})"
        for row in sorted(rows, key=lambda row: (row.task, row.attempt, row.ordinal)):
            batch = decode(tx.one("read_payload", payload_id=row.payload_id).data, self.columns)
            tx.load(into, zip(*(column.to_pylist() for column in batch.columns), strict=True))
        staging.drop_payloads(tx, [row.payload_id for row in staged])
        return Source(_RELATION)

    def drop(self, tx: Transaction) -> None:
        tx.execute(f"drop table if exists {_RELATION}")
        staging.discard(tx, self, self.app_id, self.batch_id)
