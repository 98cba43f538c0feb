"""Change events for a Delta or Iceberg table: the change of a key, with its position in the order of changes.

Spark reduces a micro-batch to the last event of each key, since later events replace earlier ones, and tasks
stage these events in files.
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
from penstock.tables.columns import VALID_FROM, VALID_TO, metadata_columns, staged_order_columns
from penstock.tables.row_checks import (
    ambiguous_order_error,
    key_for_messages,
    present_column,
    require_change_columns,
    require_changes,
    tie_breakers,
)
from penstock.tables.row_encoding import JSON_OPTIONS
from penstock.tables.unchanged_values import UnchangedValues, column_numbers

SEQUENCE, PRESENT, MISSING_COLUMNS = "_penstock_sequence", "_penstock_present", "_penstock_unknown"
"""The metadata columns of staged events."""
_RESERVED_NAMES = (VALID_FROM, VALID_TO, SEQUENCE, PRESENT, MISSING_COLUMNS)


class ColumnLayout(Protocol):
    """The columns of rows in the types of a table format."""

    @property
    def schema(self) -> pa.Schema: ...

    @property
    def keys(self) -> tuple[str, ...]: ...


@dataclass(frozen=True)
class EventLayout:
    row_schema: pa.Schema
    """The columns of the rows that events upsert, with their names in staged files."""
    keys: tuple[str, ...]
    query_columns: tuple[str, ...]
    """The same columns, with the query's names."""
    sequence_type: pa.DataType
    sequence_by: str
    """The query's column that orders the events of a key."""
    keeps_history: bool
    """Whether the table keeps every version of a row (SCD type 2), or only the current one (type 1)."""
    unchanged: UnchangedValues | None = None
    """The columns whose values events may omit, if any."""
    tie_breakers: tuple[str, ...] = ()
    """The query's columns that order events with the same key and sequence."""

    @property
    def staged_schema(self) -> pa.Schema:
        """The columns of staged files: those of the rows, and the events' metadata columns."""
        event_columns = [pa.field(SEQUENCE, self.sequence_type), pa.field(PRESENT, pa.int32())]
        event_columns += [] if self.unchanged is None else [pa.field(MISSING_COLUMNS, pa.string())]
        return pa.schema([*self.row_schema, *event_columns])

    @property
    def planning_schema(self) -> pa.Schema:
        """The columns of staged events that the merge plan is computed from."""
        missing = [] if self.unchanged is None else [MISSING_COLUMNS]
        return pa.schema(
            [self.staged_schema.field(name) for name in (*self.keys, SEQUENCE, PRESENT, *missing)]
        )

    @property
    def recorded_schema(self) -> pa.Schema:
        """The columns of applied events, as they are recorded."""
        return pa.schema([self.staged_schema.field(name) for name in (*self.keys, SEQUENCE, PRESENT)])

    @property
    def version_schema(self) -> pa.Schema:
        """With history: the columns that identify a row version in the table."""
        return pa.schema([self.table_schema.field(name) for name in (*self.keys, VALID_FROM, VALID_TO)])

    @property
    def table_schema(self) -> pa.Schema:
        """The columns that the table must have."""
        validity = (
            [pa.field(name, self.sequence_type) for name in (VALID_FROM, VALID_TO)]
            if self.keeps_history
            else []
        )
        return pa.schema([*self.row_schema, *validity])


def event_layout(
    rows: spark.StructType,
    keys: Sequence[str],
    sequence_by: str,
    to_layout: Callable[[spark.StructType, Sequence[str]], ColumnLayout],
    *,
    history: bool,
    table: str,
) -> EventLayout:
    """Return the layout of the events in change rows; ``table`` is the table's name in messages.

    ``to_layout`` returns columns in the table's format, and refuses columns that it does not support.
    """
    require_change_columns(rows.names, sequence_by)
    unchanged = UnchangedValues.of(rows, keys)
    not_data = metadata_columns(unchanged)
    columns = tuple(name for name in rows.names if name not in not_data)
    reserved = [name for name in columns if name.lower() in _RESERVED_NAMES]
    if reserved:
        raise InvalidInputError(
            f"the rows have a column {in_quotes(reserved[0])}, a name that {table} reserves where changes "
            f"are applied: rename it, as with withColumnRenamed({in_quotes(reserved[0])}, …)",
            condition="INVALID_INPUT.COLUMN_NAME",
            columns=reserved,
        )
    row_columns = to_layout(spark.StructType([rows[name] for name in columns]), keys)
    sequence_column = to_layout(spark.StructType([rows[sequence_by]]), ()).schema.field(0)
    for key in row_columns.keys:
        _require_exact_type("keys", row_columns.schema.field(key))
    _require_exact_type("sequence_by", sequence_column)
    ties = tie_breakers(rows, sequence_by)
    return EventLayout(
        row_columns.schema,
        row_columns.keys,
        columns,
        sequence_column.type,
        sequence_by,
        history,
        unchanged,
        ties,
    )


def refuse_history(columns: Iterable[str], table_path: str, table: str) -> None:
    """Refuse to write with scd_type=1 to a table with history; ``table`` is its name in the message."""
    history_columns = [name for name in columns if name in (VALID_FROM, VALID_TO)]
    if history_columns:
        raise SchemaMismatchError(
            f"{table} keeps history, with a column {in_quotes(history_columns[0])}, and scd_type=1 would "
            "not: set scd_type=2, or use another table",
            condition="SCHEMA_MISMATCH.TABLE_DIFFERS",
            table=table_path,
        )


def _require_exact_type(parameter: str, column: pa.Field) -> None:
    if pat.is_nested(column.type) or pat.is_floating(column.type):
        raise InvalidInputError(
            f"{parameter} names {in_quotes(column.name)}, which is {column.type}, and keys and sequences "
            "need an exact comparison: cast it, as to bigint, decimal or string",
            condition="INVALID_INPUT.COLUMN_TYPE",
            parameter=parameter,
        )


def check_events(chunk: pa.RecordBatch, events: EventLayout, table: str) -> pa.RecordBatch:
    """Refuse collapsed events that cannot be applied, and drop the column ``ambiguous``."""
    require_changes(chunk, events.sequence_by)
    if pc.any(chunk.column("ambiguous")).as_py():
        ambiguous = chunk.filter(chunk.column("ambiguous"))
        key = {name: ambiguous.column(events.row_schema.names.index(name))[0].as_py() for name in events.keys}
        raise ambiguous_order_error(key_for_messages(key), table, events.sequence_by)
    if events.unchanged is not None:
        events.unchanged.require_resolvable(chunk.column("unknown"), table)
    return chunk.drop_columns(["ambiguous"])


def require_stored_values(unresolved: pa.Table, events: EventLayout, table: str) -> None:
    """Refuse events that omit values which no stored row has; called before anything is written."""
    if unresolved.num_rows and events.unchanged is not None:
        name = events.row_schema.names[column_numbers(unresolved[MISSING_COLUMNS][:1].to_pylist())[0]]
        key = key_for_messages({key: unresolved[key][0].as_py() for key in events.keys})
        raise events.unchanged.not_stored_error(name, table, key)


def collapse(frame: DataFrame, events: EventLayout) -> DataFrame:
    """Return the last event of each key, or with history the last event of each key and sequence.

    The columns are ``c0``, ``c1`` and so on; ``sequence``; ``present``; ``unknown`` if values may be left
    out; and ``ambiguous``, which is true if an event with another row has the same position in the order.
    Rows without a sequence or with an unknown change type pass through, so that the tasks refuse them.
    """
    data_columns = [f"c{n}" for n in range(len(events.query_columns))]
    projected = frame.select(
        *(
            F.col(quote_column(name)).alias(short)
            for name, short in zip(events.query_columns, data_columns, strict=True)
        ),
        F.col(quote_column(events.sequence_by)).alias("sequence"),
        *(F.col(quote_column(name)).alias(f"t{n}") for n, name in enumerate(events.tie_breakers)),
        present_column(),
        *([] if events.unchanged is None else [events.unchanged.missing_columns()]),
    )
    order = staged_order_columns(events.tie_breakers)
    keys = [
        short
        for name, short in zip(events.row_schema.names, data_columns, strict=True)
        if name in events.keys
    ]
    if events.unchanged is not None and events.unchanged.omittable_columns:
        projected = _carry_over_values(projected, events.unchanged.omittable_columns, keys, order)
    key_partition = Window.partitionBy(*keys, *(["sequence"] if events.keeps_history else []))
    invalid = F.col("sequence").isNull() | F.col("present").isNull()
    # The window frame of a row includes its peers, so the first row has the number of its peers.
    newest_first = key_partition.orderBy(invalid.desc(), *(F.col(name).desc() for name in order))
    last_events = (
        projected.withColumn("place", F.rank().over(newest_first))
        .withColumn("peers", F.count("*").over(newest_first))
        .where("place = 1")
    )
    # Peers are rare, so few rows are converted to JSON.
    digest = F.when(
        F.expr("peers > 1 and present = 1"), F.md5(F.to_json(F.struct(*data_columns), JSON_OPTIONS))
    )
    last_event = (
        last_events.withColumn("digest", digest)
        .withColumn("ambiguous", F.min("digest").over(newest_first) != F.max("digest").over(newest_first))
        .withColumn("number", F.row_number().over(newest_first))
        .where("number = 1")
    )
    output_columns = [name for name in projected.columns if name not in order[1:-1]]
    return last_event.select(*output_columns, F.coalesce("ambiguous", F.lit(False)).alias("ambiguous"))


def _carry_over_values(
    projected: DataFrame, numbers: Sequence[int], keys: Sequence[str], order: Sequence[str]
) -> DataFrame:
    """Carry omitted values over from earlier events of the key; ``unknown`` lists those still missing."""
    up_to_now = (
        Window.partitionBy(*keys).orderBy(*order).rowsBetween(Window.unboundedPreceding, Window.currentRow)
    )
    last_value = {n: f"last{n}" for n in numbers}
    has_value = {n: ~F.contains(F.coalesce("unknown", F.lit("")), F.lit(f",{n},")) for n in numbers}
    with_last_values = projected.select(
        "*",
        *(
            F.last(F.when(has_value[n] & (F.col("present") == 1), F.struct(f"c{n}")), ignorenulls=True)
            .over(up_to_now)
            .alias(last_value[n])
            for n in numbers
        ),
    )

    def column(name: str) -> Column:
        n = int(name[1:])
        if n not in last_value:
            return F.col(name)
        return F.when(has_value[n], F.col(name)).otherwise(F.col(f"{last_value[n]}.{name}")).alias(name)

    still_missing = F.concat(
        *(F.when(has_value[n] | F.col(last_value[n]).isNotNull(), "").otherwise(f",{n},") for n in numbers)
    )
    has_missing = F.substring("unknown", 1, 1) == ","
    data_columns = [name for name in projected.columns if name not in (*order, "unknown")]
    return with_last_values.select(
        *map(column, data_columns),
        *order,
        F.when(has_missing, F.nullif(still_missing, F.lit(""))).otherwise(F.col("unknown")).alias("unknown"),
    )
