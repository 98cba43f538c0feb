"""Reads tables of each kind without Penstock, and runs streaming queries that write them."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, parse_qsl, quote, urlencode, urlsplit

import duckdb
import psycopg
import pyarrow as pa
from deltalake import DeltaTable, QueryBuilder
from pyiceberg.catalog import Catalog, load_catalog
from pyspark.sql import DataFrame, SparkSession

import penstock
from penstock.store.url import parse_url

NOW = penstock.Trigger.available_now()


def named(url: str, table: str) -> str:
    """Return the table's name for Penstock. In PostgreSQL, it includes the schema of the test."""
    if url.startswith("iceberg"):
        return f"shop.{table}"
    if url.startswith(("sqlite", "delta")):
        return table
    schema = parse_qs(urlsplit(url).query)["schema"][0]
    quoted = table.replace('"', '""')
    return f'{schema}."{quoted}"'


def sql_name(url: str, table: str) -> str:
    quoted = table.replace('"', '""')
    return f'"{quoted}"' if url.startswith("sqlite") else f'{parse_url(url).schema}."{quoted}"'


def query(url: str, text: str) -> list[tuple[Any, ...]]:
    """Run a statement without Penstock, and return its rows."""
    parsed = parse_url(url)
    if parsed.dialect == "sqlite":
        connection: Any = sqlite3.connect(parsed.target, isolation_level=None)
    else:
        connection = psycopg.connect(parsed.target, autocommit=True)
    with closing(connection):
        cursor = connection.execute(text)
        return [tuple(row) for row in cursor.fetchall()] if cursor.description else []


def rows(url: str, table: str, columns: str = "*") -> list[tuple[Any, ...]]:
    """Return the rows of a table, sorted."""
    if url.startswith("delta"):
        stored = QueryBuilder().register("stored", DeltaTable(f"{url.removeprefix('delta://')}/{table}"))
        result = pa.table(stored.execute(f"select {columns} from stored").read_all())
        return sorted((tuple(row.values()) for row in result.to_pylist()), key=repr)
    if url.startswith("iceberg"):
        stored = iceberg_catalog(url).load_table(("shop", table)).scan().to_arrow()
        if columns != "*":
            stored = duckdb.sql(f"select {columns} from stored").to_arrow_table()
        return sorted((tuple(row.values()) for row in stored.to_pylist()), key=repr)
    return sorted(query(url, f"select {columns} from {sql_name(url, table)}"), key=repr)


def iceberg_url(folder: Path) -> str:
    """Return the URL of a SQLite catalog of Iceberg tables in an existing folder."""
    properties = {
        "type": "sql",
        "uri": f"sqlite:///{folder}/catalog.db",
        "warehouse": f"file://{folder}/warehouse",
    }
    parameters = {f"property.{name}": value for name, value in properties.items()}
    return f"iceberg:lake?{urlencode(parameters, quote_via=quote)}"


def iceberg_catalog(url: str) -> Catalog:
    properties = {name.removeprefix("property."): value for name, value in parse_qsl(urlsplit(url).query)}
    return load_catalog("lake", **properties)


class Feed:
    """Queue that a test writes, and streaming queries over it."""

    def __init__(self, spark: SparkSession, url: str, folder: Path, schema: pa.Schema) -> None:
        self.spark, self.url, self.folder = spark, url, folder
        self.store = penstock.connect(url)
        self.queue = self.store.create_queue("in", schema)
        self.store.create_consumer("c").register("in")

    def add(self, *rows: dict[str, Any]) -> Feed:
        self.queue.append(list(rows))
        return self

    def pipeline(
        self, sink: penstock.TableSink, transform: Any = None, *, mode: str = "append", **options: Any
    ) -> penstock.Pipeline:
        stream = penstock.stream(self.spark, penstock.QueueSource("in", consumer="c", url=self.url))
        if transform is not None:
            stream = stream.transform(transform)
        return stream.write(sink, output_mode=mode, **options)

    def run(
        self,
        sink: penstock.TableSink,
        transform: Any = None,
        *,
        mode: str = "append",
        checkpoint: str = "ck",
        **options: Any,
    ) -> penstock.Query:
        """Run a query on all available rows."""
        query = self.pipeline(sink, transform, mode=mode, **options).start(
            checkpoint=self.folder / checkpoint, trigger=NOW
        )
        query.awaitTermination()
        return query

    def table(self, name: str, *keys: str, **options: Any) -> penstock.TableSink:
        return penstock.TableSink(named(self.url, name), keys, self.url, **options)


def totals(frame: DataFrame) -> DataFrame:
    return frame.groupBy("k").agg({"v": "sum", "*": "count"}).toDF("k", "total", "n")
