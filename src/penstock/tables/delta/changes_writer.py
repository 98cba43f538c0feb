"""Driver side of change rows for a Delta table: the ``foreachBatch`` function that applies them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.types import StructType

from penstock.arguments import in_quotes
from penstock.errors import SchemaMismatchError
from penstock.lake.parquet import completed
from penstock.lake.storage import DeltaPlace
from penstock.tables.columns import VALID_FROM, VALID_TO
from penstock.tables.delta import merge_plan
from penstock.tables.delta.applied_table import AppliedTable, rows_with_keys
from penstock.tables.delta.change_events import (
    PRESENT,
    SEQUENCE,
    UNKNOWN,
    EventLayout,
    EventTask,
    collapse,
    event_layout,
)
from penstock.tables.delta.data_files import REPORT, DataFile
from penstock.tables.delta.merge_plan import MergePlan
from penstock.tables.delta.schema import DeltaLayout, match_table
from penstock.tables.delta.stage import DeltaStage, delete_abandoned, to_reader
from penstock.tables.delta.transactions import (
    SOURCE,
    commit_properties,
    committing,
    merge_by_keys,
    source_columns,
)
from penstock.tables.delta.writer import DeltaWriter, Publish, refuse_backticks
from penstock.tables.names import quoted
from penstock.tables.row_checks import shown_key
from penstock.tables.unchanged_values import column_numbers

if TYPE_CHECKING:
    from deltalake import CommitProperties, DeltaTable


def changes_writer(
    frame: DataFrame,
    place: DeltaPlace,
    keys: Sequence[str],
    sequence_by: str,
    scd_type: int,
    guarantee: str,
    location: str,
    app_id: str | None,
) -> ChangesWriter:
    """Create or check the table and its applied-events table, and return the ``foreachBatch`` function."""
    events = accepted_changes(frame.schema, place, keys, sequence_by, scd_type)
    table = place.find()
    if table is None:
        table = place.create(events.table.schema)
    elif not events.history:
        _refuse_history(place, table)
    layout = match_table(place, events.table, table)
    named = pa.schema(list(layout.schema)[: len(events.columns)])
    events = replace(events, rows=DeltaLayout(named, layout.keys))
    applied = AppliedTable.of_table(place, table, events)
    with place.translating_errors():
        applied.prepare(table)
    applied.vacuum(applied.named_by(place.open()))
    delete_abandoned(place)
    return ChangesWriter(
        place, events.staged, "append", guarantee, location, app_id, events=events, applied=applied
    )


def accepted_changes(
    schema: StructType, place: DeltaPlace, keys: Sequence[str], sequence_by: str, scd_type: int
) -> EventLayout:
    """Return the layout of change events that a Delta table can take."""
    table = f"the Delta table {place.shown}"
    events = event_layout(schema, keys, sequence_by, history=scd_type == 2, table=table)
    refuse_backticks(events.rows)
    return events


def _refuse_history(place: DeltaPlace, table: DeltaTable) -> None:
    columns = [field.name for field in table.schema().fields if field.name in (VALID_FROM, VALID_TO)]
    if columns:
        raise SchemaMismatchError(
            f"the Delta table {place.shown} keeps history, with a column {in_quotes(columns[0])}, and "
            "scd_type=1 would not: set scd_type=2, or use another table",
            condition="SCHEMA_MISMATCH.TABLE_DIFFERS",
            table=place.shown,
        )


@dataclass(frozen=True, kw_only=True)
class ChangesWriter(DeltaWriter):
    """The ``foreachBatch`` function: stages change events, records them, and merges them in one commit."""

    events: EventLayout
    applied: AppliedTable

    def _staging(self, frame: DataFrame, stage: DeltaStage) -> DataFrame:
        return collapse(frame, self.events).mapInArrow(EventTask(stage, events=self.events), REPORT)

    def _indexed(self, table: DeltaTable) -> None:
        """Have tasks stage the events."""

    def _check(self, spark: SparkSession, stage: DeltaStage, files: Sequence[DataFile]) -> None:
        """Do nothing: Spark has left one event of each key, and the tasks have checked them."""

    def _publisher(self, stage: DeltaStage, files: Sequence[DataFile], spark: SparkSession | None) -> Publish:
        def publish(table: DeltaTable, versions: Mapping[str, int]) -> None:
            with committing(self.place):
                self._publish(table, stage, files, versions)

        return publish

    def _publish(
        self, table: DeltaTable, stage: DeltaStage, files: Sequence[DataFile], versions: Mapping[str, int]
    ) -> None:
        # The applied events that count are those of the table version that is merged into, whoever writes in
        # the meantime.
        recorded = self.applied.named_by(table)
        staged = stage.columns(files, self._planning_columns)
        plan = self._plan(table, staged, recorded)
        if plan.is_empty:
            return
        recorded = self.applied.record(recorded, plan.recorded)
        properties = commit_properties({**versions, self.applied.transaction: recorded})
        before = table.version()
        self._merge(table, self._rows(table, stage, files, plan), properties)
        if table.version() == before:
            # A merge that changes no row makes no commit, but the recorded events have changed.
            self.applied.name_in(table, recorded, versions)

    @property
    def _planning_columns(self) -> list[str]:
        """The columns of staged events from which the merge is planned."""
        return [*self.events.keys, SEQUENCE, PRESENT, *([] if self.events.unchanged is None else [UNKNOWN])]

    def _plan(self, table: DeltaTable, staged: pa.Table, recorded: int) -> MergePlan:
        keys = self.events.keys
        touched = staged.select(keys)
        known = self.applied.events(recorded, touched)
        placed = staged.select([*keys, SEQUENCE, PRESENT])
        if self.events.history:
            stored = self._stored(table, touched)
            plan, unmatched = merge_plan.plan_history(keys, placed, known, stored), merge_plan.without_version
        else:
            stored = known.filter(pc.equal(known[PRESENT], 1))
            plan, unmatched = merge_plan.plan_latest(keys, placed, known), merge_plan.without_row
        if self.events.unchanged is not None:
            self._require_stored(unmatched(keys, merge_plan.incomplete(staged, plan.taken), stored))
        return plan

    def _stored(self, table: DeltaTable, touched: pa.Table, more: Sequence[str] = ()) -> pa.Table:
        """Read the stored versions of some keys: the keys, when they are valid, and ``more`` columns."""
        names = [*self.events.keys, VALID_FROM, VALID_TO, *more]
        schema = pa.schema([self.events.table.schema.field(name) for name in names])
        return rows_with_keys(self.place, table, touched, schema)

    def _require_stored(self, refused: pa.Table) -> None:
        """Refuse events that leave out values which no stored row has, before anything is written."""
        if refused.num_rows and self.events.unchanged is not None:
            name = self.events.rows.schema.names[column_numbers(refused[UNKNOWN][:1].to_pylist())[0]]
            key = shown_key({key: refused[key][0].as_py() for key in self.events.keys})
            raise self.events.unchanged.not_stored(name, self.place.shown, key)

    def _merge(
        self, table: DeltaTable, rows: pa.RecordBatchReader, properties: CommitProperties | None
    ) -> None:
        events = self.events
        if events.history:
            merge = merge_by_keys(table, rows, [*events.keys, VALID_FROM], properties)
            columns = source_columns(events.table.schema.names)
            merge.when_matched_update(source_columns([VALID_TO])).when_not_matched_insert(columns).execute()
            return
        numbers = [] if events.unchanged is None else events.unchanged.numbers
        names = events.rows.schema.names
        sets, removes = (f"{SOURCE}.{quoted(PRESENT)} = {present}" for present in (1, 0))
        merge = merge_by_keys(table, rows, events.keys, properties)
        merge.when_matched_delete(removes).when_matched_update(
            merge_plan.source_or_stored(names, numbers), sets
        ).when_not_matched_insert(source_columns(names), sets).execute()

    def _rows(
        self, table: DeltaTable, stage: DeltaStage, files: Sequence[DataFile], plan: MergePlan
    ) -> pa.RecordBatchReader:
        """Stream the rows to merge: those of the table, or without history staged events."""
        if self.events.history:
            schema = self.events.table.schema
        else:
            more = [name for name in self._planning_columns if name in (PRESENT, UNKNOWN)]
            schema = pa.schema([*self.events.rows.schema, *map(self.events.staged.schema.field, more)])
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
            yield from (completed(batch, schema) for batch in plan.changed.to_batches())
        at = ended = 0
        for batch in stage.batches(files, self.events.staged.schema):
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
