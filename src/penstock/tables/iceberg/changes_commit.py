"""Commit of change events to an Iceberg table: the driver plans from the keys, and tasks write the rows.

Each attempt makes a new plan, from the record and the rows that the table then has. Files that tasks wrote
for an earlier attempt are reused if the plan is the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import pyarrow as pa
from pyiceberg.io.pyarrow import schema_to_pyarrow
from pyiceberg.manifest import DataFile
from pyiceberg.schema import Schema
from pyiceberg.table import FileScanTask, Table, Transaction
from pyiceberg.types import NestedField
from pyspark.sql import SparkSession

from penstock.tables.changes.events import UNKNOWN, EventLayout, require_stored
from penstock.tables.changes.merge_plan import MergePlan, distinct_events, incomplete, plan_events
from penstock.tables.changes.wanted_keys import WantedKeys
from penstock.tables.columns import VALID_FROM, VALID_TO
from penstock.tables.iceberg.commit import Commit, FileChanges
from penstock.tables.iceberg.data_files import FileTarget
from penstock.tables.iceberg.event_files import EventFile, EventRowsTask, divided_events, read_events
from penstock.tables.iceberg.keys import files_with_keys, ranges_of_keys
from penstock.tables.iceberg.lookups import FilePart, Lookup, ValuesTask
from penstock.tables.iceberg.reading import identity
from penstock.tables.iceberg.record import Record
from penstock.tables.iceberg.record_merges import RecordWriter
from penstock.tables.iceberg.reports import from_report
from penstock.tables.iceberg.rewriting import ChangedValues, Edit, RemovedRows, Rewriter
from penstock.tables.iceberg.schema import TableLayout
from penstock.tables.unchanged_values import column_numbers


@dataclass
class Written:
    """The files that tasks have written for a plan."""

    plan: MergePlan
    filled_from: Sequence[object]
    """The data files that supplied the values which events leave out."""
    rows: list[DataFile]
    rewriter: Rewriter | None


@dataclass
class ChangesCommit(Commit):
    """The commit of events that tasks have staged, retried after conflicts with other writers."""

    spark: SparkSession = field(kw_only=True)
    events: EventLayout = field(kw_only=True)
    event_files: Sequence[EventFile] = field(kw_only=True)
    record: Record = field(kw_only=True)
    _again: bool = False
    _written: list[Written] = field(default_factory=list)
    _values: list[str] = field(default_factory=list)
    """Files with stored values."""

    @property
    def _needed(self) -> bool:
        return bool(self.event_files)

    @property
    def repeated(self) -> bool:
        rewriters = (each.rewriter.repeated for each in self._written if each.rewriter is not None)
        return self._again or self._record_writer.repeated or any(rewriters)

    def _needed_files(self) -> list[str]:
        return [file.path for file in self.event_files]

    def _data_paths(self) -> set[str]:
        rows = [file.file_path for each in self._written for file in each.rows]
        rewritten = [path for each in self._written if each.rewriter for path in each.rewriter.paths]
        return {*rows, *rewritten, *self._record_writer.paths}

    def _paths(self) -> set[str]:
        staged = [path for each in self._written if each.rewriter for path in each.rewriter.staged_paths]
        return {*self._data_paths(), *self._needed_files(), *self._values, *staged}

    @cached_property
    def _staged(self) -> pa.Table:
        """The columns of all events from which their merge is planned."""
        with self.target.place.translating_errors("the events of a micro-batch cannot be read"):
            return read_events(self.io, self.event_files, self.events.planning)

    @cached_property
    def _recorded_lines(self) -> Lookup:
        return Lookup(self.spark, self._stored_keys(self._staged), self.events.recorded)

    @cached_property
    def _versions(self) -> Lookup:
        return Lookup(self.spark, self._stored_keys(self._staged), self.events.versions)

    @cached_property
    def _record_writer(self) -> RecordWriter:
        return RecordWriter(self.spark, self.record, self.events)

    def _changes(self, table: Table, transaction: Transaction) -> FileChanges | None:
        self.record.require(table.metadata)
        target = self.target.files(table, transaction, self.token)
        recorded = self.record.files(table)
        versions = self._stored_versions(table, target) if self.events.history else []
        plan = self._plan(target, recorded, [lines for _, lines in versions])
        if plan.is_empty:
            # A clean-up will find out which files of earlier attempts the table has.
            self._again |= bool(self._sent)
            return None
        written = self._write(table, target, self.target.layout(transaction), plan)
        rewritten, rows = [], written.rows
        if written.rewriter is not None:
            rewritten = written.rewriter.rewrite(target, self._edited_files(table, plan, versions))
            rows = [*rows, *written.rewriter.moved(target, rewritten)]
        record = self._record_writer.change(target, recorded, plan.recorded)
        return FileChanges.of(rewritten, rows, record)

    def _plan(
        self, target: FileTarget, recorded: Sequence[FileScanTask], versions: Sequence[pa.Table]
    ) -> MergePlan:
        """Return the merge plan, from the record and the stored versions of the keys."""
        near = self.record.near(recorded, self._recorded_lines.keys)
        lines = self._recorded_lines.lines(target, near, self.record.schema)
        known = distinct_events(self.events, pa.concat_tables([self.events.recorded.empty_table(), *lines]))
        plan, refused = plan_events(
            self.events,
            self._staged,
            known,
            lambda: pa.concat_tables([self.events.versions.empty_table(), *versions]),
        )
        require_stored(refused, self.events, self.target.place.shown)
        return plan

    def _stored_versions(self, table: Table, target: FileTarget) -> list[tuple[FileScanTask, pa.Table]]:
        """Return the stored versions of the keys, for each data file."""
        files = self._files(table, self._versions.keys)
        lines = self._versions.lines(target, files, self._columns([VALID_FROM, VALID_TO]))
        return list(zip(files, lines, strict=True))

    def _write(self, table: Table, target: FileTarget, layout: TableLayout, plan: MergePlan) -> Written:
        """Have tasks write the rows of a plan, unless they already have.

        ``layout`` is the table's current one: columns may have been added or moved since the events were
        staged.
        """
        events = None if self.events.unchanged is None else incomplete(self._staged, plan.taken)
        sources = [] if not events else self._files(table, self._stored_keys(events))
        filled_from = list(map(identity, sources))
        for each in self._written:
            if _same(each.plan, plan) and each.filled_from == filled_from:
                return each
        stored = [] if not events else self._stored_values(target, sources, events)
        edit = self._edit(plan)
        parts = divided_events(self.event_files)
        task = EventRowsTask(target, self.events, layout, parts, plan.taken, _ends(plan), stored)
        rewriter = None if edit is None else Rewriter(self.spark, edit)
        written = Written(plan, filled_from, [], rewriter)
        self._written.append(written)
        for report in task.reports(self.spark, len(parts)):
            self._again |= report.attempt > 0
            written.rows += from_report(target, report.result)
        return written

    def _stored_values(
        self, target: FileTarget, files: Sequence[FileScanTask], events: pa.Table
    ) -> list[str]:
        """Have tasks look up the values that events leave out; return files with the values."""
        numbers = column_numbers(events[UNKNOWN].unique().to_pylist())
        more = [VALID_FROM, VALID_TO] if self.events.history else []
        names = [*more, *(self.events.rows.names[number] for number in numbers)]
        keys = list(self.events.keys)
        task = ValuesTask(
            target,
            self._stored_keys(events),
            self._columns(names),
            [FilePart(file) for file in files],
            names=[*keys, *names],
        )
        found = []
        for report in task.reports(self.spark, len(files)):
            self._again |= report.attempt > 0
            found += [report.result.decode()] if report.result else []
        self._values += found
        return found

    def _edit(self, plan: MergePlan) -> Edit | None:
        """Return the changes of stored rows; None if there are none."""
        if plan.changed is None:
            removed = self._stored_keys(self._staged.filter(plan.taken))
            return RemovedRows(self.layout.key_schema, WantedKeys(removed)) if len(removed) else None
        if not plan.changed.num_rows:
            return None
        columns = self._columns([VALID_FROM, VALID_TO])
        return ChangedValues(columns, _in_schema(plan.changed, columns))

    def _edited_files(
        self, table: Table, plan: MergePlan, versions: Sequence[tuple[FileScanTask, pa.Table]]
    ) -> list[FileScanTask]:
        """Return the data files that may have rows to change."""
        if plan.changed is None:
            return self._files(table, self._stored_keys(self._staged.filter(plan.taken)))
        names = [*self.events.keys, VALID_FROM]
        changed = WantedKeys(plan.changed.select(names))
        return [file for file, lines in versions if len(changed.places_in(lines.select(names)))]

    def _files(self, table: Table, keys: pa.Table) -> list[FileScanTask]:
        ranges = ranges_of_keys(table.schema(), self.layout.key_schema, keys)
        return files_with_keys(self.target.place, table, ranges)

    def _stored_keys(self, events: pa.Table) -> pa.Table:
        """Return the keys of events in the table's types."""
        return _in_schema(events.select(list(self.events.keys)), self.layout.key_schema)

    def _columns(self, names: Sequence[str]) -> Schema:
        """Return the table's key columns, and its columns for the named columns of the events' rows."""
        places = [self.layout.places.index(self.events.table.names.index(name)) for name in names]
        more: list[NestedField] = [self.layout.schema.fields[place] for place in places]
        return Schema(*self.layout.key_schema.fields, *more)


def _in_schema(rows: pa.Table, columns: Schema) -> pa.Table:
    schema = schema_to_pyarrow(columns, include_field_ids=False)
    return rows.rename_columns(schema.names).cast(schema)


def _ends(plan: MergePlan) -> pa.Array | None:
    """Return for each event the end of validity of its row; null for events that are not taken."""
    if plan.ends is None:
        return None
    taken = plan.taken.to_numpy(zero_copy_only=False)
    return plan.ends.take(pa.array(taken.cumsum() - 1, mask=~taken))


def _same(one: MergePlan, other: MergePlan) -> bool:
    """Whether tasks write the same rows for two plans."""
    pairs = ((one.taken, other.taken), (one.ends, other.ends), (one.changed, other.changed))
    return all(a is b or (a is not None and b is not None and a.equals(b)) for a, b in pairs)
