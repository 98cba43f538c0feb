"""Schema and staging of the change events of a Delta table: what happened to a key, and its place in the
order of changes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as pat
from pyspark.sql import types as spark

from penstock.arguments import in_quotes
from penstock.errors import InvalidInputError, TableRefusedError
from penstock.tables.columns import VALID_FROM, VALID_TO, metadata_columns
from penstock.tables.delta.schema import DeltaLayout, rows_layout
from penstock.tables.delta.stage import DeltaStageTask
from penstock.tables.delta.writer import shown_key
from penstock.tables.row_checks import ambiguous_order, require_change_columns, require_changes, tie_breakers
from penstock.tables.unchanged_values import UnchangedValues

SEQUENCE, PRESENT, UNKNOWN = "_penstock_sequence", "_penstock_present", "_penstock_unknown"
"""The columns of staged events beside those of their rows."""
_RESERVED = (VALID_FROM, VALID_TO, SEQUENCE, PRESENT, UNKNOWN)


@dataclass(frozen=True)
class EventLayout:
    """The columns of a query's change events."""

    rows: DeltaLayout
    """The rows that they set, with the table's column names."""
    columns: tuple[str, ...]
    """The same columns, with the query's names."""
    sequence: pa.DataType
    sequence_by: str
    """The query's column that orders the events of a key."""
    history: bool
    """Whether the table keeps every version of a row (type 2), or only the current one (type 1)."""
    unchanged: UnchangedValues | None = None
    """For events that may leave values out."""
    ties: tuple[str, ...] = ()
    """The query's columns that order events of a key with one sequence."""

    @property
    def keys(self) -> list[str]:
        return list(self.rows.keys)

    @property
    def staged(self) -> DeltaLayout:
        """The columns that tasks stage: the row, its sequence, whether the event sets or removes it, and what
        it leaves out.
        """
        more = [pa.field(SEQUENCE, self.sequence), pa.field(PRESENT, pa.int32())]
        more += [] if self.unchanged is None else [pa.field(UNKNOWN, pa.string())]
        return DeltaLayout(pa.schema([*self.rows.schema, *more]), self.rows.keys)

    @property
    def table(self) -> DeltaLayout:
        """The columns that the table must have."""
        valid = [pa.field(name, self.sequence) for name in (VALID_FROM, VALID_TO)] if self.history else []
        return DeltaLayout(pa.schema([*self.rows.schema, *valid]), self.rows.keys)


def event_layout(
    rows: spark.StructType, keys: Sequence[str], sequence_by: str, *, history: bool, table: str
) -> EventLayout:
    """Return the layout of the events in change rows.

    Parameters
    ----------
    table
        The table's name in messages.

    Raises
    ------
    InvalidInputError
        When they are not change rows, or keys or sequence cannot be compared exactly.
    UnsupportedTypeError
    """
    require_change_columns(rows.names, sequence_by)
    unchanged = UnchangedValues.of(rows, keys)
    metadata = metadata_columns(unchanged)
    columns = tuple(name for name in rows.names if name not in metadata)
    reserved = [name for name in columns if name.lower() in _RESERVED]
    if reserved:
        raise InvalidInputError(
            f"the rows have a column {in_quotes(reserved[0])}, a name that {table} reserves where changes "
            f"are applied: rename it, as with withColumnRenamed({in_quotes(reserved[0])}, …)",
            columns=reserved,
        )
    layout = rows_layout(spark.StructType([rows[name] for name in columns]), keys)
    order = rows_layout(spark.StructType([rows[sequence_by]]), ()).schema.field(0)
    for key in layout.keys:
        _require_exact("keys", layout.schema.field(key))
    _require_exact("sequence_by", order)
    ties = tie_breakers(rows, sequence_by)
    return EventLayout(layout, columns, order.type, sequence_by, history, unchanged, ties)


def _require_exact(parameter: str, column: pa.Field) -> None:
    if pat.is_nested(column.type) or pat.is_floating(column.type):
        raise InvalidInputError(
            f"{parameter} names {in_quotes(column.name)}, which is {column.type}, and keys and sequences "
            "need an exact comparison: cast it, as to bigint, decimal or string",
            parameter=parameter,
        )


@dataclass
class EventTask(DeltaStageTask):
    """The function of ``mapInArrow``: takes collapsed events and returns a report of what the task staged."""

    events: EventLayout = field(kw_only=True)

    def _checked(self, chunks: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        return super()._checked(self._event(chunk) for chunk in chunks)

    def _event(self, chunk: pa.RecordBatch) -> pa.RecordBatch:
        require_changes(chunk, self.events.sequence_by)
        if pc.any(chunk.column("ambiguous")).as_py():
            raise self._ambiguous(chunk.filter(chunk.column("ambiguous")))
        if self.events.unchanged is not None:
            self.events.unchanged.require_known(chunk.column("unknown"), self.stage.place.shown)
        return chunk.drop_columns(["ambiguous"])

    def _ambiguous(self, chunk: pa.RecordBatch) -> TableRefusedError:
        names = self.events.rows.schema.names
        first = {name: chunk.column(names.index(name))[0].as_py() for name in self.events.keys}
        return ambiguous_order(shown_key(first), self.stage.place.shown, self.events.sequence_by)
