"""Delta and Iceberg tables as sinks: one interface for both table formats."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, TypeAlias, TypeVar

from pyspark.sql import DataFrame
from pyspark.sql.types import StructType

from penstock.errors import InvalidOptionError
from penstock.extras import instead
from penstock.lake.storage import DeltaLocation, is_delta
from penstock.tables.changes.events import EventLayout
from penstock.tables.delta.changes_writer import change_event_layout, changes_layout, changes_writer
from penstock.tables.delta.schema import DeltaLayout, add_columns, new_columns
from penstock.tables.delta.writer import delta_writer, row_layout
from penstock.tables.iceberg.location import IcebergLocation, is_iceberg

if TYPE_CHECKING:
    from penstock.tables.iceberg.changes_writer import ChangeLayout as IcebergChangeLayout
    from penstock.tables.iceberg.schema import RowLayout

BatchWriter = Callable[[DataFrame, int], None]
"""A ``foreachBatch`` function."""
Location = TypeVar("Location")
Layout = TypeVar("Layout")
ChangeLayout = TypeVar("ChangeLayout")


@dataclass(frozen=True)
class LakeFormat(Generic[Location, Layout, ChangeLayout]):
    """The operations that differ between Delta and Iceberg tables."""

    description: str
    """The kind of table in messages, such as "a Delta table"."""
    row_layout: Callable[[StructType, Sequence[str], str], Layout]
    """Returns the columns that a table needs for rows; refuses rows that no table of this format supports."""
    change_layout: Callable[[StructType, Location, Sequence[str], str, int], ChangeLayout]
    """Returns the layout of change events; refuses change rows that no table of this format supports."""
    table_layout: Callable[[ChangeLayout], Layout]
    new_columns: Callable[[Layout, Location], list[str]]
    evolve: Callable[[Location, Layout], None]
    rows_writer: Callable[[Location, Layout, str, str, str, str | None], BatchWriter]
    changes_writer: Callable[[Location, ChangeLayout, str, str, str | None], BatchWriter]


@dataclass(frozen=True)
class LakeTable(Generic[Location, Layout, ChangeLayout]):
    """A table in a folder or a catalog, with the settings of a sink."""

    format: LakeFormat[Location, Layout, ChangeLayout]
    location: Location
    keys: Sequence[str]
    sequence_by: str | None
    """The column that orders change rows; None if the rows are not changes."""
    scd_type: int

    def layout(self, schema: StructType, output_mode: str) -> Layout:
        """Return the columns that the table needs; refuse rows that no table of this format supports."""
        changes = self._changes(schema)
        return self._rows(schema, output_mode) if changes is None else self.format.table_layout(changes)

    def new_columns(self, schema: StructType, output_mode: str) -> list[str]:
        """Return the columns of the rows that the table lacks; an empty list if the table does not exist."""
        return self.format.new_columns(self.layout(schema, output_mode), self.location)

    def evolve(self, schema: StructType, output_mode: str) -> None:
        """Add the columns of the rows that the table lacks, except keys, and widen types as far as its format
        can.
        """
        self.format.evolve(self.location, self.layout(schema, output_mode))

    def writer(
        self, schema: StructType, output_mode: str, guarantee: str, checkpoint: str, app_id: str | None
    ) -> BatchWriter:
        """Create the table or check an existing one, and return the query's ``foreachBatch`` function.

        ``app_id`` is the query's identity in the table; by default the one in its checkpoint.
        """
        changes = self._changes(schema)
        if changes is not None:
            return self.format.changes_writer(self.location, changes, guarantee, checkpoint, app_id)
        rows = self._rows(schema, output_mode)
        return self.format.rows_writer(self.location, rows, output_mode, guarantee, checkpoint, app_id)

    def _rows(self, schema: StructType, output_mode: str) -> Layout:
        if output_mode == "append" and self.keys:
            raise InvalidOptionError(
                f"{self.format.description} has no unique keys, so output mode append cannot refuse an "
                "existing key: leave keys out, or use output mode update, which replaces the row with the "
                "same key",
                condition="INVALID_OPTION.CONFLICT",
                option="keys",
            )
        return self.format.row_layout(schema, self.keys, output_mode)

    def _changes(self, schema: StructType) -> ChangeLayout | None:
        if self.sequence_by is None:
            return None
        return self.format.change_layout(schema, self.location, self.keys, self.sequence_by, self.scd_type)


AnyLakeTable: TypeAlias = (
    "LakeTable[DeltaLocation, DeltaLayout, EventLayout]"
    " | LakeTable[IcebergLocation, RowLayout, IcebergChangeLayout]"
)


def lake_table(
    url: str, name: str, keys: Sequence[str], sequence_by: str | None, scd_type: int
) -> AnyLakeTable | None:
    """Return the table for a URL and a name; None if it is in the database of a store."""
    if is_iceberg(url):
        return LakeTable(_iceberg(), IcebergLocation.of(url, name), keys, sequence_by, scd_type)
    if is_delta(url):
        return LakeTable(_DELTA, DeltaLocation.of(url, name), keys, sequence_by, scd_type)
    return None


_DELTA = LakeFormat(
    description="a Delta table",
    row_layout=row_layout,
    change_layout=change_event_layout,
    table_layout=changes_layout,
    new_columns=lambda layout, location: new_columns(layout, location.find()),
    evolve=add_columns,
    rows_writer=delta_writer,
    changes_writer=changes_writer,
)


def _iceberg() -> LakeFormat[IcebergLocation, RowLayout, IcebergChangeLayout]:
    try:
        from penstock.tables.iceberg import changes_writer as changes
        from penstock.tables.iceberg import schema, writer
    except ModuleNotFoundError as error:
        raise instead(error, "an Iceberg table") from None
    return LakeFormat(
        description="an Iceberg table",
        row_layout=lambda rows, keys, _: schema.rows_layout(rows, keys),
        change_layout=changes.change_layout,
        table_layout=lambda changes_layout: changes_layout.table_layout,
        new_columns=lambda layout, location: schema.new_columns(layout, location.find()),
        evolve=schema.evolve,
        rows_writer=writer.iceberg_writer,
        changes_writer=changes.changes_writer,
    )
