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
from penstock.tables.iceberg.place import IcebergPlace

log = logging.getLogger("penstock.tables")

_ATTEMPTS = 10
_SIMPLE: tuple[tuple[type[spark.DataType], iceberg.PrimitiveType], ...] = (
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
    """The columns of a table, and where their values are in a query's rows."""

    schema: Schema
    spec_id: int
    places: tuple[int | None, ...]
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
        return [pa.nulls(rows.num_rows) if place is None else rows.column(place) for place in self.places]


def rows_layout(rows: spark.StructType, keys: Sequence[str]) -> RowLayout:
    """Return the layout of a query's schema."""
    ids = itertools.count(1)
    types = [(field.name, _type(field.dataType, ids)) for field in rows.fields]
    unknown = [
        f"{in_quotes(name)} is {rows[name].dataType.simpleString()}" for name, kind in types if kind is None
    ]
    if unknown:
        raise UnsupportedTypeError(
            f"an Iceberg table has no type for these columns: {'; '.join(unknown)}. Cast them, as with "
            "column.cast('string'), or drop them"
        )
    schema = pa.schema([field.with_nullable(True).remove_metadata() for field in canonical_schema(rows)])
    fields = tuple(_field(ids, name, kind) for name, kind in types if kind is not None)
    return RowLayout(schema, fields, tuple(_key(key, schema) for key in keys))


def table_schema(rows: RowLayout) -> Schema:
    """Return the schema of a new table for the rows."""
    return Schema(*rows.fields)


def match_table(place: IcebergPlace, rows: RowLayout, schema: Schema, spec_id: int) -> TableLayout:
    """Return the table's layout, or refuse rows that it cannot take."""
    found = {field.name: _match(field.name, schema) for field in rows.fields}
    differences = []
    for field in rows.fields:
        column = found[field.name]
        if column is None:
            differences.append(f"it has no column {in_quotes(field.name)}")
        elif not _takes(column.field_type, field.field_type, is_key=field.name in rows.keys):
            differences.append(
                f"column {in_quotes(column.name)} is {_shown(column.field_type)} in the table and "
                f"{_shown(field.field_type)} in the rows"
            )
    places = {column.field_id: rows.names.index(name) for name, column in found.items() if column is not None}
    differences += [
        f"its column {in_quotes(column.name)} takes no null, and the rows do not have it"
        for column in schema.fields
        if column.required and column.field_id not in places
    ]
    if differences:
        raise SchemaMismatchError(
            f"the Iceberg table {place.shown} does not take these rows: {'; '.join(differences)}. Select and "
            "cast the columns as the table has them, or drop the table if it is still empty; only output "
            "mode complete changes a table's columns",
            condition="SCHEMA_MISMATCH.TABLE_DIFFERS",
            table=place.shown,
            differences=differences,
        )
    keys = tuple(column.field_id for key in rows.keys if (column := found[key]) is not None)
    return TableLayout(schema, spec_id, tuple(places.get(f.field_id) for f in schema.fields), keys)


def new_columns(rows: RowLayout, table: Table | None) -> list[str]:
    """Return the columns of the rows that a table lacks; an empty list if the table does not exist."""
    if table is None:
        return []
    return [name for name in rows.names if _match(name, table.schema()) is None]


def evolve(place: IcebergPlace, rows: RowLayout) -> None:
    """Add the columns of the rows that the table lacks, and promote columns whose type is too narrow, except
    keys, in one commit.
    """
    from pyiceberg.exceptions import CommitFailedException

    types = {field.name: field.field_type for field in rows.fields}
    for attempt in range(_ATTEMPTS):
        table = place.find()
        names = [name for name in new_columns(rows, table) if name not in rows.keys]
        wider = {} if table is None else _promoted(rows, table.schema())
        if table is None or not (names or wider):
            return
        last = attempt == _ATTEMPTS - 1
        try:
            with (
                place.translating_errors(
                    "columns cannot be changed", beside=() if last else (CommitFailedException,)
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
            place.shown,
            ", ".join(changes),
            extra={"action": "table_evolves", "table": place.shown, "columns": changes},
        )
        return


def _promoted(rows: RowLayout, schema: Schema) -> dict[str, iceberg.IcebergType]:
    """Return the columns of a table that need a wider type for the rows, where Iceberg can promote them."""
    found = ((field, _match(field.name, schema)) for field in rows.fields if field.name not in rows.keys)
    return {
        column.name: field.field_type
        for field, column in found
        if column is not None and _is_promotion(column.field_type, field.field_type)
    }


def _takes(stored: iceberg.IcebergType, given: iceberg.IcebergType, *, is_key: bool) -> bool:
    """Whether a column takes values of a type: its own, or one from which it may have been promoted."""
    return _plain(stored) == _plain(given) or (not is_key and _is_promotion(given, stored))


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
    kept = {
        column.name
        for field in rows.fields
        if (column := _match(field.name, schema)) is not None
        and _plain(column.field_type) == _plain(field.field_type)
    }
    added = [
        field for field in rows.fields if (c := _match(field.name, schema)) is None or c.name not in kept
    ]
    dropped = [column.name for column in schema.fields if column.name not in kept]
    if not added and not dropped:
        return
    with transaction.update_schema(allow_incompatible_changes=True) as update:
        for name in dropped:
            update.delete_column((name,))
        for field in added:
            update.add_column((field.name,), field.field_type)


_PROMOTIONS = ((iceberg.IntegerType, iceberg.LongType), (iceberg.FloatType, iceberg.DoubleType))


def _type(kind: spark.DataType, ids: Iterator[int]) -> iceberg.IcebergType | None:
    """Return Iceberg's type for a Spark type; None if there is none."""
    if isinstance(kind, spark.DecimalType):
        return iceberg.DecimalType(kind.precision, kind.scale)
    if isinstance(kind, spark.ArrayType):
        element = _type(kind.elementType, ids)
        return element and iceberg.ListType(next(ids), element, element_required=False)
    if isinstance(kind, spark.MapType):
        key, value = _type(kind.keyType, ids), _type(kind.valueType, ids)
        if key is None or value is None:
            return None
        return iceberg.MapType(next(ids), key, next(ids), value, value_required=False)
    if isinstance(kind, spark.StructType):
        types = [(field.name, _type(field.dataType, ids)) for field in kind.fields]
        if not types or any(part is None for _, part in types):
            return None
        return iceberg.StructType(*(_field(ids, name, part) for name, part in types if part is not None))
    return next((found for simple, found in _SIMPLE if isinstance(kind, simple)), None)


def _field(ids: Iterator[int], name: str, kind: iceberg.IcebergType) -> iceberg.NestedField:
    return iceberg.NestedField(next(ids), name, kind, required=False)


def _key(key: str, schema: pa.Schema) -> str:
    name = next((name for name in (key, *schema.names) if name in schema.names and _same(name, key)), None)
    if name is None:
        raise InvalidInputError(
            f"the rows have no column {in_quotes(key)}, which keys names.{did_you_mean(key, schema.names)}",
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


def _match(name: str, schema: Schema) -> iceberg.NestedField | None:
    """Return the column with the name, or one whose name differs only in case."""
    same = [field for field in schema.fields if _same(field.name, name)]
    return next((field for field in same if field.name == name), same[0] if same else None)


def _same(name: str, other: str) -> bool:
    return name.lower() == other.lower()


def _plain(kind: iceberg.IcebergType) -> object:
    """Return a type without ids and nullability, for comparison."""
    if isinstance(kind, iceberg.StructType):
        return [(field.name, _plain(field.field_type)) for field in kind.fields]
    if isinstance(kind, iceberg.ListType):
        return ("list", _plain(kind.element_type))
    if isinstance(kind, iceberg.MapType):
        return ("map", _plain(kind.key_type), _plain(kind.value_type))
    return kind


def _shown(kind: iceberg.IcebergType) -> str:
    if isinstance(kind, iceberg.StructType):
        return f"struct<{', '.join(f'{field.name}: {_shown(field.field_type)}' for field in kind.fields)}>"
    if isinstance(kind, iceberg.ListType):
        return f"list<{_shown(kind.element_type)}>"
    if isinstance(kind, iceberg.MapType):
        return f"map<{_shown(kind.key_type)}, {_shown(kind.value_type)}>"
    return str(kind)
