"""Change events of a micro-batch: tasks stage them in files outside of any snapshot, the driver plans which
events to merge, and other tasks write the rows of these events to data files.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pyiceberg.io import FileIO
from pyspark import TaskContext

from penstock.arrow.coerce import conform
from penstock.errors import PenstockError
from penstock.spark.error_boundary import iterate_in_worker
from penstock.tables.changes.events import (
    MISSING_COLUMNS,
    PRESENT,
    SEQUENCE,
    EventLayout,
    check_events,
    require_stored_values,
)
from penstock.tables.changes.lookup_keys import LookupKeys
from penstock.tables.changes.merge_plan import fill_missing_values, without_stored_row
from penstock.tables.columns import VALID_FROM, VALID_TO
from penstock.tables.iceberg.data_files import (
    FileTarget,
    cast_to_file_schema,
    to_row_groups,
    write_data_files,
)
from penstock.tables.iceberg.location import translate_error
from penstock.tables.iceberg.numbered_tasks import NumberedTask, assign_to_tasks
from penstock.tables.iceberg.reports import to_report
from penstock.tables.iceberg.schema import TableLayout
from penstock.tables.row_checks import require_key_value
from penstock.tables.row_encoding import in_chunks

REPORT_DDL = "path string, rows bigint, size bigint, attempt int, query string"
_REPORT_SCHEMA = pa.schema(
    [
        ("path", pa.string()),
        ("rows", pa.int64()),
        ("size", pa.int64()),
        ("attempt", pa.int32()),
        ("query", pa.string()),
    ]
)
_BATCH_ROWS = 65_536
_TASK_BYTES = 32 << 20
"""The total compressed size of the staged files that a task processes."""


@dataclass(frozen=True)
class EventFile:
    path: str
    rows: int
    size: int

    def batches(self, io: FileIO, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
        """Yield the events with the columns of ``schema``, always in the same order."""
        with io.new_input(self.path).open() as stream:
            for batch in pq.ParquetFile(stream).iter_batches(_BATCH_ROWS, columns=schema.names):
                yield batch.select(schema.names).cast(schema)


def files_from_reports(reports: Iterable[Any]) -> list[EventFile]:
    """Return the files in collected reports."""
    return [EventFile(report.path, report.rows, report.size) for report in reports if report.path is not None]


def read_events(io: FileIO, files: Sequence[EventFile], schema: pa.Schema) -> pa.Table:
    """Read all events with the columns of ``schema``."""
    return pa.Table.from_batches((batch for file in files for batch in file.batches(io, schema)), schema)


@dataclass
class EventTask:
    """Function for ``mapInArrow``, which stages collapsed events and returns a report of the staged file."""

    target: FileTarget = field(repr=False)
    events: EventLayout = field(repr=False)

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        return iterate_in_worker(self._run(iter(batches)))

    def _run(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        context = TaskContext.get()
        assert context is not None
        file = self._stage_events(map(self._check_batch, in_chunks(batches)))
        report = {
            "path": [None if file is None else file.path],
            "rows": [0 if file is None else file.rows],
            "size": [0 if file is None else file.size],
            "attempt": [context.attemptNumber()],
            "query": [context.getLocalProperty("sql.streaming.queryId")],
        }
        yield pa.RecordBatch.from_pydict(report, schema=_REPORT_SCHEMA)

    def _check_batch(self, chunk: pa.RecordBatch) -> pa.RecordBatch:
        table = f"the Iceberg table {self.target.table}"
        schema = self.events.staged_schema
        # Events arrive with the columns c0, c1 and so on.
        batch = conform(check_events(chunk, self.events, table).rename_columns(schema.names), schema)
        for key in self.events.keys:
            require_key_value(batch.column(key), key, table)
        return batch

    def _stage_events(self, events: Iterator[pa.RecordBatch]) -> EventFile | None:
        first = next(events, None)
        if first is None:
            return None
        target, rows, batch = self.target, 0, first
        path = target.new_path()
        try:
            with target.io.new_output(path).create(overwrite=True) as out:
                with pq.ParquetWriter(out, self.events.staged_schema, compression="zstd") as writer:
                    while batch is not None:
                        writer.write_batch(batch)
                        rows += batch.num_rows
                        batch = next(events, None)
                return EventFile(path, rows, out.tell())
        except PenstockError:
            raise
        except Exception as error:
            what = "a file of events cannot be written"
            raise translate_error(error, target.table, what, target.io.properties) from None


@dataclass(frozen=True)
class StagedFile:
    """A staged file, and the position of its first event among all events of the micro-batch."""

    file: EventFile
    first_event: int


def assign_events(files: Sequence[EventFile]) -> list[list[StagedFile]]:
    """Divide the staged files among tasks; each task writes at least one file."""
    first_events = accumulate((file.rows for file in files), initial=0)
    staged_files = [StagedFile(file, start) for file, start in zip(files, first_events, strict=False)]
    return assign_to_tasks(staged_files, lambda staged: staged.file.size, _TASK_BYTES)


@dataclass
class EventRowsTask(NumberedTask):
    """Task that writes and reports the data files for each numbered group of staged files."""

    target: FileTarget = field(repr=False)
    events: EventLayout = field(repr=False)
    layout: TableLayout = field(repr=False)
    groups: Sequence[Sequence[StagedFile]] = field(repr=False)
    merged: pa.BooleanArray = field(repr=False)
    """For each event of the micro-batch, whether its row is written."""
    valid_to: pa.Array | None = field(repr=False)
    """With history: for each event, the ``VALID_TO`` of its row."""
    value_files: Sequence[str] = field(repr=False)
    """Files with stored values, for events that omit values."""
    failed_action = "a data file cannot be written"

    def result(self, number: int) -> bytes:
        rows = (batch for staged in self.groups[number] for batch in self._rows(staged))
        row_groups = (
            cast_to_file_schema(self.target, self.layout.values(staged)) for staged in to_row_groups(rows)
        )
        return to_report(self.target, write_data_files(self.target, row_groups))

    def _rows(self, staged: StagedFile) -> Iterator[pa.RecordBatch]:
        """Yield the rows of a staged file, with the table's columns that the query sets."""
        offset = staged.first_event
        for batch in staged.file.batches(self.target.io, self.events.staged_schema):
            merged = self.merged.slice(offset, batch.num_rows)
            rows = pa.Table.from_batches([batch.filter(merged)])
            if rows.num_rows:
                yield from self._complete_rows(rows, merged, offset).to_batches()
            offset += batch.num_rows

    def _complete_rows(self, rows: pa.Table, merged: pa.BooleanArray, offset: int) -> pa.Table:
        events = self.events
        if events.unchanged is not None:
            self._require_stored(rows)
            rows = fill_missing_values(rows, list(events.keys), self._read_values)
        if self.valid_to is not None:
            valid_to = self.valid_to.slice(offset, len(merged)).filter(merged)
            rows = rows.append_column(VALID_FROM, rows[SEQUENCE]).append_column(VALID_TO, valid_to)
        else:
            # A delete writes no row.
            rows = rows.filter(pc.equal(rows[PRESENT], 1))
        return rows.select(events.table_schema.names).cast(events.table_schema)

    def _require_stored(self, rows: pa.Table) -> None:
        """Refuse events that omit values of rows that other writers have deleted."""
        incomplete = rows.filter(pc.is_valid(rows[MISSING_COLUMNS]))
        if self.valid_to is None and incomplete.num_rows:
            missing = without_stored_row(list(self.events.keys), incomplete, self._stored_values)
            require_stored_values(missing, self.events, self.target.table)

    def _read_values(self, keys: pa.Table, names: Sequence[str]) -> pa.Table:
        validity = [name for name in (VALID_FROM, VALID_TO) if self.events.keeps_history]
        values = self._stored_values.select([*keys.column_names, *validity, *names])
        return values.take(LookupKeys(keys).positions_in(values.select(keys.column_names)))

    @cached_property
    def _stored_values(self) -> pa.Table:
        """The stored values, with keys and sequences in the types of the events."""
        tables = []
        for path in self.value_files:
            with self.target.io.new_input(path).open() as stream:
                tables.append(pq.read_table(stream))
        if not tables:
            return self.events.table_schema.empty_table()
        values = pa.concat_tables(tables)
        types = {name: self.events.table_schema.field(name).type for name in values.column_names}
        return values.cast(pa.schema(types.items()))
