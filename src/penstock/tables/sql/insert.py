"""Rows that tasks put into the table by themselves: each has a key that it brings from the source, so it is there once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.compute as pc

from penstock.arguments import brief, in_quotes
from penstock.errors import TableRefused
from penstock.store.database import Database, Transaction
from penstock.tables.columns import Layout
from penstock.tables.sql import upsert
from penstock.tables.sql.stage import Source, Writes, clear, defined, load, nul_refused


def insert_chunk(
    database: Database,
    layout: Layout,
    chunk: pa.RecordBatch,
    insert: Callable[[Transaction, Layout, Source], object],
) -> None:
    """Put rows that are ready for the database into the table, in one transaction.

    Parameters
    ----------
    insert
        What is done with them, such as ``merging.insert``.
    """
    columns = defined(layout, chunk.schema.names)

    def work(tx: Transaction) -> None:
        insert(tx, layout, load(tx, columns, [chunk]))
        clear(tx, columns)

    with nul_refused():
        database.run(work, idempotent=True)


@dataclass(frozen=True)
class Insert(Writes):
    """Each chunk is a transaction, in which what is there already is left out."""

    layout: Layout

    def put(
        self, database: Database, task: int, attempt: int, chunks: Iterator[pa.RecordBatch]
    ) -> dict[str, int]:
        keys = []
        for chunk in chunks:
            keys.append(pa.Table.from_batches([chunk.select(self.layout.staged_keys)]))
            insert_chunk(database, self.layout, chunk, upsert.insert_new)
        if keys:
            self._require_one_each(pa.concat_tables(keys))
        return {}

    def _require_one_each(self, keys: pa.Table) -> None:
        """Refuse several rows of one row: all but the first would be taken for repeated ones.

        One task has them all, since rows that are cut into other tasks on their way are refused when the query starts.
        """
        counted = keys.group_by(keys.column_names).aggregate([([], "count_all")])
        twice = counted.filter(pc.greater(counted["count_all"], 1)).select(keys.column_names)
        if not twice.num_rows:
            return
        values = twice.slice(0, 1).to_pylist()[0].values()
        pairs = zip(self.layout.keys, values, strict=True)
        shown = brief(", ".join(f"{in_quotes(key.name)} = {value!r}" for key, value in pairs))
        raise TableRefused(
            f"the transformation makes several rows of the one with {shown}, and guarantee=idempotent tells rows by where they "
            f"come from, so only one of them is in {self.layout.name.sql}: use guarantee=exactly_once, or make one row of each",
            condition="TABLE_REFUSED.DUPLICATE_KEYS",
            key=shown,
        )
