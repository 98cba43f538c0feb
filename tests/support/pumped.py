"""Tables with changes, a pump that runs in a thread, and the tables that result from its queues."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import penstock
from penstock.errors import QueueNotFoundError, StoreNotFoundError
from penstock.feeds.queue_feed import QueueFeed
from tests.support.feed_reading import batches_of
from tests.support.postgres_source import Row, Source, apply
from tests.support.waiting import wait_until

TABLES = {
    "orders": "id int PRIMARY KEY, item text, price numeric(10, 2)",
    "stock": "item text PRIMARY KEY, n int",
}
KEYS = {"orders": ("id",), "stock": ("item",)}
COLUMNS = {"orders": ("id", "item", "price"), "stock": ("item", "n")}


class SimulatedCrash(Exception):
    """Simulated crash of a process."""


def fill(source: Source, first: int, last: int) -> None:
    source.run(
        f"INSERT INTO {source.name}.orders SELECT n, 'item ' || n % 7, n / 4.0 "
        f"FROM generate_series({first}, {last}) AS n",
        f"INSERT INTO {source.name}.stock SELECT 'item ' || n, {first} FROM generate_series(0, 6) AS n "
        f"ON CONFLICT (item) DO UPDATE SET n = {first}",
    )


def change(source: Source, rng: random.Random) -> None:
    """Commit a transaction with random changes to both tables."""
    orders, stock = f"{source.name}.orders", f"{source.name}.stock"
    with source.connection.transaction():
        for _ in range(rng.randint(1, 6)):
            n = rng.randint(1, 700)
            free = f"NOT EXISTS (SELECT FROM {orders} WHERE id = {n + 10_000})"
            statements = [
                f"INSERT INTO {orders} VALUES ({n}, 'new', 1) ON CONFLICT DO NOTHING",
                f"UPDATE {orders} SET price = price + 1 WHERE id = {n}",
                f"UPDATE {orders} SET id = id + 10000 WHERE id = {n} AND {free}",
                f"DELETE FROM {orders} WHERE id BETWEEN {n} AND {n + 3}",
                f"UPDATE {stock} SET n = n - 1 WHERE item = 'item {n % 7}'",
            ]
            source.run(rng.choice(statements))


def source_tables(source: Source) -> dict[str, dict[object, Row]]:
    return {
        name: {
            tuple(row[COLUMNS[name].index(key)] for key in KEYS[name]): dict(
                zip(COLUMNS[name], row, strict=True)
            )
            for row in source.rows(f"SELECT {', '.join(COLUMNS[name])} FROM {source.name}.{name}")
        }
        for name in TABLES
    }


def change_rows(store_url: str, queue: str) -> list[Row]:
    """Return the change rows of the commits in a queue."""
    feed = QueueFeed(queue, store_url).open()
    schema = feed.describe().schema
    batches = batches_of(feed, -1, feed.newest(-1), schema)
    return [row for batch in batches for row in batch.to_pylist()]


def sort_by_commit(rows: list[Row]) -> list[Row]:
    return sorted(rows, key=lambda row: (row["_commit_version"], row["_commit_sequence"]))


def pumped_tables(store_url: str, source: Source) -> dict[str, dict[object, Row]]:
    """Return the tables that result from the queues, and check that no change row is repeated."""
    tables: dict[str, dict[object, Row]] = {}
    positions: set[tuple[int, int]] = set()
    for name in TABLES:
        rows = sort_by_commit(change_rows(store_url, f"{source.name}.{name}"))
        queue_positions = {(row["_commit_version"], row["_commit_sequence"]) for row in rows}
        assert len(queue_positions) == len(rows)
        assert not queue_positions & positions
        positions |= queue_positions
        tables[name] = {}
        apply(rows, KEYS[name], COLUMNS[name], tables[name])
    return tables


def create_pump(source: Source, store_url: str, **options: object) -> penstock.Pump:
    """Create a pump that starts with a copy of the existing rows."""
    return penstock.Pump(source.feed(snapshot="initial"), store_url, **options)


@contextmanager
def running(pump: penstock.Pump) -> Iterator[list[BaseException]]:
    """Run a pump in a thread, and yield a list that receives the error that ends it."""
    failures: list[BaseException] = []

    def run() -> None:
        try:
            pump.run()
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield failures
    finally:
        pump.stop()
        thread.join(60)
    assert not thread.is_alive()


def await_equal(
    store_url: str, source: Source, failures: Sequence[BaseException], seconds: float = 60
) -> None:
    """Wait until the queues have all rows of the tables, or the pump has failed."""
    # Each check reads the whole queues.
    wait_until(
        lambda: failures or is_equal(store_url, source),
        seconds,
        "the queues have the rows of the tables",
        interval=0.25,
    )
    assert not failures


def is_equal(store_url: str, source: Source) -> bool:
    """Return whether the queues have the rows of the tables. The queues may not exist yet."""
    try:
        return pumped_tables(store_url, source) == source_tables(source)
    except (StoreNotFoundError, QueueNotFoundError):
        return False
