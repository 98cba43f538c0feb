"""The columns of a Delta table and those of the rows that go into it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
from pyspark.sql import types as spark

from penstock.arguments import did_you_mean, in_quotes
from penstock.arrow.schema import canonical_schema
from penstock.errors import InvalidInput, SchemaMismatch, UnsupportedType
from penstock.lake.delta_location import DeltaPlace, library

_SIMPLE = (
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
    """What the rows look like: the schema that tasks stage, with the table's names for the columns."""

    schema: pa.Schema
    keys: tuple[str, ...]
    """As the table names them."""


def rows_layout(found: spark.StructType, keys: Sequence[str]) -> DeltaLayout:
    """The layout of rows that make their own table.

    Raises
    ------
    UnsupportedType
        Naming each column that Delta has no type for.
    InvalidInput
        When a key is no column of theirs, or cannot be compared.
    """
    unknown = [
        f"{in_quotes(field.name)} is {field.dataType.simpleString()}"
        for field in found.fields
        if not _known(field.dataType)
    ]
    if unknown:
        raise UnsupportedType(
            f"a Delta table has no type for these columns: {'; '.join(unknown)}. Cast them, as with column.cast('string'), or drop them"
        )
    schema = pa.schema([field.with_nullable(True).remove_metadata() for field in canonical_schema(found)])
    return DeltaLayout(schema, tuple(_key(key, schema) for key in keys))


def fitting(place: DeltaPlace, layout: DeltaLayout, table: Any) -> DeltaLayout:
    """The layout with the table's names for its columns.

    Raises
    ------
    SchemaMismatch
        Naming each difference.
    """
    there = {field["name"]: field for field in json.loads(table.schema().to_json())["fields"]}
    with place.plainly():
        given = library("deltalake").Schema.from_arrow(layout.schema)
    names, wrong = [], []
    for field in json.loads(given.to_json())["fields"]:
        name = _match(field["name"], there)
        if name is None:
            wrong.append(f"it has no column {in_quotes(field['name'])}")
        elif _plain(field["type"]) != _plain(there[name]["type"]):
            wrong.append(
                f"column {in_quotes(name)} is {_shown(there[name]['type'])} there and {_shown(field['type'])} in the rows"
            )
        names.append(name or field["name"])
    for name, field in there.items():
        if name not in names and not field["nullable"]:
            wrong.append(f"its column {in_quotes(name)} takes no null, and the rows do not have it")
    if wrong:
        raise SchemaMismatch(
            f"the Delta table {place.shown} does not take these rows: {'; '.join(wrong)}. Select and cast the columns as the table has "
            "them; only output mode complete changes a table's columns. A table that a query made and has not filled yet can be deleted "
            "with its folder, and is made anew",
            table=place.shown,
            differences=wrong,
        )
    renamed = dict(zip(layout.schema.names, names, strict=True))
    schema = pa.schema([field.with_name(name) for field, name in zip(layout.schema, names, strict=True)])
    return DeltaLayout(schema, tuple(renamed[key] for key in layout.keys))


def _known(found: spark.DataType) -> bool:
    if isinstance(found, spark.ArrayType):
        return _known(found.elementType)
    if isinstance(found, spark.MapType):
        return _known(found.keyType) and _known(found.valueType)
    if isinstance(found, spark.StructType):
        return all(_known(field.dataType) for field in found.fields)
    return isinstance(found, _SIMPLE)


def _key(key: str, schema: pa.Schema) -> str:
    name = _match(key, schema.names)
    if name is None:
        raise InvalidInput(
            f"the rows have no column {in_quotes(key)}, which is named as a key.{did_you_mean(key, schema.names)}",
            parameter="keys",
        )
    if pa.types.is_nested(schema.field(name).type):
        raise InvalidInput(
            f"the key {in_quotes(name)} is {schema.field(name).type}, and rows are found by simple values: give a field of it a column of "
            "its own",
            parameter="keys",
        )
    return name


def _match(name: str, names: Any) -> str | None:
    return name if name in names else next(_alike(name, names), None)


def _alike(name: str, names: Any) -> Iterator[str]:
    return (each for each in names if each.lower() == name.lower())


def _plain(kind: Any) -> Any:
    """A Delta type as JSON, without what may be null and without metadata."""
    if not isinstance(kind, dict):
        return kind
    if kind["type"] == "struct":
        return [(field["name"], _plain(field["type"])) for field in kind["fields"]]
    return {name: _plain(part) for name, part in kind.items() if not name.lower().endswith("containsnull")}


def _shown(kind: Any) -> str:
    return kind if isinstance(kind, str) else json.dumps(_plain(kind))
