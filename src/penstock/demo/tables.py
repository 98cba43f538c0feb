"""The demo's queues."""

from __future__ import annotations

import pyarrow as pa

import penstock as ps
from penstock.demo.feed import FEED_SCHEMA

CHANGES, ROWS, DELAYS = "flight_changes", "flight_rows", "carrier_delays"
ROWS_PER_TRIGGER = 500_000

ROWS_SCHEMA = pa.schema(
    [
        ("flight_id", pa.int64()),
        ("carrier", pa.string()),
        ("status", pa.string()),
        ("_change_type", pa.string()),
        ("_commit_version", pa.int64()),
        ("carried_over", pa.bool_()),
        ("gained_minutes", pa.float64()),
    ]
)
DELAYS_SCHEMA = pa.schema(
    [
        ("hour", pa.timestamp("us", tz="UTC")),
        ("carrier", pa.string()),
        ("arrivals", pa.int64()),
        ("delay_minutes", pa.float64()),
    ]
)


def create(store: ps.Store) -> None:
    """The queues and consumers, anew."""
    for name in (CHANGES, ROWS, DELAYS):
        if name in store.queues():
            store.drop_queue(name, force=True)
    for name in ("rows", "delays"):
        if name in store.consumers():
            store.drop_consumer(name)
        store.create_consumer(name)
    changes = store.create_queue(CHANGES, FEED_SCHEMA, partitions=2, key=["flight_id"])
    store.create_queue(ROWS, ROWS_SCHEMA, partitions=2, key=["flight_id"])
    store.create_queue(DELAYS, DELAYS_SCHEMA)
    changes.register("rows", vital=True)
    changes.register("delays", vital=True)


def contents(queue: ps.Queue) -> pa.Table:
    """All rows of a queue."""
    return pa.concat_tables([queue.read(partition, 0) for partition in range(queue.partitions)])
