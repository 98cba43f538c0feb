"""Queues, consumers and queries for a page to show."""

from __future__ import annotations

from typing import Any

import pyarrow as pa

import penstock
from penstock.store.records import queries
from penstock.store.records.queries import QueryError, QueryProgress, QueryRun

SCHEMA = pa.schema([("id", pa.int64()), ("customer", pa.string())])
ODD = 'it\'s "<script>alert(1)</script>" ž'
"""A name that has to be quoted wherever it is shown."""


def rows(count: int) -> list[dict[str, Any]]:
    return [{"id": number, "customer": f"c{number}"} for number in range(count)]


def begin(store: penstock.Store, run: QueryRun) -> None:
    store.database.run(lambda tx: queries.begin(tx, run))


def tell(store: penstock.Store, run: QueryRun, progress: QueryProgress) -> None:
    store.database.run(lambda tx: queries.report(tx, run, progress))


def fill(store: penstock.Store) -> None:
    """A queue with one row, its consumer, and a query that has failed."""
    store.create_queue(ODD, SCHEMA).append([{"id": 1}])
    store.create_consumer(ODD).register(ODD)
    run = QueryRun("id", "run", ODD, "continuous", 5, spark_ui="http://127.0.0.1:4040")
    begin(store, run)
    latency = {"p50": 1.0, "p90": 2.0, "p99": 3.0, "max": 4.0}
    tell(store, run, QueryProgress(3, 10, 9, latency, 20.0, {"a": 20.0}, 7, 8, 9))
    store.database.run(lambda tx: queries.end(tx, run, QueryError("BAD", ODD)))
