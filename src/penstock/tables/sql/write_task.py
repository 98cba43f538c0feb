"""What a task does with the rows of a table: check them, make them ready, stage them, and tell the driver."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import pyarrow as pa
from pyspark import TaskContext

from penstock.arguments import in_quotes
from penstock.arrow.coerce import conform_batch
from penstock.errors import TableRefused
from penstock.queue.open_stores import open_store
from penstock.spark.error_boundary import iterate_without_tracebacks
from penstock.spark.internals.gc_tuning import freeze_imports
from penstock.spark.session_store import check_reach
from penstock.tables.change_rows import require_changes
from penstock.tables.columns import Layout
from penstock.tables.shaping import ready, shaped_schema, staged_schema
from penstock.tables.sql.stage import Writes, chunked
from penstock.tables.untouched_values import UNKNOWN

REPORT = "attempt string, staged bigint, rows bigint, query string"
_REPORT = pa.schema(
    [
        ("attempt", pa.string()),
        ("staged", pa.int64()),
        ("rows", pa.int64()),
        ("query", pa.string()),
    ]
)


@dataclass(frozen=True)
class Taking:
    """How a task takes rows from Spark."""

    layout: Layout
    shaped: pa.Schema
    """Of the rows that come in."""
    columns: pa.Schema
    """Of rows that are ready for the database."""

    @classmethod
    def of(cls, layout: Layout) -> Taking:
        shaped = shaped_schema(layout)
        return cls(layout, shaped, staged_schema(shaped, layout.dialect))

    def ready(self, chunk: pa.RecordBatch) -> pa.RecordBatch:
        """Shaped rows, looked at, as the database takes them.

        Raises
        ------
        TableRefused
            When a key has no value, or a change says not what it does, or when, or leaves a value out that nobody can know.
        """
        shaped = conform_batch(chunk, self.shaped)
        self._check_keys(shaped)
        if self.layout.sequence is not None:
            require_changes(shaped, self.layout.sequence.name)
        if self.layout.unchanged is not None:
            self.layout.unchanged.require_known(shaped.column(UNKNOWN), self.layout.name.sql)
        return ready(shaped, self.columns)

    def _check_keys(self, chunk: pa.RecordBatch) -> None:
        for array, column in zip(chunk.columns, self.layout.columns, strict=False):
            if column.key and array.null_count:
                raise TableRefused(
                    f"a row has no value in {in_quotes(column.name)}, which is a key of {self.layout.name.sql}: give it one, as "
                    "coalesce(column, '') does, or drop such rows",
                    condition="TABLE_REFUSED.NULL_KEY",
                    column=column.name,
                )


@dataclass
class StageTask:
    """For ``mapInArrow``: shaped rows in, what was staged out."""

    url: str = field(repr=False)
    taking: Taking
    stage: Writes

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        return iterate_without_tracebacks(self._run(iter(batches)))

    def _run(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        check_reach(self.url, None)
        freeze_imports()
        context = TaskContext.get()
        assert context is not None
        self._rows = 0
        staged = self.put(context, batches)
        query = context.getLocalProperty("sql.streaming.queryId")
        attempts, counts = [*staged, None], [*staged.values(), 0]
        rows = [0] * len(staged) + [self._rows]
        columns = [attempts, counts, rows, [query] * len(rows)]
        yield pa.RecordBatch.from_arrays(
            [pa.array(values, kind.type) for values, kind in zip(columns, _REPORT, strict=True)],
            schema=_REPORT,
        )

    def put(self, context: TaskContext, batches: Iterator[pa.RecordBatch]) -> dict[str, int]:
        """Stage the rows; how much, by attempt."""
        database = open_store(self.url).database
        return self.stage.put(
            database, context.partitionId(), context.taskAttemptId(), self._ready(chunked(batches))
        )

    def _ready(self, chunks: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for chunk in chunks:
            self._rows += chunk.num_rows
            yield self.taking.ready(chunk)
