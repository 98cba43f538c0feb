"""Change rows applied to a Delta table: what a streaming query calls with each micro-batch of them, on the driver."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
from pyspark.sql import DataFrame
from pyspark.sql.types import StructType

from penstock.errors import SchemaMismatch
from penstock.names import in_quotes
from penstock.tables.columns import VALID_FROM, VALID_TO
from penstock.tables.delta_applied import Applied, rows_of
from penstock.tables.delta_events import (
    PRESENT,
    SEQUENCE,
    Events,
    EventTask,
    collapsed,
    events_of,
)
from penstock.tables.delta_merging import SOURCE, assigned, merging
from penstock.tables.delta_outcome import Outcome, history, latest
from penstock.tables.delta_place import DeltaPlace
from penstock.tables.delta_schema import DeltaLayout, fitting
from penstock.tables.delta_stage import REPORT, DeltaStage, streamed, sweep
from penstock.tables.delta_transactions import AppTransaction, properties
from penstock.tables.delta_writer import DeltaWriter, create, refuse_backticks
from penstock.tables.names import quoted


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
    """See to the table and what is remembered beside it, both made where there are none, and make what the query calls.

    Raises
    ------
    SchemaMismatch, UnsupportedType, InvalidInput
        When the table cannot take the changes.
    StoreUnavailable, MissingDependency
    """
    events = accepted_changes(frame.schema, place, keys, sequence_by, scd_type)
    table = place.find()
    if table is None:
        create(place, events.table)
        table = place.open()
    elif not events.history:
        _refuse_history(place, table)
    layout = fitting(place, events.table, table)
    named = pa.schema(list(layout.schema)[: len(events.columns)])
    events = Events(
        DeltaLayout(named, layout.keys), events.columns, events.sequence, sequence_by, events.history
    )
    applied = Applied.beside(place, table, events)
    with place.plainly():
        applied.prepare(table)
    applied.tidy(applied.in_force(place.open()))
    sweep(place)
    return ChangesWriter(
        place, events.staged, "append", guarantee, location, app_id, events=events, applied=applied
    )


def accepted_changes(
    schema: StructType, place: DeltaPlace, keys: Sequence[str], sequence_by: str, scd_type: int
) -> Events:
    """The events that rows stand for, which a Delta table can take at all.

    Raises
    ------
    UnsupportedType, InvalidInput
    """
    shown = f"the Delta table {place.shown}"
    events = events_of(schema, keys, sequence_by, history=scd_type == 2, table=shown)
    refuse_backticks(events.rows)
    return events


def _refuse_history(place: DeltaPlace, table: Any) -> None:
    there = [field.name for field in table.schema().fields if field.name in (VALID_FROM, VALID_TO)]
    if there:
        raise SchemaMismatch(
            f"the Delta table {place.shown} keeps history, with a column {in_quotes(there[0])}, and scd_type=1 would keep none: give "
            "scd_type=2, or another table",
            table=place.shown,
        )


@dataclass(frozen=True, kw_only=True)
class ChangesWriter(DeltaWriter):
    """For ``foreachBatch``: the tasks stage events; then they are remembered, and the table takes them in one commit."""

    events: Events
    applied: Applied

    def _staging(self, frame: DataFrame, stage: DeltaStage) -> DataFrame:
        return collapsed(frame, self.events).mapInArrow(EventTask(stage, events=self.events), REPORT)

    def _check(self, stage: DeltaStage, files: Sequence[str]) -> None:
        """Nothing is left to refuse: Spark has left one event of each key, and the tasks have looked at them."""

    def _publish(
        self, table: Any, stage: DeltaStage, files: Sequence[str], transaction: AppTransaction | None
    ) -> None:
        # What is remembered belongs to the version of the table that is merged into, whoever writes in the meantime.
        remembered = self.applied.in_force(table)
        staged = stage.columns(files, [*self.events.keys, SEQUENCE, PRESENT])
        outcome = self._outcome(table, staged, remembered)
        if outcome.is_nothing:
            return
        remembered = self.applied.remember(remembered, outcome.remembered)
        versions = {} if transaction is None else transaction.versions
        carried = properties({**versions, self.applied.transaction: remembered})
        before = table.version()
        if self.events.history:
            self._merge_history(table, self._rows(stage, files, outcome), carried)
        else:
            self._merge_latest(table, self._rows(stage, files, outcome), carried)
        if table.version() == before:
            # A merge that changes no row is no commit, and what is remembered has changed.
            self.applied.name(table, remembered, versions)

    def _outcome(self, table: Any, staged: pa.Table, remembered: int) -> Outcome:
        keys = self.events.keys
        touched = staged.select(keys)
        known = self.applied.events(remembered, touched)
        if not self.events.history:
            return latest(keys, staged, known)
        fields = [self.events.table.schema.field(name) for name in (*keys, VALID_FROM, VALID_TO)]
        stored = rows_of(self.place, table, touched, pa.schema(fields))
        return history(keys, staged, known, stored)

    def _merge_latest(self, table: Any, rows: pa.RecordBatchReader, carried: Any) -> None:
        columns = assigned(self.events.rows.schema.names)
        there, gone = (f"{SOURCE}.{quoted(PRESENT)} = {present}" for present in (1, 0))
        merge = merging(table, rows, self.events.keys, carried)
        merge.when_matched_delete(gone).when_matched_update(columns, there).when_not_matched_insert(
            columns, there
        ).execute()

    def _merge_history(self, table: Any, rows: pa.RecordBatchReader, carried: Any) -> None:
        merge = merging(table, rows, [*self.events.keys, VALID_FROM], carried)
        columns = assigned(self.events.table.schema.names)
        merge.when_matched_update(assigned([VALID_TO])).when_not_matched_insert(columns).execute()

    def _rows(self, stage: DeltaStage, files: Sequence[str], outcome: Outcome) -> pa.RecordBatchReader:
        """The rows to merge: with history those of the table, and else those of staged events with ``PRESENT``."""
        if self.events.history:
            schema = self.events.table.schema
        else:
            schema = pa.schema([*self.events.rows.schema, self.events.staged.schema.field(PRESENT)])
        return streamed(schema, self._parts(stage, files, outcome, schema))

    def _parts(
        self, stage: DeltaStage, files: Sequence[str], outcome: Outcome, schema: pa.Schema
    ) -> Iterator[pa.RecordBatch]:
        if outcome.changed is not None:
            yield from _widened(outcome.changed, schema).to_batches()
        at = ended = 0
        for batch in stage.batches(files, self.events.staged.schema):
            taken = batch.filter(outcome.taken.slice(at, batch.num_rows))
            at += batch.num_rows
            if not taken.num_rows:
                continue
            rows = pa.Table.from_batches([taken])
            if outcome.ends is not None:
                rows = rows.append_column(VALID_FROM, rows[SEQUENCE]).append_column(
                    VALID_TO, outcome.ends.slice(ended, taken.num_rows)
                )
                ended += taken.num_rows
            yield from rows.select(schema.names).cast(schema).to_batches()


def _widened(rows: pa.Table, schema: pa.Schema) -> pa.Table:
    """The rows with all columns; those that they have not are null."""
    columns = [
        rows[field.name] if field.name in rows.column_names else pa.nulls(rows.num_rows, field.type)
        for field in schema
    ]
    return pa.Table.from_arrays(columns, schema=schema)
