"""Change events of a micro-batch: tasks stage them in files that no snapshot refers to, and once the driver
has decided which events to apply, other tasks write their rows to data files.
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
    PRESENT,
    SEQUENCE,
    UNKNOWN,
    EventLayout,
    checked_events,
    require_stored,
)
from penstock.tables.changes.merge_plan import fill, without_row
from penstock.tables.changes.wanted_keys import WantedKeys
from penstock.tables.columns import VALID_FROM, VALID_TO
from penstock.tables.iceberg.data_files import FileTarget, gathered, in_schema, written
from penstock.tables.iceberg.numbered_tasks import NumberedTask, divided
from penstock.tables.iceberg.place import translated
from penstock.tables.iceberg.reports import to_report
from penstock.tables.iceberg.schema import TableLayout
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
_TASK_BYTES = 32 << 20
"""The compressed size of the staged files that a task processes."""


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


def event_files(reports: Iterable[Any]) -> list[EventFile]:
    """Return the files in collected reports."""
    return [EventFile(report.path, report.rows, report.size) for report in reports if report.path is not None]


def read_events(io: FileIO, files: Sequence[EventFile], schema: pa.Schema) -> pa.Table:
    """Read all events with the columns of ``schema``."""
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


@dataclass(frozen=True)
class Part:
    """A staged file, and the position of its first event among all events of the micro-batch."""

    file: EventFile
    start: int


def divided_events(files: Sequence[EventFile]) -> list[list[Part]]:
    """Divide the staged files among tasks; each task writes at least one file."""
    starts = accumulate((file.rows for file in files), initial=0)
    parts = [Part(file, start) for file, start in zip(files, starts, strict=False)]
    return divided(parts, lambda part: part.file.size, _TASK_BYTES)


@dataclass
class EventRowsTask(NumberedTask):
    """Task that takes numbers of its parts, and reports the data files with the rows of their events."""

    target: FileTarget = field(repr=False)
    events: EventLayout = field(repr=False)
    layout: TableLayout = field(repr=False)
    parts: Sequence[Sequence[Part]] = field(repr=False)
    taken: pa.BooleanArray = field(repr=False)
    """For each event of the micro-batch, whether its row is written."""
    ends: pa.Array | None = field(repr=False)
    """With history: for each event, the end of validity of its row."""
    stored: Sequence[str] = field(repr=False)
    """Files with stored values, for events that leave values out."""
    what = "a data file cannot be written"

    def result(self, number: int) -> bytes:
        rows = (batch for part in self.parts[number] for batch in self._rows(part))
        parts = (in_schema(self.target, self.layout.values(part)) for part in gathered(rows))
        return to_report(self.target, written(self.target, parts))

    def _rows(self, part: Part) -> Iterator[pa.RecordBatch]:
        """Yield the rows of a staged file, with the table's columns that the query sets."""
        at = part.start
        for batch in part.file.batches(self.target.io, self.events.staged):
            taken = self.taken.slice(at, batch.num_rows)
            rows = pa.Table.from_batches([batch.filter(taken)])
            if rows.num_rows:
                yield from self._completed(rows, taken, at).to_batches()
            at += batch.num_rows

    def _completed(self, rows: pa.Table, taken: pa.BooleanArray, at: int) -> pa.Table:
        events = self.events
        if events.unchanged is not None:
            self._require_stored(rows)
            rows = fill(rows, list(events.keys), self._stored)
        if self.ends is not None:
            ends = self.ends.slice(at, len(taken)).filter(taken)
            rows = rows.append_column(VALID_FROM, rows[SEQUENCE]).append_column(VALID_TO, ends)
        else:
            # A delete sets no row.
            rows = rows.filter(pc.equal(rows[PRESENT], 1))
        return rows.select(events.table.names).cast(events.table)

    def _require_stored(self, rows: pa.Table) -> None:
        """Refuse events that leave out values of rows that other writers have deleted."""
        left_out = rows.filter(pc.is_valid(rows[UNKNOWN]))
        if self.ends is None and left_out.num_rows:
            missing = without_row(list(self.events.keys), left_out, self._values)
            require_stored(missing, self.events, self.target.table)

    def _stored(self, keys: pa.Table, names: Sequence[str]) -> pa.Table:
        more = [name for name in (VALID_FROM, VALID_TO) if self.events.history]
        found = self._values.select([*keys.column_names, *more, *names])
        return found.take(WantedKeys(keys).places_in(found.select(keys.column_names)))

    @cached_property
    def _values(self) -> pa.Table:
        """The stored values, with keys and sequences in the types of the events."""
        tables = []
        for path in self.stored:
            with self.target.io.new_input(path).open() as stream:
                tables.append(pq.read_table(stream))
        if not tables:
            return self.events.table.empty_table()
        found = pa.concat_tables(tables)
        types = {name: self.events.table.field(name).type for name in found.column_names}
        return found.cast(pa.schema(types.items()))
