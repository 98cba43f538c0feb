"""Staging in PostgreSQL: all tasks copy into one unlogged relation of the try."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count

import pyarrow as pa
import pyarrow.csv as pacsv

from penstock.errors import PenstockError, TableRefused
from penstock.store import relations
from penstock.store.database import Database, Transaction
from penstock.tables.columns import Layout
from penstock.tables.stages import Source, Stage

_CSV = pacsv.WriteOptions(include_header=False)
_PIECES_BITS = 20
_NO_TEXT = ("22021", "22P05")


@dataclass(frozen=True)
class PostgresStage(Stage):
    """Every chunk is a transaction, and a piece with a number: one whose outcome is unknown is sent again as another."""

    relation: str = ""

    @classmethod
    def open(
        cls, database: Database, layout: Layout, columns: pa.Schema, app_id: str, batch_id: int
    ) -> PostgresStage:
        """Make the relation; what earlier tries of the app have left goes."""
        sink = layout.name.ledger_name
        relations.drop_of(database, sink, app_id)
        defined = ["piece bigint", *(f"c{n} {column.sql_type}" for n, column in enumerate(layout.columns))]
        defined += (
            [] if layout.sequence is None else [f"sequence {layout.sequence.declared}", "present integer"]
        )
        relation = database.run(
            lambda tx: relations.create(tx, defined, sink=sink, app_id=app_id), idempotent=True
        )
        return cls(columns, sink, app_id, batch_id, relation)

    def put(
        self, database: Database, task: int, attempt: int, chunks: Iterator[pa.RecordBatch]
    ) -> dict[str, int]:
        numbers = count(attempt << _PIECES_BITS)
        return dict(self._put(database, numbers, chunk) for chunk in chunks)

    def _put(self, database: Database, numbers: count[int], chunk: pa.RecordBatch) -> tuple[str, int]:
        used = [0]

        def work(tx: Transaction) -> None:
            used[0] = next(numbers)
            columns = ", ".join(["piece", *chunk.schema.names])
            where = relations.qualified(tx, self.relation)
            tx.load(f"copy {where} ({columns}) from stdin (format csv)", [as_csv(_numbered(used[0], chunk))])

        with nul_refused():
            database.run(work, idempotent=True)
        return str(used[0]), int(chunk.num_rows)

    def take(self, tx: Transaction, attempts: Mapping[str, int]) -> Source:
        if not relations.exists(tx, self.relation):
            raise self.swept()
        pieces = ",".join(str(int(piece)) for piece in attempts)
        return Source(
            relations.qualified(tx, self.relation),
            f"piece = any('{{{pieces}}}'::bigint[])",
            sum(attempts.values()),
        )

    def drop(self, tx: Transaction) -> None:
        relations.drop(tx, self.relation)


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


def _numbered(piece: int, chunk: pa.RecordBatch) -> pa.RecordBatch:
    return pa.RecordBatch.from_arrays(
        [pa.repeat(pa.scalar(piece, pa.int64()), chunk.num_rows), *chunk.columns],
        names=["piece", *chunk.schema.names],
    )


def as_csv(chunk: pa.RecordBatch) -> memoryview:
    """Rows as PostgreSQL's COPY takes them."""
    sink = pa.BufferOutputStream()
    pacsv.write_csv(chunk, sink, _CSV)
    return memoryview(sink.getvalue())
