"""Idempotent inserts by tasks: each row has a key from its source, so a repeated row is skipped."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.compute as pc

from penstock.errors import TableRefused
from penstock.store.database import Database, Transaction
from penstock.tables.columns import Layout
from penstock.tables.sql import upsert
from penstock.tables.sql.loading import StagedRows, clear, load, refusing_nul_characters, relation_columns
from penstock.tables.sql.staging import TaskWriter


def insert_chunk(
    database: Database,
    layout: Layout,
    chunk: pa.RecordBatch,
    insert: Callable[[Transaction, Layout, StagedRows], object],
) -> None:
    """Write encoded rows to the table in one transaction, with ``upsert.insert`` or another statement."""
    columns = relation_columns(layout, chunk.schema.names)

    def work(tx: Transaction) -> None:
        insert(tx, layout, load(tx, columns, [chunk]))
        clear(tx, columns)

    with refusing_nul_characters():
        database.run(work, idempotent=True)


@dataclass(frozen=True)
class IdempotentInsert(TaskWriter):
    """Inserts of new keys, one transaction for each chunk."""

    layout: Layout

    def put(
        self, database: Database, task: int, attempt: int, chunks: Iterator[pa.RecordBatch]
    ) -> dict[str, int]:
        keys = []
        for chunk in chunks:
            keys.append(pa.Table.from_batches([chunk.select(self.layout.staged_keys)]))
            insert_chunk(database, self.layout, chunk, upsert.insert_new)
        if keys:
            self._require_distinct(pa.concat_tables(keys))
        return {}

    def _require_distinct(self, keys: pa.Table) -> None:
        """Refuse several rows with one key: all but the first would be skipped as repeats.

        One task has all of them, since a query that shuffles its rows to other tasks is refused when it
        starts.
        """
        counted = keys.group_by(keys.column_names).aggregate([([], "count_all")])
        repeated = counted.filter(pc.greater(counted["count_all"], 1)).select(keys.column_names)
        if not repeated.num_rows:
            return
        shown = upsert.shown_key(self.layout.keys, tuple(repeated.slice(0, 1).to_pylist()[0].values()))
        raise TableRefused(
            f"the transformation makes several rows of the source row with {shown}, of which "
            f"guarantee=idempotent keeps only one in {self.layout.name.sql}: use guarantee=exactly_once, or "
            "make one row of each",
            condition="TABLE_REFUSED.DUPLICATE_KEYS",
            key=shown,
        )
