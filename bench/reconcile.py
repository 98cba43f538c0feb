"""Reconciliation of a table with its copy, compared with reading both tables into pandas."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import pandas as pd
import psycopg
from deltalake import DeltaTable

import penstock
from bench.harness import Result, pairs, scratch
from penstock.reconciliation.reconcile import reconcile
from penstock.testing.stores import drop_schema, with_schema

ROWS = 1_000_000
_TABLE, _COPY = "bench_reconcile", "bench_reconcile_copy"
_COLUMNS = "id bigint PRIMARY KEY, customer text, item text, price numeric(12, 2), at timestamptz, n int"
MIN_RATIO_POSTGRES, MIN_RATIO_DELTA = 1.5, 0.8


def postgres(url: str, *, rounds: int = 3) -> list[Result]:
    """Measure a copy in PostgreSQL, where both databases compute checksums."""
    with _tables(url) as (feed, store):

        def peer() -> float:
            start = time.perf_counter()
            _require_equal(_read(url, _TABLE), _read(url, _COPY))
            return time.perf_counter() - start

        sink = penstock.TableSink(f"public.{_COPY}", url=store)
        return [_result("PostgreSQL", pairs(lambda: _ours(feed, sink), peer, rounds), MIN_RATIO_POSTGRES)]


def delta(url: str, *, rounds: int = 3) -> list[Result]:
    """Measure a copy in a Delta table."""
    with _tables(url) as (feed, _), scratch() as folder:
        import pyarrow as pa
        from deltalake import write_deltalake

        schema = pa.schema(
            [
                ("id", pa.int64()),
                ("customer", pa.string()),
                ("item", pa.string()),
                ("price", pa.decimal128(12, 2)),
                ("at", pa.timestamp("us", "UTC")),
                ("n", pa.int32()),
            ]
        )
        write_deltalake(f"{folder}/copy", pa.Table.from_pandas(_read(url, _TABLE), schema))

        def peer() -> float:
            start = time.perf_counter()
            _require_equal(_read(url, _TABLE), DeltaTable(f"{folder}/copy").to_pandas())
            return time.perf_counter() - start

        sink = penstock.TableSink("copy", url=f"delta://{folder}")
        return [_result("Delta", pairs(lambda: _ours(feed, sink), peer, rounds), MIN_RATIO_DELTA)]


def _ours(feed: penstock.PostgresFeed, sink: penstock.TableSink) -> float:
    start = time.perf_counter()
    report = reconcile(feed, sink)
    assert report.equal
    assert report.rows == ROWS
    return time.perf_counter() - start


def _result(kind: str, times: tuple[float, float], least: float) -> Result:
    our_seconds, peer = times
    return Result(
        f"reconcile with a copy in {kind}, 1,000,000 rows",
        our_seconds,
        peer,
        peer / our_seconds,
        f">= {least}",
        peer / our_seconds >= least,
        f"{ROWS / our_seconds:,.0f} rows/s; the peer holds both tables in memory",
    )


def _read(url: str, table: str) -> pd.DataFrame:
    with psycopg.connect(url) as connection, connection.cursor() as cursor:
        cursor.execute(f"SELECT * FROM {table}".encode())
        return pd.DataFrame(cursor.fetchall(), columns=[column.name for column in cursor.description or ()])


def _require_equal(expected: pd.DataFrame, actual: pd.DataFrame) -> None:
    first, second = (rows.sort_values("id").reset_index(drop=True) for rows in (expected, actual))
    assert all((first[name] == second[name]).all() for name in first.columns)


@contextmanager
def _tables(url: str) -> Iterator[tuple[penstock.PostgresFeed, str]]:
    """Create a published table, an equal copy and a store."""
    store = with_schema(url, "bench")
    drop_schema(url, "bench")
    penstock.connect(store).close()
    rows = (
        "SELECT n, 'customer ' || n % 1000, 'item number ' || n, n / 4.0, "
        f"timestamptz '2026-01-01' + n * interval '1 second', n % 17 FROM generate_series(1, {ROWS}) AS n"
    )
    with psycopg.connect(url, autocommit=True) as connection:
        for table in (_TABLE, _COPY):
            connection.execute(f"DROP TABLE IF EXISTS {table}".encode())
            connection.execute(f"CREATE TABLE {table} ({_COLUMNS})".encode())
            connection.execute(f"INSERT INTO {table} {rows}".encode())
            connection.execute(f"VACUUM ANALYZE {table}".encode())
        connection.execute(f"CREATE PUBLICATION {_TABLE} FOR TABLE {_TABLE}".encode())
        try:
            yield penstock.PostgresFeed(url, _TABLE), store
        finally:
            connection.execute(f"DROP PUBLICATION {_TABLE}".encode())
            connection.execute(f"DROP TABLE {_TABLE}, {_COPY}".encode())
    drop_schema(url, "bench")
