"""Spark's view of a queue's schema, and the service columns."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as pat
from pyspark.sql import SparkSession
from pyspark.sql.types import StructType

from penstock.arguments import did_you_mean, in_quotes
from penstock.arrow.schema import canonical_schema, spark_json
from penstock.errors import SchemaMismatch
from penstock.store.log.partition_log import Chunk
from penstock.store.records.catalog import QueueRecord

SERVICE_FIELDS = (
    pa.field("_queue", pa.string(), nullable=False),
    pa.field("_generation", pa.int64(), nullable=False),
    pa.field("_partition", pa.int32(), nullable=False),
    pa.field("_row_index", pa.int64(), nullable=False),
    pa.field("_timestamp", pa.timestamp("us", tz="UTC"), nullable=False),
)
COORDINATES = ("_queue", "_generation", "_partition", "_row_index")
"""The service columns that tell each row from every other one; a queue that is made anew has another generation."""


def source_schema(schema: pa.Schema, service_columns: bool) -> pa.Schema:
    """The Arrow schema of a read.

    Raises
    ------
    SchemaMismatch
        When a column of the queue has a service column's name.
    """
    if not service_columns:
        return schema
    taken = {name.lower() for name in schema.names}.intersection(field.name for field in SERVICE_FIELDS)
    if taken:
        raise SchemaMismatch(
            f"includeServiceColumns adds {', '.join(sorted(taken))}, which the queue has as columns of its own: "
            "leave the option out",
            columns=sorted(taken),
        )
    return pa.schema([*schema, *SERVICE_FIELDS])


def to_struct(schema: pa.Schema) -> StructType:
    return StructType.fromJson(json.loads(spark_json(schema)))


def is_case_sensitive(spark: SparkSession) -> bool:
    """Whether the session tells apart names that differ in case alone."""
    return bool(spark.conf.get("spark.sql.caseSensitive") == "true")


def quote_column(name: str) -> str:
    """A column's name as Spark's expressions take it literally."""
    return f"`{name.replace('`', '``')}`"


def projection(requested: StructType, full: pa.Schema) -> pa.Schema:
    """The columns to read: those of the schema that the user gave to the reader, or all.

    Raises
    ------
    SchemaMismatch
        When a column is not there, or of another type.
    """
    wanted = canonical_schema(requested)
    for field in wanted:
        index = full.get_field_index(field.name)
        if index < 0:
            raise SchemaMismatch(
                f"the schema given to the read has a column {in_quotes(field.name)}, which is not there."
                f"{did_you_mean(field.name, full.names)}",
                column=field.name,
            )
        if not full.field(index).type.equals(field.type):
            raise SchemaMismatch(
                f"the schema given to the read has {in_quotes(field.name)} as {field.type}, it is {full.field(index).type}: "
                "read it as it is, then cast it",
                column=field.name,
                expected=str(full.field(index).type),
                found=str(field.type),
            )
        if full.field(index).nullable and not field.nullable:
            raise SchemaMismatch(
                f"the schema given to the read has {in_quotes(field.name)} as NOT NULL, and it may be null: leave that out",
                column=field.name,
            )
    return wanted


def to_output_batch(chunk: Chunk, queue: QueueRecord, partition: int, schema: pa.Schema) -> pa.RecordBatch:
    """The chunk's rows in a read's schema, service columns included."""
    if chunk.batch.schema.equals(schema):
        return chunk.batch
    service: dict[str, Callable[[], pa.Array]] = {
        "_queue": lambda: pa.repeat(queue.name, chunk.batch.num_rows),
        "_generation": lambda: pa.repeat(pa.scalar(queue.generation, pa.int64()), chunk.batch.num_rows),
        "_partition": lambda: pa.repeat(pa.scalar(partition, pa.int32()), chunk.batch.num_rows),
        "_row_index": lambda: _consecutive(chunk.start, chunk.batch.num_rows),
        "_timestamp": lambda: _timestamps(chunk),
    }
    there = set(chunk.batch.schema.names)
    arrays = [chunk.batch.column(name) if name in there else service[name]() for name in schema.names]
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def _consecutive(start: int, count: int) -> pa.Array:
    return pc.add(pc.cumulative_sum(pa.repeat(pa.scalar(1, pa.int64()), count)), start - 1)


def _timestamps(chunk: Chunk) -> pa.Array:
    if chunk.runs is not None:
        return chunk.runs.timestamps().view(SERVICE_FIELDS[-1].type)
    return pa.repeat(pa.scalar(chunk.first_timestamp, SERVICE_FIELDS[-1].type), chunk.batch.num_rows)


def check_writable(frame: StructType, queue: pa.Schema, name: str) -> None:
    """Refuse a DataFrame that cannot go into the queue, before anything runs.

    Raises
    ------
    SchemaMismatch
        Naming the columns, what is expected and what was found.
    """
    found = canonical_schema(frame)
    _check_columns(found.names, queue, name)
    for field in queue:
        index = _index(found.names, field.name)
        if index is not None and not _fits(found.field(index).type, field.type):
            raise SchemaMismatch(
                f"column {in_quotes(field.name)} of queue {in_quotes(name)} is {field.type}, the DataFrame has "
                f"{found.field(index).type}: cast it first",
                column=field.name,
                expected=str(field.type),
                found=str(found.field(index).type),
            )


def _check_columns(found: Sequence[str], queue: pa.Schema, name: str) -> None:
    known = {column.lower() for column in queue.names}
    for column in found:
        if column.lower() not in known:
            raise SchemaMismatch(
                f"queue {in_quotes(name)} has no column {in_quotes(column)}.{did_you_mean(column, queue.names)} Drop or "
                "rename it, or add it to the queue with add_columns",
                column=column,
            )
    for field in queue:
        if not field.nullable and _index(found, field.name) is None:
            raise SchemaMismatch(
                f"column {in_quotes(field.name)} of queue {in_quotes(name)} may not be null, and the DataFrame has no such "
                "column",
                column=field.name,
                expected=str(field.type),
            )


def _index(names: Sequence[str], wanted: str) -> int | None:
    if wanted in names:
        return list(names).index(wanted)
    lower = [name.lower() for name in names]
    return lower.index(wanted.lower()) if wanted.lower() in lower else None


def _fits(found: pa.DataType, expected: pa.DataType) -> bool:
    """Whether every value of one type is one of the other; nullability is checked where the data is."""
    if found.equals(expected) or pat.is_null(found):
        return True
    if pat.is_decimal(found) and pat.is_decimal(expected):
        whole = expected.precision - expected.scale >= found.precision - found.scale
        return bool(whole and expected.scale >= found.scale)
    if pat.is_struct(found) and pat.is_struct(expected):
        return _struct_fits(found, expected)
    if pat.is_map(found) and pat.is_map(expected):
        return _fits(found.key_type, expected.key_type) and _fits(found.item_type, expected.item_type)
    if pat.is_list(found) and pat.is_list(expected):
        return _fits(found.value_type, expected.value_type)
    same_kind = any(kind(found) and kind(expected) for kind in (pat.is_integer, pat.is_floating))
    return same_kind and bool(found.bit_width <= expected.bit_width)


def _struct_fits(found: pa.StructType, expected: pa.StructType) -> bool:
    names = [field.name for field in found]
    places = [_index(names, field.name) for field in expected]
    if len(set(places) - {None}) < len(names):
        return False
    return all(
        field.nullable if place is None else _fits(found.field(place).type, field.type)
        for place, field in zip(places, expected, strict=True)
    )
