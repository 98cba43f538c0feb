"""The change feed, queues and SQL tables of the demo."""

from __future__ import annotations

from contextlib import suppress

import pyarrow as pa

import penstock
from examples.flights.change_feed import STATE_SCHEMA
from penstock.errors import AlreadyExistsError

FLIGHTS, BOARD, DELAYS, DAY = "flight_changes", "flight_board", "carrier_delays", "last_day"
CANCELLED = "first_cancelled"
"""The queue with the first cancelled flights; its query and its consumer have the same name."""
CANCELLED_LIMIT = 10
CURRENT, TOTALS = "flights_now", "carrier_totals"
"""SQL tables: the current state of each flight, and each carrier's delays of the year."""
CONSUMER = "tables"
"""The consumer of the queries that maintain the SQL tables."""
PREVIEW = "modes.txt"
"""The file with the preview of the output modes."""
ROWS_PER_TRIGGER, ROWS_PER_TASK = 600_000, 300_000
CANCELLED_ROWS_PER_TRIGGER = 20_000
LAST_DAY_HOURS = 24

CONTRACT = penstock.ChangeContract(
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
CANCELLED_SCHEMA = pa.schema(
    [("flight_id", pa.int64()), ("carrier", pa.string()), ("_commit_version", pa.int64())]
)
DELAYS_SCHEMA = pa.schema(
    [
        ("hour", pa.timestamp("us", tz="UTC")),
        ("carrier", pa.string()),
        ("arrivals", pa.int64()),
        ("delay_minutes", pa.float64()),
    ]
)


def create(store: penstock.Store, url: str) -> penstock.QueueFeed:
    """Create the feed and the queues, empty, and drop the SQL tables."""
    with store.database.transaction() as tx:
        for table in (CURRENT, TOTALS):
            tx.execute(f"drop table if exists {table}")
    for name in (FLIGHTS, BOARD, DELAYS, DAY, CANCELLED):
        if name in store.queues():
            store.drop_queue(name, force=True)
    store.create_queue(BOARD, BOARD_SCHEMA, partitions=2, key=["flight_id"])
    store.create_queue(DELAYS, DELAYS_SCHEMA)
    store.create_queue(DAY, DAY_SCHEMA)
    store.create_queue(CANCELLED, CANCELLED_SCHEMA)
    for consumer, queues in {CONSUMER: (BOARD, DELAYS), CANCELLED: (BOARD,)}.items():
        with suppress(AlreadyExistsError):
            store.create_consumer(consumer)
        for name in queues:
            store.consumer(consumer).register(name)
    return penstock.QueueFeed.create(FLIGHTS, STATE_SCHEMA, CONTRACT, store=url)


def read_queue(queue: penstock.Queue) -> pa.Table:
    """Return all rows of a queue."""
    return pa.concat_tables([queue.read(partition, 0) for partition in range(queue.partitions)])


def read_table(store: penstock.Store, table: str, columns: list[str]) -> pa.Table:
    """Return some columns of a SQL table."""
    with store.database.transaction(write=False) as tx:
        rows = tx.query(f"select {', '.join(columns)} from {table}")
    values = zip(*rows, strict=True) if rows else [[] for _ in columns]
    return pa.table([pa.array(list(column)) for column in values], names=columns)
