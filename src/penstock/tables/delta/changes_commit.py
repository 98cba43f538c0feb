"""Commit of change events to a Delta table by tasks: the driver plans from the keys, and tasks look up the
stored rows of these keys, write the new rows, and remove the old ones from their files.

Each attempt makes a new plan for the table as loaded. Files that tasks wrote for an earlier attempt are
reused if the plan is the same.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING

import pyarrow as pa
from pyspark.sql import SparkSession

from penstock.tables.changes.events import EventLayout, require_stored
from penstock.tables.changes.merge_plan import MergePlan, incomplete, plan_events
from penstock.tables.delta.applied_table import AppliedTable
from penstock.tables.delta.copy_on_write import CopyOnWrite, Replacement
from penstock.tables.delta.data_files import DataFile, UnreadableFile
from penstock.tables.delta.direct_writes import obstacle
from penstock.tables.delta.event_rows import written_rows
from penstock.tables.delta.file_commit import commit_replacement
from penstock.tables.delta.found_rows import rows_with_keys, rows_with_new_ends
from penstock.tables.delta.leaving_rows import GivenKeys, LeavingRows
from penstock.tables.delta.lookups import Lookup
from penstock.tables.delta.schema import DeltaLayout
from penstock.tables.delta.small_files import copied
from penstock.tables.delta.stage import DeltaStage
from penstock.tables.delta.statistics import indexed_columns
from penstock.tables.delta.stored_files import StoredFiles

if TYPE_CHECKING:
    from deltalake import DeltaTable


@dataclass
class Written:
    """The files that tasks have written for a plan."""

    plan: MergePlan
    rows: list[DataFile]
    copies: CopyOnWrite
    moved: dict[frozenset[str], list[DataFile]] = field(default_factory=dict)
    """Files with the rewritten rows, by the set of files with moved rows."""


@dataclass
class ChangesCommit:
    """A function that commits staged events, used for all attempts."""

    spark: SparkSession
    stage: DeltaStage
    files: Sequence[DataFile]
    events: EventLayout
    applied: AppliedTable
    _written: list[Written] = field(default_factory=list)

    def __call__(self, table: DeltaTable, versions: Mapping[str, int]) -> bool:
        """Commit to a loaded table, with versions of app transactions.

        Return False, without a commit, if deltalake has to do it.
        """
        layout = DeltaLayout(self.events.table, self.events.keys)
        if obstacle(table, "update", layout) is not None:
            return False
        target = replace(
            self.stage, layout=layout, indexed=indexed_columns(layout.schema, _properties(table))
        )
        try:
            stored, record = self._stored(table)
            plan = self._plan(stored, record)
            if plan is None:
                return False
            if plan.is_empty:
                return True
            written = self._write(target, plan)
            replacement = written.copies.replacement(stored, self._leaving(plan, stored))
        except UnreadableFile:
            return False
        moved = self._moved(target, written, replacement)
        new = [*written.rows, *moved]
        target.require_files(new)
        recorded = self._record(record, plan.recorded)
        versions = {**versions, self.applied.transaction: recorded}
        commit_replacement(target, table, new, replacement, versions)
        target.delete([file for file in replacement.moved if file not in moved])
        return True

    @cached_property
    def _staged(self) -> pa.Table:
        """The columns of all events from which their merge is planned."""
        return self.stage.columns(self.files, self.events.planning.names)

    @cached_property
    def _touched(self) -> pa.Table:
        return self._staged.select(self.events.keys)

    @cached_property
    def _recorded(self) -> Lookup:
        stage = DeltaStage(self.applied.place, self.stage.layout, "applied", 0)
        return Lookup(self.spark, stage, self._touched, self.applied.schema)

    @cached_property
    def _versions(self) -> Lookup:
        return Lookup(self.spark, self.stage, self._touched, self.events.versions)

    def _stored(self, table: DeltaTable) -> tuple[StoredFiles, StoredFiles]:
        """Return the data files of the table, and of the applied-events table in the version it names."""
        record = self.applied.place
        version = self.applied.named_by(table)
        return StoredFiles(self.stage.place, table), StoredFiles(record, record.open(version))

    def _plan(self, stored: StoredFiles, record: StoredFiles) -> MergePlan | None:
        """Return the merge plan; None if events leave values out, so that deltalake has to merge them."""
        known = self._recorded.rows(record)
        plan, refused = plan_events(self.events, self._staged, known, lambda: self._versions.rows(stored))
        require_stored(refused, self.events, self.stage.place.shown)
        if self.events.unchanged is not None and incomplete(self._staged, plan.taken).num_rows:
            return None
        return plan

    def _write(self, target: DeltaStage, plan: MergePlan) -> Written:
        """Have tasks write the rows of a plan, unless they already have."""
        for each in self._written:
            if _same(each.plan, plan):
                return each
        rows = written_rows(self.spark, target, self.events, self.files, plan)
        written = Written(plan, rows, CopyOnWrite(self.spark, target))
        self._written.append(written)
        return written

    def _leaving(self, plan: MergePlan, stored: StoredFiles) -> LeavingRows:
        """Return the stored rows that a plan replaces, or whose end of validity it changes."""
        if plan.changed is None:
            return GivenKeys(self._touched.filter(plan.taken))
        return rows_with_new_ends(self._versions.found(stored), plan.changed)

    def _record(self, record: StoredFiles, events: pa.Table) -> int:
        """Record events in a file, replacing earlier events of their keys; return the new version."""
        version = record.table.version()

        def by_tasks(table: DeltaTable) -> int | None:
            stored = record if table.version() == version else StoredFiles(self.applied.place, table)
            stage = self.applied.stage(table)
            replacement = Replacement()
            try:
                if not self.events.history:
                    leaving = rows_with_keys(self._recorded.found(stored), events.select(self.events.keys))
                    replacement = CopyOnWrite(self.spark, stage).replacement(stored, leaving)
            except UnreadableFile:
                return None
            file = stage.write(iter(events.combine_chunks().to_batches()))
            return commit_replacement(stage, table, [] if file is None else [file], replacement, {})

        return self.applied.record(version, events, by_tasks)

    def _moved(self, target: DeltaStage, written: Written, replacement: Replacement) -> list[DataFile]:
        """Return data files with the rows that are moved because their end of validity changes."""
        files = replacement.moved
        key = frozenset(file.path for file in files)
        if key not in written.moved:
            written.moved[key] = copied(self.spark, target, files)
        return written.moved[key]


def _properties(table: DeltaTable) -> Mapping[str, str | None]:
    return table.metadata().configuration


def _same(one: MergePlan, other: MergePlan) -> bool:
    """Whether tasks write the same rows for two plans."""
    pairs = ((one.taken, other.taken), (one.ends, other.ends), (one.changed, other.changed))
    return all(a is b or (a is not None and b is not None and a.equals(b)) for a, b in pairs)
