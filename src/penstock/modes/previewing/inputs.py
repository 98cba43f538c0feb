"""Inputs of a preview: the caller's micro-batches as Arrow tables with one schema."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal

import pyarrow as pa
from pyspark.sql import DataFrame, Row, SparkSession, functions
from pyspark.sql.types import (
    DateType,
    DecimalType,
    DoubleType,
    FloatType,
    StringType,
    StructField,
    StructType,
    TimestampNTZType,
    TimestampType,
)

from penstock.arguments import did_you_mean, in_quotes, refusal
from penstock.arrow.python_rows import to_table
from penstock.arrow.schema import canonical_schema
from penstock.errors import InvalidInputError
from penstock.json_text import Json
from penstock.spark.schemas import quote_column, to_struct

_BATCH_KINDS = "a list of rows (dicts, or tuples and a schema), an Arrow table, a pandas or Spark DataFrame"
_EXPECTED = f"a list of micro-batches, each of them {_BATCH_KINDS}"
_EXAMPLE = 'such as [[{"id": 1}, {"id": 2}], [{"id": 3}]]'
_PARSED_FROM_TEXT = (DateType, TimestampType, TimestampNTZType)

_MAX_BATCHES = 90
"""The maximum number of micro-batches; Spark keeps the progress of a hundred."""

_Rows = list[Json]


@dataclass(frozen=True)
class Input:
    """One input of a transformation: a table for each of its micro-batches."""

    schema: StructType
    tables: tuple[pa.Table, ...]
    watermark: tuple[str, str] | None
    """The event-time column and the delay."""


def input_of(
    spark: SparkSession,
    name: str,
    batches: object,
    schema: object,
    watermark: tuple[str, str] | None = None,
) -> Input:
    """Convert one input's micro-batches to one schema."""
    declared = None if schema is None else _parse_schema(schema)
    raw_batches = [
        _read_batch(spark, batch, name, number, declared)
        for number, batch in enumerate(_check_batches(name, batches))
    ]
    struct = declared or _infer_schema(spark, name, raw_batches, watermark)
    nullable = StructType([StructField(field.name, field.dataType, True, field.metadata) for field in struct])
    canonical = canonical_schema(nullable)
    tables = [
        to_table(raw if isinstance(raw, pa.Table) else _rows_to_arrow(spark, name, raw, nullable), canonical)
        for raw in raw_batches
    ]
    return Input(nullable, tuple(tables), watermark)


def _check_batches(name: str, batches: object) -> Sequence[object]:
    if not isinstance(batches, list | tuple):
        raise refusal(name, batches, f"{_EXPECTED}, {_EXAMPLE}")
    if not batches:
        raise InvalidInputError(f"{name} is empty: pass {_EXPECTED}, {_EXAMPLE}", parameter=name)
    if any(isinstance(batch, Mapping | Row) for batch in batches):
        raise InvalidInputError(
            f"{name} is a list of rows, and must be a list of micro-batches: put each micro-batch's rows "
            f"into a list, {_EXAMPLE}",
            parameter=name,
        )
    if len(batches) > _MAX_BATCHES:
        raise InvalidInputError(
            f"a preview takes at most {_MAX_BATCHES} small micro-batches, not {len(batches)}: put the rows "
            "into fewer",
            batches=len(batches),
        )
    return batches


def _parse_schema(schema: object) -> StructType:
    if isinstance(schema, StructType):
        return schema
    if isinstance(schema, pa.Schema):
        return to_struct(schema)
    struct = StructType.fromDDL(schema) if isinstance(schema, str) else None
    if isinstance(struct, StructType):
        return struct
    raise refusal(
        "schema", schema, "DDL such as 'id bigint, ts timestamp', a pyspark StructType or a pyarrow.Schema"
    )


def _read_batch(
    spark: SparkSession, batch: object, name: str, number: int, schema: StructType | None
) -> pa.Table | _Rows:
    if isinstance(batch, DataFrame):
        if batch.isStreaming:
            raise InvalidInputError(
                f"micro-batch {number} of {name} is a streaming DataFrame: pass a batch DataFrame",
                condition="INVALID_INPUT.STREAMING",
            )
        return batch.toArrow()
    if isinstance(batch, pa.RecordBatch):
        return pa.Table.from_batches([batch])
    if isinstance(batch, pa.Table):
        return batch
    if type(batch).__module__.partition(".")[0] == "pandas":
        return spark.createDataFrame(batch).toArrow() if len(batch) else []  # type: ignore[arg-type]  # pandas has no stubs here
    if hasattr(batch, "__arrow_c_stream__"):
        return pa.RecordBatchReader.from_stream(batch).read_all()
    if isinstance(batch, list | tuple):
        return [_check_row(row, name, number, schema) for row in batch]
    raise refusal(f"micro-batch {number} of {name}", batch, _BATCH_KINDS)


def _check_row(row: object, name: str, number: int, schema: StructType | None) -> Json:
    where = f"micro-batch {number} of {name}"
    if isinstance(row, Row) and hasattr(row, "__fields__"):
        row = row.asDict()
    if isinstance(row, tuple | list) and schema is not None:
        if len(row) != len(schema):
            raise InvalidInputError(
                f"{where} has a row of {len(row)} values, and the schema has {len(schema)} columns: add or "
                "remove values",
                row=repr(row),
            )
        return dict(zip(schema.names, row, strict=True))
    if not isinstance(row, Mapping):
        raise refusal(f"a row in {where}", row, "a dict; or a tuple, with its columns in schema=")
    for key in row:
        if schema is not None and key not in schema.names:
            raise InvalidInputError(
                f"{where} has a row with {in_quotes(key)}, which is not a column of the schema."
                f"{did_you_mean(str(key), schema.names)}",
                condition="INVALID_INPUT.UNKNOWN_COLUMN",
                column=key,
            )
    return dict(row)


def _infer_schema(
    spark: SparkSession, name: str, parts: list[pa.Table | _Rows], watermark: tuple[str, str] | None
) -> StructType:
    tables = [part for part in parts if isinstance(part, pa.Table)]
    if tables:
        return to_struct(tables[0].schema)
    rows = [row for part in parts for row in part]
    names = list(dict.fromkeys(key for row in rows for key in row))
    if not names:
        raise InvalidInputError(f"{name} has no rows to infer the columns from: pass schema=", parameter=name)
    inferred = spark.createDataFrame([tuple(map(row.get, names)) for row in rows], names).schema
    types = {field.name: field.dataType for field in inferred}
    if watermark is not None and isinstance(types.get(watermark[0]), StringType):
        types[watermark[0]] = TimestampType()
    return StructType([StructField(column, kind) for column, kind in types.items()])


def _rows_to_arrow(spark: SparkSession, name: str, rows: _Rows, schema: StructType) -> pa.Table:
    """Convert rows in the way that Spark reads them, and dates and times in text in the way it casts them."""
    if not rows:
        return canonical_schema(schema).empty_table()
    for row in rows:
        if unknown := row.keys() - set(schema.names):
            raise InvalidInputError(
                f"{name} has a row with {in_quotes(min(unknown))}, which its Arrow tables do not have: use "
                "the same columns",
                condition="INVALID_INPUT.UNKNOWN_COLUMN",
                column=min(unknown),
            )
    values_by_column = {field.name: [row.get(field.name) for row in rows] for field in schema}
    spark_schema, columns = StructType(), []
    for field in schema:
        column = functions.col(quote_column(field.name))
        if isinstance(field.dataType, _PARSED_FROM_TEXT) and any(
            isinstance(value, str) for value in values_by_column[field.name]
        ):
            values_by_column[field.name] = [
                None if value is None else str(value) for value in values_by_column[field.name]
            ]
            field, column = StructField(field.name, StringType()), column.cast(field.dataType)
        else:
            values_by_column[field.name] = [
                _convert_integer(value, field) for value in values_by_column[field.name]
            ]
        spark_schema.add(field)
        columns.append(column.alias(field.name))
    values = list(zip(*values_by_column.values(), strict=True))
    return spark.createDataFrame(values, spark_schema).select(*columns).toArrow()


def _convert_integer(value: object, field: StructField) -> object:
    """Convert integers for float and decimal columns, for which Spark refuses them."""
    if isinstance(value, int) and not isinstance(value, bool):
        if isinstance(field.dataType, DoubleType | FloatType):
            return float(value)
        return Decimal(value) if isinstance(field.dataType, DecimalType) else value
    return value
