"""A Delta table as the sink of a streaming query."""

from __future__ import annotations

from dataclasses import dataclass

from pyspark.sql import DataFrame
from pyspark.sql.types import StructType

from penstock.lake.storage import DeltaPlace
from penstock.tables.delta.changes_writer import accepted_changes, changes_writer
from penstock.tables.delta.schema import DeltaLayout, add_columns, new_columns, rows_layout
from penstock.tables.delta.writer import DeltaWriter, accepted_rows, delta_writer


@dataclass(frozen=True)
class DeltaSinkTable:
    place: DeltaPlace
    keys: tuple[str, ...]
    sequence_by: str | None
    """The column that orders change rows; None if the rows are not changes."""
    scd_type: int
    kind = "a Delta table"

    def check_rows(self, schema: StructType, output_mode: str) -> None:
        if self.sequence_by is None:
            accepted_rows(schema, self.keys, output_mode)
        else:
            accepted_changes(schema, self.place, self.keys, self.sequence_by, self.scd_type)

    def new_columns(self, schema: StructType) -> list[str]:
        return new_columns(self._layout(schema), self.place.find())

    def evolve(self, schema: StructType) -> None:
        add_columns(self.place, self._layout(schema))

    def writer(
        self, frame: DataFrame, output_mode: str, guarantee: str, checkpoint: str, app_id: str | None
    ) -> DeltaWriter:
        place, keys = self.place, self.keys
        if self.sequence_by is None:
            return delta_writer(frame, place, keys, output_mode, guarantee, checkpoint, app_id)
        return changes_writer(
            frame, place, keys, self.sequence_by, self.scd_type, guarantee, checkpoint, app_id
        )

    def _layout(self, schema: StructType) -> DeltaLayout:
        if self.sequence_by is None:
            return rows_layout(schema, self.keys)
        events = accepted_changes(schema, self.place, self.keys, self.sequence_by, self.scd_type)
        return DeltaLayout(events.table, events.keys)
