"""The columns of a table, and the SQL type that each Spark type becomes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.types as pat

from penstock.arrow.fields import mark_of
from penstock.arrow.types import canonical_schema
from penstock.errors import InvalidInput, UnsupportedType
from penstock.names import did_you_mean, in_quotes
from penstock.tables.names import TableName, quoted

_POSTGRES = {
    pa.bool_(): "boolean",
    pa.int8(): "smallint",
    pa.int16(): "smallint",
    pa.int32(): "integer",
    pa.int64(): "bigint",
    pa.float32(): "real",
    pa.float64(): "double precision",
    pa.string(): "text",
    pa.binary(): "bytea",
    pa.date32(): "date",
    pa.null(): "text",
    pa.time64("ns"): "time without time zone",
    pa.duration("us"): "interval",
    pa.timestamp("us", tz="UTC"): "timestamp with time zone",
    pa.timestamp("us"): "timestamp without time zone",
}
_SQLITE = {
    pa.bool_(): "INTEGER",
    pa.int8(): "INTEGER",
    pa.int16(): "INTEGER",
    pa.int32(): "INTEGER",
    pa.int64(): "INTEGER",
    pa.float32(): "REAL",
    pa.float64(): "REAL",
    pa.binary(): "BLOB",
    pa.duration("us"): "INTEGER",
}


@dataclass(frozen=True)
class Column:
    """One column of a table."""

    name: str
    type: pa.DataType
    """Of the DataFrame's column, in the canonical Arrow form."""
    sql_type: str
    key: bool = False

    @property
    def sql(self) -> str:
        return quoted(self.name)

    @property
    def is_json(self) -> bool:
        return bool(pat.is_nested(self.type))


@dataclass(frozen=True)
class Layout:
    """A table as a query keeps it."""

    name: TableName
    columns: tuple[Column, ...]
    dialect: str

    @property
    def keys(self) -> tuple[Column, ...]:
        return tuple(column for column in self.columns if column.key)


def layout_of(name: TableName, schema: object, keys: Sequence[str], dialect: str) -> Layout:
    """The table for the rows of a DataFrame.

    Parameters
    ----------
    schema
        The DataFrame's schema.
    keys
        The names of the columns that make a row's key.

    Raises
    ------
    UnsupportedType, SchemaMismatch, InvalidInput
        When a column has no SQL type, or a key is not there, or cannot be one.
    """
    fields = list(canonical_schema(schema))
    names = [field.name for field in fields]
    for key in keys:
        if key not in names:
            raise InvalidInput(
                f"the key {in_quotes(key)} is no column of the rows.{did_you_mean(key, names)} They have {', '.join(names)}",
                parameter="keys",
            )
    columns = tuple(
        Column(field.name, field.type, sql_type(field, dialect), field.name in keys) for field in fields
    )
    for column in columns:
        if column.key and column.is_json:
            raise InvalidInput(
                f"the key {in_quotes(column.name)} is nested, and a database compares plain values: use its fields as keys",
                parameter="keys",
            )
    return Layout(name, columns, dialect)


def sql_type(field: pa.Field, dialect: str) -> str:
    """The native type of a canonical field."""
    found = field.type
    mark = mark_of(found) if pat.is_struct(found) else None
    if mark is not None and mark[0] != "variant":
        raise UnsupportedType(
            f"column {in_quotes(field.name)} is a {mark[0]}, which a table has no type for: write st_asbinary(column)",
            column=field.name,
            found=mark[0],
        )
    if dialect == "sqlite":
        return _SQLITE.get(found, "TEXT")
    if pat.is_nested(found):
        return "jsonb"
    if pat.is_decimal(found):
        return f"numeric({found.precision},{found.scale})"
    return _POSTGRES[found]
