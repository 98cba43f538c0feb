"""The micro-batches that somebody gives to a preview, as Arrow tables of one schema."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

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
from penstock.arrow.coerce import to_table
from penstock.arrow.schema import canonical_schema
from penstock.errors import InvalidInput
from penstock.spark.schemas import quote_column, to_struct

_WANTED = (
    "a list of micro-batches, each of them a list of rows (dicts, or tuples and a schema), an Arrow table, a pandas or Spark "
    "DataFrame"
)
_SO = 'such as [[{"id": 1}, {"id": 2}], [{"id": 3}]]'
_READ_FROM_TEXT = (DateType, TimestampType, TimestampNTZType)

_MOST_BATCHES = 90
"""Spark keeps what it says of a hundred."""

_Rows = list[dict[str, Any]]


@dataclass(frozen=True)
class Input:
    """One input of a transformation: a table for each of its micro-batches."""

    schema: StructType
    tables: tuple[pa.Table, ...]


def input_of(
    spark: SparkSession, name: str, batches: object, schema: object, times: Collection[str] = ()
) -> Input:
    """Bring one input's micro-batches into one schema.

    Parameters
    ----------
    name
        What messages call the input.
    schema
        DDL text, a ``StructType`` or a ``pyarrow.Schema``; that of the rows when None.
    times
        Columns that are timestamps even where the rows hold text.

    Raises
    ------
    InvalidInput
        It is no list of micro-batches, or a schema is needed.
    SchemaMismatch
        Rows do not fit the schema.
    """
    given = _checked(name, batches)
    wanted = None if schema is None else _struct(schema)
    found = [_read(spark, batch, name, number, wanted) for number, batch in enumerate(given)]
    struct = wanted or _inferred(spark, name, found, times)
    nullable = StructType([StructField(each.name, each.dataType, True, each.metadata) for each in struct])
    canonical = canonical_schema(nullable)
    tables = [
        to_table(each if isinstance(each, pa.Table) else _arrow(spark, name, each, nullable), canonical)
        for each in found
    ]
    return Input(nullable, tuple(tables))


def _checked(name: str, batches: object) -> Sequence[object]:
    if not isinstance(batches, list | tuple):
        raise refusal(name, batches, f"{_WANTED}, {_SO}")
    if not batches:
        raise InvalidInput(f"{name} is empty: give {_WANTED}, {_SO}", parameter=name)
    if any(isinstance(batch, Mapping | Row) for batch in batches):
        raise InvalidInput(
            f"{name} is a list of rows, and has to be a list of micro-batches: put the rows of each into a list, {_SO}",
            parameter=name,
        )
    if len(batches) > _MOST_BATCHES:
        raise InvalidInput(
            f"a preview is for a few small micro-batches, {_MOST_BATCHES} at the most, not for {len(batches)}: put the rows into fewer",
            batches=len(batches),
        )
    return batches


def _struct(schema: object) -> StructType:
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


def _read(
    spark: SparkSession, batch: object, name: str, number: int, schema: StructType | None
) -> pa.Table | _Rows:
    if isinstance(batch, DataFrame):
        if batch.isStreaming:
            raise InvalidInput(f"micro-batch {number} of {name} is a streaming DataFrame: give one at rest")
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
        return [_row(row, name, number, schema) for row in batch]
    raise refusal(f"micro-batch {number} of {name}", batch, _WANTED.partition(", each of them ")[2])


def _row(row: object, name: str, number: int, schema: StructType | None) -> dict[str, Any]:
    where = f"micro-batch {number} of {name}"
    if isinstance(row, Row) and hasattr(row, "__fields__"):
        row = row.asDict()
    if isinstance(row, tuple | list) and schema is not None:
        if len(row) != len(schema):
            raise InvalidInput(
                f"{where} has a row of {len(row)} values, the schema has {len(schema)} columns", row=repr(row)
            )
        return dict(zip(schema.names, row, strict=True))
    if not isinstance(row, Mapping):
        raise refusal(f"a row in {where}", row, "a dict; or a tuple, and schema= says its columns")
    for key in row if schema is not None else ():
        if schema is not None and key not in schema.names:
            raise InvalidInput(
                f"{where} has a row with {in_quotes(key)}, which is no column of the schema."
                f"{did_you_mean(str(key), schema.names)}",
                column=key,
            )
    return dict(row)


def _inferred(
    spark: SparkSession, name: str, found: list[pa.Table | _Rows], times: Collection[str]
) -> StructType:
    tables = [each for each in found if isinstance(each, pa.Table)]
    if tables:
        return to_struct(tables[0].schema)
    rows = [row for each in found for row in each]
    names = list(dict.fromkeys(key for row in rows for key in row))
    if not names:
        raise InvalidInput(
            f"{name} has no rows to tell the columns by: say them with schema=", parameter=name
        )
    struct = spark.createDataFrame([tuple(map(row.get, names)) for row in rows], names).schema
    return StructType(
        [
            StructField(each.name, TimestampType())
            if each.name in times and isinstance(each.dataType, StringType)
            else each
            for each in struct
        ]
    )


def _arrow(spark: SparkSession, name: str, rows: _Rows, schema: StructType) -> pa.Table:
    """Rows as Spark reads them, and besides dates and times in text as Spark casts them."""
    if not rows:
        return canonical_schema(schema).empty_table()
    for row in rows:
        if unknown := row.keys() - set(schema.names):
            raise InvalidInput(
                f"{name} has a row with {in_quotes(min(unknown))}, which is no column of the Arrow tables beside it",
                column=min(unknown),
            )
    texts = {field.name for field in schema if _is_in_text(field, rows)}
    loose = StructType([_loose(field) if field.name in texts else field for field in schema])
    values = [
        tuple(
            _text(row.get(field.name)) if field.name in texts else _value(row.get(field.name), field)
            for field in loose
        )
        for row in rows
    ]
    columns = [
        functions.col(quote_column(field.name)).cast(field.dataType).alias(field.name)
        if field.name in texts
        else functions.col(quote_column(field.name))
        for field in schema
    ]
    return spark.createDataFrame(values, loose).select(*columns).toArrow()


def _is_in_text(field: StructField, rows: _Rows) -> bool:
    return isinstance(field.dataType, _READ_FROM_TEXT) and any(
        isinstance(row.get(field.name), str) for row in rows
    )


def _loose(field: StructField) -> StructField:
    return StructField(field.name, StringType())


def _text(value: Any) -> str | None:
    return None if value is None else str(value)


def _value(value: Any, field: StructField) -> Any:
    """A value as Spark takes it, which refuses whole numbers for floats and decimals."""
    if isinstance(value, int) and not isinstance(value, bool):
        if isinstance(field.dataType, DoubleType | FloatType):
            return float(value)
        return Decimal(value) if isinstance(field.dataType, DecimalType) else value
    return value
