"""Copies of a published table, written without Spark from the rows of its feed."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psycopg
import pyarrow as pa
import pyarrow.types as pat
from deltalake import DeltaTable, write_deltalake
from deltalake.exceptions import CommitFailedError

import penstock
from penstock.reconciliation.reconcile import reconcile
from penstock.reconciliation.report import Reconciliation
from penstock.store.database import Transaction
from penstock.store.url import parse_url
from penstock.tables.columns import Layout, layout_of
from penstock.tables.names import resolve
from penstock.tables.row_encoding import database_schema, projected_schema, to_database_types
from penstock.tables.sql import ddl, staging, upsert
from penstock.testing import temporary_store_url
from tests.support.postgres_source import Source
from tests.support.sql_tables import named, query, sql_name

KINDS = ("postgresql", "sqlite", "delta")
METADATA = ("_change_type", "_commit_version", "_commit_timestamp", "_commit_sequence", "_unchanged")


@dataclass(frozen=True)
class CopiedTable:
    """Table of a source, and a copy of it."""

    source: Source
    table: str
    url: str
    plain_name: str

    @property
    def name(self) -> str:
        """The copy's name for Penstock."""
        return named(self.url, self.plain_name)

    @property
    def kind(self) -> str:
        return self.url.partition(":")[0]

    @property
    def sink(self) -> penstock.TableSink:
        return penstock.TableSink(self.name, url=self.url)

    @property
    def feed(self) -> penstock.PostgresFeed:
        return self.source.feed(tables=[self.table])

    def compare(self, **options: Any) -> Reconciliation:
        options = {"settle": 0.0, "timeout": 60.0} | options
        return reconcile(options.pop("source", self.feed), self.sink, **options)

    def run(self, *statements: str) -> None:
        """Change a SQL copy in one transaction. Statements refer to it as ``COPY``."""
        parsed = parse_url(self.url)
        connection: Any = psycopg.connect(parsed.target) if self.kind == "postgresql" else None
        connection = connection or sqlite3.connect(parsed.target, timeout=60)
        with closing(connection):
            for statement in statements:
                connection.execute(statement.replace("COPY", self.sql))
            connection.commit()

    @property
    def sql(self) -> str:
        return sql_name(self.url, self.plain_name)

    @property
    def delta(self) -> DeltaTable:
        return DeltaTable(f"{self.url.removeprefix('delta://')}/{self.name}")

    def delete(self, condition: str) -> None:
        if self.kind == "delta":
            _retry_conflicts(lambda: self.delta.delete(condition))
        else:
            self.run(f"DELETE FROM COPY WHERE {condition}")

    def update(self, column: str, value: str, condition: str) -> None:
        """Set a column to a value in SQL."""
        if self.kind == "delta":
            _retry_conflicts(lambda: self.delta.update(updates={column: value}, predicate=condition))
        else:
            self.run(f"UPDATE COPY SET {column} = {value} WHERE {condition}")

    def insert(self, rows: Sequence[dict[str, Any]]) -> None:
        write_rows(self.url, self.name, source_rows(self.source, self.table, rows), keys=None)

    def rows(self, columns: str) -> list[tuple[Any, ...]]:
        if self.kind == "delta":
            rows = self.delta.to_pyarrow_table(columns=columns.split(", ")).to_pylist()
            return sorted((tuple(row.values()) for row in rows), key=repr)
        return sorted(query(self.url, f"SELECT {columns} FROM {self.sql}"), key=repr)


def _retry_conflicts(change: Callable[[], object]) -> None:
    """Change a Delta table, and retry after conflicts with other writers."""
    while True:
        try:
            change()
            return
        except CommitFailedError:
            continue


@contextmanager
def copied_table(
    source: Source, table: str, kind: str, folder: Path, name: str = "copy", *, quoted: str | None = None
) -> Iterator[CopiedTable]:
    """Create a copy of a table with its rows. ``quoted`` is the table's name in SQL, if it differs."""
    with temporary_store_url(source.url if kind == "postgresql" else None) as url:
        if kind == "delta":
            url = f"delta://{folder}"
        else:
            with closing(penstock.connect(url)):
                pass
        copy = CopiedTable(source, table, url, name)
        write_rows(url, copy.name, source_rows(source, table), key_of(source, quoted or table))
        yield copy


def key_of(source: Source, table: str) -> list[str]:
    escaped = table.replace("'", "''")
    rows = source.rows(
        "SELECT a.attname FROM pg_index i JOIN pg_attribute a ON a.attrelid = i.indrelid AND a.attnum = ANY "
        f"(i.indkey) WHERE i.indisprimary AND i.indrelid = '{escaped}'::regclass ORDER BY a.attnum"
    )
    return [name for (name,) in rows]


def source_rows(source: Source, table: str, rows: Sequence[dict[str, Any]] | None = None) -> pa.Table:
    """Return the rows of a table from its feed's initial copy, or convert other rows to its schema."""
    feed = replace(
        source.feed(tables=[table], snapshot="initial"), slot=f"{source.name}_copy", url=source.url
    )
    with closing(feed.open()) as opened:
        schema = opened.describe().schema
        columns = pa.schema([field for field in schema if field.name not in METADATA])
        if rows is not None:
            return pa.Table.from_pylist(list(rows), columns)
        start = opened.prepare()
        batches = [
            batch.select(columns.names)
            for task in opened.tasks(start, opened.newest(start), 1000)
            for batch in opened.read(task, schema)
        ]
        result = pa.Table.from_batches([batch.cast(columns) for batch in batches], columns)
    source.run(f"SELECT pg_drop_replication_slot('{source.name}_copy')")
    source.run("DROP SCHEMA penstock_snapshots CASCADE")
    return result


def write_rows(url: str, name: str, rows: pa.Table, keys: Sequence[str] | None) -> None:
    """Write rows to a copy. The copy is created if there are keys."""
    if url.startswith("delta"):
        folder = f"{url.removeprefix('delta://')}/{name}"
        write_deltalake(
            folder, rows.cast(pa.schema([f.with_nullable(True) for f in rows.schema])), mode="append"
        )
        return

    def write(tx: Transaction) -> None:
        layout = layout_of(resolve(tx, name), rows.schema, keys or (), tx.dialect)
        if keys is not None:
            ddl.create_table(tx, layout)
        columns = staging.column_definitions(layout)
        upsert.insert(tx, layout, staging.load_chunks(tx, columns, _encode(rows, layout)))
        staging.drop_loaded(tx, columns)

    with closing(penstock.connect(url)) as store:
        store.database.run(write)


def _encode(rows: pa.Table, layout: Layout) -> list[pa.RecordBatch]:
    schema = projected_schema(layout)
    batches = []
    for batch in rows.combine_chunks().to_batches():
        arrays = [
            pa.array(
                [None if value is None else "\\x" + value.hex() for value in column.to_pylist()], field.type
            )
            if pat.is_binary(column.type) and pat.is_string(field.type)
            else column.cast(field.type)
            for column, field in zip(batch.columns, schema, strict=True)
        ]
        encoded = pa.RecordBatch.from_arrays(arrays, schema=schema)
        batches.append(to_database_types(encoded, database_schema(schema, layout.dialect)))
    return batches
