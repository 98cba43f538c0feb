"""Driver side of change rows for an Iceberg table: the ``foreachBatch`` function that applies them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pyiceberg.types import IcebergType
from pyspark.sql import DataFrame
from pyspark.sql.types import StructField, StructType

from penstock.tables.changes.events import EventLayout, collapse, event_layout, refuse_history
from penstock.tables.columns import VALID_FROM, VALID_TO
from penstock.tables.iceberg.attempts import delete_abandoned
from penstock.tables.iceberg.changes_commit import ChangesCommit
from penstock.tables.iceberg.commit import Commit, Target
from penstock.tables.iceberg.data_files import FileTarget
from penstock.tables.iceberg.event_files import REPORT, EventTask, event_files
from penstock.tables.iceberg.place import IcebergPlace
from penstock.tables.iceberg.record import Record
from penstock.tables.iceberg.schema import RowLayout, TableLayout, rows_layout, table_schema
from penstock.tables.iceberg.transactions import MicroBatch
from penstock.tables.iceberg.writer import IcebergWriter, require_writable


@dataclass(frozen=True)
class Changes:
    """Change rows that an Iceberg table can take."""

    events: EventLayout
    table: RowLayout
    """The columns that the table must have."""
    sequence: IcebergType
    """The type of the column that orders the events of a key."""


def accepted_changes(
    schema: StructType, place: IcebergPlace, keys: Sequence[str], sequence_by: str, scd_type: int
) -> Changes:
    """Return the layout of change rows that an Iceberg table can take."""
    table = f"the Iceberg table {place.shown}"
    events = event_layout(schema, keys, sequence_by, rows_layout, history=scd_type == 2, table=table)
    order = schema[sequence_by].dataType
    valid = [StructField(name, order) for name in (VALID_FROM, VALID_TO)] if events.history else []
    columns = rows_layout(StructType([*(schema[name] for name in events.columns), *valid]), keys)
    (sequence,) = rows_layout(StructType([schema[sequence_by]]), ()).fields
    return Changes(events, columns, sequence.field_type)


def changes_writer(
    place: IcebergPlace, changes: Changes, guarantee: str, location: str, app_id: str | None
) -> ChangesWriter:
    """Create the table and its record of events or check existing ones, and return the ``foreachBatch``
    function.
    """
    table = place.find()
    if table is None:
        table = place.create(table_schema(changes.table))
    elif not changes.events.history:
        refuse_history(table.schema().column_names, place.shown, f"the Iceberg table {place.shown}")
    require_writable(place, table)
    target = Target(place, changes.table, "append")
    layout = target.layout(table.transaction())
    record = Record.of(place, layout, changes.sequence, changes.events.history)
    delete_abandoned(place, record.prepare())
    return ChangesWriter(target, guarantee, location, app_id, events=changes.events, record=record)


@dataclass(frozen=True, kw_only=True)
class ChangesWriter(IcebergWriter):
    """The ``foreachBatch`` function: tasks stage change events, then one commit applies them."""

    events: EventLayout
    record: Record

    def _staging(self, frame: DataFrame, layout: TableLayout, files: FileTarget) -> DataFrame:
        return collapse(frame, self.events).mapInArrow(EventTask(files, self.events), REPORT)

    def _new_commit(
        self,
        frame: DataFrame,
        layout: TableLayout,
        files: FileTarget,
        reports: Sequence[Any],
        batch_id: int,
        batch: MicroBatch | None,
    ) -> ChangesCommit:
        return ChangesCommit(
            self.target,
            layout,
            [],
            files.io,
            files.token,
            batch_id,
            batch,
            spark=frame.sparkSession,
            events=self.events,
            event_files=event_files(reports),
            record=self.record,
        )

    def _check(self, frame: DataFrame, files: FileTarget, commit: Commit) -> None:
        """Do nothing: Spark has kept one event per key, and the tasks have checked them."""
