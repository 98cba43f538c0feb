"""Contents of a golden store: how it is filled and described, and the queries that are interrupted.

``scripts/make_golden.py`` makes a golden store for each version. The contents must keep matching the
existing golden stores.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa

import penstock
from penstock.arrow.schema import spark_json
from penstock.store.records import feed_commits

FOLDER = Path(__file__).parent
DIALECTS = ("sqlite", "postgresql")
SCHEMA = "penstock_golden"
"""The PostgreSQL schema of the store."""

ORDERS = pa.schema(
    [
        pa.field("id", pa.int64(), nullable=False),
        ("customer", pa.string()),
        ("amount", pa.float64()),
        ("at", pa.timestamp("us", tz="UTC")),
    ]
)
CUSTOMERS = 12
NOON = datetime(2026, 1, 1, 12, tzinfo=UTC)
EVERY_TYPE: dict[str, tuple[pa.DataType, Any]] = {
    "flag": (pa.bool_(), True),
    "tiny": (pa.int8(), -8),
    "small": (pa.int16(), -16),
    "int": (pa.int32(), -32),
    "real": (pa.float32(), 0.5),
    "price": (pa.decimal128(10, 2), Decimal("12.34")),
    "raw": (pa.binary(), b"\x00\xff"),
    "day": (pa.date32(), NOON.date()),
    "local": (pa.timestamp("us"), datetime(2026, 1, 1, 12)),  # noqa: DTZ001 - a type without a zone
    "span": (pa.duration("us"), timedelta(seconds=90)),
    "tags": (pa.list_(pa.string()), ["a", None]),
    "place": (pa.struct([("x", pa.int32()), ("name", pa.string())]), {"x": 1, "name": "b"}),
    "counts": (pa.map_(pa.string(), pa.int64()), [("a", 1)]),
}
SESSION, SEQUENCE = "web-1", 41
LIMIT, PASSED = 20, 12
COPY = pa.schema([("id", pa.int64())])
COPIED = pa.schema([("id", pa.int64()), ("twice", pa.int64())])


def cases(dialect: str, url: str, folder: str) -> list[Any]:
    """The micro-batch queries: a stateful one killed after the sink's commit of a micro-batch, and one
    killed before it.
    """
    from tests.support.crash.cases import Case

    return [
        Case(f"{kind}_{dialect}", url, kind, "exactly_once", folder, checkpoint_name="checkpoints")
        for kind in ("watermark", "stateless")
    ]


def copy_name(dialect: str) -> str:
    """The name of the continuous query and of its sink."""
    return f"continuous_{dialect}"


def orders(numbers: Iterable[int]) -> list[dict[str, Any]]:
    return [
        {"id": n, "customer": f"c{n % CUSTOMERS}", "amount": n / 4, "at": NOON + timedelta(minutes=n)}
        for n in numbers
    ]


def fill(store: penstock.Store, url: str) -> None:
    """Create everything that needs no query."""
    _fill_orders(store)
    trimmed = store.create_queue("trimmed", COPY, retention=penstock.Retention(rows=7, bytes=10**9))
    trimmed.append([{"id": n} for n in range(5)])
    trimmed.append([{"id": n} for n in range(5, 12)])
    trimmed.trim()
    types = store.create_queue("types", pa.schema([(name, kind) for name, (kind, _) in EVERY_TYPE.items()]))
    types.append([{name: value for name, (_, value) in EVERY_TYPE.items()}, {}])
    flights = penstock.QueueFeed.create(
        "flights",
        pa.schema([("id", pa.int64()), ("status", pa.string())]),
        penstock.ChangeContract("id", intermediate_changes=True, updates_as_delete_and_insert=True),
        store=url,
        partitions=2,
    )
    inserted = [{"id": n, "status": "scheduled", "_change_type": "insert"} for n in range(4)]
    flights.append_commit(1, NOON, inserted)
    gone = {"id": 1, "status": "scheduled", "_change_type": "delete"}
    flights.append_commit(2, NOON, [gone, {"id": 1, "status": "departed", "_change_type": "insert"}])


def _fill_orders(store: penstock.Store) -> None:
    """Create a keyed queue that has grown, with a compacted segment and single ones after it, consumers and
    a producer session.
    """
    queue = store.create_queue("orders", ORDERS, partitions=2, key=["customer"])
    for n in range(70):
        queue.append(orders([n]))
    queue.add_partitions(2)
    queue.append(orders(range(70, 90)))
    queue.compact()
    store.producer("orders", SESSION).append(orders([90, 91]), sequence=SEQUENCE)
    queue.append(orders(range(92, 100)))
    billing = store.create_consumer("billing")
    billing.register("orders", vital=True)
    store.create_consumer("späte Gäste").register("orders", start="latest")
    pull = billing.pull("orders", 0, max_rows=9)
    billing.advance("orders", 0, old=pull.start, new=pull.end)


def describe(store: penstock.Store) -> dict[str, Any]:
    """The contents of a store, as JSON."""
    found = {
        "uuid": store.uuid,
        "queues": {name: _queue(store, name) for name in store.queues()},
        "consumers": sorted(
            [each.consumer, each.queue, bool(each.vital), *_offsets(store, each)]
            for each in store.registrations()
        ),
        "commits": store.info().commits,
        "staged": store.info().staged_segments,
    }
    return json.loads(json.dumps(found, default=str))


def _offsets(store: penstock.Store, registration: Any) -> list[int]:
    return list(store.consumer(registration.consumer).offsets(registration.queue).values())


def _queue(store: penstock.Store, name: str) -> dict[str, Any]:
    queue = store.queue(name)
    info = queue.info()
    return {
        "schema": json.loads(spark_json(info.schema)),
        "key": info.key,
        "keeps": [info.retention.rows, info.retention.age, info.retention.bytes],
        "created_at": info.created_at,
        "partitions": [[part.first_index, part.next_index] for part in info.partitions],
        "rows": [_rows(queue, part.partition, part.first_index) for part in info.partitions],
        "commits": _feed_commits(store, queue),
    }


def _rows(queue: penstock.Queue, partition: int, start: int) -> list[list[Any]]:
    return [list(row.values()) for row in queue.read(partition, start).to_pylist()]


def _feed_commits(store: penstock.Store, queue: penstock.Queue) -> list[list[Any]]:
    found = store.database.run(lambda tx: feed_commits.list_page(tx, queue.record, -1), write=False)
    return [[each.version, each.timestamp, each.rows, each.ends] for each in found]
