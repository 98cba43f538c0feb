"""Staging of a micro-batch: where tasks put rows, invisible to readers, until the driver publishes them.

SQLite stages all rows as compressed segments beside those of queues, so that rows become SQL values once.
PostgreSQL stages micro-batches in an unlogged relation, and the epochs of continuous queries in segments: a
relation for each epoch would cost more than its rows.
"""

from __future__ import annotations

import hashlib
import uuid
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import count

import pyarrow as pa

from penstock.arrow.segments import decode
from penstock.errors import CommitRefusedError
from penstock.store import staging
from penstock.store.database import Database, Transaction
from penstock.store.log.segmenting import Segment, to_segments
from penstock.store.postgres import staging_relations
from penstock.store.staging import Attempt
from penstock.tables.chunks import chunked
from penstock.tables.columns import Layout
from penstock.tables.sql.loading import (
    StagedRows,
    as_csv,
    clear,
    load,
    refusing_nul_characters,
    relation_columns,
)

_ALL_BATCHES = 2**62
_CHUNKS_BITS = 20


@dataclass(frozen=True)
class TaskWriter(ABC):
    """What tasks do with their rows; built on the driver, sent to the tasks."""

    columns: pa.Schema
    """The schema of encoded rows."""

    @abstractmethod
    def put(
        self, database: Database, task: int, attempt: int, chunks: Iterator[pa.RecordBatch]
    ) -> dict[str, int]:
        """Write the rows of one attempt of a task, and return how much it staged, by names that no other
        attempt has.

        Parameters
        ----------
        attempt
            Spark's number of the attempt, which is unique in the application.
        """


@dataclass(frozen=True)
class Stage(TaskWriter):
    """One try of one micro-batch, whose rows nobody sees until they are published."""

    sink: str
    """The table's name in the ledger."""
    app_id: str
    batch_id: int

    @abstractmethod
    def take(self, tx: Transaction, attempts: Mapping[str, int]) -> StagedRows:
        """Return the rows of the acknowledged attempts, for the transaction that publishes them.

        Raises
        ------
        CommitRefusedError
            When some of them are gone.
        """

    @abstractmethod
    def drop(self, tx: Transaction) -> None:
        """Drop everything that was staged up to the micro-batch."""

    def rows_gone(self) -> CommitRefusedError:
        return CommitRefusedError(
            f"some rows that {self.app_id!r} staged for its batch {self.batch_id} are gone: they were "
            "cleaned up as too old, another run of the query took over, or the server lost them in a crash. "
            "Nothing of the batch is visible: restart the query, it repeats the micro-batch",
            condition="COMMIT_REFUSED.STAGING_LOST",
            batch_id=self.batch_id,
        )


@dataclass(frozen=True)
class SegmentStage(Stage):
    """Staging as Arrow segments, which become SQL values in the transaction that publishes them."""

    relation_columns: tuple[str, ...]
    """The columns of the temporary relation."""

    @classmethod
    def of(cls, layout: Layout, columns: pa.Schema, app_id: str, batch_id: int) -> SegmentStage:
        return cls(
            columns, layout.name.ledger_name, app_id, batch_id, relation_columns(layout, columns.names)
        )

    def put(
        self, database: Database, task: int, attempt: int, chunks: Iterator[pa.RecordBatch]
    ) -> dict[str, int]:
        own = Attempt(self.app_id, self.batch_id, task, str(uuid.uuid4()))
        staged = 0
        for chunk in chunks:
            staged += self.add(database, own, chunk, staged)
        return {own.attempt: staged} if staged else {}

    def add(self, database: Database, attempt: Attempt, chunk: pa.RecordBatch, staged: int) -> int:
        """Stage rows, and return the number of their segments.

        Parameters
        ----------
        staged
            How many segments the attempt has staged before.
        """
        segments: list[Segment] = to_segments(chunk, 0)
        owner = _SegmentOwner(self.sink)
        database.run(lambda tx: staging.stage(tx, owner, attempt, segments, staged), idempotent=True)
        return len(segments)

    def take(self, tx: Transaction, attempts: Mapping[str, int]) -> StagedRows:
        staged = staging.take(tx, _SegmentOwner(self.sink), self.app_id, self.batch_id)
        rows = [row for row in staged if row.batch_id == self.batch_id and row.attempt in attempts]
        if len(rows) != sum(attempts.values()):
            raise self.rows_gone()
        rows.sort(key=lambda row: (row.task, row.attempt, row.ordinal))
        loaded = load(tx, self.relation_columns, chunked(self._payload(tx, row.payload_id) for row in rows))
        staging.drop_payloads(tx, [row.payload_id for row in staged])
        return loaded

    def _payload(self, tx: Transaction, payload_id: int) -> pa.RecordBatch:
        return decode(tx.one("read_payload", payload_id=payload_id).data, self.columns)

    def drop(self, tx: Transaction) -> None:
        clear(tx, self.relation_columns)
        staging.discard(tx, _SegmentOwner(self.sink), self.app_id, self.batch_id)


@dataclass(frozen=True)
class _SegmentOwner:
    """A table as an owner of staged segments, which are otherwise staged for queues."""

    sink: str
    """Its name in the ledger."""

    @property
    def queue_id(self) -> int:
        """A number that no queue has, and no other table."""
        return -1 - int.from_bytes(hashlib.sha256(self.sink.encode()).digest()[:7])


@dataclass(frozen=True)
class PostgresStage(Stage):
    """Staging in one unlogged PostgreSQL relation, which all tasks of a try copy into.

    Each chunk is a transaction and has a number; a chunk whose outcome is unknown is sent again under another
    number.
    """

    relation: str = ""

    @classmethod
    def open(
        cls, database: Database, layout: Layout, columns: pa.Schema, app_id: str, batch_id: int
    ) -> PostgresStage:
        """Create the relation, and drop what earlier tries of the app have left."""
        sink = layout.name.ledger_name
        drop_earlier_attempts(database, sink, app_id)
        definitions = ["piece bigint", *relation_columns(layout, columns.names)]
        relation = database.run(
            lambda tx: staging_relations.create(tx, definitions, sink=sink, app_id=app_id), idempotent=True
        )
        return cls(columns, sink, app_id, batch_id, relation)

    def put(
        self, database: Database, task: int, attempt: int, chunks: Iterator[pa.RecordBatch]
    ) -> dict[str, int]:
        numbers = count(attempt << _CHUNKS_BITS)
        return dict(self._put(database, numbers, chunk) for chunk in chunks)

    def _put(self, database: Database, numbers: count[int], chunk: pa.RecordBatch) -> tuple[str, int]:
        def work(tx: Transaction) -> int:
            number = next(numbers)
            columns = ", ".join(["piece", *chunk.schema.names])
            where = staging_relations.qualified(tx, self.relation)
            tx.load(f"copy {where} ({columns}) from stdin (format csv)", [as_csv(_numbered(number, chunk))])
            return number

        with refusing_nul_characters():
            number = database.run(work, idempotent=True)
        return str(number), int(chunk.num_rows)

    def take(self, tx: Transaction, attempts: Mapping[str, int]) -> StagedRows:
        if not staging_relations.exists(tx, self.relation):
            raise self.rows_gone()
        numbers = ",".join(str(int(number)) for number in attempts)
        return StagedRows(
            staging_relations.qualified(tx, self.relation),
            f"piece = any('{{{numbers}}}'::bigint[])",
            sum(attempts.values()),
        )

    def drop(self, tx: Transaction) -> None:
        staging_relations.drop(tx, self.relation)


def _numbered(number: int, chunk: pa.RecordBatch) -> pa.RecordBatch:
    return pa.RecordBatch.from_arrays(
        [pa.repeat(pa.scalar(number, pa.int64()), chunk.num_rows), *chunk.columns],
        names=["piece", *chunk.schema.names],
    )


def drop_earlier_attempts(database: Database, sink: str, app_id: str) -> None:
    """Drop what earlier tries of an app have staged for a table, in either form."""
    staging_relations.drop_of(database, sink, app_id)
    database.run(lambda tx: staging.discard(tx, _SegmentOwner(sink), app_id, _ALL_BATCHES), idempotent=True)
