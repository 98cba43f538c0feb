"""The columns of a table, and the SQL type that each Spark type becomes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import pyarrow as pa
import pyarrow.types as pat

from penstock.arguments import did_you_mean, in_quotes
from penstock.arrow.schema import canonical_schema
from penstock.arrow.spark_json import mark_of
from penstock.errors import InvalidInput, UnsupportedType
from penstock.feeds.contract import CHANGE_COLUMNS, CHANGE_TYPE
from penstock.tables.names import TableName, quoted
from penstock.tables.untouched_values import Unchanged

VALID_FROM, VALID_TO = "_valid_from", "_valid_to"

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
    ordered: bool = False
    """Whether rows are put in an order by it."""

    @property
    def sql(self) -> str:
        return quoted(self.name)

    @property
    def declared(self) -> str:
        """The type of a column that is made: text that orders rows does so by its bytes, in PostgreSQL as in Spark and SQLite."""
        return 'text collate "C"' if self.ordered and self.sql_type == "text" else self.sql_type

    @property
    def is_json(self) -> bool:
        return bool(pat.is_nested(self.type))


@dataclass(frozen=True)
class Layout:
    """A table as a query keeps it."""

    name: TableName
    columns: tuple[Column, ...]
    dialect: str
    sequence: Column | None = None
    """Where the rows are changes, the column that orders the changes of a key; it need not be one of the table's."""

    history: bool = False
    """Whether every version of a row is kept."""

    unchanged: Unchanged | None = None
    """Where the rows are changes that may leave values out."""

    ties: tuple[Column, ...] = ()
    """Where the rows are changes, the columns that order those of a key with one sequence."""

    @property
    def keys(self) -> tuple[Column, ...]:
        return tuple(column for column in self.columns if column.key)

    @property
    def order(self) -> list[str]:
        """The names among staged rows of what orders the changes of a key; a row that is there comes after one that is gone."""
        return staged_order(self.ties)

    @property
    def staged_keys(self) -> list[str]:
        """The names that the keys have among staged rows."""
        return [f"c{n}" for n, column in enumerate(self.columns) if column.key]

    def same_key(self, kept: str, staged: str) -> str:
        """The condition that a row of the table and a staged one have one key."""
        pairs = zip(self.keys, self.staged_keys, strict=True)
        return " and ".join(f"{kept}.{key.sql} = {staged}.{column}" for key, column in pairs)

    @property
    def kept(self) -> Layout:
        """The table as it is in the database: a version's key has the sequence with which it began."""
        if self.sequence is None or not self.history:
            return self
        begins = replace(self.sequence, name=VALID_FROM, key=True)
        return replace(self, columns=(*self.columns, begins, replace(begins, name=VALID_TO, key=False)))


def layout_of(
    name: TableName,
    schema: object,
    keys: Sequence[str],
    dialect: str,
    *,
    changes: str | None = None,
    history: bool = False,
    unchanged: Unchanged | None = None,
    ties: Sequence[str] = (),
) -> Layout:
    """The table for the rows of a DataFrame.

    Parameters
    ----------
    schema
        The DataFrame's schema.
    keys
        The names of the columns that make a row's key.
    changes
        Where the rows are changes to apply, the column that orders those of a key.
    history
        Whether every version of a row is kept.
    unchanged
        What the rows say of values that they leave out.
    ties
        The columns that order changes of a key with one value of ``changes``.

    Raises
    ------
    UnsupportedType, SchemaMismatch, InvalidInput
        When a column has no SQL type, or a key is not there, or cannot be one.
    """
    fields = list(canonical_schema(schema))
    sequence, tied = None, [sequence_of(fields, name, dialect) for name in ties]
    if changes is not None:
        sequence = sequence_of(fields, changes, dialect)
        taken_out = not_kept(unchanged)
        fields = [field for field in fields if field.name not in taken_out]
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
    if history:
        _refuse_taken(names)
    return Layout(name, columns, dialect, sequence, history, unchanged, tuple(tied))


def not_kept(unchanged: Unchanged | None) -> tuple[str, ...]:
    """The columns of change rows that are none of the table's."""
    return CHANGE_COLUMNS if unchanged is None else (*CHANGE_COLUMNS, unchanged.column)


def staged_order(ties: Sequence[object]) -> list[str]:
    """The names among staged changes of what orders those of a key, ``t0`` and so on those of the ties."""
    return ["sequence", *(f"t{n}" for n in range(len(ties))), "present"]


def _refuse_taken(names: Sequence[str]) -> None:
    taken = [name for name in (VALID_FROM, VALID_TO) if name in names]
    if taken:
        raise InvalidInput(
            f"scd_type=2 adds the columns {VALID_FROM} and {VALID_TO}, and the rows have {taken[0]} already: rename it",
            parameter="scd_type",
        )


def sequence_of(fields: Sequence[pa.Field], name: str, dialect: str) -> Column:
    """The column that orders the changes of a key.

    Raises
    ------
    InvalidInput
        When the rows are no changes, or the column is not there or has no order in the database.
    """
    there = {field.name: field for field in fields}
    lacking = [wanted for wanted in (CHANGE_TYPE, name) if wanted not in there]
    if lacking:
        raise InvalidInput(
            f"apply_changes takes change rows, with the columns {CHANGE_TYPE} and {name}, and these have no "
            f"{lacking[0]}.{did_you_mean(lacking[0], there)} They have {', '.join(there)}",
            parameter="apply_changes",
        )
    found = there[name].type
    # SQLite keeps decimals as text, which has another order.
    if pat.is_nested(found) or (dialect == "sqlite" and pat.is_decimal(found)):
        raise InvalidInput(
            f"sequence_by={in_quotes(name)} is {found}, which the database does not order as Spark does: use a number, text or a time",
            parameter="sequence_by",
        )
    return Column(name, found, sql_type(there[name], dialect), ordered=True)


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
