"""Change rows on their way into a Delta table, as events: what happened to a key, and where in the order of its changes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as pat
from pyspark.sql import types as spark

from penstock.arguments import did_you_mean, in_quotes
from penstock.errors import InvalidInput, TableRefused
from penstock.feeds.contract import CHANGE_TYPE
from penstock.tables.change_rows import require_changes, ties
from penstock.tables.columns import VALID_FROM, VALID_TO, not_kept
from penstock.tables.delta.schema import DeltaLayout, rows_layout
from penstock.tables.delta.stage import DeltaTask
from penstock.tables.untouched_values import Unchanged

SEQUENCE, PRESENT, UNKNOWN = "_penstock_sequence", "_penstock_present", "_penstock_unknown"
"""Of staged events, beside the columns of their rows."""
_OURS = (VALID_FROM, VALID_TO, SEQUENCE, PRESENT, UNKNOWN)


@dataclass(frozen=True)
class Events:
    """What the events of a query look like."""

    rows: DeltaLayout
    """Of the rows that they put into the table, with the table's names."""
    columns: tuple[str, ...]
    """The same, with the names that the query has for them."""
    sequence: pa.DataType
    sequence_by: str
    """The query's column that orders the events of a key."""
    history: bool
    """Whether the table keeps each row with the time when it was valid (type 2), or only those that are (type 1)."""
    unchanged: Unchanged | None = None
    """Where events may leave values out."""
    ties: tuple[str, ...] = ()
    """The query's columns that order events of a key with one sequence."""

    @property
    def keys(self) -> list[str]:
        return list(self.rows.keys)

    @staticmethod
    def shown_key(values: Mapping[str, object]) -> str:
        """A key as messages show it."""
        return ", ".join(f"{in_quotes(name)} = {in_quotes(value)}" for name, value in values.items())

    @property
    def staged(self) -> DeltaLayout:
        """What tasks stage: the row with its event's place in the order, and 1 where it is there from then on, 0 where it is gone.

        Where events may leave values out, they say which.
        """
        more = [pa.field(SEQUENCE, self.sequence), pa.field(PRESENT, pa.int32())]
        more += [] if self.unchanged is None else [pa.field(UNKNOWN, pa.string())]
        return DeltaLayout(pa.schema([*self.rows.schema, *more]), self.rows.keys)

    @property
    def table(self) -> DeltaLayout:
        """What the table has to have."""
        valid = [pa.field(name, self.sequence) for name in (VALID_FROM, VALID_TO)] if self.history else []
        return DeltaLayout(pa.schema([*self.rows.schema, *valid]), self.rows.keys)


def events_of(
    found: spark.StructType, keys: Sequence[str], sequence_by: str, *, history: bool, table: str
) -> Events:
    """The events that rows stand for.

    Parameters
    ----------
    table
        As messages name it.

    Raises
    ------
    InvalidInput
        When they are no change rows, or keys or sequence cannot be compared.
    UnsupportedType
    """
    names = found.names
    lacking = [name for name in (CHANGE_TYPE, sequence_by) if name not in names]
    if lacking:
        raise InvalidInput(
            f"apply_changes takes change rows, with the columns {CHANGE_TYPE} and {sequence_by}, and these have no "
            f"{lacking[0]}.{did_you_mean(lacking[0], names)} They have {', '.join(names)}",
            parameter="apply_changes",
        )
    unchanged = Unchanged.of(found, keys)
    taken_out = not_kept(unchanged)
    columns = tuple(name for name in names if name not in taken_out)
    taken = [name for name in columns if name.lower() in _OURS]
    if taken:
        raise InvalidInput(
            f"the rows have a column {in_quotes(taken[0])}, a name that {table} has a use of its own for where changes are applied: "
            f"rename it, as with withColumnRenamed({in_quotes(taken[0])}, …)",
            columns=taken,
        )
    rows = rows_layout(spark.StructType([found[name] for name in columns]), keys)
    order = rows_layout(spark.StructType([found[sequence_by]]), ()).schema.field(0)
    for key in rows.keys:
        _require_exact("keys", rows.schema.field(key))
    _require_exact("sequence_by", order)
    return Events(rows, columns, order.type, sequence_by, history, unchanged, ties(found, sequence_by))


def _require_exact(parameter: str, column: pa.Field) -> None:
    if pat.is_nested(column.type) or pat.is_floating(column.type):
        raise InvalidInput(
            f"{parameter} names {in_quotes(column.name)}, which is {column.type}, and changes are ordered and their keys found by values "
            "that are equal or not: cast it, as to bigint, decimal or string",
            parameter=parameter,
        )


@dataclass
class EventTask(DeltaTask):
    """For ``mapInArrow``: collapsed events in, what was staged out."""

    events: Events = field(kw_only=True)

    def _checked(self, chunks: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        return super()._checked(self._event(chunk) for chunk in chunks)

    def _event(self, chunk: pa.RecordBatch) -> pa.RecordBatch:
        require_changes(chunk, self.events.sequence_by)
        if pc.any(chunk.column("ambiguous")).as_py():
            self._refuse(chunk.filter(chunk.column("ambiguous")))
        if self.events.unchanged is not None:
            self.events.unchanged.require_known(chunk.column("unknown"), self.stage.place.shown)
        return chunk.drop_columns(["ambiguous"])

    def _refuse(self, chunk: pa.RecordBatch) -> None:
        names = self.events.rows.schema.names
        first = {name: chunk.column(names.index(name))[0].as_py() for name in self.events.keys}
        raise TableRefused(
            f"the key {self.events.shown_key(first)} of {self.stage.place.shown} has several changes with one value of {in_quotes(self.events.sequence_by)}, and "
            "nothing says which of them is the last one: take the feed's net changes (deduplication_mode='netChanges', "
            "net_window='commit'), or name a column as sequence_by that orders all changes of a key",
            condition="TABLE_REFUSED.AMBIGUOUS_ORDER",
            key=self.events.shown_key(first),
        )
