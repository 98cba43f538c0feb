"""Schemas of Delta tables, and their comparison with the rows of a query."""

from __future__ import annotations

import json
import logging
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import types as spark

from penstock.arguments import did_you_mean, in_quotes
from penstock.arrow.schema import canonical_schema
from penstock.errors import InvalidInputError, SchemaMismatchError, TableRefusedError, UnsupportedTypeError
from penstock.json_text import Json
from penstock.lake.storage import DeltaLocation, import_deltalake

if TYPE_CHECKING:
    from deltalake import DeltaTable

log = logging.getLogger("penstock.tables")
_ATTEMPTS = 10
_HIVE_NULL = "__HIVE_DEFAULT_PARTITION__"
"""The text that stands for NULL in the names of partition folders."""
_SIMPLE_TYPES = (
    spark.BooleanType,
    spark.ByteType,
    spark.ShortType,
    spark.IntegerType,
    spark.LongType,
    spark.FloatType,
    spark.DoubleType,
    spark.DecimalType,
    spark.StringType,
    spark.CharType,
    spark.VarcharType,
    spark.BinaryType,
    spark.DateType,
    spark.TimestampType,
    spark.TimestampNTZType,
)


@dataclass(frozen=True)
class DeltaLayout:
    """The schema of staged rows, with the table's column names."""

    schema: pa.Schema
    keys: tuple[str, ...]
    """The key columns, with the table's names."""


def rows_layout(rows: spark.StructType, keys: Sequence[str]) -> DeltaLayout:
    """Return the layout for a query's schema."""
    unsupported = [
        f"{in_quotes(field.name)} is {field.dataType.simpleString()}"
        for field in rows.fields
        if not _is_supported(field.dataType)
    ]
    if unsupported:
        raise UnsupportedTypeError(
            f"a Delta table has no type for these columns: {'; '.join(unsupported)}. Cast them, as with "
            "column.cast('string'), or drop them"
        )
    schema = pa.schema([field.with_nullable(True).remove_metadata() for field in canonical_schema(rows)])
    return DeltaLayout(schema, tuple(_key_column(key, schema) for key in keys))


def match_table(location: DeltaLocation, layout: DeltaLayout, table: DeltaTable) -> DeltaLayout:
    """Return the layout with the table's names for its columns."""
    existing = {field["name"]: field for field in json.loads(table.schema().to_json())["fields"]}
    with location.translating_errors():
        rows = import_deltalake("deltalake").Schema.from_arrow(layout.schema)
    names, differences = [], []
    for field in json.loads(rows.to_json())["fields"]:
        name = _match_name(field["name"], existing)
        if name is None:
            differences.append(f"it has no column {in_quotes(field['name'])}")
        elif comparable_type(field["type"]) != comparable_type(existing[name]["type"]):
            differences.append(
                f"column {in_quotes(name)} is {_type_for_messages(existing[name]['type'])} in the table and "
                f"{_type_for_messages(field['type'])} in the rows"
            )
        names.append(name or field["name"])
    for name, field in existing.items():
        if name not in names and not field["nullable"]:
            differences.append(
                f"its column {in_quotes(name)} does not allow nulls, and the rows do not have it"
            )
    if differences:
        raise SchemaMismatchError(
            f"the Delta table {location.label} does not accept these rows: {'; '.join(differences)}. Select "
            "and cast the columns as the table has them, or delete its folder if it is still empty; only "
            "output mode complete changes a table's columns",
            condition="SCHEMA_MISMATCH.TABLE_DIFFERS",
            table=location.label,
            differences=differences,
        )
    renamed = dict(zip(layout.schema.names, names, strict=True))
    schema = pa.schema([field.with_name(name) for field, name in zip(layout.schema, names, strict=True)])
    return DeltaLayout(schema, tuple(renamed[key] for key in layout.keys))


def require_partitioning(location: DeltaLocation, table: DeltaTable) -> None:
    """Refuse partitioning by a binary column, and partition values that deltalake treats as NULL.

    deltalake misreads such values in the log, and would write wrong ones when it rewrites rows.
    """
    partition_names = table.metadata().partition_columns
    for field in json.loads(table.schema().to_json())["fields"] if partition_names else ():
        if field["name"] in partition_names and field["type"] == "binary":
            raise TableRefusedError(
                f"the Delta table {location.label} is partitioned by {in_quotes(field['name'])}, whose "
                "binary values deltalake changes when it rewrites rows: partition it by text, such as "
                "hex(column)",
                condition="TABLE_REFUSED.PARTITIONING",
                table=location.label,
            )
    with location.translating_errors():
        partitions = table.partitions() if partition_names else []
    for partition in partitions:
        for column, value in partition.items():
            if value == _HIVE_NULL:
                raise _mistaken_for_null_error(f"the Delta table {location.label} has rows with", column)


def partition_columns(table: DeltaTable) -> tuple[str, ...]:
    """Return the columns that a table is partitioned by."""
    return tuple(table.metadata().partition_columns)


def require_partition_values(rows: pa.RecordBatch | pa.Table, columns: Collection[str], table: str) -> None:
    """Refuse text in partition columns that deltalake treats as NULL."""
    texts = {field.name for field in rows.schema if pa.types.is_string(field.type)}
    for column in texts.intersection(columns):
        if pc.any(pc.equal(rows.column(column), _HIVE_NULL)).as_py():
            raise _mistaken_for_null_error(f"a row for {table} has", column)


def _mistaken_for_null_error(location: str, column: str) -> TableRefusedError:
    return TableRefusedError(
        f"{location} the text {_HIVE_NULL} in the partition column {in_quotes(column)}. It stands for NULL "
        "in the names of a Delta table's folders, so deltalake would write NULL: use another text",
        condition="TABLE_REFUSED.PARTITION_VALUE",
        column=column,
    )


def new_columns(layout: DeltaLayout, table: DeltaTable | None) -> list[str]:
    """Return the columns of the rows that a table lacks; an empty list if the table does not exist."""
    if table is None:
        return []
    existing = [field.name for field in table.schema().fields]
    return [name for name in layout.schema.names if _match_name(name, existing) is None]


def add_columns(location: DeltaLocation, layout: DeltaLayout) -> None:
    """Add the columns of the rows that the table lacks, except keys, in one commit."""
    deltalake, conflict = (
        import_deltalake("deltalake"),
        import_deltalake("deltalake.exceptions").CommitFailedError,
    )
    for _ in range(_ATTEMPTS):
        table = location.find()
        names = [name for name in new_columns(layout, table) if name not in layout.keys]
        if table is None or not names:
            return
        with suppress(conflict), location.translating_errors(untranslated=(conflict,)):
            fields = deltalake.Schema.from_arrow(pa.schema([layout.schema.field(name) for name in names]))
            table.alter.add_columns(fields.fields)
            log.info(
                "the Delta table %s is changed to take new rows: add column %s",
                location.label,
                ", ".join(names),
                extra={"action": "table_evolves", "table": location.label, "columns": names},
            )
            return


def _is_supported(kind: spark.DataType) -> bool:
    if isinstance(kind, spark.ArrayType):
        return _is_supported(kind.elementType)
    if isinstance(kind, spark.MapType):
        return _is_supported(kind.keyType) and _is_supported(kind.valueType)
    if isinstance(kind, spark.StructType):
        return all(_is_supported(field.dataType) for field in kind.fields)
    return isinstance(kind, _SIMPLE_TYPES)


def _key_column(key: str, schema: pa.Schema) -> str:
    name = _match_name(key, schema.names)
    if name is None:
        raise InvalidInputError(
            f"the rows have no column {in_quotes(key)}, which is in keys.{did_you_mean(key, schema.names)}",
            condition="INVALID_INPUT.UNKNOWN_COLUMN",
            parameter="keys",
        )
    if pa.types.is_nested(schema.field(name).type):
        raise InvalidInputError(
            f"the key {in_quotes(name)} is {schema.field(name).type}, and rows are matched only by simple "
            "values: select one of its fields as a column",
            condition="INVALID_INPUT.COLUMN_TYPE",
            parameter="keys",
        )
    return name


def _match_name(name: str, names: Collection[str]) -> str | None:
    """Return the matching name, which may differ in case."""
    if name in names:
        return name
    return next((other for other in names if other.lower() == name.lower()), None)


def comparable_type(kind: Json | str) -> object:
    """Return a Delta type in JSON without nullability and metadata, for comparison."""
    if not isinstance(kind, dict):
        return kind
    if kind["type"] == "struct":
        return [(field["name"], comparable_type(field["type"])) for field in kind["fields"]]
    return {
        name: comparable_type(part)
        for name, part in kind.items()
        if not name.lower().endswith("containsnull")
    }


def _type_for_messages(kind: Json | str) -> str:
    return kind if isinstance(kind, str) else json.dumps(comparable_type(kind))
