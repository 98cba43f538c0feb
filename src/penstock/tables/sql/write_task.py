"""Task side of a SQL table: tasks check, encode and write rows, and report to the driver."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

import pyarrow as pa
from pyspark import TaskContext

from penstock.arrow.coerce import conform
from penstock.errors import TableRefusedError
from penstock.queue.store import open_store
from penstock.spark.error_boundary import iterate_in_worker
from penstock.spark.internals.python_workers import check_store_reach
from penstock.store.database import Database, Transaction
from penstock.tables.columns import Layout
from penstock.tables.row_checks import (
    first_repeated_key,
    require_changes,
    require_key_value,
    require_no_nan,
    require_ordered_times,
    require_writable_times,
)
from penstock.tables.row_encoding import database_schema, in_chunks, projected_schema, to_database_types
from penstock.tables.sql import ddl, upsert
from penstock.tables.sql.altered_table import explaining_alterations
from penstock.tables.sql.staging import (
    StagedRows,
    TaskWriter,
    column_definitions,
    drop_loaded,
    load_chunks,
    refusing_unstorable_text,
)
from penstock.tables.unchanged_values import MISSING_COLUMNS

REPORT = "attempt string, staged bigint, rows bigint, query string"
_REPORT = pa.schema(
    [("attempt", pa.string()), ("staged", pa.int64()), ("rows", pa.int64()), ("query", pa.string())]
)


@dataclass(frozen=True)
class RowEncoder:
    """Encoder of projected rows for the database, which also checks them."""

    layout: Layout
    projected_schema: pa.Schema
    encoded_schema: pa.Schema
    """The schema of encoded rows."""

    @classmethod
    def of(cls, layout: Layout) -> RowEncoder:
        projected = projected_schema(layout)
        return cls(layout, projected, database_schema(projected, layout.dialect))

    def encode(self, chunk: pa.RecordBatch) -> pa.RecordBatch:
        rows = conform(chunk, self.projected_schema)
        for array, column in zip(rows.columns, self.layout.columns, strict=False):
            if column.key:
                require_key_value(array, column.name, self.layout.name.sql)
        for array, column in zip(rows.columns, self.layout.staged_columns.values(), strict=True):
            require_writable_times(array, column.name, self.layout.name.sql, self.layout.dialect)
            if column.orders_rows:
                require_ordered_times(array, column.name, self.layout.name.sql, self.layout.dialect)
            if column.key or column.orders_rows:
                require_no_nan(array, column.name, self.layout.name.sql, self.layout.dialect)
        if self.layout.sequence is not None:
            require_changes(rows, self.layout.sequence.name)
        if self.layout.unchanged is not None:
            self.layout.unchanged.require_resolvable(rows.column(MISSING_COLUMNS), self.layout.name.sql)
        return to_database_types(rows, self.encoded_schema)


@dataclass
class StageTask:
    """Function for ``mapInArrow``, which writes projected rows and returns a report."""

    url: str = field(repr=False)
    encoder: RowEncoder
    stage: TaskWriter

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        return iterate_in_worker(self._run(iter(batches)))

    def _run(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        check_store_reach(self.url, None)
        context = TaskContext.get()
        assert context is not None
        self._rows = 0
        staged = self.write_rows(context, batches)
        query = context.getLocalProperty("sql.streaming.queryId")
        reports = {
            "attempt": [*staged, None],
            "staged": [*staged.values(), 0],
            "rows": [0] * len(staged) + [self._rows],
            "query": [query] * (len(staged) + 1),
        }
        yield pa.RecordBatch.from_pydict(reports, schema=_REPORT)

    def write_rows(self, context: TaskContext, batches: Iterator[pa.RecordBatch]) -> dict[str, int]:
        """Write the rows; return the staged amounts, as ``TaskWriter.write_chunks`` does."""
        database = open_store(self.url).database
        return self.stage.write_chunks(
            database, context.partitionId(), context.taskAttemptId(), self._encode_chunks(in_chunks(batches))
        )

    def _encode_chunks(self, chunks: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for chunk in chunks:
            self._rows += chunk.num_rows
            yield self.encoder.encode(chunk)


def insert_chunk(
    database: Database,
    layout: Layout,
    chunk: pa.RecordBatch,
    insert: Callable[[Transaction, Layout, StagedRows], object],
) -> None:
    """Write encoded rows to the table in one transaction, with a function such as ``upsert.insert``."""
    columns = column_definitions(layout)

    def work(tx: Transaction) -> None:
        ddl.lock_table(tx, layout.name)
        insert(tx, layout, load_chunks(tx, columns, [chunk]))
        drop_loaded(tx, columns)

    with explaining_alterations(database, layout), refusing_unstorable_text():
        database.run(work, idempotent=True)


@dataclass(frozen=True)
class IdempotentInsert(TaskWriter):
    """Writer that inserts rows with new keys, in one transaction for each chunk.

    The keys are the rows' coordinates in their source, so repeated rows are skipped.
    """

    layout: Layout

    def write_chunks(
        self, database: Database, task: int, attempt: int, chunks: Iterator[pa.RecordBatch]
    ) -> dict[str, int]:
        keys = []
        for chunk in chunks:
            keys.append(pa.Table.from_batches([chunk.select(self.layout.staged_keys)]))
            insert_chunk(database, self.layout, chunk, upsert.insert_new)
        if keys:
            self._require_distinct_keys(pa.concat_tables(keys))
        return {}

    def _require_distinct_keys(self, keys: pa.Table) -> None:
        """Refuse several rows with the same key: all except the first would be skipped as repeats.

        One task has all of them, since a query that shuffles its rows is refused when it starts.
        """
        repeated = first_repeated_key(keys)
        if repeated is None:
            return
        key = self.layout.shown_key(tuple(repeated.values()))
        raise TableRefusedError(
            f"the transformation returns several rows for the source row with {key}, of which "
            f"guarantee=idempotent keeps only one in {self.layout.name.sql}: use guarantee=exactly_once, or "
            "return one row for each",
            condition="TABLE_REFUSED.DUPLICATE_KEYS",
            key=key,
        )
