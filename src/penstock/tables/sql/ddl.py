"""DDL of SQL tables: read and create definitions, and compare them with the rows of a query."""

from __future__ import annotations

import re
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation

import pyarrow.types as pat

from penstock.arguments import in_quotes
from penstock.errors import SchemaMismatchError, TableRefusedError
from penstock.store.database import Transaction
from penstock.tables.columns import VALID_TO, Column, Layout
from penstock.tables.names import TableName, quoted

_POSTGRES_COLUMNS = """
select
    a.attname,
    format_type(a.atttypid, a.atttypmod),
    a.attnotnull and not a.atthasdef and a.attidentity = ''
from pg_attribute as a
where a.attrelid = :oid and a.attnum > 0 and not a.attisdropped
order by a.attnum
"""
_POSTGRES_UNIQUE = """
select array_agg(a.attname order by a.attname)
from pg_index as i
join pg_attribute as a on a.attrelid = i.indrelid and a.attnum = any(i.indkey[0:i.indnkeyatts - 1])
where i.indrelid = :oid and i.indisunique and i.indisvalid and i.indimmediate
and i.indpred is null and i.indexprs is null
group by i.indexrelid
"""
_POSTGRES_TABLE = """
select c.oid::bigint, c.relkind::text
from pg_class as c
join pg_namespace as n on n.oid = c.relnamespace
where n.nspname = :schema and c.relname = :name
"""
_WIDER_TYPES = {
    "smallint": ("integer", "bigint", "numeric"),
    "integer": ("bigint", "numeric"),
    "bigint": ("numeric",),
    "real": ("double precision",),
    "text": ("character varying",),
    "jsonb": ("json",),
}
_MISSING_TABLE_STATES = ("3F000", "42P01")
"""SQL states for a schema or a table that does not exist."""
_NUMERIC_TYPE = re.compile(r"numeric\((\d+),(\d+)\)")


@dataclass(frozen=True)
class ExistingTable:
    types: dict[str, str]
    """The SQL type of each column, in SQLite its affinity."""
    required: frozenset[str]
    """The columns that are NOT NULL and have no default."""
    unique: frozenset[frozenset[str]]
    """The columns of each unique index."""


def find_table(tx: Transaction, name: TableName) -> ExistingTable | None:
    """Read the definition of a table, or None if it does not exist; refuse a table of an untrusted role."""
    tx.require_trusted_owner(name.schema, name.table)
    return _find_sqlite(tx, name) if tx.dialect == "sqlite" else _find_postgres(tx, name)


def _find_postgres(tx: Transaction, name: TableName) -> ExistingTable | None:
    relations = tx.query(_POSTGRES_TABLE, schema=name.schema, name=name.table)
    if not relations:
        return None
    oid, kind = relations[0]
    if kind not in ("r", "p"):
        raise _not_a_table_error(name)
    columns = tx.query(_POSTGRES_COLUMNS, oid=oid)
    return ExistingTable(
        {column: kind for column, kind, _ in columns},
        frozenset(column for column, _, required in columns if required),
        frozenset(frozenset(names) for (names,) in tx.query(_POSTGRES_UNIQUE, oid=oid)),
    )


def _find_sqlite(tx: Transaction, name: TableName) -> ExistingTable | None:
    schema_objects = tx.query(
        "select type from main.sqlite_schema where lower(name) = lower(:name) and type in ('table', 'view')",
        name=name.table,
    )
    if not schema_objects:
        return None
    if schema_objects[0][0] != "table":
        raise _not_a_table_error(name)
    columns = tx.query(f"pragma main.table_info({quoted(name.table)})")
    unique = {frozenset(column for _, column, _, _, _, key_position in columns if key_position)}
    for _, index, is_unique, _, partial in tx.query(f"pragma main.index_list({quoted(name.table)})"):
        if is_unique and not partial:
            # An expression in an index has no column name.
            parts = tx.query(f"pragma main.index_info({quoted(index)})")
            unique.add(frozenset(column or "" for _, _, column in parts))
    return ExistingTable(
        {column: affinity(kind) for _, column, kind, _, _, _ in columns},
        frozenset(column for _, column, _, required, default, _ in columns if required and default is None),
        frozenset(unique - {frozenset()}),
    )


def _not_a_table_error(name: TableName) -> TableRefusedError:
    return TableRefusedError(
        f"{name.sql} exists and is not a table: choose another name", condition="TABLE_REFUSED.NO_TABLE"
    )


def affinity(declared: str) -> str:
    """Return the affinity of a declared type, by SQLite's rules in their order."""
    text = declared.upper()
    if "INT" in text:
        return "INTEGER"
    if any(part in text for part in ("CHAR", "CLOB", "TEXT")):
        return "TEXT"
    if "BLOB" in text or not text:
        return "BLOB"
    return "REAL" if any(part in text for part in ("REAL", "FLOA", "DOUB")) else "NUMERIC"


def create_table(tx: Transaction, layout: Layout) -> None:
    """Create the table, with its key as the primary key."""
    lines = [
        f"{column.sql} {column.ddl_type}{' not null' if column.key else ''}" for column in layout.columns
    ]
    if layout.keys:
        lines.append(f"primary key ({layout.keys_sql})")
    tx.execute(f"create table {layout.name.sql} ({', '.join(lines)})")


def index_current_versions(tx: Transaction, layout: Layout) -> None:
    """Create the unique index that allows one current version per key in a table with history."""
    index = new_index(layout, "penstock_current_")
    tx.execute(f"create unique index {index} ({layout.keys_sql}) where {quoted(VALID_TO)} is null")


def new_index(layout: Layout, prefix: str) -> str:
    """Return a new index name and the table, as CREATE INDEX takes them.

    The name is unique, since the indexes of a table that is renamed keep their names.
    """
    name = f"{prefix}{uuid.uuid4().hex}"
    if layout.dialect == "sqlite":
        return f"{quoted(layout.name.schema)}.{name} on {quoted(layout.name.table)}"
    return f"{name} on {layout.name.sql}"


def drop_table(tx: Transaction, layout: Layout) -> None:
    """Drop the table, to recreate it with other columns."""
    try:
        tx.execute(f"drop table {layout.name.sql}")
    except Exception as error:
        if getattr(error, "sqlstate", None) != "2BP01":
            raise
        raise TableRefusedError(
            f"the columns of {layout.name.sql} have changed, and views depend on the table: drop them, and "
            "recreate them after the query has written",
            condition="TABLE_REFUSED.DEPENDED_ON",
        ) from error


def differences(layout: Layout, existing: ExistingTable, *, complete: bool) -> list[str]:
    """Describe why the rows cannot be inserted into the table, or cannot replace all of its rows."""
    names = {column.name for column in layout.columns}
    existing = with_spelling_of(existing, layout)
    messages = [_difference(column, existing, layout) for column in layout.columns]
    missing_in_rows = set(existing.types) - names if complete else existing.required - names
    reason = "" if complete else " is NOT NULL without a default, and"
    messages += [
        f"the table's column {in_quotes(name)}{reason} is not in the rows" for name in sorted(missing_in_rows)
    ]
    keys = frozenset(column.name for column in layout.keys)
    if keys and keys not in existing.unique:
        messages.append(f"the table has no unique index on ({layout.keys_sql})")
    return [difference for difference in messages if difference]


def with_spelling_of(existing: ExistingTable, layout: Layout) -> ExistingTable:
    """Return the definition with names spelled as in the rows; SQLite ignores the case of ASCII letters."""
    if layout.dialect != "sqlite":
        return existing
    spelling = {column.name.encode().lower(): column.name for column in layout.columns}

    def rename(name: str) -> str:
        return spelling.get(name.encode().lower(), name)

    return ExistingTable(
        {rename(name): kind for name, kind in existing.types.items()},
        frozenset(map(rename, existing.required)),
        frozenset(frozenset(map(rename, columns)) for columns in existing.unique),
    )


def _difference(column: Column, existing: ExistingTable, layout: Layout) -> str:
    kind = existing.types.get(column.name)
    alter = f"alter table {layout.name.sql}"
    if kind is None:
        fix = "" if column.key else f" ({alter} add column {column.sql} {column.ddl_type})"
        return f"the table has no column {in_quotes(column.name)}{fix}"
    if can_store(column, kind, layout.dialect):
        return ""
    widenable = needs_widening(column, kind, layout.dialect)
    fix = f" ({alter} alter column {column.sql} type {column.ddl_type})" if widenable else ""
    return f"the table's column {in_quotes(column.name)} is {kind}, and the rows need {column.sql_type}{fix}"


def can_store(column: Column, kind: str, dialect: str) -> bool:
    """Whether an existing column of a type (in SQLite: affinity) stores a column's values unchanged."""
    return (
        _sqlite_can_store(column, kind) if dialect == "sqlite" else _postgres_can_store(column.sql_type, kind)
    )


def needs_widening(column: Column, kind: str, dialect: str) -> bool:
    """Whether an existing column has to be widened to store a column's values, and can be."""
    return not can_store(column, kind, dialect) and can_widen(column, kind, dialect)


def can_widen(column: Column, kind: str, dialect: str) -> bool:
    """Whether an existing column can be altered to a column's type, which holds all of its values."""
    return dialect == "postgres" and _postgres_can_store(kind, column.sql_type)


def _sqlite_can_store(column: Column, kind: str) -> bool:
    if kind in (column.sql_type, "BLOB"):
        return True
    # With NUMERIC affinity, SQLite converts text that looks like a number, and a decimal would lose digits.
    text_like_number = column.sql_type == "TEXT" and not (
        pat.is_date(column.type) or pat.is_timestamp(column.type)
    )
    return kind == "NUMERIC" and not text_like_number


def _postgres_can_store(needed: str, kind: str) -> bool:
    base_type = "character varying" if kind.startswith("character varying(") else kind
    if base_type == needed or base_type in _WIDER_TYPES.get(needed, ()):
        return True
    stored, wanted = _NUMERIC_TYPE.fullmatch(kind), _NUMERIC_TYPE.fullmatch(needed)
    if wanted is None:
        return False
    if kind == "numeric":
        return True
    if stored is None:
        return False
    digits, scale = (int(stored[1]) - int(stored[2]), int(stored[2]))
    return digits >= int(wanted[1]) - int(wanted[2]) and scale >= int(wanted[2])


def ensure_table(tx: Transaction, layout: Layout, *, complete: bool) -> None:
    """Create the table, or check that the existing one accepts the rows."""
    existing = find_table(tx, layout.name)
    if existing is None:
        create_table(tx, layout)
    elif not complete:
        _require_compatible(layout, existing, _scale_differences(tx, layout, existing))


def _scale_differences(tx: Transaction, layout: Layout, existing: ExistingTable) -> list[str]:
    """Describe decimal keys that SQLite stores with another scale, as text that differs from equal keys."""
    if layout.dialect != "sqlite":
        return []
    names, messages = with_spelling_of(existing, layout).types, []
    for key in layout.keys:
        if not pat.is_decimal(key.type) or key.name not in names:
            continue
        stored_keys = f"select {key.sql} from {layout.name.sql} where typeof({key.sql}) = 'text' limit 1"
        for (text,) in tx.query(stored_keys):
            scale = _scale(text)
            if scale not in (None, key.type.scale):
                messages.append(
                    f"the table's keys {in_quotes(key.name)} have {scale} digits after the point, and those "
                    f"of the rows {key.type.scale}, which are other text"
                )
    return messages


def _scale(text: str) -> int | None:
    """Return the number of digits after the point; None if the text is not a number."""
    try:
        return -int(Decimal(text).as_tuple().exponent)
    except (InvalidOperation, ValueError):
        return None


def require_compatible(tx: Transaction, layout: Layout) -> None:
    """Check that the table still exists and accepts the rows."""
    existing = find_table(tx, layout.name)
    if existing is None:
        raise _table_gone_error(layout.name)
    _require_compatible(layout, existing)


def lock_table(tx: Transaction, name: TableName) -> None:
    """Lock the table against replacement for the transaction; refuse a table of an untrusted role."""
    try:
        tx.lock_table(name.schema, name.table)
    except Exception as error:
        if getattr(error, "sqlstate", None) not in _MISSING_TABLE_STATES:
            raise
        raise _table_gone_error(name) from error


def _table_gone_error(name: TableName) -> TableRefusedError:
    return TableRefusedError(
        f"the table {name.sql} has been dropped or renamed since the query started: restore it, or restart "
        "the query, which recreates it without its earlier rows",
        condition="TABLE_REFUSED.TABLE_GONE",
        table=name.sql,
    )


def _require_compatible(
    layout: Layout, existing: ExistingTable, other_differences: Sequence[str] = ()
) -> None:
    messages = [*differences(layout, existing, complete=False), *other_differences]
    if messages:
        raise SchemaMismatchError(
            f"the table {layout.name.sql} does not accept the rows: {'; '.join(messages)}. Change the query "
            "or the table, or use another table; only output mode complete replaces a table's columns",
            condition="SCHEMA_MISMATCH.TABLE_DIFFERS",
            table=layout.name.sql,
            differences=messages,
        )
