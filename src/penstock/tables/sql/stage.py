"""Where tasks put the rows of a micro-batch for nobody to see, until the driver publishes them."""

from __future__ import annotations

import hashlib
import uuid
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.csv as pacsv

from penstock.arrow.segments import decode
from penstock.errors import CommitRefused, PenstockError, TableRefused
from penstock.store import staging
from penstock.store.database import Database, Transaction
from penstock.store.log.segmenting import Segment, to_segments
from penstock.store.postgres import staging_relations
from penstock.store.staging import Attempt
from penstock.tables.columns import Layout
from penstock.tables.untouched_values import UNKNOWN

CHUNK_ROWS = 131_072
CHUNK_BYTES = 32 << 20
"""What a task gathers before it sends it."""


@dataclass(frozen=True)
class Source:
    """Staged rows as SQL reads them, in the columns c0, c1 and so on."""

    relation: str
    where: str = "true"
    rows: int | None = None
    """How many there have to be; None where that has been seen to."""


@dataclass(frozen=True)
class Writes(ABC):
    """What tasks do with their rows; made on the driver, carried to the tasks."""

    columns: pa.Schema
    """Of rows that are ready for the database."""

    @abstractmethod
    def put(
        self, database: Database, task: int, attempt: int, chunks: Iterator[pa.RecordBatch]
    ) -> dict[str, int]:
        """Write the rows of one attempt of a task; what it staged, by names that no other attempt has.

        Parameters
        ----------
        attempt
            Spark's number of the attempt, which no other one of the application has.
        """


@dataclass(frozen=True)
class Stage(Writes):
    """One try of one micro-batch, whose rows nobody sees until they are published."""

    sink: str
    """The table's name in the ledger."""
    app_id: str
    batch_id: int

    @abstractmethod
    def take(self, tx: Transaction, attempts: Mapping[str, int]) -> Source:
        """The rows of the acknowledged attempts, for the transaction that publishes them.

        Raises
        ------
        CommitRefused
            When they are not all there any more.
        """

    @abstractmethod
    def drop(self, tx: Transaction) -> None:
        """Drop everything that was staged up to the micro-batch."""

    def swept(self) -> CommitRefused:
        return CommitRefused(
            f"the rows that {self.app_id!r} staged for its batch {self.batch_id} are not all there any more: they were swept, or "
            "another run of the query took over, or the server lost them in a crash; nothing of the batch is visible. Restart "
            "the query, it repeats the micro-batch",
            batch_id=self.batch_id,
        )


def chunked(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """The same rows in batches that are worth a transaction of their own."""
    held: list[pa.RecordBatch] = []
    rows = size = 0
    for batch in batches:
        if not batch.num_rows:
            continue
        held.append(batch)
        rows, size = rows + batch.num_rows, size + batch.nbytes
        if rows >= CHUNK_ROWS or size >= CHUNK_BYTES:
            yield pa.concat_batches(held)
            held, rows, size = [], 0, 0
    if held:
        yield pa.concat_batches(held)


# ---- loading: Rows into a temporary relation, where a statement can read them, in the transaction that puts them into the table.

_CSV = pacsv.WriteOptions(include_header=False)
_NO_TEXT = ("22021", "22P05")


def defined(layout: Layout, names: Sequence[str]) -> tuple[str, ...]:
    """The columns of a relation for rows that are ready for the database; SQLite keeps values as they are in columns without a type."""
    if layout.dialect == "sqlite":
        return tuple(names)
    columns = [f"c{n} {column.sql_type}" for n, column in enumerate(layout.columns)]
    if layout.sequence is not None:
        columns += [f"sequence {layout.sequence.declared}", "present integer"]
    columns += [f"t{n} {tie.declared}" for n, tie in enumerate(layout.ties)]
    if layout.unchanged is not None:
        columns += [f"{UNKNOWN} text"]
    return tuple(columns)


def load(tx: Transaction, columns: Sequence[str], chunks: Iterable[pa.RecordBatch]) -> Source:
    """The rows as SQL reads them; for the caller to clear.

    Parameters
    ----------
    columns
        As ``defined`` gives them.
    """
    relation = _made(tx, columns)
    for chunk in chunks:
        _add(tx, relation, chunk)
    return Source(relation)


def clear(tx: Transaction, columns: Sequence[str]) -> None:
    """Take rows away that were loaded; PostgreSQL does so itself when the transaction ends."""
    if tx.dialect == "sqlite":
        tx.execute(f"drop table if exists {_relation(tx, columns)}")


def _relation(tx: Transaction, columns: Sequence[str]) -> str:
    digest = hashlib.sha256(", ".join(columns).encode()).hexdigest()[:32]
    return f"{'temp' if tx.dialect == 'sqlite' else 'pg_temp'}.penstock_rows_{digest}"


def _made(tx: Transaction, columns: Sequence[str]) -> str:
    """An empty relation; PostgreSQL keeps it for the connection's next one, since its catalog swells with each that is made."""
    relation = _relation(tx, columns)
    name = relation.partition(".")[2]
    if tx.dialect == "sqlite":
        clear(tx, columns)
        tx.execute(f"create temporary table {name} ({', '.join(columns)})")
    elif not tx.query("select to_regclass(:relation) is not null", relation=relation)[0][0]:
        tx.execute(f"create temporary table {name} ({', '.join(columns)}) on commit delete rows")
    return relation


def _add(tx: Transaction, relation: str, chunk: pa.RecordBatch) -> None:
    names = ", ".join(chunk.schema.names)
    if tx.dialect == "postgres":
        tx.load(f"copy {relation} ({names}) from stdin (format csv)", [as_csv(chunk)])
    else:
        values = ", ".join("?" * chunk.num_columns)
        rows = zip(*(column.to_pylist() for column in chunk.columns), strict=True)
        tx.load(f"insert into {relation} values ({values})", rows)


def as_csv(chunk: pa.RecordBatch) -> memoryview:
    """Rows as PostgreSQL's COPY takes them."""
    sink = pa.BufferOutputStream()
    pacsv.write_csv(chunk, sink, _CSV)
    return memoryview(sink.getvalue())


@contextmanager
def nul_refused() -> Iterator[None]:
    """Text that PostgreSQL cannot keep is an error that says so."""
    try:
        yield
    except PenstockError as error:
        if getattr(error.__cause__, "sqlstate", None) not in _NO_TEXT:
            raise
        raise TableRefused(
            "a text has the character NUL, which PostgreSQL cannot keep: take it out, as translate(column, chr(0), '') does",
            condition="TABLE_REFUSED.NUL_CHARACTER",
        ) from error


# ---- segment_stage: Staging as compressed segments, beside those of queues, which the driver unpacks into a temporary relation.
#
# SQLite stages everything so, since rows become SQL values once. PostgreSQL stages the epochs of continuous queries so: a
# relation for each of them, as micro-batches have, would cost more than its rows.

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
