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
from penstock.tables.iceberg.applied_events import AppliedEvents
from penstock.tables.iceberg.attempts import delete_abandoned
from penstock.tables.iceberg.changes_commit import ChangesCommit
from penstock.tables.iceberg.commit import Commit, Target
from penstock.tables.iceberg.data_files import FileTarget
from penstock.tables.iceberg.event_files import REPORT_DDL, EventTask, files_from_reports
from penstock.tables.iceberg.location import IcebergLocation
from penstock.tables.iceberg.schema import RowLayout, TableLayout, rows_layout, table_schema
from penstock.tables.iceberg.transactions import MicroBatch
from penstock.tables.iceberg.writer import IcebergWriter, require_writable


@dataclass(frozen=True)
class ChangeLayout:
    """The layout of change rows for an Iceberg table."""

    events: EventLayout
    table_layout: RowLayout
    """The columns that the table must have."""
    sequence_type: IcebergType
    """The type of the column that orders the events of a key."""


def change_layout(
    schema: StructType, location: IcebergLocation, keys: Sequence[str], sequence_by: str, scd_type: int
) -> ChangeLayout:
    """Return the layout of change rows; refuse change rows that Iceberg tables do not support."""
    table = f"the Iceberg table {location.label}"
    events = event_layout(schema, keys, sequence_by, rows_layout, history=scd_type == 2, table=table)
    sequence_type = schema[sequence_by].dataType
    validity = (
        [StructField(name, sequence_type) for name in (VALID_FROM, VALID_TO)] if events.keeps_history else []
    )
    columns = rows_layout(StructType([*(schema[name] for name in events.query_columns), *validity]), keys)
    (sequence,) = rows_layout(StructType([schema[sequence_by]]), ()).fields
    return ChangeLayout(events, columns, sequence.field_type)


def changes_writer(
    location: IcebergLocation,
    changes: ChangeLayout,
    guarantee: str,
    checkpoint_location: str,
    app_id: str | None,
) -> ChangesWriter:
    """Create or check the table and its applied-events branch; return the ``foreachBatch`` function."""
    table = location.find()
    if table is None:
        table = location.create(table_schema(changes.table_layout))
    elif not changes.events.keeps_history:
        refuse_history(table.schema().column_names, location.label, f"the Iceberg table {location.label}")
    require_writable(location, table)
    target = Target(location, changes.table_layout, "append")
    layout = target.layout(table.transaction())
    applied_events = AppliedEvents.of(location, layout, changes.sequence_type, changes.events.keeps_history)
    delete_abandoned(location, applied_events.prepare())
    return ChangesWriter(
        target, guarantee, checkpoint_location, app_id, events=changes.events, applied_events=applied_events
    )


@dataclass(frozen=True, kw_only=True)
class ChangesWriter(IcebergWriter):
    """``foreachBatch`` function: tasks stage change events, then one commit applies them."""

    events: EventLayout
    applied_events: AppliedEvents

    def _staging_query(self, frame: DataFrame, layout: TableLayout, files: FileTarget) -> DataFrame:
        return collapse(frame, self.events).mapInArrow(EventTask(files, self.events), REPORT_DDL)

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
            event_files=files_from_reports(reports),
            applied_events=self.applied_events,
        )

    def _check_keys(self, frame: DataFrame, files: FileTarget, commit: Commit) -> None:
        """Do nothing: Spark kept one event per key, and the tasks checked the events."""
