"""Tables with changes, a pump of them in a thread, and the tables that the rows of its queues make."""

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


class Dies(Exception):
    """Stands for the death of a process."""


def fill(source: Source, first: int, last: int) -> None:
    source.run(
        f"INSERT INTO {source.name}.orders SELECT n, 'item ' || n % 7, n / 4.0 "
        f"FROM generate_series({first}, {last}) AS n",
        f"INSERT INTO {source.name}.stock SELECT 'item ' || n, {first} FROM generate_series(0, 6) AS n "
        f"ON CONFLICT (item) DO UPDATE SET n = {first}",
    )


def change(source: Source, chance: random.Random) -> None:
    """Commit a transaction of some changes to both tables."""
    orders, stock = f"{source.name}.orders", f"{source.name}.stock"
    with source.connection.transaction():
        for _ in range(chance.randint(1, 6)):
            n = chance.randint(1, 700)
            free = f"NOT EXISTS (SELECT FROM {orders} WHERE id = {n + 10_000})"
            statements = [
                f"INSERT INTO {orders} VALUES ({n}, 'new', 1) ON CONFLICT DO NOTHING",
                f"UPDATE {orders} SET price = price + 1 WHERE id = {n}",
                f"UPDATE {orders} SET id = id + 10000 WHERE id = {n} AND {free}",
                f"DELETE FROM {orders} WHERE id BETWEEN {n} AND {n + 3}",
                f"UPDATE {stock} SET n = n - 1 WHERE item = 'item {n % 7}'",
            ]
            source.run(chance.choice(statements))


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
    """The rows of the commits of a feed's queue."""
    feed = QueueFeed(queue, store_url).open()
    schema = feed.describe().schema
    batches = batches_of(feed, -1, feed.newest(-1), schema)
    return [row for batch in batches for row in batch.to_pylist()]


def ordered(rows: list[Row]) -> list[Row]:
    return sorted(rows, key=lambda row: (row["_commit_version"], row["_commit_sequence"]))


def pumped_tables(store_url: str, source: Source) -> dict[str, dict[object, Row]]:
    """What the commits in the queues make, after checks that none is there twice, torn or out of order."""
    tables: dict[str, dict[object, Row]] = {}
    places: set[tuple[int, int]] = set()
    for name in TABLES:
        rows = ordered(change_rows(store_url, f"{source.name}.{name}"))
        mine = {(row["_commit_version"], row["_commit_sequence"]) for row in rows}
        assert len(mine) == len(rows)
        assert not mine & places
        places |= mine
        tables[name] = {}
        apply(rows, KEYS[name], COLUMNS[name], tables[name])
    return tables


def pump_of(source: Source, store_url: str, **options: object) -> penstock.Pump:
    """A pump that first copies the rows that are there."""
    return penstock.Pump(source.feed(snapshot="initial"), store_url, **options)


@contextmanager
def running(pump: penstock.Pump) -> Iterator[list[BaseException]]:
    """Run a pump in a thread; what ends it is in the list."""
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
    """Wait until the queues have everything that the tables have, or the pump has failed."""
    # Each look reads the whole queues.
    wait_until(
        lambda: failures or is_equal(store_url, source),
        seconds,
        "the queues to have what the tables have",
        interval=0.25,
    )
    assert not failures


def is_equal(store_url: str, source: Source) -> bool:
    """Whether the queues have what the tables have; they may not be there yet."""
    try:
        return pumped_tables(store_url, source) == source_tables(source)
    except (StoreNotFoundError, QueueNotFoundError):
        return False
