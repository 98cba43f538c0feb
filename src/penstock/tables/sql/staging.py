"""Staging of a micro-batch: tasks write rows that are invisible until the driver publishes them, and SQL
statements read them from staging tables.

SQLite stages all rows as compressed segments, like those of queues, so rows are converted to SQL values only
once. PostgreSQL stages micro-batches in an unlogged table, and the epochs of continuous queries in segments,
since creating a table for each epoch would cost more than writing its rows.
"""

from __future__ import annotations

import hashlib
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from typing import Any

import pyarrow as pa
import pyarrow.csv as pacsv

from penstock.arrow.segments import decode
from penstock.errors import PenstockError, TableRefusedError
from penstock.store import staging
from penstock.store.database import Database, Transaction
from penstock.store.log.segmenting import to_segments
from penstock.store.postgres import staging_relations
from penstock.store.records.staged import delete_staged_payloads, payloads_of
from penstock.store.staging import Attempt, StagingLost
from penstock.tables.columns import Layout
from penstock.tables.names import digest
from penstock.tables.row_encoding import in_chunks

_INVALID_BYTES, _UNTRANSLATABLE_CHARACTER = "22021", "22P05"
_LAST_BATCH = 2**62
_MARK_IN_USE_SECONDS = 3600.0
"""How often a long micro-batch marks its staging table as in use; an unused one is dropped after a day."""
_CHUNK_NUMBER_BITS = 20


@dataclass(frozen=True)
class StagedRows:
    """A staging table, with the columns ``c0``, ``c1`` and so on."""

    relation: str
    where: str = "true"
    rows: int | None = None
    """The expected number of rows; None if the rows have already been counted."""


def column_definitions(layout: Layout) -> tuple[str, ...]:
    """Return the column definitions of a staging table for encoded rows; SQLite needs no types."""
    if layout.dialect == "sqlite":
        return tuple(layout.staged_columns)
    return tuple(f"{name} {column.ddl_type}" for name, column in layout.staged_columns.items())


def load_chunks(tx: Transaction, columns: Sequence[str], chunks: Iterable[pa.RecordBatch]) -> StagedRows:
    """Load chunks into a temporary table with the given `column_definitions`; `drop_loaded` drops it."""
    relation = _create_temporary_table(tx, columns)
    for chunk in chunks:
        if tx.dialect == "postgres":
            _copy_rows(tx, relation, chunk)
        else:
            rows = zip(*_python_values(chunk), strict=True)
            tx.load(f"insert into {relation} values ({', '.join('?' * chunk.num_columns)})", rows)
    return StagedRows(relation)


def _python_values(chunk: pa.RecordBatch) -> list[list[Any]]:
    try:
        return [column.to_pylist() for column in chunk.columns]
    except UnicodeDecodeError as error:
        raise _invalid_utf8_error(str(error)) from None


def drop_loaded(tx: Transaction, columns: Sequence[str]) -> None:
    """Drop the temporary table; PostgreSQL empties it when the transaction ends."""
    if tx.dialect == "sqlite":
        tx.execute(f"drop table if exists {_temporary_table(tx, columns)}")


def _temporary_table(tx: Transaction, columns: Sequence[str]) -> str:
    schema = "temp" if tx.dialect == "sqlite" else "pg_temp"
    return f"{schema}.penstock_rows_{digest(', '.join(columns))}"


def _create_temporary_table(tx: Transaction, columns: Sequence[str]) -> str:
    """Create the table; in PostgreSQL reuse that of the connection, as each new one bloats the catalog."""
    relation = _temporary_table(tx, columns)
    name = relation.partition(".")[2]
    if tx.dialect == "sqlite":
        drop_loaded(tx, columns)
        tx.execute(f"create temporary table {name} ({', '.join(columns)})")
    elif not tx.query("select to_regclass(:relation) is not null", relation=relation)[0][0]:
        tx.execute(f"create temporary table {name} ({', '.join(columns)}) on commit delete rows")
    return relation


def _copy_rows(tx: Transaction, relation: str, rows: pa.RecordBatch) -> None:
    """Send rows to PostgreSQL as CSV."""
    sink = pa.BufferOutputStream()
    pacsv.write_csv(rows, sink, pacsv.WriteOptions(include_header=False))
    columns = ", ".join(rows.schema.names)
    tx.load(f"copy {relation} ({columns}) from stdin (format csv)", [memoryview(sink.getvalue())])


@contextmanager
def refusing_unstorable_text() -> Iterator[None]:
    """Translate PostgreSQL's errors for text that it cannot store."""
    try:
        yield
    except PenstockError as error:
        translated = _unstorable_text_error(error.__cause__)
        if translated is None:
            raise
        raise translated from error


def _unstorable_text_error(error: Any) -> TableRefusedError | None:
    """Return the error for text that PostgreSQL cannot store; None for any other error."""
    state = getattr(error, "sqlstate", None)
    if state not in (_INVALID_BYTES, _UNTRANSLATABLE_CHARACTER):
        return None
    # Messages may be localized, but bytes and escapes are the same in all languages.
    message, detail = error.diag.message_primary or "", error.diag.message_detail or ""
    if message.endswith("0x00") or "\\u0000" in detail:
        return TableRefusedError(
            "a text has the character NUL, which PostgreSQL cannot store: remove it, as translate(column, "
            "chr(0), '') does",
            condition="TABLE_REFUSED.NUL_CHARACTER",
        )
    if state == _UNTRANSLATABLE_CHARACTER:
        return TableRefusedError(
            f"a text has a character that the database's encoding does not have ({message}): replace it, or "
            "use a database with the encoding UTF8",
            condition="TABLE_REFUSED.ENCODING",
        )
    return _invalid_utf8_error(message)


def _invalid_utf8_error(reason: str) -> TableRefusedError:
    return TableRefusedError(
        f"a text is not valid UTF-8, so the database cannot store it ({reason}): replace the invalid bytes, "
        "as make_valid_utf8(column) does, or use a binary column",
        condition="TABLE_REFUSED.INVALID_UTF8",
    )


@dataclass(frozen=True)
class TaskWriter(ABC):
    """Writer for the rows of tasks; created on the driver and sent to the tasks."""

    columns: pa.Schema
    """The schema of encoded rows."""

    @abstractmethod
    def write_chunks(
        self, database: Database, task: int, attempt: int, chunks: Iterator[pa.RecordBatch]
    ) -> dict[str, int]:
        """Write the rows of a task attempt; return the staged amounts by the names that ``take`` gets."""


@dataclass(frozen=True)
class Stage(TaskWriter):
    """Staging area of one attempt at a micro-batch, whose rows are invisible until they are published."""

    sink: str
    """The table's name in the ledger."""
    app_id: str
    batch_id: int

    def prepare(self, tx: Transaction, attempts: Mapping[str, int]) -> None:
        """Load the rows of the acknowledged attempts into the database, unless they are there as SQL values.

        This runs before any lock is taken, since PostgreSQL does not end a session that is suspended while it
        sends rows.
        """

    @abstractmethod
    def take(self, tx: Transaction, attempts: Mapping[str, int]) -> StagedRows:
        """Return the rows of the acknowledged attempts, in the transaction that loaded and publishes them."""

    @abstractmethod
    def drop(self, tx: Transaction) -> None:
        """Drop everything that was staged up to and including the micro-batch."""

    def unload(self, tx: Transaction) -> None:
        """Drop what ``prepare`` has loaded into the session."""

    def clear(self, tx: Transaction) -> None:
        """Clean up in the transaction that published the rows."""
        self.drop(tx)

    def rows_lost_error(self) -> StagingLost:
        return StagingLost(
            f"rows that {self.app_id!r} staged for batch {self.batch_id} are gone: cleaned up as too old, "
            "dropped by another run, or lost in a server crash. Nothing of the batch is visible: restart the "
            "query, it repeats the micro-batch",
            batch_id=self.batch_id,
        )


@dataclass(frozen=True)
class SegmentStage(Stage):
    """Staging in Arrow segments, which are converted to SQL values in the transaction that publishes them."""

    column_definitions: tuple[str, ...]
    """The column definitions of the temporary table."""

    @classmethod
    def of(cls, layout: Layout, columns: pa.Schema, app_id: str, batch_id: int) -> SegmentStage:
        return cls(columns, layout.name.ledger_name, app_id, batch_id, column_definitions(layout))

    def write_chunks(
        self, database: Database, task: int, attempt: int, chunks: Iterator[pa.RecordBatch]
    ) -> dict[str, int]:
        task_attempt = Attempt(self.app_id, self.batch_id, task, str(uuid.uuid4()))
        staged = 0
        for chunk in chunks:
            staged += self.stage_chunk(database, task_attempt, chunk, staged)
        return {task_attempt.attempt: staged} if staged else {}

    def stage_chunk(
        self,
        database: Database,
        attempt: Attempt,
        chunk: pa.RecordBatch,
        staged: int,
        *,
        durable: bool = True,
    ) -> int:
        """Stage rows after ``staged`` segments of the attempt, and return the number of their segments."""
        owner, segments = _SegmentOwner(self.sink), to_segments(chunk, 0)
        return staging.stage_segments(database, owner, attempt, segments, staged, durable=durable)

    def prepare(self, tx: Transaction, attempts: Mapping[str, int]) -> None:
        staged = staging.staged_records(tx, _SegmentOwner(self.sink), self.app_id, self.batch_id)
        rows = [row for row in staged if row.attempt in attempts]
        rows.sort(key=lambda row: (row.task, row.attempt, row.ordinal))
        load_chunks(
            tx,
            self.column_definitions,
            in_chunks(self._payload(tx, payload_id) for payload_id in payloads_of(rows)),
        )

    def take(self, tx: Transaction, attempts: Mapping[str, int]) -> StagedRows:
        staged = staging.remove_records(tx, _SegmentOwner(self.sink), self.app_id, self.batch_id)
        rows = [row for row in staged if row.batch_id == self.batch_id and row.attempt in attempts]
        if sum(row.segments for row in rows) != sum(attempts.values()):
            raise self.rows_lost_error()
        delete_staged_payloads(tx, staged)
        return StagedRows(_temporary_table(tx, self.column_definitions))

    def _payload(self, tx: Transaction, payload_id: int) -> pa.RecordBatch:
        payloads = tx.all("read_payload", payload_id=payload_id)
        if not payloads:
            raise self.rows_lost_error()
        return decode(payloads[0].data, self.columns)

    def drop(self, tx: Transaction) -> None:
        self.unload(tx)
        staging.discard(tx, _SegmentOwner(self.sink), self.app_id, self.batch_id)

    def unload(self, tx: Transaction) -> None:
        drop_loaded(tx, self.column_definitions)

    def clear(self, tx: Transaction) -> None:
        # Leave rows that tasks staged while the driver was suspended to its successor: locking staged rows
        # a second time could cause a deadlock.
        self.unload(tx)


@dataclass(frozen=True)
class _SegmentOwner:
    """A table that owns staged segments, as a queue does."""

    sink: str
    """The table's name in the ledger."""
    payloads: str | None = None
    """None, since segments are stored in the database."""

    @property
    def queue_id(self) -> int:
        """A negative number, which no queue and no other table has."""
        return -1 - int.from_bytes(hashlib.sha256(self.sink.encode()).digest()[:7])


@dataclass(frozen=True)
class PostgresStage(Stage):
    """Staging in one unlogged PostgreSQL table, into which all tasks of an attempt copy their rows.

    Each chunk is a transaction and has a number. If the outcome of a transaction is unknown, its chunk is
    sent again with another number.
    """

    relation: str = ""
    opened_at: float = 0.0
    """Seconds since 1970."""

    @classmethod
    def open(
        cls, database: Database, layout: Layout, columns: pa.Schema, app_id: str, batch_id: int
    ) -> PostgresStage:
        """Create the staging table, and drop the rows that earlier attempts of the app left behind."""
        sink = layout.name.ledger_name
        drop_earlier_attempts(database, sink, app_id)
        definitions = ["piece bigint", *column_definitions(layout)]
        relation = database.run(
            lambda tx: staging_relations.create(tx, definitions, sink=sink, app_id=app_id), idempotent=True
        )
        return cls(columns, sink, app_id, batch_id, relation, time.time())

    def write_chunks(
        self, database: Database, task: int, attempt: int, chunks: Iterator[pa.RecordBatch]
    ) -> dict[str, int]:
        numbers = count(attempt << _CHUNK_NUMBER_BITS)
        marked_at, staged = self.opened_at, {}
        for chunk in chunks:
            number, rows = self._copy_chunk(database, numbers, chunk)
            staged[number] = rows
            if time.time() - marked_at >= _MARK_IN_USE_SECONDS:
                database.run(self._mark_in_use, idempotent=True)
                marked_at = time.time()
        return staged

    def _mark_in_use(self, tx: Transaction) -> None:
        staging_relations.describe(tx, self.relation, sink=self.sink, app_id=self.app_id)

    def _copy_chunk(self, database: Database, numbers: count[int], chunk: pa.RecordBatch) -> tuple[str, int]:
        def work(tx: Transaction) -> int:
            number = next(numbers)
            staging_relations.lock_relation(tx, self.relation)
            chunk_numbers = pa.repeat(pa.scalar(number, pa.int64()), chunk.num_rows)
            _copy_rows(
                tx,
                staging_relations.qualified(tx, self.relation),
                chunk.add_column(0, "piece", chunk_numbers),
            )
            return number

        with refusing_unstorable_text():
            number = database.run(work, idempotent=True)
        return str(number), int(chunk.num_rows)

    def take(self, tx: Transaction, attempts: Mapping[str, int]) -> StagedRows:
        if not staging_relations.exists(tx, self.relation):
            raise self.rows_lost_error()
        staging_relations.lock_relation(tx, self.relation)
        numbers = ",".join(str(int(number)) for number in attempts)
        return StagedRows(
            staging_relations.qualified(tx, self.relation),
            f"piece = any('{{{numbers}}}'::bigint[])",
            sum(attempts.values()),
        )

    def drop(self, tx: Transaction) -> None:
        staging_relations.drop(tx, self.relation)


def drop_earlier_attempts(database: Database, sink: str, app_id: str) -> None:
    """Drop the rows that earlier attempts of an app staged for a table, in segments or a staging table."""
    staging_relations.drop_earlier_relations(database, sink, app_id)
    database.run(lambda tx: staging.discard(tx, _SegmentOwner(sink), app_id, _LAST_BATCH), idempotent=True)
