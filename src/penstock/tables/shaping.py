"""Rows on their way from Spark into a database: what Spark itself does, and what its tasks do with Arrow."""

from __future__ import annotations

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as pat
from pyspark.sql import Column as SparkColumn
from pyspark.sql import DataFrame
from pyspark.sql import functions as F  # noqa: N812 - its usual name

from penstock.spark.schemas import quote_column
from penstock.tables.change_rows import present
from penstock.tables.columns import Column, Layout
from penstock.tables.untouched_values import UNKNOWN

JSON = {
    "ignoreNullFields": "false",
    "timeZone": "UTC",
    "timestampFormat": "yyyy-MM-dd'T'HH:mm:ss.SSSSSSXXX",
    "timestampNTZFormat": "yyyy-MM-dd'T'HH:mm:ss.SSSSSS",
}
"""How nested values are written: every field, the times in UTC and to the microsecond."""
_DAY, _SECOND = 86_400_000_000, 1_000_000


def shaped(frame: DataFrame, layout: Layout) -> DataFrame:
    """The rows with the columns c0, c1 and so on, nested ones as JSON text, binary ones in PostgreSQL's form of text.

    Changes have two more: ``sequence``, and ``present``, which is 0 for a row that is gone, 1 for one that is there, and null for
    a change of no known type; ``t0`` and so on where they have an order inside a commit, and where they may leave values out,
    ``unknown``.
    """
    columns = [_expression(column, layout.dialect).alias(f"c{n}") for n, column in enumerate(layout.columns)]
    if layout.sequence is not None:
        sequence = _expression(layout.sequence, layout.dialect).alias("sequence")
        columns += [sequence, present()]
    columns += [_expression(tie, layout.dialect).alias(f"t{n}") for n, tie in enumerate(layout.ties)]
    if layout.unchanged is not None:
        columns += [layout.unchanged.unknown()]
    return frame.select(*columns)


def _expression(column: Column, dialect: str) -> SparkColumn:
    found = F.col(quote_column(column.name))
    if column.is_json:
        return F.to_json(found, JSON)
    if dialect == "postgres" and pat.is_binary(column.type):
        return F.concat(F.lit("\\x"), F.hex(found))
    return found


def shaped_schema(layout: Layout) -> pa.Schema:
    """The Arrow schema of shaped rows; null is refused in the keys alone, where they are staged."""
    fields = [(f"c{n}", _shaped_type(column, layout.dialect)) for n, column in enumerate(layout.columns)]
    if layout.sequence is not None:
        sequence = _shaped_type(layout.sequence, layout.dialect)
        fields += [("sequence", sequence), ("present", pa.int32())]
    fields += [(f"t{n}", _shaped_type(tie, layout.dialect)) for n, tie in enumerate(layout.ties)]
    if layout.unchanged is not None:
        fields += [(UNKNOWN, pa.string())]
    return pa.schema(fields)


def _shaped_type(column: Column, dialect: str) -> pa.DataType:
    as_text = column.is_json or (dialect == "postgres" and pat.is_binary(column.type))
    return pa.string() if as_text else column.type


def staged_schema(shaped: pa.Schema, dialect: str) -> pa.Schema:
    """The schema of rows that are ready for the database."""
    return pa.schema([pa.field(field.name, _staged_type(field.type, dialect)) for field in shaped])


def ready(batch: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
    """Shaped rows in the schema of those that are ready for the database."""
    arrays = [_ready(array, field.type) for array, field in zip(batch.columns, schema, strict=True)]
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def _staged_type(found: pa.DataType, dialect: str) -> pa.DataType:
    if dialect == "postgres":
        # Arrow writes the others as PostgreSQL reads them.
        return pa.string() if pat.is_duration(found) else found
    if pat.is_boolean(found):
        return pa.int8()
    if pat.is_duration(found):
        return pa.int64()
    if pat.is_integer(found) or pat.is_floating(found) or pat.is_binary(found):
        return found
    return pa.string()


def _ready(array: pa.Array, wanted: pa.DataType) -> pa.Array:
    if array.type.equals(wanted):
        return array
    if pat.is_duration(array.type) and pat.is_string(wanted):
        return _interval(array.cast(pa.int64()))
    if pat.is_time(array.type):
        array = array.cast(pa.time64("us"))
    return array.cast(wanted)


def _interval(micros: pa.Array) -> pa.Array:
    """Whole numbers that PostgreSQL 13 takes too; each has the sign of the whole, as division goes towards zero."""
    days = pc.divide(micros, _DAY)
    rest = pc.subtract(micros, pc.multiply(days, _DAY))
    seconds = pc.divide(rest, _SECOND)
    parts = (days, seconds, pc.subtract(rest, pc.multiply(seconds, _SECOND)))
    texts = [part.cast(pa.string()) for part in parts]
    units = ("days", "seconds", "microseconds")
    return pc.binary_join_element_wise(*(x for pair in zip(texts, units, strict=True) for x in pair), " ")
