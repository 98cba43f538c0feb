"""An Iceberg table as the sink of a streaming query."""

from __future__ import annotations

from dataclasses import dataclass

from pyspark.sql import DataFrame
from pyspark.sql.types import StructType

from penstock.tables.iceberg.changes_writer import accepted_changes, changes_writer
from penstock.tables.iceberg.place import IcebergPlace
from penstock.tables.iceberg.schema import RowLayout, evolve, new_columns, rows_layout
from penstock.tables.iceberg.writer import IcebergWriter, accepted_rows, iceberg_writer


@dataclass(frozen=True)
class IcebergSinkTable:
    place: IcebergPlace
    keys: tuple[str, ...]
    sequence_by: str | None
    """The column that orders change rows; None if the rows are not changes."""
    scd_type: int
    kind = "an Iceberg table"

    def check_rows(self, schema: StructType, output_mode: str) -> None:
        if self.sequence_by is None:
            accepted_rows(schema, self.keys, output_mode)
        else:
            accepted_changes(schema, self.place, self.keys, self.sequence_by, self.scd_type)

    def new_columns(self, schema: StructType) -> list[str]:
        return new_columns(self._layout(schema), self.place.find())

    def evolve(self, schema: StructType) -> None:
        evolve(self.place, self._layout(schema))

    def writer(
        self, frame: DataFrame, output_mode: str, guarantee: str, checkpoint: str, app_id: str | None
    ) -> IcebergWriter:
        place, keys = self.place, self.keys
        if self.sequence_by is None:
            return iceberg_writer(frame, place, keys, output_mode, guarantee, checkpoint, app_id)
        return changes_writer(
            frame, place, keys, self.sequence_by, self.scd_type, guarantee, checkpoint, app_id
        )

    def _layout(self, schema: StructType) -> RowLayout:
        if self.sequence_by is None:
            return rows_layout(schema, self.keys)
        return accepted_changes(schema, self.place, self.keys, self.sequence_by, self.scd_type).table
