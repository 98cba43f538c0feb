"""Schemas of Iceberg tables, and their comparison with the rows of a query."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.types as pat
from pyiceberg import types as iceberg
from pyiceberg.schema import Schema
from pyiceberg.table import Table, Transaction
from pyspark.sql import types as spark

from penstock.arguments import did_you_mean, in_quotes
from penstock.arrow.schema import canonical_schema
from penstock.errors import InvalidInputError, SchemaMismatchError, UnsupportedTypeError
from penstock.tables.iceberg.location import IcebergLocation

log = logging.getLogger("penstock.tables")

_ATTEMPTS = 10
_PRIMITIVE_TYPES: tuple[tuple[type[spark.DataType], iceberg.PrimitiveType], ...] = (
    (spark.BooleanType, iceberg.BooleanType()),
    (spark.ByteType, iceberg.IntegerType()),
    (spark.ShortType, iceberg.IntegerType()),
    (spark.IntegerType, iceberg.IntegerType()),
    (spark.LongType, iceberg.LongType()),
    (spark.FloatType, iceberg.FloatType()),
    (spark.DoubleType, iceberg.DoubleType()),
    (spark.StringType, iceberg.StringType()),
    (spark.CharType, iceberg.StringType()),
    (spark.VarcharType, iceberg.StringType()),
    (spark.BinaryType, iceberg.BinaryType()),
    (spark.DateType, iceberg.DateType()),
    (spark.TimeType, iceberg.TimeType()),
    (spark.TimestampType, iceberg.TimestamptzType()),
    (spark.TimestampNTZType, iceberg.TimestampType()),
)


@dataclass(frozen=True)
class RowLayout:
    """The columns of a query's rows."""

    schema: pa.Schema
    """The schema in which tasks get the rows, with the rows' own names."""
    fields: tuple[iceberg.NestedField, ...]
    """The columns as fields of an Iceberg table, with arbitrary ids."""
    keys: tuple[str, ...]
    """The key columns, with the rows' names."""

    @property
    def names(self) -> list[str]:
        return list(self.schema.names)


@dataclass(frozen=True)
class TableLayout:
    """The columns of a table, and the matching columns of a query's rows."""

    schema: Schema
    spec_id: int
    row_columns: tuple[int | None, ...]
    """For each column of the table, the index of the rows' column; None if the rows lack it."""
    keys: tuple[int, ...]
    """The field ids of the key columns."""

    @property
    def key_names(self) -> list[str]:
        return [self.schema.find_field(key).name for key in self.keys]

    @property
    def key_schema(self) -> Schema:
        return Schema(*(self.schema.find_field(key) for key in self.keys))

    def values(self, rows: pa.Table) -> list[pa.ChunkedArray | pa.Array]:
        """Return the values of each column of the table; nulls for columns that the rows lack."""
        return [
            pa.nulls(rows.num_rows) if position is None else rows.column(position)
            for position in self.row_columns
        ]


def rows_layout(rows: spark.StructType, keys: Sequence[str]) -> RowLayout:
    """Return the layout of a query's schema."""
    ids = itertools.count(1)
    types = [(field.name, _iceberg_type(field.dataType, ids)) for field in rows.fields]
    unsupported = [
        f"{in_quotes(name)} is {rows[name].dataType.simpleString()}" for name, kind in types if kind is None
    ]
    if unsupported:
        raise UnsupportedTypeError(
            f"an Iceberg table has no type for these columns: {'; '.join(unsupported)}. Cast them, as with "
            "column.cast('string'), or drop them"
        )
    schema = pa.schema([field.with_nullable(True).remove_metadata() for field in canonical_schema(rows)])
    fields = tuple(_nested_field(ids, name, kind) for name, kind in types if kind is not None)
    return RowLayout(schema, fields, tuple(_key_column(key, schema) for key in keys))


def table_schema(rows: RowLayout) -> Schema:
    """Return the schema of a new table for the rows."""
    return Schema(*rows.fields)


def match_table(location: IcebergLocation, rows: RowLayout, schema: Schema, spec_id: int) -> TableLayout:
    """Return the table's layout, or refuse rows that it does not accept."""
    matches = {field.name: _match_column(field.name, schema) for field in rows.fields}
    differences = []
    for field in rows.fields:
        column = matches[field.name]
        if column is None:
            differences.append(f"it has no column {in_quotes(field.name)}")
        elif not _can_store(column.field_type, field.field_type, is_key=field.name in rows.keys):
            differences.append(
                f"column {in_quotes(column.name)} is {_type_for_messages(column.field_type)} in the table "
                f"and {_type_for_messages(field.field_type)} in the rows"
            )
    positions = {
        column.field_id: rows.names.index(name) for name, column in matches.items() if column is not None
    }
    differences += [
        f"its column {in_quotes(column.name)} does not allow nulls, and the rows do not have it"
        for column in schema.fields
        if column.required and column.field_id not in positions
    ]
    if differences:
        raise SchemaMismatchError(
            f"the Iceberg table {location.label} does not accept these rows: {'; '.join(differences)}. "
            "Select and cast the columns as the table has them, or drop the table if it is still empty; only "
            "output mode complete changes a table's columns",
            condition="SCHEMA_MISMATCH.TABLE_DIFFERS",
            table=location.label,
            differences=differences,
        )
    keys = tuple(column.field_id for key in rows.keys if (column := matches[key]) is not None)
    return TableLayout(schema, spec_id, tuple(positions.get(f.field_id) for f in schema.fields), keys)


def new_columns(rows: RowLayout, table: Table | None) -> list[str]:
    """Return the columns of the rows that a table lacks; an empty list if the table does not exist."""
    if table is None:
        return []
    return [name for name in rows.names if _match_column(name, table.schema()) is None]


def evolve(location: IcebergLocation, rows: RowLayout) -> None:
    """Add the columns of the rows that the table lacks, and promote columns whose type is too narrow, except
    keys, in one commit.
    """
    from pyiceberg.exceptions import CommitFailedException

    types = {field.name: field.field_type for field in rows.fields}
    for attempt in range(_ATTEMPTS):
        table = location.find()
        names = [name for name in new_columns(rows, table) if name not in rows.keys]
        wider = {} if table is None else _columns_to_promote(rows, table.schema())
        if table is None or not (names or wider):
            return
        last = attempt == _ATTEMPTS - 1
        try:
            with (
                location.translating_errors(
                    "columns cannot be changed", untranslated=() if last else (CommitFailedException,)
                ),
                table.update_schema() as update,
            ):
                for name in names:
                    update.add_column((name,), types[name])
                for name, kind in wider.items():
                    update.update_column((name,), kind)
        except CommitFailedException:
            continue
        changes = [
            *(f"add column {name}" for name in names),
            *(f"alter column {name} type {kind}" for name, kind in wider.items()),
        ]
        log.info(
            "the Iceberg table %s is changed to take new rows: %s",
            location.label,
            ", ".join(changes),
            extra={"action": "table_evolves", "table": location.label, "columns": changes},
        )
        return


def _columns_to_promote(rows: RowLayout, schema: Schema) -> dict[str, iceberg.IcebergType]:
    """Return the columns of a table to promote for the rows, with their new types, where Iceberg can."""
    matches = (
        (field, _match_column(field.name, schema)) for field in rows.fields if field.name not in rows.keys
    )
    return {
        column.name: field.field_type
        for field, column in matches
        if column is not None and _is_promotion(column.field_type, field.field_type)
    }


def _can_store(stored: iceberg.IcebergType, row_type: iceberg.IcebergType, *, is_key: bool) -> bool:
    """Whether a column accepts values of a type: its own, or one that Iceberg can promote to its own."""
    return _comparable_type(stored) == _comparable_type(row_type) or (
        not is_key and _is_promotion(row_type, stored)
    )


def _is_promotion(stored: iceberg.IcebergType, wanted: iceberg.IcebergType) -> bool:
    """Whether Iceberg can promote a type (specification, version 2, "Schema Evolution")."""
    if isinstance(stored, iceberg.DecimalType) and isinstance(wanted, iceberg.DecimalType):
        return wanted.scale == stored.scale and wanted.precision > stored.precision
    return any(isinstance(stored, a) and isinstance(wanted, b) for a, b in _PROMOTIONS)


def replace_columns(rows: RowLayout, transaction: Transaction) -> None:
    """Change the columns of a table to those of the rows, in a transaction that replaces all rows.

    A column whose type changes gets a new id, like a new column.
    """
    schema = transaction.table_metadata.schema()
    kept_names = {
        column.name
        for field in rows.fields
        if (column := _match_column(field.name, schema)) is not None
        and _comparable_type(column.field_type) == _comparable_type(field.field_type)
    }
    added = [
        field
        for field in rows.fields
        if (c := _match_column(field.name, schema)) is None or c.name not in kept_names
    ]
    dropped = [column.name for column in schema.fields if column.name not in kept_names]
    if not added and not dropped:
        return
    with transaction.update_schema(allow_incompatible_changes=True) as update:
        for name in dropped:
            update.delete_column((name,))
        for field in added:
            update.add_column((field.name,), field.field_type)


_PROMOTIONS = ((iceberg.IntegerType, iceberg.LongType), (iceberg.FloatType, iceberg.DoubleType))


def _iceberg_type(kind: spark.DataType, ids: Iterator[int]) -> iceberg.IcebergType | None:
    """Return the Iceberg type for a Spark type; None if there is none."""
    if isinstance(kind, spark.DecimalType):
        return iceberg.DecimalType(kind.precision, kind.scale)
    if isinstance(kind, spark.ArrayType):
        element = _iceberg_type(kind.elementType, ids)
        return element and iceberg.ListType(next(ids), element, element_required=False)
    if isinstance(kind, spark.MapType):
        key, value = _iceberg_type(kind.keyType, ids), _iceberg_type(kind.valueType, ids)
        if key is None or value is None:
            return None
        return iceberg.MapType(next(ids), key, next(ids), value, value_required=False)
    if isinstance(kind, spark.StructType):
        types = [(field.name, _iceberg_type(field.dataType, ids)) for field in kind.fields]
        if not types or any(part is None for _, part in types):
            return None
        return iceberg.StructType(
            *(_nested_field(ids, name, part) for name, part in types if part is not None)
        )
    return next((iceberg_type for simple, iceberg_type in _PRIMITIVE_TYPES if isinstance(kind, simple)), None)


def _nested_field(ids: Iterator[int], name: str, kind: iceberg.IcebergType) -> iceberg.NestedField:
    return iceberg.NestedField(next(ids), name, kind, required=False)


def _key_column(key: str, schema: pa.Schema) -> str:
    name = next(
        (name for name in (key, *schema.names) if name in schema.names and _same_name(name, key)), None
    )
    if name is None:
        raise InvalidInputError(
            f"the rows have no column {in_quotes(key)}, which is in keys.{did_you_mean(key, schema.names)}",
            condition="INVALID_INPUT.UNKNOWN_COLUMN",
            parameter="keys",
        )
    kind = schema.field(name).type
    if pat.is_nested(kind):
        raise InvalidInputError(
            f"the key {in_quotes(name)} is {kind}, and rows are matched only by simple values: select one of "
            "its fields as a column",
            condition="INVALID_INPUT.COLUMN_TYPE",
            parameter="keys",
        )
    if pat.is_floating(kind):
        raise InvalidInputError(
            f"the key {in_quotes(name)} is {kind}, and keys need an exact comparison: cast it, as to bigint, "
            "decimal or string",
            condition="INVALID_INPUT.COLUMN_TYPE",
            parameter="keys",
        )
    return str(name)


def _match_column(name: str, schema: Schema) -> iceberg.NestedField | None:
    """Return the column with the name, or one whose name differs only in case."""
    same = [field for field in schema.fields if _same_name(field.name, name)]
    return next((field for field in same if field.name == name), same[0] if same else None)


def _same_name(name: str, other: str) -> bool:
    return name.lower() == other.lower()


def _comparable_type(kind: iceberg.IcebergType) -> object:
    """Return a type without ids and nullability, for comparison."""
    if isinstance(kind, iceberg.StructType):
        return [(field.name, _comparable_type(field.field_type)) for field in kind.fields]
    if isinstance(kind, iceberg.ListType):
        return ("list", _comparable_type(kind.element_type))
    if isinstance(kind, iceberg.MapType):
        return ("map", _comparable_type(kind.key_type), _comparable_type(kind.value_type))
    return kind


def _type_for_messages(kind: iceberg.IcebergType) -> str:
    if isinstance(kind, iceberg.StructType):
        fields = (f"{field.name}: {_type_for_messages(field.field_type)}" for field in kind.fields)
        return f"struct<{', '.join(fields)}>"
    if isinstance(kind, iceberg.ListType):
        return f"list<{_type_for_messages(kind.element_type)}>"
    if isinstance(kind, iceberg.MapType):
        return f"map<{_type_for_messages(kind.key_type)}, {_type_for_messages(kind.value_type)}>"
    return str(kind)
