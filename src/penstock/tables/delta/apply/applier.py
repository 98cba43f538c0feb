"""Change rows applied to a Delta table: what a streaming query calls with each micro-batch of them, on the driver."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import DataFrame
from pyspark.sql.types import StructType

from penstock.arguments import in_quotes
from penstock.errors import SchemaMismatch
from penstock.lake.delta_location import DeltaPlace
from penstock.tables.columns import VALID_FROM, VALID_TO
from penstock.tables.delta.apply.events import PRESENT, SEQUENCE, UNKNOWN, Events, EventTask, events_of
from penstock.tables.delta.apply.fill import (
    collapsed,
    filled,
    kept_or_assigned,
    lacking,
    without,
    without_version,
)
from penstock.tables.delta.apply.memory import Applied, rows_of
from penstock.tables.delta.apply.outcome import Outcome, history, latest
from penstock.tables.delta.schema import DeltaLayout, fitting
from penstock.tables.delta.stage import REPORT, DeltaStage, streamed, sweep
from penstock.tables.delta.transactions import SOURCE, AppTransaction, assigned, merging, properties
from penstock.tables.delta.writer import DeltaWriter, create, refuse_backticks
from penstock.tables.names import quoted
from penstock.tables.untouched_values import numbers_of


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
    events = replace(events, rows=DeltaLayout(named, layout.keys))
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
        staged = stage.columns(files, self._looked_at)
        outcome = self._outcome(table, staged, remembered)
        if outcome.is_nothing:
            return
        remembered = self.applied.remember(remembered, outcome.remembered)
        versions = {} if transaction is None else transaction.versions
        carried = properties({**versions, self.applied.transaction: remembered})
        before = table.version()
        if self.events.history:
            self._merge_history(table, self._rows(table, stage, files, outcome), carried)
        else:
            self._merge_latest(table, self._rows(table, stage, files, outcome), carried)
        if table.version() == before:
            # A merge that changes no row is no commit, and what is remembered has changed.
            self.applied.name(table, remembered, versions)

    @property
    def _looked_at(self) -> list[str]:
        """The columns of staged events that tell what becomes of them."""
        return [*self.events.keys, SEQUENCE, PRESENT, *([] if self.events.unchanged is None else [UNKNOWN])]

    def _outcome(self, table: Any, staged: pa.Table, remembered: int) -> Outcome:
        keys = self.events.keys
        touched = staged.select(keys)
        known = self.applied.events(remembered, touched)
        placed = staged.select([*keys, SEQUENCE, PRESENT])
        if not self.events.history:
            outcome = latest(keys, placed, known)
            there = known.filter(pc.equal(known[PRESENT], 1))
            self._require_known(staged, outcome, lambda events: without(keys, events, there))
            return outcome
        fields = [self.events.table.schema.field(name) for name in (*keys, VALID_FROM, VALID_TO)]
        stored = rows_of(self.place, table, touched, pa.schema(fields))
        outcome = history(keys, placed, known, stored)
        self._require_known(staged, outcome, lambda events: without_version(keys, events, stored))
        return outcome

    def _require_known(
        self, staged: pa.Table, outcome: Outcome, lost: Callable[[pa.Table], pa.Table]
    ) -> None:
        """Refuse events of which no row has the values that they leave out; all of them are looked at before anything is written."""
        if self.events.unchanged is None:
            return
        found = lost(lacking(staged, outcome.taken))
        if found.num_rows:
            name = self.events.rows.schema.names[numbers_of(found[UNKNOWN][:1].to_pylist())[0]]
            shown = self.events.shown_key({key: found[key][0].as_py() for key in self.events.keys})
            raise self.events.unchanged.lost(name, self.place.shown, shown)

    def _merge_latest(self, table: Any, rows: pa.RecordBatchReader, carried: Any) -> None:
        numbers = [] if self.events.unchanged is None else self.events.unchanged.numbers
        columns = kept_or_assigned(self.events.rows.schema.names, numbers)
        there, gone = (f"{SOURCE}.{quoted(PRESENT)} = {present}" for present in (1, 0))
        merge = merging(table, rows, self.events.keys, carried)
        merge.when_matched_delete(gone).when_matched_update(columns, there).when_not_matched_insert(
            assigned(self.events.rows.schema.names), there
        ).execute()

    def _merge_history(self, table: Any, rows: pa.RecordBatchReader, carried: Any) -> None:
        merge = merging(table, rows, [*self.events.keys, VALID_FROM], carried)
        columns = assigned(self.events.table.schema.names)
        merge.when_matched_update(assigned([VALID_TO])).when_not_matched_insert(columns).execute()

    def _rows(
        self, table: Any, stage: DeltaStage, files: Sequence[str], outcome: Outcome
    ) -> pa.RecordBatchReader:
        """The rows to merge: with history those of the table, and else those of staged events with ``PRESENT``."""
        if self.events.history:
            schema = self.events.table.schema
        else:
            more = [name for name in self._looked_at if name in (PRESENT, UNKNOWN)]
            schema = pa.schema([*self.events.rows.schema, *map(self.events.staged.schema.field, more)])
        return streamed(schema, self._parts(table, stage, files, outcome, schema))

    def _parts(
        self, table: Any, stage: DeltaStage, files: Sequence[str], outcome: Outcome, schema: pa.Schema
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
                rows = self._filled(table, rows)
                rows = rows.append_column(VALID_FROM, rows[SEQUENCE]).append_column(
                    VALID_TO, outcome.ends.slice(ended, taken.num_rows)
                )
                ended += taken.num_rows
            yield from rows.select(schema.names).cast(schema).to_batches()

    def _filled(self, table: Any, rows: pa.Table) -> pa.Table:
        if self.events.unchanged is None:
            return rows

        def read(touched: pa.Table, names: list[str]) -> pa.Table:
            fields = [
                self.events.table.schema.field(name)
                for name in (*self.events.keys, VALID_FROM, VALID_TO, *names)
            ]
            return rows_of(self.place, table, touched, pa.schema(fields))

        return filled(rows, self.events.keys, read)


def _widened(rows: pa.Table, schema: pa.Schema) -> pa.Table:
    """The rows with all columns; those that they have not are null."""
    columns = [
        rows[field.name] if field.name in rows.column_names else pa.nulls(rows.num_rows, field.type)
        for field in schema
    ]
    return pa.Table.from_arrays(columns, schema=schema)
