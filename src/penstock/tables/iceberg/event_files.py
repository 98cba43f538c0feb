"""Change events of a micro-batch, staged by tasks in files that no snapshot ever has."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from pyiceberg.io import FileIO
from pyspark import TaskContext

from penstock.arrow.coerce import conform
from penstock.errors import PenstockError
from penstock.spark.error_boundary import iterate_in_worker
from penstock.tables.changes.events import EventLayout, checked_events
from penstock.tables.iceberg.data_files import FileTarget
from penstock.tables.iceberg.place import translated
from penstock.tables.row_checks import require_key_value
from penstock.tables.row_encoding import chunked

REPORT = "path string, rows bigint, size bigint, attempt int, query string"
_REPORT = pa.schema(
    [
        ("path", pa.string()),
        ("rows", pa.int64()),
        ("size", pa.int64()),
        ("attempt", pa.int32()),
        ("query", pa.string()),
    ]
)
_BATCH_ROWS = 65_536


@dataclass(frozen=True)
class EventFile:
    path: str
    rows: int
    size: int

    def batches(self, io: FileIO, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
        """Yield some columns of the events, always in the same order."""
        with io.new_input(self.path).open() as stream:
            for batch in pq.ParquetFile(stream).iter_batches(_BATCH_ROWS, columns=schema.names):
                yield batch.select(schema.names).cast(schema)


def event_files(reports: Iterable[Any]) -> list[EventFile]:
    """Return the files in collected reports."""
    return [EventFile(report.path, report.rows, report.size) for report in reports if report.path is not None]


def read_events(io: FileIO, files: Sequence[EventFile], schema: pa.Schema) -> pa.Table:
    """Read some columns of all events."""
    return pa.Table.from_batches((batch for file in files for batch in file.batches(io, schema)), schema)


@dataclass
class EventTask:
    """The function of ``mapInArrow``: takes collapsed events and returns a report of what the task staged."""

    target: FileTarget = field(repr=False)
    events: EventLayout = field(repr=False)

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        return iterate_in_worker(self._run(iter(batches)))

    def _run(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        context = TaskContext.get()
        assert context is not None
        file = self._staged(map(self._checked, chunked(batches)))
        report = {
            "path": [None if file is None else file.path],
            "rows": [0 if file is None else file.rows],
            "size": [0 if file is None else file.size],
            "attempt": [context.attemptNumber()],
            "query": [context.getLocalProperty("sql.streaming.queryId")],
        }
        yield pa.RecordBatch.from_pydict(report, schema=_REPORT)

    def _checked(self, chunk: pa.RecordBatch) -> pa.RecordBatch:
        shown = f"the Iceberg table {self.target.table}"
        schema = self.events.staged
        # Events arrive with the columns c0, c1 and so on.
        batch = conform(checked_events(chunk, self.events, shown).rename_columns(schema.names), schema)
        for key in self.events.keys:
            require_key_value(batch.column(key), key, shown)
        return batch

    def _staged(self, events: Iterator[pa.RecordBatch]) -> EventFile | None:
        first = next(events, None)
        if first is None:
            return None
        target, rows, batch = self.target, 0, first
        path = target.new_path()
        try:
            with target.io.new_output(path).create(overwrite=True) as out:
                with pq.ParquetWriter(out, self.events.staged, compression="zstd") as writer:
                    while batch is not None:
                        writer.write_batch(batch)
                        rows += batch.num_rows
                        batch = next(events, None)
                return EventFile(path, rows, out.tell())
        except PenstockError:
            raise
        except Exception as error:
            what = "a file of events cannot be written"
            raise translated(error, target.table, what, target.io.properties) from None
