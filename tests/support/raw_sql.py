"""Runs raw SQL on the database of a store, and describes its schema."""

from __future__ import annotations

import sqlite3
from typing import Any

from penstock import Store
from penstock.store.database import Database
from penstock.store.statements import qualify


def raw_connection(database: Database, *, checks: bool = True) -> Any:
    """Open a connection in autocommit mode. Without ``checks``, it may violate check constraints."""
    if database.dialect == "sqlite":
        embedded = sqlite3.connect(database.url.target, isolation_level=None)
        if not checks:
            embedded.execute("pragma ignore_check_constraints = on")
        return embedded
    import psycopg

    connection = psycopg.connect(database.url.target, autocommit=True)
    if not checks:
        drops = connection.execute(
            "select format('alter table %%s drop constraint %%I', conrelid::regclass, conname) "
            "from pg_constraint where contype = 'c' and connamespace = %s::regnamespace",
            [database.url.options["schema"]],
        )
        for (text,) in drops.fetchall():
            connection.execute(text.encode())
    return connection


def run_sql(database: Database, text: str, *, transaction: bool = True) -> list[tuple[Any, ...]]:
    """Execute a statement outside the store's own connections, and return its rows.

    ``penstock`` stands for the schema of the store's tables, as in the named statements.
    """
    connection = raw_connection(database)
    try:
        cursor = connection.execute(qualify(text, database.dialect, database.url.schema))
        return cursor.fetchall() if cursor.description else []
    finally:
        connection.close()


def bytes_literal(dialect: str, data: bytes) -> str:
    """Return a SQL literal of bytes."""
    return f"x'{data.hex()}'" if dialect == "sqlite" else rf"'\x{data.hex()}'"


def write_unchecked(store: Store, change: str, *values: object) -> None:
    """Update a table of the store, named without its schema. Values may violate check constraints."""
    database = store.database
    text = qualify(f"update penstock.{change}", database.dialect, database.url.schema)
    connection = raw_connection(database, checks=False)
    connection.execute(text if database.dialect == "sqlite" else text.replace("?", "%s"), values)
    connection.close()


def overwrite(store: Store, column: str, value: object) -> None:
    """Set ``table.column`` in all rows of the table. The value may violate check constraints."""
    table, name = column.split(".")
    write_unchecked(store, f"{table} set {name} = ?", value)


def numbers(database: Database, count: int) -> str:
    """Return the SQL of a table with the numbers 0 to ``count`` - 1 in its column ``i``."""
    if database.dialect == "postgres":
        return f"generate_series(0, {count} - 1) as s(i)"
    rows = f"select 0 union all select i + 1 from s where i < {count} - 1"
    return f"(with recursive s(i) as ({rows}) select i from s)"


def long_text(database: Database, characters: int) -> str:
    """Return the SQL of a text of this many letters x."""
    if database.dialect == "postgres":
        return f"repeat('x', {characters})"
    return f"replace(hex(zeroblob({characters // 2})), '0', 'x')"


def describe_schema(database: Database) -> list[tuple[Any, ...]]:
    """Return tables, columns, types, keys and indexes, in an order that does not depend on their creation."""
    if database.dialect == "sqlite":
        tables = [
            row[0]
            for row in run_sql(database, "select name from sqlite_schema where type = 'table' order by name")
        ]
        columns = [
            (table, *row) for table in tables for row in run_sql(database, f"pragma table_info('{table}')")
        ]
        indexes = run_sql(
            database, "select tbl_name, name from sqlite_schema where type = 'index' order by 1, 2"
        )
        return columns + indexes
    schema = database.url.options["schema"]
    columns = run_sql(
        database,
        "select table_name, column_name, ordinal_position, data_type, is_nullable, collation_name, "
        f"column_default from information_schema.columns where table_schema = '{schema}' order by 1, 3",
    )
    indexes = run_sql(
        database,
        f"select tablename, replace(indexdef, '{schema}', '') from pg_indexes where schemaname = '{schema}' "
        "order by 1, 2",
    )
    constraints = run_sql(
        database,
        "select conname, contype::text, replace(pg_get_constraintdef(oid), '"
        + schema
        + "', '') from pg_constraint "
        f"where connamespace = '{schema}'::regnamespace order by 1",
    )
    return [tuple(str(value).replace(schema, "") for value in row) for row in columns + indexes + constraints]
