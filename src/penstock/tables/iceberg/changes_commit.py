"""Commit of change events to an Iceberg table: the driver plans the merge from the keys, and tasks write the
rows.

Each attempt makes a new plan from the applied events and the rows of the loaded table. Files that tasks wrote
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

from penstock.tables.changes.events import MISSING_COLUMNS, EventLayout, require_stored_values
from penstock.tables.changes.lookup_keys import LookupKeys
from penstock.tables.changes.merge_plan import MergePlan, distinct_events, plan_events, with_missing_values
from penstock.tables.columns import VALID_FROM, VALID_TO
from penstock.tables.iceberg.applied_events import AppliedEvents
from penstock.tables.iceberg.applied_events_writer import AppliedEventsWriter
from penstock.tables.iceberg.commit import Commit, FileChanges
from penstock.tables.iceberg.data_files import FileTarget
from penstock.tables.iceberg.event_files import EventFile, EventRowsTask, assign_events, read_events
from penstock.tables.iceberg.keys import files_with_keys, filter_for_keys
from penstock.tables.iceberg.lookups import FilePart, Lookup, ValuesTask
from penstock.tables.iceberg.reading import file_identity
from penstock.tables.iceberg.reports import from_report
from penstock.tables.iceberg.rewriting import ChangedValues, Edit, RemovedRows, Rewriter
from penstock.tables.iceberg.schema import TableLayout
from penstock.tables.unchanged_values import column_numbers


@dataclass
class WrittenFiles:
    """The files that tasks have written for a plan."""

    plan: MergePlan
    value_sources: Sequence[object]
    """The identities of the data files that supplied the values which events omit."""
    rows: list[DataFile]
    rewriter: Rewriter | None


@dataclass
class ChangesCommit(Commit):
    """The commit of events that tasks have staged, retried after conflicts with other writers."""

    spark: SparkSession = field(kw_only=True)
    events: EventLayout = field(kw_only=True)
    event_files: Sequence[EventFile] = field(kw_only=True)
    applied_events: AppliedEvents = field(kw_only=True)
    _own_tasks_retried: bool = False
    _written: list[WrittenFiles] = field(default_factory=list)
    _value_files: list[str] = field(default_factory=list)
    """The files in which tasks wrote stored values."""

    @property
    def _has_changes(self) -> bool:
        return bool(self.event_files)

    @property
    def tasks_retried(self) -> bool:
        rewriters = (
            written.rewriter.tasks_retried for written in self._written if written.rewriter is not None
        )
        return self._own_tasks_retried or self._applied_events_writer.tasks_retried or any(rewriters)

    def _staged_paths(self) -> list[str]:
        return [file.path for file in self.event_files]

    def _written_table_paths(self) -> set[str]:
        rows = [file.file_path for written in self._written for file in written.rows]
        rewritten = [path for written in self._written if written.rewriter for path in written.rewriter.paths]
        return {*rows, *rewritten, *self._applied_events_writer.paths}

    def _written_paths(self) -> set[str]:
        staged = [
            path for written in self._written if written.rewriter for path in written.rewriter.staged_paths
        ]
        return {*self._written_table_paths(), *self._staged_paths(), *self._value_files, *staged}

    @cached_property
    def _staged(self) -> pa.Table:
        """The planning columns of all staged events."""
        with self.target.location.translating_errors("the events of a micro-batch cannot be read"):
            return read_events(self.io, self.event_files, self.events.planning_schema)

    @cached_property
    def _recorded_lookup(self) -> Lookup:
        return Lookup(self.spark, self._stored_keys(self._staged), self.events.recorded_schema)

    @cached_property
    def _version_lookup(self) -> Lookup:
        return Lookup(self.spark, self._stored_keys(self._staged), self.events.version_schema)

    @cached_property
    def _applied_events_writer(self) -> AppliedEventsWriter:
        return AppliedEventsWriter(self.spark, self.applied_events, self.events)

    def _changes(self, table: Table, transaction: Transaction) -> FileChanges | None:
        self.applied_events.require_consistent(table.metadata)
        target = self.target.files(table, transaction, self.token)
        event_files = self.applied_events.files(table)
        stored_versions = self._stored_versions(table, target) if self.events.keeps_history else []
        plan = self._plan(target, event_files, [lines for _, lines in stored_versions])
        if plan.is_empty:
            # Leave the pending file, so that a clean-up finds out which files of earlier attempts are in use.
            self._own_tasks_retried |= bool(self._sent_snapshots)
            return None
        written = self._write_files(table, target, self.target.layout(transaction), plan)
        rewritten, rows = [], written.rows
        if written.rewriter is not None:
            rewritten = written.rewriter.rewrite(target, self._edited_files(table, plan, stored_versions))
            rows = [*rows, *written.rewriter.move_rows(target, rewritten)]
        event_change = self._applied_events_writer.change(target, event_files, plan.recorded)
        return FileChanges.of(rewritten, rows, event_change)

    def _plan(
        self, target: FileTarget, event_files: Sequence[FileScanTask], versions: Sequence[pa.Table]
    ) -> MergePlan:
        """Return the merge plan, from the applied events and the stored row versions of the keys."""
        candidate_files = self.applied_events.files_with_keys(event_files, self._recorded_lookup.keys)
        tables = self._recorded_lookup.rows(target, candidate_files, self.applied_events.schema)
        recorded_events = distinct_events(
            self.events, pa.concat_tables([self.events.recorded_schema.empty_table(), *tables])
        )
        plan, unresolved = plan_events(
            self.events,
            self._staged,
            recorded_events,
            lambda: pa.concat_tables([self.events.version_schema.empty_table(), *versions]),
        )
        require_stored_values(unresolved, self.events, self.target.location.label)
        return plan

    def _stored_versions(self, table: Table, target: FileTarget) -> list[tuple[FileScanTask, pa.Table]]:
        """Return the stored row versions of the keys, for each data file."""
        files = self._files(table, self._version_lookup.keys)
        tables = self._version_lookup.rows(target, files, self._columns([VALID_FROM, VALID_TO]))
        return list(zip(files, tables, strict=True))

    def _write_files(
        self, table: Table, target: FileTarget, layout: TableLayout, plan: MergePlan
    ) -> WrittenFiles:
        """Have tasks write the rows of a plan, unless they already have.

        ``layout`` is the table's current one: columns may have been added or moved since the events were
        staged.
        """
        incomplete = None if self.events.unchanged is None else with_missing_values(self._staged, plan.merged)
        value_sources = [] if not incomplete else self._files(table, self._stored_keys(incomplete))
        source_identities = list(map(file_identity, value_sources))
        for earlier in self._written:
            if _same_rows(earlier.plan, plan) and earlier.value_sources == source_identities:
                return earlier
        value_files = [] if not incomplete else self._look_up_values(target, value_sources, incomplete)
        edit = self._edit(plan)
        parts = assign_events(self.event_files)
        task = EventRowsTask(
            target, self.events, layout, parts, plan.merged, _valid_to_by_event(plan), value_files
        )
        rewriter = None if edit is None else Rewriter(self.spark, edit)
        written = WrittenFiles(plan, source_identities, [], rewriter)
        self._written.append(written)
        for report in task.reports(self.spark, len(parts)):
            self._own_tasks_retried |= report.attempt > 0
            written.rows += from_report(target, report.result)
        return written

    def _look_up_values(
        self, target: FileTarget, files: Sequence[FileScanTask], events: pa.Table
    ) -> list[str]:
        """Have tasks look up the values that events omit; return the files with the values."""
        column_indexes = column_numbers(events[MISSING_COLUMNS].unique().to_pylist())
        validity = [VALID_FROM, VALID_TO] if self.events.keeps_history else []
        names = [*validity, *(self.events.row_schema.names[number] for number in column_indexes)]
        keys = list(self.events.keys)
        task = ValuesTask(
            target,
            self._stored_keys(events),
            self._columns(names),
            [FilePart(file) for file in files],
            names=[*keys, *names],
        )
        paths = []
        for report in task.reports(self.spark, len(files)):
            self._own_tasks_retried |= report.attempt > 0
            paths += [report.result.decode()] if report.result else []
        self._value_files += paths
        return paths

    def _edit(self, plan: MergePlan) -> Edit | None:
        """Return the changes of stored rows; None if there are none."""
        if plan.ended_versions is None:
            removed = self._stored_keys(self._staged.filter(plan.merged))
            return RemovedRows(self.layout.key_schema, LookupKeys(removed)) if len(removed) else None
        if not plan.ended_versions.num_rows:
            return None
        columns = self._columns([VALID_FROM, VALID_TO])
        return ChangedValues(columns, _cast_to_columns(plan.ended_versions, columns))

    def _edited_files(
        self, table: Table, plan: MergePlan, versions: Sequence[tuple[FileScanTask, pa.Table]]
    ) -> list[FileScanTask]:
        """Return the data files that may have rows to change."""
        if plan.ended_versions is None:
            return self._files(table, self._stored_keys(self._staged.filter(plan.merged)))
        names = [*self.events.keys, VALID_FROM]
        lookup_keys = LookupKeys(plan.ended_versions.select(names))
        return [file for file, rows in versions if len(lookup_keys.positions_in(rows.select(names)))]

    def _files(self, table: Table, keys: pa.Table) -> list[FileScanTask]:
        ranges = filter_for_keys(table.schema(), self.layout.key_schema, keys)
        return files_with_keys(self.target.location, table, ranges)

    def _stored_keys(self, events: pa.Table) -> pa.Table:
        """Return the keys of events in the table's types."""
        return _cast_to_columns(events.select(list(self.events.keys)), self.layout.key_schema)

    def _columns(self, names: Sequence[str]) -> Schema:
        """Return the table's key columns, and its columns for the named columns of the events' rows."""
        positions = [
            self.layout.row_columns.index(self.events.table_schema.names.index(name)) for name in names
        ]
        other_fields: list[NestedField] = [self.layout.schema.fields[position] for position in positions]
        return Schema(*self.layout.key_schema.fields, *other_fields)


def _cast_to_columns(rows: pa.Table, columns: Schema) -> pa.Table:
    schema = schema_to_pyarrow(columns, include_field_ids=False)
    return rows.rename_columns(schema.names).cast(schema)


def _valid_to_by_event(plan: MergePlan) -> pa.Array | None:
    """Return the ``VALID_TO`` of each event's row; null for events that are not merged."""
    if plan.valid_to is None:
        return None
    merged = plan.merged.to_numpy(zero_copy_only=False)
    return plan.valid_to.take(pa.array(merged.cumsum() - 1, mask=~merged))


def _same_rows(one: MergePlan, other: MergePlan) -> bool:
    """Whether tasks write the same rows for two plans."""
    pairs = (
        (one.merged, other.merged),
        (one.valid_to, other.valid_to),
        (one.ended_versions, other.ended_versions),
    )
    return all(a is b or (a is not None and b is not None and a.equals(b)) for a, b in pairs)
