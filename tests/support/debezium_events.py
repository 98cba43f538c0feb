"""Change events in the format of Debezium's connectors."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from pyspark.sql import DataFrame, SparkSession

Row = dict[str, Any]
NOW = 1_700_000_000_000
TYPES = (
    "id bigint not null, i int, s smallint, f double, price decimal(10,2), d date, t timestamp, n "
    "timestamp_ntz, ok boolean, b binary, text string, tags array<string>, more struct<a: int>"
)
ROW = {
    "id": 1,
    "i": -5,
    "s": 3,
    "f": 1.5,
    "price": "12.30",
    "d": 19_000,
    "t": "2023-11-14T22:13:20.123456Z",
    "n": -1,
    "ok": True,
    "b": "aGk=",
    "text": "ä\n",
    "tags": ["x", None],
    "more": {"a": 1},
}


def postgres(
    op: str,
    *,
    before: Row | None = None,
    after: object = None,
    lsn: object = 1,
    order: int | None = None,
    wrapped: bool = False,
    declared: Mapping[str, Row] | None = None,
    **source: object,
) -> str:
    """Return an event of the PostgreSQL connector.

    With ``wrapped`` or ``declared``, the event is wrapped with its schema. ``declared`` has column schemas.
    """
    time_ms = NOW + (lsn if isinstance(lsn, int) else 0)
    source_fields = {
        "version": "2.7.3.Final",
        "connector": "postgresql",
        "name": "shop",
        "ts_ms": time_ms,
        "snapshot": "true" if op == "r" else "false",
        "db": "shop",
        "sequence": f'["{lsn}","{lsn}"]',
        "ts_us": time_ms * 1000 + 7,
        "schema": "public",
        "table": "orders",
        "txId": 571,
        "lsn": lsn,
        "xmin": None,
        **source,
    }
    return _event(op, before, after, source_fields, order, wrapped, declared)


def mysql(
    op: str,
    *,
    before: Row | None = None,
    after: Row | None = None,
    file: str = "mysql-bin.000003",
    pos: int = 154,
    row: int = 0,
    wrapped: bool = False,
) -> str:
    """Return an event of the MySQL connector."""
    source_fields = {
        "version": "2.7.3.Final",
        "connector": "mysql",
        "name": "shop",
        "ts_ms": NOW,
        "snapshot": "false",
        "db": "shop",
        "table": "orders",
        "server_id": 223344,
        "gtid": None,
        "file": file,
        "pos": pos,
        "row": row,
        "thread": 7,
        "query": None,
    }
    return _event(op, before, after, source_fields, None, wrapped, None)


def _event(
    op: str,
    before: Row | None,
    after: object,
    source: Row,
    order: int | None,
    wrapped: bool,
    declared: Mapping[str, Row] | None,
) -> str:
    transaction = None
    if order is not None:
        transaction = {"id": "571:24023128", "total_order": order, "data_collection_order": order}
    payload = {
        "before": before,
        "after": after,
        "source": source,
        "transaction": transaction,
        "op": op,
        "ts_ms": NOW + 500,
    }
    if not wrapped and declared is None:
        return json.dumps(payload)
    columns = [{**schema, "field": name} for name, schema in (declared or {}).items()]
    fields = [
        {"type": "struct", "fields": columns, "optional": True, "field": name} for name in ("before", "after")
    ]
    fields.append({"type": "struct", "optional": False, "field": "source"})
    schema = {
        "type": "struct",
        "fields": fields,
        "optional": False,
        "name": "shop.public.orders.Envelope",
    }
    return json.dumps({"schema": schema, "payload": payload})


def topic(spark: SparkSession, events: Sequence[str | None]) -> DataFrame:
    """Return the events as Spark's Kafka source does, in one partition."""
    rows = [
        (None if event is None else event.encode(), "shop.public.orders", 0, offset)
        for offset, event in enumerate(events)
    ]
    return spark.createDataFrame(rows, "value binary, topic string, partition int, offset bigint").coalesce(1)
