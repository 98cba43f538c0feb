"""Columns of a SQL table, and the SQL type of each Spark type.

The type maps are written out here instead of using a SQL toolkit's: each choice is a promise about stored
data (text that orders rows collates by bytes, SQLite keeps decimals as text), and the comparison with an
existing table needs the same names.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import pyarrow as pa
import pyarrow.types as pat

from penstock.arguments import did_you_mean, in_quotes
from penstock.arrow.schema import canonical_schema
from penstock.arrow.spark_json import spark_struct_kind
from penstock.errors import InvalidInputError, UnsupportedTypeError
from penstock.feeds.contract import CHANGE_COLUMNS
from penstock.tables.names import POSTGRES_BYTES, TableName, quoted
from penstock.tables.row_checks import key_for_messages, require_change_columns
from penstock.tables.unchanged_values import MISSING_COLUMNS, UnchangedValues

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
    **dict.fromkeys(
        (pa.bool_(), pa.int8(), pa.int16(), pa.int32(), pa.int64(), pa.duration("us")), "INTEGER"
    ),
    pa.float32(): "REAL",
    pa.float64(): "REAL",
    pa.binary(): "BLOB",
}
"""All other types are TEXT."""

_POSTGRES_SYSTEM_COLUMNS = frozenset({"cmax", "cmin", "ctid", "tableoid", "xmax", "xmin"})


@dataclass(frozen=True)
class Column:
    name: str
    type: pa.DataType
    """The canonical Arrow type of the DataFrame's column."""
    sql_type: str
    key: bool = False
    orders_rows: bool = False
    """Whether changes are ordered by this column."""

    @property
    def sql(self) -> str:
        return quoted(self.name)

    @property
    def ddl_type(self) -> str:
        """The type in CREATE TABLE; text that orders changes collates by bytes, as in Spark and SQLite."""
        return 'text collate "C"' if self.orders_rows and self.sql_type == "text" else self.sql_type

    @property
    def is_json(self) -> bool:
        return bool(pat.is_nested(self.type))


@dataclass(frozen=True)
class Layout:
    """The columns of a table and how a query writes it."""

    name: TableName
    columns: tuple[Column, ...]
    dialect: str
    sequence: Column | None = None
    """For change rows: the column that orders the changes of a key; the table may lack it."""

    history: bool = False
    """Whether every version of a row is kept (SCD type 2)."""

    unchanged: UnchangedValues | None = None
    """For change rows that may leave values out."""

    tie_breakers: tuple[Column, ...] = ()
    """For change rows: the columns that order changes with the same key and sequence."""

    @property
    def keys(self) -> tuple[Column, ...]:
        return tuple(column for column in self.columns if column.key)

    @property
    def staged_columns(self) -> dict[str, Column]:
        """The columns of staged rows, by their names in the staging table."""
        columns = {f"c{n}": column for n, column in enumerate(self.columns)}
        if self.sequence is not None:
            columns |= {"sequence": self.sequence, "present": Column("present", pa.int32(), "integer")}
        columns |= {f"t{n}": tie for n, tie in enumerate(self.tie_breakers)}
        if self.unchanged is not None:
            columns[MISSING_COLUMNS] = Column(MISSING_COLUMNS, pa.string(), "text")
        return columns

    @property
    def staged_order(self) -> list[str]:
        """The staged columns that order the changes of a key; inserts and updates sort after deletes."""
        return staged_order_columns(self.tie_breakers)

    @property
    def staged_keys(self) -> list[str]:
        """The staged columns that hold the keys."""
        return [f"c{n}" for n, column in enumerate(self.columns) if column.key]

    @property
    def columns_sql(self) -> str:
        """The columns of the table as a list in SQL."""
        return ", ".join(column.sql for column in self.columns)

    @property
    def keys_sql(self) -> str:
        """The key columns of the table as a list in SQL."""
        return ", ".join(column.sql for column in self.keys)

    def same_key(self, staged: str) -> str:
        """Return the SQL condition that a stored row (alias ``kept``) and a staged row have the same key."""
        pairs = zip(self.keys, self.staged_keys, strict=True)
        return " and ".join(f"kept.{key.sql} = {staged}.{column}" for key, column in pairs)

    def shown_key(self, values: Sequence[object]) -> str:
        """Return a key for messages."""
        return key_for_messages({key.name: value for key, value in zip(self.keys, values, strict=True)})

    @property
    def stored_layout(self) -> Layout:
        """The layout of the stored table; with history, the key of a row version includes its start."""
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
    sequence_by: str | None = None,
    history: bool = False,
    unchanged: UnchangedValues | None = None,
    tie_breakers: Sequence[str] = (),
) -> Layout:
    """Return the layout of the table for a DataFrame's schema.

    For change rows, ``sequence_by`` is the column that orders the changes of a key, and ``tie_breakers`` are
    the columns that order changes with the same sequence.
    """
    fields = list(canonical_schema(schema))
    sequence, tie_columns = None, [sequence_column_of(fields, name, dialect) for name in tie_breakers]
    if sequence_by is not None:
        sequence = sequence_column_of(fields, sequence_by, dialect)
        metadata = metadata_columns(unchanged)
        fields = [field for field in fields if field.name not in metadata]
    names = [field.name for field in fields]
    _require_possible_names(names, dialect)
    for key in keys:
        if key not in names:
            raise InvalidInputError(
                f"the rows have no column {in_quotes(key)}, which is in keys.{did_you_mean(key, names)} They "
                f"have {', '.join(names)}",
                condition="INVALID_INPUT.UNKNOWN_COLUMN",
                parameter="keys",
            )
    columns = tuple(
        Column(field.name, field.type, sql_type(field, dialect), field.name in keys) for field in fields
    )
    for column in columns:
        if column.key and column.is_json:
            raise InvalidInputError(
                f"the key {in_quotes(column.name)} is nested, and a database compares only plain values: use "
                "its fields as keys",
                condition="INVALID_INPUT.COLUMN_TYPE",
                parameter="keys",
            )
    reserved = [name for name in (VALID_FROM, VALID_TO) if name in names]
    if history and reserved:
        raise InvalidInputError(
            f"scd_type=2 adds the columns {VALID_FROM} and {VALID_TO}, and the rows already have "
            f"{reserved[0]}: rename it",
            condition="INVALID_INPUT.COLUMN_NAME",
            parameter="scd_type",
        )
    return Layout(name, columns, dialect, sequence, history, unchanged, tuple(tie_columns))


def _require_possible_names(names: Sequence[str], dialect: str) -> None:
    """Refuse column names that the database cannot have; PostgreSQL would shorten long ones silently."""
    for name in names:
        if "\0" in name:
            reason = "has the character NUL, which a column's name cannot have"
        elif dialect == "postgres" and len(name.encode()) > POSTGRES_BYTES:
            reason = f"is longer than {POSTGRES_BYTES} bytes, and PostgreSQL would shorten it"
        elif dialect == "postgres" and name in _POSTGRES_SYSTEM_COLUMNS:
            reason = "is the name of a system column of PostgreSQL"
        else:
            continue
        raise InvalidInputError(
            f"the column name {in_quotes(name)} {reason}: rename the column, as alias does",
            condition="INVALID_INPUT.COLUMN_NAME",
            column=name,
        )


def metadata_columns(unchanged: UnchangedValues | None) -> tuple[str, ...]:
    """Return the metadata columns of change rows, which are not written to the table."""
    return CHANGE_COLUMNS if unchanged is None else (*CHANGE_COLUMNS, unchanged.column)


def staged_order_columns(tie_breakers: Sequence[object]) -> list[str]:
    """Return the staged columns that order the changes of a key; ``t0`` and so on are tie breakers."""
    return ["sequence", *(f"t{n}" for n in range(len(tie_breakers))), "present"]


def sequence_column_of(fields: Sequence[pa.Field], name: str, dialect: str) -> Column:
    """Return the column that orders the changes of a key."""
    by_name = {field.name: field for field in fields}
    require_change_columns(by_name, name)
    kind = by_name[name].type
    # SQLite keeps decimals as text, which sorts differently.
    if pat.is_nested(kind) or (dialect == "sqlite" and pat.is_decimal(kind)):
        raise InvalidInputError(
            f"sequence_by={in_quotes(name)} is {kind}, which the database does not order as Spark does: use "
            "a number, text or a time",
            condition="INVALID_INPUT.COLUMN_TYPE",
            parameter="sequence_by",
        )
    return Column(name, kind, sql_type(by_name[name], dialect), orders_rows=True)


def sql_type(field: pa.Field, dialect: str) -> str:
    """Return the native SQL type of a canonical field."""
    kind = field.type
    special_type = spark_struct_kind(kind) if pat.is_struct(kind) else None
    if special_type is not None and special_type[0] != "variant":
        raise UnsupportedTypeError(
            f"column {in_quotes(field.name)} is a {special_type[0]}, which has no SQL type: convert it "
            "with st_asbinary(column)",
            column=field.name,
            found=special_type[0],
        )
    if dialect == "sqlite":
        return _SQLITE.get(kind, "TEXT")
    if pat.is_nested(kind):
        return "jsonb"
    if pat.is_decimal(kind):
        return f"numeric({kind.precision},{kind.scale})"
    return _POSTGRES[kind]
