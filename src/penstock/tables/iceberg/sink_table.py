"""An Iceberg table as the sink of a streaming query."""

from __future__ import annotations

from dataclasses import dataclass

from pyspark.sql import DataFrame
from pyspark.sql.types import StructType

from penstock.errors import InvalidOptionError
from penstock.tables.iceberg.place import IcebergPlace
from penstock.tables.iceberg.schema import add_columns, new_columns, rows_layout
from penstock.tables.iceberg.writer import IcebergWriter, accepted_rows, iceberg_writer


@dataclass(frozen=True)
class IcebergSinkTable:
    place: IcebergPlace
    keys: tuple[str, ...]
    applies_changes: bool
    """Whether the rows are changes, which it does not take."""
    kind = "an Iceberg table"

    def check_rows(self, schema: StructType, output_mode: str) -> None:
        self._refuse_changes()
        accepted_rows(schema, self.keys, output_mode)

    def new_columns(self, schema: StructType) -> list[str]:
        self._refuse_changes()
        return new_columns(rows_layout(schema, self.keys), self.place.find())

    def add_columns(self, schema: StructType) -> None:
        self._refuse_changes()
        add_columns(self.place, rows_layout(schema, self.keys))

    def writer(
        self, frame: DataFrame, output_mode: str, guarantee: str, checkpoint: str, app_id: str | None
    ) -> IcebergWriter:
        self._refuse_changes()
        return iceberg_writer(frame, self.place, self.keys, output_mode, guarantee, checkpoint, app_id)

    def _refuse_changes(self) -> None:
        if self.applies_changes:
            raise InvalidOptionError(
                "changes cannot be applied to an Iceberg table: use a SQL table or a Delta table, or leave "
                "apply_changes out and write the newest state of each key in output mode update",
                condition="INVALID_OPTION.CONFLICT",
                option="apply_changes",
            )
