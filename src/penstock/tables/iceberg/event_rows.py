"""Rows that staged change events set, written by tasks to data files of an Iceberg table."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from penstock.tables.changes.events import PRESENT, SEQUENCE, UNKNOWN, EventLayout, require_stored
from penstock.tables.changes.merge_plan import fill, without_row
from penstock.tables.columns import VALID_FROM, VALID_TO
from penstock.tables.iceberg.data_files import FileTarget, gathered, in_schema, written
from penstock.tables.iceberg.event_files import EventFile
from penstock.tables.iceberg.keys import WantedKeys
from penstock.tables.iceberg.numbered_tasks import NumberedTask, divided
from penstock.tables.iceberg.reports import to_report
from penstock.tables.iceberg.schema import TableLayout

_TASK_BYTES = 32 << 20
"""How much of the staged files, as they are compressed, is the work of a task."""


@dataclass(frozen=True)
class Part:
    """A staged file, and the number of its first event among all of the micro-batch."""

    file: EventFile
    start: int


def divided_events(files: Sequence[EventFile]) -> list[list[Part]]:
    """Divide the staged files into the work of tasks: each writes a file at least."""
    starts = accumulate((file.rows for file in files), initial=0)
    parts = [Part(file, start) for file, start in zip(files, starts, strict=False)]
    return divided(parts, lambda part: part.file.size, _TASK_BYTES)


@dataclass
class EventRowsTask(NumberedTask):
    """Takes numbers of tasks, and reports the data files with the rows of their events."""

    target: FileTarget = field(repr=False)
    events: EventLayout = field(repr=False)
    layout: TableLayout = field(repr=False)
    parts: Sequence[Sequence[Part]] = field(repr=False)
    taken: pa.BooleanArray = field(repr=False)
    """For each event of the micro-batch, whether its row is written."""
    ends: pa.Array | None = field(repr=False)
    """With history: for each event, the end of its row."""
    stored: Sequence[str] = field(repr=False)
    """Files with stored values, for events that leave values out."""
    what = "a data file cannot be written"

    def result(self, number: int) -> bytes:
        rows = (batch for part in self.parts[number] for batch in self._rows(part))
        parts = (in_schema(self.target, self.layout.values(part)) for part in gathered(rows))
        return to_report(self.target, written(self.target, parts))

    def _rows(self, part: Part) -> Iterator[pa.RecordBatch]:
        """Yield the rows of a staged file, in the columns of the table that the query sets."""
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
        """Refuse values that no stored row has: the record has the key, but others may delete rows."""
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
        """The stored values, with the keys and sequences in the types of events."""
        tables = []
        for path in self.stored:
            with self.target.io.new_input(path).open() as stream:
                tables.append(pq.read_table(stream))
        if not tables:
            return self.events.table.empty_table()
        found = pa.concat_tables(tables)
        types = {name: self.events.table.field(name).type for name in found.column_names}
        return found.cast(pa.schema(types.items()))
