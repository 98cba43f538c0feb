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
from penstock.lake.storage import DeltaPlace
from penstock.tables.changes import merge_plan
from penstock.tables.changes.events import (
    PRESENT,
    SEQUENCE,
    UNKNOWN,
    EventLayout,
    checked_events,
    collapse,
    event_layout,
    refuse_history,
    require_stored,
)
from penstock.tables.changes.merge_plan import MergePlan
from penstock.tables.columns import VALID_FROM, VALID_TO
from penstock.tables.delta.applied_table import AppliedTable, rows_with_keys
from penstock.tables.delta.changes_commit import ChangesCommit
from penstock.tables.delta.data_files import REPORT, DataFile
from penstock.tables.delta.schema import DeltaLayout, match_table, require_partitioning, rows_layout
from penstock.tables.delta.stage import DeltaStage, DeltaStageTask, delete_abandoned, to_reader
from penstock.tables.delta.transactions import (
    SOURCE,
    TARGET,
    AppTransaction,
    commit_properties,
    committing,
    merge_by_keys,
    source_columns,
)
from penstock.tables.delta.writer import DeltaWriter, Publish, refuse_backticks
from penstock.tables.names import quoted
from penstock.tables.unchanged_values import has_value

if TYPE_CHECKING:
    from deltalake import CommitProperties, DeltaTable


def changes_writer(
    place: DeltaPlace, events: EventLayout, guarantee: str, location: str, app_id: str | None
) -> ChangesWriter:
    """Create the table and its applied-events table or check existing ones, and return the ``foreachBatch``
    function.
    """
    table = place.find()
    if table is None:
        table = place.create(events.table)
    elif not events.history:
        refuse_history((f.name for f in table.schema().fields), place.shown, f"the Delta table {place.shown}")
    require_partitioning(place, table)
    layout = match_table(place, changes_layout(events), table)
    named = pa.schema(list(layout.schema)[: len(events.columns)])
    events = replace(events, rows=named, keys=layout.keys)
    applied = AppliedTable.of_table(place, table, events)
    with place.translating_errors():
        applied.prepare(table)
    applied.vacuum(applied.named_by(place.open()))
    delete_abandoned(place)
    staged = DeltaLayout(events.staged, events.keys)
    return ChangesWriter(place, staged, "append", guarantee, location, app_id, events=events, applied=applied)


def accepted_changes(
    schema: StructType, place: DeltaPlace, keys: Sequence[str], sequence_by: str, scd_type: int
) -> EventLayout:
    """Return the layout of change events that a Delta table can take."""
    table = f"the Delta table {place.shown}"
    events = event_layout(schema, keys, sequence_by, rows_layout, history=scd_type == 2, table=table)
    refuse_backticks(events.rows.names)
    return events


def changes_layout(events: EventLayout) -> DeltaLayout:
    """Return the columns that the table must have."""
    return DeltaLayout(events.table, events.keys)


@dataclass
class EventTask(DeltaStageTask):
    """The function of ``mapInArrow``: takes collapsed events and returns a report of what the task staged."""

    events: EventLayout = field(kw_only=True)

    def _checked(self, chunks: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        shown = self.stage.place.shown
        return super()._checked(checked_events(chunk, self.events, shown) for chunk in chunks)


@dataclass(frozen=True, kw_only=True)
class ChangesWriter(DeltaWriter):
    """The ``foreachBatch`` function: stages change events, records them, and merges them in one commit."""

    events: EventLayout
    applied: AppliedTable

    def _named(self, table: DeltaTable, transaction: AppTransaction | None) -> list[str]:
        named = super()._named(table, transaction)
        # An empty record fits any rows.
        return [*named, self.applied.transaction] if self.applied.named_by(table) else named

    def _staging(self, frame: DataFrame, stage: DeltaStage) -> DataFrame:
        return collapse(frame, self.events).mapInArrow(EventTask(stage, events=self.events), REPORT)

    def _indexed(self, table: DeltaTable) -> None:
        """Have tasks stage the events."""

    def _check(self, spark: SparkSession, stage: DeltaStage, files: Sequence[DataFile]) -> None:
        """Do nothing: Spark has kept one event per key, and the tasks have checked them."""

    def _publisher(self, stage: DeltaStage, files: Sequence[DataFile], spark: SparkSession | None) -> Publish:
        by_tasks = None if spark is None else ChangesCommit(spark, stage, files, self.events, self.applied)

        def publish(table: DeltaTable, versions: Mapping[str, int]) -> None:
            with committing(self.place):
                if by_tasks is None or not by_tasks(table, versions):
                    self._publish(table, stage, files, versions)

        return publish

    def _publish(
        self, table: DeltaTable, stage: DeltaStage, files: Sequence[DataFile], versions: Mapping[str, int]
    ) -> None:
        # Use the applied events that belong to the table version merged into, whatever other processes write
        # in the meantime.
        recorded = self.applied.named_by(table)
        staged = stage.columns(files, self.events.planning.names)
        plan = self._plan(table, staged, recorded)
        if plan.is_empty:
            return
        recorded = self.applied.record(recorded, plan.recorded)
        properties = commit_properties({**versions, self.applied.transaction: recorded})
        before = table.version()
        self._merge(table, self._rows(table, stage, files, plan), properties)
        if table.version() == before:
            # A merge that changes no row does not commit, but the recorded events have changed.
            self.applied.name_in(table, recorded, versions)

    def _plan(self, table: DeltaTable, staged: pa.Table, recorded: int) -> MergePlan:
        touched = staged.select(self.events.keys)
        known = self.applied.events(recorded, touched)
        plan, refused = merge_plan.plan_events(
            self.events, staged, known, lambda: self._stored(table, touched)
        )
        require_stored(refused, self.events, self.place.shown)
        if self.events.unchanged is not None and not self.events.history:
            self._require_rows(table, merge_plan.incomplete(staged, plan.taken))
        return plan

    def _require_rows(self, table: DeltaTable, left_out: pa.Table) -> None:
        """Refuse events that leave out values of rows that other writers have deleted."""
        if left_out.num_rows:
            keys = list(self.events.keys)
            schema = pa.schema([self.events.table.field(name) for name in keys])
            stored = rows_with_keys(self.place, table, left_out.select(keys), schema)
            missing = merge_plan.without_row(keys, left_out, stored)
            require_stored(missing, self.events, self.place.shown)

    def _stored(self, table: DeltaTable, touched: pa.Table, more: Sequence[str] = ()) -> pa.Table:
        """Read the stored versions of the ``touched`` keys: keys, validity, and ``more`` columns."""
        names = [*self.events.keys, VALID_FROM, VALID_TO, *more]
        schema = pa.schema([self.events.table.field(name) for name in names])
        return rows_with_keys(self.place, table, touched, schema)

    def _merge(
        self, table: DeltaTable, rows: pa.RecordBatchReader, properties: CommitProperties | None
    ) -> None:
        events = self.events
        if events.history:
            merge = merge_by_keys(table, rows, [*events.keys, VALID_FROM], properties)
            columns = source_columns(events.table.names)
            merge.when_matched_update(source_columns([VALID_TO])).when_not_matched_insert(columns).execute()
            return
        numbers = [] if events.unchanged is None else events.unchanged.numbers
        names = events.rows.names
        sets, removes = (f"{SOURCE}.{quoted(PRESENT)} = {present}" for present in (1, 0))
        merge = merge_by_keys(table, rows, events.keys, properties)
        merge.when_matched_delete(removes).when_matched_update(
            source_or_stored(names, numbers), sets
        ).when_not_matched_insert(source_columns(names), sets).execute()

    def _rows(
        self, table: DeltaTable, stage: DeltaStage, files: Sequence[DataFile], plan: MergePlan
    ) -> pa.RecordBatchReader:
        """Stream the rows to merge: rows of the table, or staged events if there is no history."""
        if self.events.history:
            schema = self.events.table
        else:
            more = [name for name in self.events.planning.names if name in (PRESENT, UNKNOWN)]
            schema = pa.schema([*self.events.rows, *map(self.events.staged.field, more)])
        return to_reader(schema, self._parts(table, stage, files, plan, schema))

    def _parts(
        self,
        table: DeltaTable,
        stage: DeltaStage,
        files: Sequence[DataFile],
        plan: MergePlan,
        schema: pa.Schema,
    ) -> Iterator[pa.RecordBatch]:
        if plan.changed is not None:
            yield from (align_to_schema(batch, schema) for batch in plan.changed.to_batches())
        at = ended = 0
        for batch in stage.batches(files, self.events.staged):
            taken = batch.filter(plan.taken.slice(at, batch.num_rows))
            at += batch.num_rows
            if not taken.num_rows:
                continue
            rows = pa.Table.from_batches([taken])
            if plan.ends is not None:
                if self.events.unchanged is not None:
                    rows = merge_plan.fill(rows, self.events.keys, partial(self._stored, table))
                rows = rows.append_column(VALID_FROM, rows[SEQUENCE]).append_column(
                    VALID_TO, plan.ends.slice(ended, taken.num_rows)
                )
                ended += taken.num_rows
            yield from rows.select(schema.names).cast(schema).to_batches()


def source_or_stored(names: Sequence[str], numbers: Sequence[int]) -> dict[str, str]:
    """Return a merge's assignments: the source's values, or the stored ones where the source has none."""
    columns = source_columns(names)
    for number in numbers:
        name = quoted(names[number])
        in_source = has_value(f"{SOURCE}.{quoted(UNKNOWN)}", number)
        columns[name] = f"case when {in_source} then {SOURCE}.{name} else {TARGET}.{name} end"
    return columns
