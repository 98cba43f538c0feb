"""Staging in PostgreSQL: all tasks copy into one unlogged relation of the try."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import count

import pyarrow as pa

from penstock.store.database import Database, Transaction
from penstock.store.postgres import staging_relations
from penstock.tables.columns import Layout
from penstock.tables.sql.stage import Source, Stage, as_csv, defined, drop_earlier, nul_refused

_PIECES_BITS = 20


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
        drop_earlier(database, sink, app_id)
        own = ["piece bigint", *defined(layout, columns.names)]
        relation = database.run(
            lambda tx: staging_relations.create(tx, own, sink=sink, app_id=app_id), idempotent=True
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
            where = staging_relations.qualified(tx, self.relation)
            tx.load(f"copy {where} ({columns}) from stdin (format csv)", [as_csv(_numbered(used[0], chunk))])

        with nul_refused():
            database.run(work, idempotent=True)
        return str(used[0]), int(chunk.num_rows)

    def take(self, tx: Transaction, attempts: Mapping[str, int]) -> Source:
        if not staging_relations.exists(tx, self.relation):
            raise self.swept()
        pieces = ",".join(str(int(piece)) for piece in attempts)
        return Source(
            staging_relations.qualified(tx, self.relation),
            f"piece = any('{{{pieces}}}'::bigint[])",
            sum(attempts.values()),
        )

    def drop(self, tx: Transaction) -> None:
        staging_relations.drop(tx, self.relation)


def _numbered(piece: int, chunk: pa.RecordBatch) -> pa.RecordBatch:
    return pa.RecordBatch.from_arrays(
        [pa.repeat(pa.scalar(piece, pa.int64()), chunk.num_rows), *chunk.columns],
        names=["piece", *chunk.schema.names],
    )
