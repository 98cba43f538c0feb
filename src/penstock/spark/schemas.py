"""Schemas of queues in Spark, metadata columns of reads, and metadata of feeds about their columns."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Sequence

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as pat
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - its usual name
from pyspark.sql.types import StructField, StructType

from penstock.arguments import did_you_mean, in_quotes
from penstock.arrow.schema import canonical_schema, is_wider, spark_json
from penstock.errors import SchemaMismatchError
from penstock.queue.checks import refuse_feed
from penstock.store.log.reading import Chunk
from penstock.store.records.catalog import QueueRecord

QUEUE_METADATA = (
    pa.field("_queue", pa.string(), nullable=False),
    pa.field("_generation", pa.int64(), nullable=False),
    pa.field("_partition", pa.int32(), nullable=False),
    pa.field("_row_index", pa.int64(), nullable=False),
    pa.field("_timestamp", pa.timestamp("us", tz="UTC"), nullable=False),
)
COORDINATES = ("_queue", "_generation", "_partition", "_row_index")
"""The metadata columns that identify a row; a recreated queue has another generation."""


def source_schema(schema: pa.Schema, metadata_columns: bool) -> pa.Schema:
    """Return the Arrow schema of a read."""
    if not metadata_columns:
        return schema
    conflicts = {name.lower() for name in schema.names}.intersection(field.name for field in QUEUE_METADATA)
    if conflicts:
        raise SchemaMismatchError(
            f"includeMetadataColumns adds {', '.join(sorted(conflicts))}, which the queue already has: leave "
            "the option out",
            condition="SCHEMA_MISMATCH.RESERVED_COLUMN",
            columns=sorted(conflicts),
        )
    return pa.schema([*schema, *QUEUE_METADATA])


def to_struct(schema: pa.Schema) -> StructType:
    return StructType.fromJson(json.loads(spark_json(schema)))


def is_case_sensitive(spark: SparkSession) -> bool:
    """Return whether names that differ only in case are different columns."""
    return bool(spark.conf.get("spark.sql.caseSensitive") == "true")


def quote_column(name: str) -> str:
    return f"`{name.replace('`', '``')}`"


def numbered_columns(frame: DataFrame) -> DataFrame:
    """Rename the columns to c0, c1 and so on: mapInArrow does not accept all names."""
    return frame.select(*(F.col(quote_column(name)).alias(f"c{n}") for n, name in enumerate(frame.columns)))


def projection(requested: StructType, full: pa.Schema) -> pa.Schema:
    """Return the columns of the requested schema; refuse those that the queue does not have."""
    columns = canonical_schema(requested)
    for field in columns:
        index = full.get_field_index(field.name)
        if index < 0:
            raise SchemaMismatchError(
                f"the read's schema has a column {in_quotes(field.name)}, which does not exist."
                f"{did_you_mean(field.name, full.names)}",
                condition="SCHEMA_MISMATCH.UNKNOWN_COLUMN",
                column=field.name,
            )
        if not full.field(index).type.equals(field.type):
            raise SchemaMismatchError(
                f"the read's schema has {in_quotes(field.name)} as {field.type}, but the column is "
                f"{full.field(index).type}: read it as that, then cast it",
                condition="SCHEMA_MISMATCH.COLUMN_TYPE",
                column=field.name,
                expected=str(full.field(index).type),
                found=str(field.type),
            )
        if full.field(index).nullable and not field.nullable:
            raise SchemaMismatchError(
                f"the read's schema has {in_quotes(field.name)} as NOT NULL, but the column may be null: "
                "leave out NOT NULL",
                condition="SCHEMA_MISMATCH.NOT_NULL",
                column=field.name,
            )
    return columns


def require_columns(queue: QueueRecord, read: pa.Schema) -> None:
    """Refuse a queue that was recreated without a column of the read, or with another type for it.

    Raises
    ------
    SchemaMismatchError
        ``SCHEMA_MISMATCH.QUEUE_RECREATED``
    """
    metadata = {field.name for field in QUEUE_METADATA}
    for field in read:
        index = queue.schema.get_field_index(field.name)
        if index < 0 and field.name in metadata:
            continue
        current = None if index < 0 else queue.schema.field(index)
        if current is None or not _is_readable(field, current):
            current_type = "missing" if current is None else _type_text(current)
            raise SchemaMismatchError(
                f"queue {in_quotes(queue.name)} was dropped and recreated after the query looked up its "
                f"columns: {in_quotes(field.name)} is now {current_type}, and the query reads "
                f"{_type_text(field)}. Start the query again",
                condition="SCHEMA_MISMATCH.QUEUE_RECREATED",
                queue=queue.name,
                column=field.name,
            )


def _is_readable(field: pa.Field, current: pa.Field) -> bool:
    """Whether a read can use a queue's column, whose type may be wider by now."""
    is_same_or_wider = current.type == field.type or is_wider(current.type, field.type)
    return is_same_or_wider and (field.nullable or not current.nullable)


def _type_text(field: pa.Field) -> str:
    return str(field.type) if field.nullable else f"{field.type} NOT NULL"


def to_output_batch(chunk: Chunk, queue: QueueRecord, schema: pa.Schema) -> pa.RecordBatch:
    """Return the rows of a chunk in the schema of a read, with metadata columns."""
    if chunk.batch.schema.equals(schema):
        return chunk.batch
    metadata: dict[str, Callable[[], pa.Array]] = {
        "_queue": lambda: pa.repeat(queue.name, chunk.batch.num_rows),
        "_generation": lambda: pa.repeat(pa.scalar(queue.generation, pa.int64()), chunk.batch.num_rows),
        "_partition": lambda: pa.repeat(pa.scalar(chunk.partition, pa.int32()), chunk.batch.num_rows),
        "_row_index": lambda: _consecutive(chunk.start, chunk.batch.num_rows),
        "_timestamp": lambda: _timestamps(chunk),
    }
    queue_columns = set(chunk.batch.schema.names)
    arrays = [
        chunk.batch.column(name) if name in queue_columns else metadata[name]() for name in schema.names
    ]
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def _consecutive(start: int, count: int) -> pa.Array:
    return pc.add(pc.cumulative_sum(pa.repeat(pa.scalar(1, pa.int64()), count)), start - 1)


def _timestamps(chunk: Chunk) -> pa.Array:
    if chunk.runs is not None:
        return chunk.runs.timestamps().view(QUEUE_METADATA[-1].type)
    return pa.repeat(pa.scalar(chunk.first_timestamp, QUEUE_METADATA[-1].type), chunk.batch.num_rows)


def check_writable(frame: StructType, queue: QueueRecord) -> None:
    """Refuse the queue of a change feed, and a DataFrame that does not fit a queue, before anything runs."""
    refuse_feed(queue)
    schema, name = canonical_schema(frame), queue.name
    _check_columns(schema.names, queue.schema, name)
    for field in queue.schema:
        index = _index(schema.names, field.name)
        if index is not None and not _fits(schema.field(index).type, field.type):
            raise SchemaMismatchError(
                f"column {in_quotes(field.name)} of queue {in_quotes(name)} is {field.type}, but the "
                f"DataFrame has {schema.field(index).type}: cast it first",
                condition="SCHEMA_MISMATCH.COLUMN_TYPE",
                column=field.name,
                expected=str(field.type),
                found=str(schema.field(index).type),
            )


def _check_columns(names: Sequence[str], queue: pa.Schema, name: str) -> None:
    known = {column.lower() for column in queue.names}
    for column in names:
        if column.lower() not in known:
            raise SchemaMismatchError(
                f"queue {in_quotes(name)} has no column "
                f"{in_quotes(column)}.{did_you_mean(column, queue.names)} Drop or rename it, or add it to "
                "the queue with add_columns",
                condition="SCHEMA_MISMATCH.UNKNOWN_COLUMN",
                column=column,
            )
    for field in queue:
        if not field.nullable and _index(names, field.name) is None:
            raise SchemaMismatchError(
                f"column {in_quotes(field.name)} of queue {in_quotes(name)} may not be null, and the "
                "DataFrame has no such column: add it",
                condition="SCHEMA_MISMATCH.MISSING_COLUMN",
                column=field.name,
                expected=str(field.type),
            )


def _index(names: Sequence[str], requested: str) -> int | None:
    if requested in names:
        return list(names).index(requested)
    lower = [name.lower() for name in names]
    return lower.index(requested.lower()) if requested.lower() in lower else None


def _fits(actual: pa.DataType, expected: pa.DataType) -> bool:
    """Return whether all values of a type fit into the expected one; nulls are checked with the data."""
    if actual.equals(expected) or pat.is_null(actual):
        return True
    if pat.is_decimal(actual) and pat.is_decimal(expected):
        fits_integer_digits = expected.precision - expected.scale >= actual.precision - actual.scale
        return bool(fits_integer_digits and expected.scale >= actual.scale)
    if pat.is_struct(actual) and pat.is_struct(expected):
        return _struct_fits(actual, expected)
    if pat.is_map(actual) and pat.is_map(expected):
        return _fits(actual.key_type, expected.key_type) and _fits(actual.item_type, expected.item_type)
    if pat.is_list(actual) and pat.is_list(expected):
        return _fits(actual.value_type, expected.value_type)
    same_kind = any(kind(actual) and kind(expected) for kind in (pat.is_integer, pat.is_floating))
    return same_kind and bool(actual.bit_width <= expected.bit_width)


def _struct_fits(actual: pa.StructType, expected: pa.StructType) -> bool:
    names = [field.name for field in actual]
    indices = [_index(names, field.name) for field in expected]
    if len(set(indices) - {None}) < len(names):
        return False
    return all(
        field.nullable if index is None else _fits(actual.field(index).type, field.type)
        for index, field in zip(indices, expected, strict=True)
    )


_ROW_ID, _VALUE, _UNCHANGED = "penstock.rowId", "penstock.value", "penstock.unchanged"
_STEP, _STEPS, _SPLIT = "penstock.step", "penstock.steps", "penstock.split"


def with_feed_metadata(
    schema: StructType,
    row_id: Collection[str],
    *,
    unchanged: str | None = None,
    sequence: str | None = None,
    ordered: str | None = None,
    split: bool = False,
) -> StructType:
    """Add what a feed guarantees about its columns to their metadata, so that sinks find it after renames.

    Spark keeps the metadata of a column in selections and renames; computed columns have none. ``row_id``
    identifies rows. ``unchanged`` is the column with the names of columns that have unchanged TOAST values.
    ``sequence`` orders the changes of a row inside a commit; with ``split``, a commit may span several
    micro-batches. ``ordered`` is a column that every selection of change rows keeps. If a commit may have
    several changes of a row, its metadata says that ``sequence`` is required as well.
    """

    def add_marks(field: StructField) -> StructField:
        marks: dict[str, object] = {}
        if field.name in row_id:
            marks[_ROW_ID] = True
        if field.name == unchanged:
            marks[_UNCHANGED] = True
        elif unchanged is not None:
            field = _with_feed_name(field)
        if field.name == sequence:
            marks |= {_STEP: True, _SPLIT: True} if split else {_STEP: True}
        if field.name == ordered and sequence in schema.names:
            marks[_STEPS] = sequence
        return _add_metadata(field, marks)

    return StructType([add_marks(field) for field in schema])


def row_id_columns(schema: StructType) -> list[str]:
    """Return the current names of the columns that identify rows."""
    return [field.name for field in schema if field.metadata.get(_ROW_ID)]


def unchanged_column(schema: StructType) -> str | None:
    """Return the current name of the column that lists unchanged TOAST values, if there is one."""
    return next((field.name for field in schema if field.metadata.get(_UNCHANGED)), None)


def sequence_column(schema: StructType) -> str | None:
    """Return the current name of the column that orders a row's changes inside a commit, if any."""
    return next((field.name for field in schema if field.metadata.get(_STEP)), None)


def is_split(schema: StructType) -> bool:
    """Return whether a commit with several changes of a row may span several micro-batches."""
    return any(field.metadata.get(_SPLIT) for field in schema)


def required_sequence(schema: StructType) -> str | None:
    """Return the feed's name for the sequence column, if a commit may have several changes of a row."""
    return next((str(field.metadata[_STEPS]) for field in schema if _STEPS in field.metadata), None)


def feed_column(field: StructField) -> str | None:
    """Return the feed's name for a column that may have unchanged TOAST values; None if it was computed."""
    return field.metadata.get(_VALUE)


def _with_feed_name(field: StructField) -> StructField:
    if isinstance(field.dataType, StructType):
        # A feed of several tables has a struct for each table, and names the columns inside.
        inner = StructType([_with_feed_name(column) for column in field.dataType])
        field = StructField(field.name, inner, field.nullable, field.metadata)
    return _add_metadata(field, {_VALUE: field.name})


def _add_metadata(field: StructField, marks: dict[str, object]) -> StructField:
    return StructField(field.name, field.dataType, field.nullable, {**field.metadata, **marks})
