"""Change events for a Delta or Iceberg table: a change of a key, and its position in the order of changes.

Spark collapses a micro-batch to the last event of each key, since later events replace earlier ones, and
tasks stage these events.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as pat
from pyspark.sql import Column, DataFrame, Window
from pyspark.sql import functions as F  # noqa: N812 - its usual name
from pyspark.sql import types as spark

from penstock.arguments import in_quotes
from penstock.errors import InvalidInputError, SchemaMismatchError
from penstock.spark.schemas import quote_column
from penstock.tables.columns import VALID_FROM, VALID_TO, metadata_columns, staged_order
from penstock.tables.row_checks import (
    ambiguous_order,
    present,
    require_change_columns,
    require_changes,
    shown_key,
    tie_breakers,
)
from penstock.tables.row_encoding import JSON
from penstock.tables.unchanged_values import UnchangedValues, column_numbers

SEQUENCE, PRESENT, UNKNOWN = "_penstock_sequence", "_penstock_present", "_penstock_unknown"
"""The columns that staged events have in addition to the columns of their rows."""
_RESERVED = (VALID_FROM, VALID_TO, SEQUENCE, PRESENT, UNKNOWN)


class Columns(Protocol):
    """The columns of rows in a table format."""

    @property
    def schema(self) -> pa.Schema: ...

    @property
    def keys(self) -> tuple[str, ...]: ...


@dataclass(frozen=True)
class EventLayout:
    rows: pa.Schema
    """The columns of the rows that events insert or update, with their names in staged files."""
    keys: tuple[str, ...]
    columns: tuple[str, ...]
    """The same columns, with the query's names."""
    sequence: pa.DataType
    sequence_by: str
    """The query's column that orders the events of a key."""
    history: bool
    """Whether the table keeps every version of a row (type 2), or only the current one (type 1)."""
    unchanged: UnchangedValues | None = None
    """The columns whose values events may leave out, if any."""
    ties: tuple[str, ...] = ()
    """The query's columns that order events with the same key and sequence."""

    @property
    def staged(self) -> pa.Schema:
        """The columns that tasks stage: the row's columns and the event's."""
        more = [pa.field(SEQUENCE, self.sequence), pa.field(PRESENT, pa.int32())]
        more += [] if self.unchanged is None else [pa.field(UNKNOWN, pa.string())]
        return pa.schema([*self.rows, *more])

    @property
    def planning(self) -> pa.Schema:
        """The columns of staged events from which their merge is planned."""
        unknown = [] if self.unchanged is None else [UNKNOWN]
        return pa.schema([self.staged.field(name) for name in (*self.keys, SEQUENCE, PRESENT, *unknown)])

    @property
    def recorded(self) -> pa.Schema:
        """The columns of events that are recorded as applied."""
        return pa.schema([self.staged.field(name) for name in (*self.keys, SEQUENCE, PRESENT)])

    @property
    def versions(self) -> pa.Schema:
        """With history: the columns that identify the versions of a row in the table."""
        return pa.schema([self.table.field(name) for name in (*self.keys, VALID_FROM, VALID_TO)])

    @property
    def table(self) -> pa.Schema:
        """The columns that the table must have."""
        valid = [pa.field(name, self.sequence) for name in (VALID_FROM, VALID_TO)] if self.history else []
        return pa.schema([*self.rows, *valid])


def event_layout(
    rows: spark.StructType,
    keys: Sequence[str],
    sequence_by: str,
    layout: Callable[[spark.StructType, Sequence[str]], Columns],
    *,
    history: bool,
    table: str,
) -> EventLayout:
    """Return the layout of the events in change rows; ``table`` is the table's name in messages.

    ``layout`` returns columns in the table's format, and refuses columns that it does not support.
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
            condition="INVALID_INPUT.COLUMN_NAME",
            columns=reserved,
        )
    found = layout(spark.StructType([rows[name] for name in columns]), keys)
    order = layout(spark.StructType([rows[sequence_by]]), ()).schema.field(0)
    for key in found.keys:
        _require_exact("keys", found.schema.field(key))
    _require_exact("sequence_by", order)
    ties = tie_breakers(rows, sequence_by)
    return EventLayout(found.schema, found.keys, columns, order.type, sequence_by, history, unchanged, ties)


def refuse_history(columns: Iterable[str], place: str, table: str) -> None:
    """Refuse to write only current rows to a table with history; ``table`` is ``place`` with its format."""
    found = [name for name in columns if name in (VALID_FROM, VALID_TO)]
    if found:
        raise SchemaMismatchError(
            f"{table} keeps history, with a column {in_quotes(found[0])}, and scd_type=1 would not: set "
            "scd_type=2, or use another table",
            condition="SCHEMA_MISMATCH.TABLE_DIFFERS",
            table=place,
        )


def _require_exact(parameter: str, column: pa.Field) -> None:
    if pat.is_nested(column.type) or pat.is_floating(column.type):
        raise InvalidInputError(
            f"{parameter} names {in_quotes(column.name)}, which is {column.type}, and keys and sequences "
            "need an exact comparison: cast it, as to bigint, decimal or string",
            condition="INVALID_INPUT.COLUMN_TYPE",
            parameter=parameter,
        )


def checked_events(chunk: pa.RecordBatch, events: EventLayout, table: str) -> pa.RecordBatch:
    """Refuse collapsed events that cannot be applied, and return the others without ``ambiguous``."""
    require_changes(chunk, events.sequence_by)
    if pc.any(chunk.column("ambiguous")).as_py():
        first = chunk.filter(chunk.column("ambiguous"))
        key = {name: first.column(events.rows.names.index(name))[0].as_py() for name in events.keys}
        raise ambiguous_order(shown_key(key), table, events.sequence_by)
    if events.unchanged is not None:
        events.unchanged.require_known(chunk.column("unknown"), table)
    return chunk.drop_columns(["ambiguous"])


def require_stored(refused: pa.Table, events: EventLayout, table: str) -> None:
    """Refuse events that leave out values which no stored row has; called before anything is written."""
    if refused.num_rows and events.unchanged is not None:
        name = events.rows.names[column_numbers(refused[UNKNOWN][:1].to_pylist())[0]]
        key = shown_key({key: refused[key][0].as_py() for key in events.keys})
        raise events.unchanged.not_stored(name, table, key)


def collapse(frame: DataFrame, events: EventLayout) -> DataFrame:
    """Return the last event of each key, or with history the last event of each key and sequence.

    The columns are c0, c1 and so on; ``sequence``; ``present``; ``unknown`` if values may be left out; and
    ``ambiguous``, which is true if an event with another row has the same position in the order. Rows without
    a sequence or with an unknown change type pass through, so that the tasks refuse them.
    """
    data = [f"c{n}" for n in range(len(events.columns))]
    projected = frame.select(
        *(F.col(quote_column(name)).alias(short) for name, short in zip(events.columns, data, strict=True)),
        F.col(quote_column(events.sequence_by)).alias("sequence"),
        *(F.col(quote_column(name)).alias(f"t{n}") for n, name in enumerate(events.ties)),
        present(),
        *([] if events.unchanged is None else [events.unchanged.unknown()]),
    )
    order = staged_order(events.ties)
    keys = [short for name, short in zip(events.rows.names, data, strict=True) if name in events.keys]
    if events.unchanged is not None and events.unchanged.numbers:
        projected = _carry_over(projected, events.unchanged.numbers, keys, order)
    within = Window.partitionBy(*keys, *(["sequence"] if events.history else []))
    invalid = F.col("sequence").isNull() | F.col("present").isNull()
    # The frame of this window ends with the peers of a row, so the first row sees the number of its peers.
    window = within.orderBy(invalid.desc(), *(F.col(name).desc() for name in order))
    last = (
        projected.withColumn("place", F.rank().over(window))
        .withColumn("peers", F.count("*").over(window))
        .where("place = 1")
    )
    # Peers are rare, so few rows are written as text.
    digest = F.when(F.expr("peers > 1 and present = 1"), F.md5(F.to_json(F.struct(*data), JSON)))
    one = (
        last.withColumn("digest", digest)
        .withColumn("ambiguous", F.min("digest").over(window) != F.max("digest").over(window))
        .withColumn("number", F.row_number().over(window))
        .where("number = 1")
    )
    kept = [name for name in projected.columns if name not in order[1:-1]]
    return one.select(*kept, F.coalesce("ambiguous", F.lit(False)).alias("ambiguous"))


def _carry_over(
    projected: DataFrame, numbers: Sequence[int], keys: Sequence[str], order: Sequence[str]
) -> DataFrame:
    """Carry unchanged values over from earlier events of the key; ``unknown`` has the remaining columns."""
    before = (
        Window.partitionBy(*keys).orderBy(*order).rowsBetween(Window.unboundedPreceding, Window.currentRow)
    )
    last = {n: f"last{n}" for n in numbers}
    has_value = {n: ~F.contains(F.coalesce("unknown", F.lit("")), F.lit(f",{n},")) for n in numbers}
    with_last = projected.select(
        "*",
        *(
            F.last(F.when(has_value[n] & (F.col("present") == 1), F.struct(f"c{n}")), ignorenulls=True)
            .over(before)
            .alias(last[n])
            for n in numbers
        ),
    )

    def column(name: str) -> Column:
        n = int(name[1:])
        if n not in last:
            return F.col(name)
        return F.when(has_value[n], F.col(name)).otherwise(F.col(f"{last[n]}.{name}")).alias(name)

    left = F.concat(
        *(F.when(has_value[n] | F.col(last[n]).isNotNull(), "").otherwise(f",{n},") for n in numbers)
    )
    listed = F.substring("unknown", 1, 1) == ","
    data = [name for name in projected.columns if name not in (*order, "unknown")]
    return with_last.select(
        *map(column, data),
        *order,
        F.when(listed, F.nullif(left, F.lit(""))).otherwise(F.col("unknown")).alias("unknown"),
    )
