"""Commit of change events to a Delta table by tasks: the driver plans the merge from the keys, and tasks look
up the stored rows of these keys, write the new rows, and remove the old ones from their data files.

Each attempt makes a new plan for the loaded version of the table. Files that tasks wrote for an earlier
attempt are reused if the plan is the same.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING

import pyarrow as pa
from pyspark.sql import SparkSession

from penstock.tables.changes.events import EventLayout, require_stored_values
from penstock.tables.changes.merge_plan import MergePlan, plan_events, with_missing_values
from penstock.tables.delta.applied_table import AppliedTable
from penstock.tables.delta.copy_on_write import CopyOnWrite, Replacement
from penstock.tables.delta.data_files import DataFile, UnreadableFile
from penstock.tables.delta.direct_writes import obstacle
from penstock.tables.delta.event_rows import write_event_rows
from penstock.tables.delta.file_commit import commit_replacement
from penstock.tables.delta.lookups import Lookup
from penstock.tables.delta.removed_positions import removals_with_keys, removals_with_new_valid_to
from penstock.tables.delta.removed_rows import RemovedByGivenKey, RemovedRows
from penstock.tables.delta.schema import DeltaLayout
from penstock.tables.delta.small_files import merge_if_many
from penstock.tables.delta.stage import DeltaStage
from penstock.tables.delta.statistics import indexed_columns
from penstock.tables.delta.stored_files import StoredFiles

if TYPE_CHECKING:
    from deltalake import DeltaTable


@dataclass
class WrittenFiles:
    """The files that tasks have written for a plan."""

    plan: MergePlan
    rows: list[DataFile]
    copy_on_write: CopyOnWrite
    moved: dict[frozenset[str], list[DataFile]] = field(default_factory=dict)
    """The data files with moved rows, merged if they are many, by the paths of the files they come from."""


@dataclass
class ChangesCommit:
    """Function that commits staged events; one instance serves all attempts."""

    spark: SparkSession
    stage: DeltaStage
    files: Sequence[DataFile]
    events: EventLayout
    applied: AppliedTable
    _written: list[WrittenFiles] = field(default_factory=list)

    def __call__(self, table: DeltaTable, versions: Mapping[str, int]) -> bool:
        """Commit to a loaded table, with versions of app transactions.

        Return False, without a commit, if deltalake has to merge the events.
        """
        layout = DeltaLayout(self.events.table_schema, self.events.keys)
        if obstacle(table, "update", layout) is not None:
            return False
        target = replace(
            self.stage, layout=layout, indexed=indexed_columns(layout.schema, _properties(table))
        )
        try:
            stored, applied_files = self._stored_files(table)
            plan = self._plan(stored, applied_files)
            if plan is None:
                return False
            if plan.is_empty:
                return True
            written = self._write_files(target, plan)
            replacement = written.copy_on_write.replacement(stored, self._removed_rows(plan, stored))
        except UnreadableFile:
            return False
        moved_files = self._merge_moved_files(target, written, replacement)
        new_files = [*written.rows, *moved_files]
        target.require_files(new_files)
        applied_version = self._record(applied_files, plan.recorded)
        versions = {**versions, self.applied.transaction: applied_version}
        commit_replacement(target, table, new_files, replacement, versions)
        target.delete_uncommitted([file for file in replacement.moved if file not in moved_files])
        return True

    @cached_property
    def _staged(self) -> pa.Table:
        """The planning columns of all staged events."""
        return self.stage.columns(self.files, self.events.planning_schema.names)

    @cached_property
    def _staged_keys(self) -> pa.Table:
        return self._staged.select(self.events.keys)

    @cached_property
    def _recorded_lookup(self) -> Lookup:
        stage = DeltaStage(self.applied.location, self.stage.layout, "applied", 0)
        return Lookup(self.spark, stage, self._staged_keys, self.applied.schema)

    @cached_property
    def _version_lookup(self) -> Lookup:
        return Lookup(self.spark, self.stage, self._staged_keys, self.events.version_schema)

    def _stored_files(self, table: DeltaTable) -> tuple[StoredFiles, StoredFiles]:
        """Return the data files of the table, and of the matching version of its applied-events table."""
        applied = self.applied.location
        version = self.applied.version_for(table)
        return StoredFiles(self.stage.location, table), StoredFiles(applied, applied.open(version))

    def _plan(self, stored: StoredFiles, applied_files: StoredFiles) -> MergePlan | None:
        """Return the merge plan; None if events omit values, so that deltalake has to merge them."""
        recorded = self._recorded_lookup.rows(applied_files)
        plan, unresolved = plan_events(
            self.events, self._staged, recorded, lambda: self._version_lookup.rows(stored)
        )
        require_stored_values(unresolved, self.events, self.stage.location.label)
        if self.events.unchanged is not None and with_missing_values(self._staged, plan.merged).num_rows:
            return None
        return plan

    def _write_files(self, target: DeltaStage, plan: MergePlan) -> WrittenFiles:
        """Have tasks write the rows of a plan, unless they already have."""
        for earlier in self._written:
            if _same_rows(earlier.plan, plan):
                return earlier
        rows = write_event_rows(self.spark, target, self.events, self.files, plan)
        written = WrittenFiles(plan, rows, CopyOnWrite(self.spark, target))
        self._written.append(written)
        return written

    def _removed_rows(self, plan: MergePlan, stored: StoredFiles) -> RemovedRows:
        """Return the stored rows that a plan replaces, or whose ``VALID_TO`` it changes."""
        if plan.ended_versions is None:
            return RemovedByGivenKey(self._staged_keys.filter(plan.merged))
        return removals_with_new_valid_to(self._version_lookup.rows_by_file(stored), plan.ended_versions)

    def _record(self, applied_files: StoredFiles, events: pa.Table) -> int:
        """Record events in a new file, replacing earlier events of their keys; return the new version."""
        version = applied_files.table.version()

        def record_in_tasks(table: DeltaTable) -> int | None:
            stored = (
                applied_files if table.version() == version else StoredFiles(self.applied.location, table)
            )
            stage = self.applied.stage(table)
            replacement = Replacement()
            try:
                if not self.events.keeps_history:
                    replaced = removals_with_keys(
                        self._recorded_lookup.rows_by_file(stored), events.select(self.events.keys)
                    )
                    replacement = CopyOnWrite(self.spark, stage).replacement(stored, replaced)
            except UnreadableFile:
                return None
            file = stage.write(iter(events.combine_chunks().to_batches()))
            return commit_replacement(stage, table, [] if file is None else [file], replacement, {})

        return self.applied.record(version, events, record_in_tasks)

    def _merge_moved_files(
        self, target: DeltaStage, written: WrittenFiles, replacement: Replacement
    ) -> list[DataFile]:
        """Return data files with the rows that are stored again because their ``VALID_TO`` changes."""
        files = replacement.moved
        key = frozenset(file.path for file in files)
        if key not in written.moved:
            written.moved[key] = merge_if_many(self.spark, target, files)
        return written.moved[key]


def _properties(table: DeltaTable) -> Mapping[str, str | None]:
    return table.metadata().configuration


def _same_rows(one: MergePlan, other: MergePlan) -> bool:
    """Whether tasks write the same rows for two plans."""
    pairs = (
        (one.merged, other.merged),
        (one.valid_to, other.valid_to),
        (one.ended_versions, other.ended_versions),
    )
    return all(a is b or (a is not None and b is not None and a.equals(b)) for a, b in pairs)
