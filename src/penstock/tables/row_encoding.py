"""Encoding of rows for a SQL table: the projection in Spark, the chunks that tasks write, and the conversion
to the types of the database.

Projected rows have the columns ``c0``, ``c1`` and so on, with nested values as JSON text, and binary values
in PostgreSQL's text format. Change rows also have ``sequence``; ``present``, which is 0 for a delete, 1 for
an insert or update, and null for an unknown change type; ``t0`` and so on for tie breakers; and ``unknown``
if changes may leave values out.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, TypeVar

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as pat
from pyspark.sql import Column as SparkColumn
from pyspark.sql import DataFrame
from pyspark.sql import functions as F  # noqa: N812 - its usual name

from penstock.arrow.arrays import grouped
from penstock.spark.schemas import quote_column
from penstock.tables.columns import Column, Layout
from penstock.tables.row_checks import present_column
from penstock.tables.unchanged_values import MISSING_COLUMNS

if TYPE_CHECKING:
    from penstock.continuous.dataframe import ContinuousFrame

Frame = TypeVar("Frame", DataFrame, "ContinuousFrame")

JSON_OPTIONS = {
    "ignoreNullFields": "false",
    "timeZone": "UTC",
    "timestampFormat": "yyyy-MM-dd'T'HH:mm:ss.SSSSSSXXX",
    "timestampNTZFormat": "yyyy-MM-dd'T'HH:mm:ss.SSSSSS",
}
"""``to_json`` options for nested values: null fields are kept, and times are in UTC with microseconds."""
CHUNK_ROWS = 131_072
CHUNK_BYTES = 32 << 20
"""The number of rows, and of bytes, that a task buffers before it writes."""
_DAY, _SECOND = 86_400_000_000, 1_000_000


def project_rows(frame: Frame, layout: Layout) -> Frame:
    """Select the columns that tasks write."""
    selected: Frame = frame.select(
        *(_projection(name, column, layout) for name, column in layout.staged_columns.items())
    )
    return selected


def in_chunks(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Concatenate batches into chunks of at least `CHUNK_ROWS` or `CHUNK_BYTES`; the last may be smaller."""
    return (pa.concat_batches(group) for group in grouped(batches, CHUNK_ROWS, CHUNK_BYTES))


def _projection(name: str, column: Column, layout: Layout) -> SparkColumn:
    if name == "present":
        return present_column()
    if name == MISSING_COLUMNS and layout.unchanged is not None:
        return layout.unchanged.missing_columns()
    value = F.col(quote_column(column.name))
    if column.is_json:
        value = F.to_json(value, JSON_OPTIONS)
    elif layout.dialect == "postgres" and pat.is_binary(column.type):
        value = F.concat(F.lit("\\x"), F.hex(value))
    return value.alias(name)


def projected_schema(layout: Layout) -> pa.Schema:
    """Return the Arrow schema of projected rows."""
    return pa.schema(
        [(name, _projected_type(column, layout.dialect)) for name, column in layout.staged_columns.items()]
    )


def _projected_type(column: Column, dialect: str) -> pa.DataType:
    as_text = column.is_json or (dialect == "postgres" and pat.is_binary(column.type))
    return pa.string() if as_text else column.type


def database_schema(projected: pa.Schema, dialect: str) -> pa.Schema:
    """Return the schema of encoded rows: projected rows with the types of the database."""
    return pa.schema([pa.field(field.name, _database_type(field.type, dialect)) for field in projected])


def to_database_types(batch: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
    """Convert projected rows to a `database_schema`."""
    arrays = [_convert_array(array, field.type) for array, field in zip(batch.columns, schema, strict=True)]
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def _database_type(kind: pa.DataType, dialect: str) -> pa.DataType:
    if dialect == "postgres":
        # Arrow writes all other types to CSV in a format that PostgreSQL parses.
        return pa.string() if pat.is_duration(kind) else kind
    if pat.is_boolean(kind):
        return pa.int8()
    if pat.is_duration(kind):
        return pa.int64()
    if pat.is_integer(kind) or pat.is_floating(kind) or pat.is_binary(kind):
        return kind
    return pa.string()


def _convert_array(array: pa.Array, target_type: pa.DataType) -> pa.Array:
    if array.type.equals(target_type):
        return array
    if pat.is_duration(array.type) and pat.is_string(target_type):
        return _format_intervals(array.cast(pa.int64()))
    if pat.is_time(array.type):
        array = array.cast(pa.time64("us"))
    return array.cast(target_type)


def _format_intervals(micros: pa.Array) -> pa.Array:
    """Format durations as intervals of integers, which PostgreSQL 13 also parses; all parts have one sign."""
    days = pc.divide(micros, _DAY)
    remainder = pc.subtract(micros, pc.multiply(days, _DAY))
    seconds = pc.divide(remainder, _SECOND)
    parts = (days, seconds, pc.subtract(remainder, pc.multiply(seconds, _SECOND)))
    texts = [part.cast(pa.string()) for part in parts]
    units = ("days", "seconds", "microseconds")
    return pc.binary_join_element_wise(*(x for pair in zip(texts, units, strict=True) for x in pair), " ")
