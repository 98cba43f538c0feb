"""Driver side of change rows for a Delta table: the ``foreachBatch`` function that applies them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.types import StructType

from penstock.lake.parquet import align_to_schema
from penstock.lake.storage import DeltaLocation
from penstock.tables.changes import merge_plan
from penstock.tables.changes.events import (
    MISSING_COLUMNS,
    PRESENT,
    SEQUENCE,
    EventLayout,
    check_events,
    collapse,
    event_layout,
    refuse_history,
    require_stored_values,
)
from penstock.tables.changes.merge_plan import MergePlan
from penstock.tables.columns import VALID_FROM, VALID_TO
from penstock.tables.delta.applied_table import AppliedTable, rows_with_keys
from penstock.tables.delta.changes_commit import ChangesCommit
from penstock.tables.delta.data_files import REPORT_DDL, DataFile
from penstock.tables.delta.schema import DeltaLayout, match_table, require_partitioning, rows_layout
from penstock.tables.delta.stage import DeltaStage, DeltaStageTask, delete_abandoned, record_batch_reader
from penstock.tables.delta.transactions import (
    SOURCE,
    TARGET,
    AppTransaction,
    commit_properties,
    committing,
    merge_by_keys,
    source_columns,
)
from penstock.tables.delta.writer import DeltaWriter, PublishFunction, refuse_backticks, table_gone_error
from penstock.tables.names import quoted
from penstock.tables.unchanged_values import has_value

if TYPE_CHECKING:
    from deltalake import CommitProperties, DeltaTable


def changes_writer(
    location: DeltaLocation, events: EventLayout, guarantee: str, checkpoint_location: str, app_id: str | None
) -> ChangesWriter:
    """Create or check the table and its applied-events table; return the ``foreachBatch`` function."""
    table = location.find() or location.create(events.table_schema)
    if not events.keeps_history:
        refuse_history(
            (f.name for f in table.schema().fields),
            location.label,
            f"the Delta table {location.label}",
        )
    require_partitioning(location, table)
    layout = match_table(location, changes_layout(events), table)
    row_schema = pa.schema(list(layout.schema)[: len(events.query_columns)])
    events = replace(events, row_schema=row_schema, keys=layout.keys)
    applied = AppliedTable.for_table(location, table, events)
    with location.translating_errors():
        applied.prepare(table)
    applied.vacuum(applied.version_for(location.open()))
    delete_abandoned(location)
    staged_layout = DeltaLayout(events.staged_schema, events.keys)
    return ChangesWriter(
        location,
        staged_layout,
        "append",
        guarantee,
        checkpoint_location,
        app_id,
        events=events,
        applied=applied,
    )


def change_event_layout(
    schema: StructType, location: DeltaLocation, keys: Sequence[str], sequence_by: str, scd_type: int
) -> EventLayout:
    """Return the layout of change events; refuse change rows that Delta tables do not support."""
    table = f"the Delta table {location.label}"
    events = event_layout(schema, keys, sequence_by, rows_layout, history=scd_type == 2, table=table)
    refuse_backticks(events.row_schema.names)
    return events


def changes_layout(events: EventLayout) -> DeltaLayout:
    """Return the columns that the table must have."""
    return DeltaLayout(events.table_schema, events.keys)


@dataclass
class EventTask(DeltaStageTask):
    """Function for ``mapInArrow``, which stages collapsed events and returns a report of the staged file."""

    events: EventLayout = field(kw_only=True)

    def _check_rows(self, chunks: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        table = self.stage.location.label
        return super()._check_rows(check_events(chunk, self.events, table) for chunk in chunks)


@dataclass(frozen=True, kw_only=True)
class ChangesWriter(DeltaWriter):
    """``foreachBatch`` function that stages change events, records them, and merges them in one commit."""

    events: EventLayout
    applied: AppliedTable

    def _open(self) -> DeltaTable:
        table = super()._open()
        if not self.applied.belongs_to(table):
            raise table_gone_error(self.location)
        return table

    @property
    def _table_layout(self) -> DeltaLayout:
        return changes_layout(self.events)

    def _required_transactions(self, table: DeltaTable, transaction: AppTransaction | None) -> list[str]:
        required = super()._required_transactions(table, transaction)
        # An empty applied-events table matches any rows.
        return [*required, self.applied.transaction] if self.applied.version_for(table) else required

    def _staging_query(self, frame: DataFrame, stage: DeltaStage) -> DataFrame:
        return collapse(frame, self.events).mapInArrow(EventTask(stage, events=self.events), REPORT_DDL)

    def _indexed_columns(self, table: DeltaTable) -> None:
        """Return None, since tasks stage the events."""

    def _check_keys(self, spark: SparkSession, stage: DeltaStage, files: Sequence[DataFile]) -> None:
        """Do nothing: Spark kept one event per key, and the tasks checked the events."""

    def _publisher(
        self, stage: DeltaStage, files: Sequence[DataFile], spark: SparkSession | None
    ) -> PublishFunction:
        commit_in_tasks = (
            None if spark is None else ChangesCommit(spark, stage, files, self.events, self.applied)
        )

        def publish(table: DeltaTable, versions: Mapping[str, int]) -> None:
            with committing(self.location):
                if commit_in_tasks is None or not commit_in_tasks(table, versions):
                    self._merge_in_driver(table, stage, files, versions)

        return publish

    def _merge_in_driver(
        self, table: DeltaTable, stage: DeltaStage, files: Sequence[DataFile], versions: Mapping[str, int]
    ) -> None:
        # Use the applied events that match the loaded version of the table, whatever other processes write in
        # the meantime.
        applied_version = self.applied.version_for(table)
        staged = stage.columns(files, self.events.planning_schema.names)
        plan = self._plan(table, staged, applied_version)
        if plan.is_empty:
            return
        applied_version = self.applied.record(applied_version, plan.recorded)
        properties = commit_properties({**versions, self.applied.transaction: applied_version})
        version_before = table.version()
        self._merge(table, self._rows_to_merge(table, stage, files, plan), properties)
        if table.version() == version_before:
            # A merge that changes no row does not commit, but the applied events have changed.
            self.applied.set_version_in(table, applied_version, versions)

    def _plan(self, table: DeltaTable, staged: pa.Table, applied_version: int) -> MergePlan:
        staged_keys = staged.select(self.events.keys)
        recorded_events = self.applied.events(applied_version, staged_keys)
        plan, unresolved = merge_plan.plan_events(
            self.events, staged, recorded_events, lambda: self._read_versions(table, staged_keys)
        )
        require_stored_values(unresolved, self.events, self.location.label)
        if self.events.unchanged is not None and not self.events.keeps_history:
            self._require_stored_rows(table, merge_plan.with_missing_values(staged, plan.merged))
        return plan

    def _require_stored_rows(self, table: DeltaTable, incomplete: pa.Table) -> None:
        """Refuse events that omit values of rows that other writers have deleted."""
        if incomplete.num_rows:
            keys = list(self.events.keys)
            schema = pa.schema([self.events.table_schema.field(name) for name in keys])
            stored = rows_with_keys(self.location, table, incomplete.select(keys), schema)
            missing = merge_plan.without_stored_row(keys, incomplete, stored)
            require_stored_values(missing, self.events, self.location.label)

    def _read_versions(
        self, table: DeltaTable, keys: pa.Table, other_columns: Sequence[str] = ()
    ) -> pa.Table:
        """Read the stored row versions of some keys: the keys, the validity, and ``other_columns``."""
        names = [*self.events.keys, VALID_FROM, VALID_TO, *other_columns]
        schema = pa.schema([self.events.table_schema.field(name) for name in names])
        return rows_with_keys(self.location, table, keys, schema)

    def _merge(
        self, table: DeltaTable, rows: pa.RecordBatchReader, properties: CommitProperties | None
    ) -> None:
        events = self.events
        if events.keeps_history:
            merge = merge_by_keys(table, rows, [*events.keys, VALID_FROM], properties)
            columns = source_columns(events.table_schema.names)
            merge.when_matched_update(source_columns([VALID_TO])).when_not_matched_insert(columns).execute()
            return
        omittable = [] if events.unchanged is None else events.unchanged.omittable_columns
        names = events.row_schema.names
        is_upsert, is_delete = (f"{SOURCE}.{quoted(PRESENT)} = {present}" for present in (1, 0))
        merge = merge_by_keys(table, rows, events.keys, properties)
        merge.when_matched_delete(is_delete).when_matched_update(
            source_or_stored(names, omittable), is_upsert
        ).when_not_matched_insert(source_columns(names), is_upsert).execute()

    def _rows_to_merge(
        self, table: DeltaTable, stage: DeltaStage, files: Sequence[DataFile], plan: MergePlan
    ) -> pa.RecordBatchReader:
        """Stream the rows to merge: row versions with history, and staged events without."""
        if self.events.keeps_history:
            schema = self.events.table_schema
        else:
            event_columns = [
                name for name in self.events.planning_schema.names if name in (PRESENT, MISSING_COLUMNS)
            ]
            schema = pa.schema(
                [*self.events.row_schema, *map(self.events.staged_schema.field, event_columns)]
            )
        return record_batch_reader(schema, self._batches_to_merge(table, stage, files, plan, schema))

    def _batches_to_merge(
        self,
        table: DeltaTable,
        stage: DeltaStage,
        files: Sequence[DataFile],
        plan: MergePlan,
        schema: pa.Schema,
    ) -> Iterator[pa.RecordBatch]:
        if plan.ended_versions is not None:
            yield from (align_to_schema(batch, schema) for batch in plan.ended_versions.to_batches())
        offset = merged_rows = 0
        for batch in stage.batches(files, self.events.staged_schema):
            merged = batch.filter(plan.merged.slice(offset, batch.num_rows))
            offset += batch.num_rows
            if not merged.num_rows:
                continue
            rows = pa.Table.from_batches([merged])
            if plan.valid_to is not None:
                if self.events.unchanged is not None:
                    rows = merge_plan.fill_missing_values(
                        rows, self.events.keys, partial(self._read_versions, table)
                    )
                rows = rows.append_column(VALID_FROM, rows[SEQUENCE]).append_column(
                    VALID_TO, plan.valid_to.slice(merged_rows, merged.num_rows)
                )
                merged_rows += merged.num_rows
            yield from rows.select(schema.names).cast(schema).to_batches()


def source_or_stored(names: Sequence[str], omittable: Sequence[int]) -> dict[str, str]:
    """Return a merge's assignments: the source's values, or the stored values where the source omits them."""
    assignments = source_columns(names)
    for number in omittable:
        name = quoted(names[number])
        in_source = has_value(f"{SOURCE}.{quoted(MISSING_COLUMNS)}", number)
        assignments[name] = f"case when {in_source} then {SOURCE}.{name} else {TARGET}.{name} end"
    return assignments
