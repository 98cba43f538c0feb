"""The demo's change feed and queues."""

from __future__ import annotations

import pyarrow as pa

import penstock as ps
from penstock.demo.feed import STATE_SCHEMA

FLIGHTS, BOARD, DELAYS, DAY = "flight_changes", "flight_board", "carrier_delays", "last_day"
ROWS_PER_TRIGGER, ROWS_PER_TASK = 600_000, 300_000
HOURS = 24

CONTRACT = ps.ChangeContract(
    "flight_id",
    row_version="row_version",
    carryover_rows=True,
    intermediate_changes=True,
    updates_as_delete_and_insert=True,
    whole_commits=True,
)
BOARD_SCHEMA = pa.schema(
    [
        ("flight_id", pa.int64()),
        ("carrier", pa.string()),
        ("status", pa.string()),
        ("_change_type", pa.string()),
        ("_commit_version", pa.int64()),
        ("gained_minutes", pa.float64()),
    ]
)
DAY_SCHEMA = pa.schema(
    [
        ("flight_id", pa.int64()),
        ("_change_type", pa.string()),
        ("status", pa.string()),
        ("row_version", pa.int64()),
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


def create(store: ps.Store, url: str) -> ps.QueueFeed:
    """The feed and the queues, anew."""
    for name in (FLIGHTS, BOARD, DELAYS, DAY):
        if name in store.queues():
            store.drop_queue(name, force=True)
    store.create_queue(BOARD, BOARD_SCHEMA, partitions=2, key=["flight_id"])
    store.create_queue(DELAYS, DELAYS_SCHEMA)
    store.create_queue(DAY, DAY_SCHEMA)
    return ps.QueueFeed.create(FLIGHTS, STATE_SCHEMA, CONTRACT, store=url)


def contents(queue: ps.Queue) -> pa.Table:
    """All rows of a queue."""
    return pa.concat_tables([queue.read(partition, 0) for partition in range(queue.partitions)])
