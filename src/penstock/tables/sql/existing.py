"""The table that is there: looked at, made, and held against the rows that are to come."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable
from dataclasses import dataclass

import pyarrow.types as pat

from penstock.arguments import in_quotes
from penstock.errors import SchemaMismatch, TableRefused
from penstock.store.database import Transaction
from penstock.tables.columns import VALID_TO, Column, Layout
from penstock.tables.names import TableName, quoted

_POSTGRES_COLUMNS = """
select a.attname, format_type(a.atttypid, a.atttypmod), a.attnotnull and not a.atthasdef and a.attidentity = ''
from pg_attribute as a
where a.attrelid = :oid and a.attnum > 0 and not a.attisdropped
order by a.attnum
"""
_POSTGRES_UNIQUE = """
select array_agg(a.attname order by a.attname)
from pg_index as i
join pg_attribute as a on a.attrelid = i.indrelid and a.attnum = any(i.indkey[0:i.indnkeyatts - 1])
where i.indrelid = :oid and i.indisunique and i.indisvalid and i.indpred is null and i.indexprs is null and i.indimmediate
group by i.indexrelid
"""
_POSTGRES_TABLE = """
select c.oid::bigint, c.relkind::text
from pg_class as c
join pg_namespace as n on n.oid = c.relnamespace
where n.nspname = :schema and c.relname = :name
"""
_WIDER = {
    "smallint": ("integer", "bigint", "numeric"),
    "integer": ("bigint", "numeric"),
    "bigint": ("numeric",),
    "real": ("double precision",),
    "text": ("character varying",),
    "jsonb": ("json",),
}
_NUMERIC = re.compile(r"numeric\((\d+),(\d+)\)")


@dataclass(frozen=True)
class Existing:
    """A table as it is in the database."""

    types: dict[str, str]
    """The SQL type of each column, in SQLite its affinity."""
    required: frozenset[str]
    """The columns that take no null and have no default."""
    unique: frozenset[frozenset[str]]
    """The columns of each unique index."""


def look(tx: Transaction, name: TableName) -> Existing | None:
    """The table of that name; None when there is none.

    Raises
    ------
    TableRefused
        When something else has the name.
    """
    return _look_sqlite(tx, name) if tx.dialect == "sqlite" else _look_postgres(tx, name)


def _look_postgres(tx: Transaction, name: TableName) -> Existing | None:
    found = tx.query(_POSTGRES_TABLE, schema=name.schema, name=name.table)
    if not found:
        return None
    oid, kind = found[0]
    if kind not in ("r", "p"):
        raise _no_table(name)
    columns = tx.query(_POSTGRES_COLUMNS, oid=oid)
    return Existing(
        {column: kind for column, kind, _ in columns},
        frozenset(column for column, _, required in columns if required),
        frozenset(frozenset(names) for (names,) in tx.query(_POSTGRES_UNIQUE, oid=oid)),
    )


def _look_sqlite(tx: Transaction, name: TableName) -> Existing | None:
    found = tx.query(
        "select type from main.sqlite_schema where lower(name) = lower(:name) and type in ('table', 'view')",
        name=name.table,
    )
    if not found:
        return None
    if found[0][0] != "table":
        raise _no_table(name)
    columns = tx.query(f"pragma main.table_info({quoted(name.table)})")
    unique = {frozenset(column for _, column, _, _, _, place in columns if place)}
    for _, index, is_unique, _, partial in tx.query(f"pragma main.index_list({quoted(name.table)})"):
        if is_unique and not partial:
            parts = tx.query(f"pragma main.index_info({quoted(index)})")
            unique.add(frozenset(column for _, _, column in parts))
    return Existing(
        {column: affinity(kind) for _, column, kind, _, _, _ in columns},
        frozenset(column for _, column, _, required, default, _ in columns if required and default is None),
        frozenset(unique - {frozenset()}),
    )


def _no_table(name: TableName) -> TableRefused:
    return TableRefused(
        f"{name.sql} is there and is no table: choose another name", condition="TABLE_REFUSED.NO_TABLE"
    )


def affinity(declared: str) -> str:
    """What SQLite makes of a declared type (its rules, in their order)."""
    text = declared.upper()
    if "INT" in text:
        return "INTEGER"
    if any(part in text for part in ("CHAR", "CLOB", "TEXT")):
        return "TEXT"
    if "BLOB" in text or not text:
        return "BLOB"
    return "REAL" if any(part in text for part in ("REAL", "FLOA", "DOUB")) else "NUMERIC"


def create(tx: Transaction, layout: Layout) -> None:
    """Make the table, with its key as the primary key."""
    lines = [
        f"{column.sql} {column.declared}{' not null' if column.key else ''}" for column in layout.columns
    ]
    if layout.keys:
        lines.append(f"primary key ({', '.join(column.sql for column in layout.keys)})")
    tx.execute(f"create table {layout.name.sql} ({', '.join(lines)})")


def allow_one_current(tx: Transaction, layout: Layout) -> None:
    """Let the database itself see to it that no key of a table with history has two current versions."""
    keys = ", ".join(column.sql for column in layout.keys)
    name = f"penstock_current_{hashlib.sha256(layout.name.ledger_name.encode()).hexdigest()[:32]}"
    if tx.dialect == "sqlite":
        where = f"{quoted(layout.name.schema)}.{name} on {quoted(layout.name.table)}"
    else:
        where = f"{name} on {layout.name.sql}"
    tx.execute(f"create unique index {where} ({keys}) where {quoted(VALID_TO)} is null")


def drop(tx: Transaction, layout: Layout) -> None:
    """Drop the table, for one of another schema to take its place.

    Raises
    ------
    TableRefused
        When something in the database depends on it.
    """
    try:
        tx.execute(f"drop table {layout.name.sql}")
    except Exception as error:
        if getattr(error, "sqlstate", None) != "2BP01":
            raise
        raise TableRefused(
            f"the rows of {layout.name.sql} have got other columns, and views depend on the table: drop them, and make them "
            "anew when the query has written",
            condition="TABLE_REFUSED.DEPENDED_ON",
        ) from error


def differences(layout: Layout, there: Existing, *, complete: bool) -> list[str]:
    """What keeps the rows from going into the table as it is, each in words.

    Parameters
    ----------
    complete
        Whether the rows are all there will be: then the columns are to be the same.
    """
    names = {column.name for column in layout.columns}
    found = [_difference(column, there, layout) for column in layout.columns]
    spare = set(there.types) - names if complete else there.required - names
    found += [f"the table has a column {in_quotes(name)}, which the rows have not" for name in sorted(spare)]
    keys = frozenset(column.name for column in layout.keys)
    if keys and keys not in there.unique:
        found.append(f"the table has no unique index on ({', '.join(map(quoted, _ordered(keys, layout)))})")
    return [each for each in found if each]


def _ordered(keys: frozenset[str], layout: Layout) -> Iterable[str]:
    return (column.name for column in layout.columns if column.name in keys)


def _difference(column: Column, there: Existing, layout: Layout) -> str:
    found = there.types.get(column.name)
    alter = f"alter table {layout.name.sql}"
    if found is None:
        mend = "" if column.key else f" ({alter} add column {column.sql} {column.declared})"
        return f"the table has no column {in_quotes(column.name)}{mend}"
    if layout.dialect == "sqlite":
        takes, mend = _sqlite_takes(column, found), ""
    else:
        takes = _postgres_takes(column.sql_type, found)
        wider = column.sql_type in _WIDER.get(found, ())
        mend = f" ({alter} alter column {column.sql} type {column.declared})" if wider else ""
    if takes:
        return ""
    return (
        f"the table's column {in_quotes(column.name)} is {found}, and the rows need {column.sql_type}{mend}"
    )


def _sqlite_takes(column: Column, found: str) -> bool:
    if found in (column.sql_type, "BLOB"):
        return True
    # Text that looks like a number would become one: a decimal would lose digits.
    text_like_number = column.sql_type == "TEXT" and not (
        pat.is_date(column.type) or pat.is_timestamp(column.type)
    )
    return found == "NUMERIC" and not text_like_number


def _postgres_takes(needed: str, found: str) -> bool:
    plain = "character varying" if found.startswith("character varying(") else found
    if plain == needed or plain in _WIDER.get(needed, ()):
        return True
    have, want = _NUMERIC.fullmatch(found), _NUMERIC.fullmatch(needed)
    if want is None:
        return False
    if found == "numeric":
        return True
    if have is None:
        return False
    digits, scale = (int(have[1]) - int(have[2]), int(have[2]))
    return digits >= int(want[1]) - int(want[2]) and scale >= int(want[2])


def prepare(tx: Transaction, layout: Layout, *, complete: bool) -> None:
    """Make the table where there is none, or see whether the one that is there will do.

    Raises
    ------
    SchemaMismatch
        When it will not, naming every difference.
    """
    there = look(tx, layout.name)
    if there is None:
        create(tx, layout)
    elif not complete:
        _require_taking(layout, there)


def require(tx: Transaction, layout: Layout) -> None:
    """See whether the table is still there, and still takes the rows.

    Raises
    ------
    TableRefused
        When it has gone.
    SchemaMismatch
        When it does not take them.
    """
    there = look(tx, layout.name)
    if there is None:
        raise TableRefused(
            f"the table {layout.name.sql} was there when the query started and has been dropped or renamed since: put it back, or "
            "start the query again, which makes it anew, without the rows that it had",
            condition="TABLE_REFUSED.TABLE_GONE",
            table=layout.name.sql,
        )
    _require_taking(layout, there)


def _require_taking(layout: Layout, there: Existing) -> None:
    found = differences(layout, there, complete=False)
    if found:
        raise SchemaMismatch(
            f"the table {layout.name.sql} does not take the rows: {'; '.join(found)}. Change the query or the table, or name "
            "another one; only output mode complete replaces a table's columns",
            table=layout.name.sql,
            differences=found,
        )
