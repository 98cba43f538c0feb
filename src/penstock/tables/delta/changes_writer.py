"""Driver side of change rows for a Delta table: the ``foreachBatch`` function that applies them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import DataFrame
from pyspark.sql.types import StructType

from penstock.arguments import in_quotes
from penstock.errors import SchemaMismatchError
from penstock.lake.storage import DeltaPlace
from penstock.tables.columns import VALID_FROM, VALID_TO
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
from penstock.tables.delta.merge_plan import (
    MergePlan,
    fill,
    incomplete,
    plan_history,
    plan_latest,
    source_or_stored,
    without_row,
    without_version,
)
from penstock.tables.delta.schema import DeltaLayout, match_table
from penstock.tables.delta.stage import REPORT, DeltaStage, delete_abandoned, to_reader
from penstock.tables.delta.transactions import (
    SOURCE,
    AppTransaction,
    commit_properties,
    merge_by_keys,
    source_columns,
)
from penstock.tables.delta.writer import (
    DeltaWriter,
    create_table,
    refuse_backticks,
    shown_key,
    with_columns,
)
from penstock.tables.names import quoted
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
        create_table(place, events.table)
        table = place.open()
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

    def _check(self, stage: DeltaStage, files: Sequence[str]) -> None:
        """Do nothing: Spark has left one event of each key, and the tasks have checked them."""

    def _publish(
        self, table: DeltaTable, stage: DeltaStage, files: Sequence[str], transaction: AppTransaction | None
    ) -> None:
        # The applied events that count are those of the table version that is merged into, whoever writes in
        # the meantime.
        recorded = self.applied.named_by(table)
        staged = stage.columns(files, self._planning_columns)
        plan = self._plan(table, staged, recorded)
        if plan.is_empty:
            return
        recorded = self.applied.record(recorded, plan.recorded)
        versions = {} if transaction is None else transaction.versions
        properties = commit_properties({**versions, self.applied.transaction: recorded})
        before = table.version()
        rows = self._rows(table, stage, files, plan)
        if self.events.history:
            self._merge_history(table, rows, properties)
        else:
            self._merge_latest(table, rows, properties)
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
        if not self.events.history:
            plan = plan_latest(keys, placed, known)
            existing = known.filter(pc.equal(known[PRESENT], 1))
            self._require_stored(staged, plan, lambda events: without_row(keys, events, existing))
            return plan
        fields = [self.events.table.schema.field(name) for name in (*keys, VALID_FROM, VALID_TO)]
        stored = rows_with_keys(self.place, table, touched, pa.schema(fields))
        plan = plan_history(keys, placed, known, stored)
        self._require_stored(staged, plan, lambda events: without_version(keys, events, stored))
        return plan

    def _require_stored(
        self, staged: pa.Table, plan: MergePlan, unmatched: Callable[[pa.Table], pa.Table]
    ) -> None:
        """Refuse events that leave out values which no stored row has, before anything is written."""
        if self.events.unchanged is None:
            return
        refused = unmatched(incomplete(staged, plan.taken))
        if refused.num_rows:
            name = self.events.rows.schema.names[column_numbers(refused[UNKNOWN][:1].to_pylist())[0]]
            key = shown_key({key: refused[key][0].as_py() for key in self.events.keys})
            raise self.events.unchanged.not_stored(name, self.place.shown, key)

    def _merge_latest(
        self, table: DeltaTable, rows: pa.RecordBatchReader, properties: CommitProperties | None
    ) -> None:
        numbers = [] if self.events.unchanged is None else self.events.unchanged.numbers
        names = self.events.rows.schema.names
        sets, removes = (f"{SOURCE}.{quoted(PRESENT)} = {present}" for present in (1, 0))
        merge = merge_by_keys(table, rows, self.events.keys, properties)
        merge.when_matched_delete(removes).when_matched_update(
            source_or_stored(names, numbers), sets
        ).when_not_matched_insert(source_columns(names), sets).execute()

    def _merge_history(
        self, table: DeltaTable, rows: pa.RecordBatchReader, properties: CommitProperties | None
    ) -> None:
        merge = merge_by_keys(table, rows, [*self.events.keys, VALID_FROM], properties)
        columns = source_columns(self.events.table.schema.names)
        merge.when_matched_update(source_columns([VALID_TO])).when_not_matched_insert(columns).execute()

    def _rows(
        self, table: DeltaTable, stage: DeltaStage, files: Sequence[str], plan: MergePlan
    ) -> pa.RecordBatchReader:
        """Stream the rows to merge: those of the table, or without history staged events."""
        if self.events.history:
            schema = self.events.table.schema
        else:
            more = [name for name in self._planning_columns if name in (PRESENT, UNKNOWN)]
            schema = pa.schema([*self.events.rows.schema, *map(self.events.staged.schema.field, more)])
        return to_reader(schema, self._parts(table, stage, files, plan, schema))

    def _parts(
        self, table: DeltaTable, stage: DeltaStage, files: Sequence[str], plan: MergePlan, schema: pa.Schema
    ) -> Iterator[pa.RecordBatch]:
        if plan.changed is not None:
            yield from (with_columns(batch, schema) for batch in plan.changed.to_batches())
        at = ended = 0
        for batch in stage.batches(files, self.events.staged.schema):
            taken = batch.filter(plan.taken.slice(at, batch.num_rows))
            at += batch.num_rows
            if not taken.num_rows:
                continue
            rows = pa.Table.from_batches([taken])
            if plan.ends is not None:
                rows = self._filled(table, rows)
                rows = rows.append_column(VALID_FROM, rows[SEQUENCE]).append_column(
                    VALID_TO, plan.ends.slice(ended, taken.num_rows)
                )
                ended += taken.num_rows
            yield from rows.select(schema.names).cast(schema).to_batches()

    def _filled(self, table: DeltaTable, rows: pa.Table) -> pa.Table:
        if self.events.unchanged is None:
            return rows

        def read(touched: pa.Table, names: list[str]) -> pa.Table:
            fields = [
                self.events.table.schema.field(name)
                for name in (*self.events.keys, VALID_FROM, VALID_TO, *names)
            ]
            return rows_with_keys(self.place, table, touched, pa.schema(fields))

        return fill(rows, self.events.keys, read)
