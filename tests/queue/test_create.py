"""Queues and consumers can be created with any valid name."""

from __future__ import annotations

import threading
from datetime import timedelta
from typing import Any

import pyarrow as pa
import pytest

import penstock
from penstock.errors import (
    AlreadyExistsError,
    ConsumerNotFoundError,
    InvalidInputError,
    InvalidNameError,
    PenstockError,
    QueueNotFoundError,
    UnsupportedTypeError,
)
from tests.support.queues import SCHEMA, everything, numbers, rows

NAMES = [
    "orders",
    "with \"double\" and 'single' quotes",
    "a/b\\c/../../etc/passwd",
    "line\nbreak\ttab\r",
    "'; drop table penstock_queue; --",
    "%s %(name)s :name ? {0} ${x}",
    "penstock.queue",
    " leading and trailing ",
    "😀" * 255,
    "x" * 255,
    "ñ",
    "n\u0303",
    "\x01\x7f\u200b\ufeff",
    "CON",
    "null",
]


@pytest.mark.parametrize("name", NAMES)
def test_any_text_can_be_a_name(store: penstock.Store, name: str) -> None:
    queue = store.create_queue(name, SCHEMA, partitions=2)
    queue.append(rows(1), 1)
    consumer = store.create_consumer(name)
    queue.register(name, vital=True)
    producer = store.producer(name, session=name)
    producer.append(rows(2), 0, partition=1)
    assert producer.append(rows(2), 0, partition=1).skipped
    pull = consumer.pull(name, 1)
    assert numbers(pull.table) == [1, 2]
    consumer.advance(name, 1, old=0, new=2)
    assert consumer.seek(name, to={1: 1}) == {0: 0, 1: 1}
    assert consumer.lag(name).rows == 1
    assert queue.trim(before=5) == 1
    assert (store.queues(), store.consumers(), consumer.queues()) == ([name], [name], [name])
    assert store.queue(name).info().consumers == (name,)
    store.drop_consumer(name)
    store.drop_queue(name)
    assert (store.queues(), store.consumers()) == ([], [])


def test_similar_names_are_different(store: penstock.Store) -> None:
    names = ["a", "A", "á", "a\u0301", " a", "a "]
    for number, name in enumerate(names):
        store.create_queue(name, SCHEMA).append(rows(number))
    for number, name in enumerate(names):
        assert everything(store.queue(name)) == {0: [number]}


def test_names_are_listed_in_the_same_order_in_every_database(store: penstock.Store) -> None:
    names = ["b", "B", "a", "Ä", "ä", "_", "1", "😀", "a b", "a-b"]
    for name in names:
        store.create_queue(name, SCHEMA)
        store.create_consumer(name)
    assert store.queues() == sorted(names, key=str.encode)
    assert store.consumers() == sorted(names, key=str.encode)


@pytest.mark.parametrize(
    "name", ["", "x" * 256, "😀" * 256, "nul\0", "\ud800", "postgresql://app:s3cret@db/x", None, 5, b"x"]
)
def test_an_invalid_name_is_refused_everywhere(store: penstock.Store, name: str) -> None:
    store.create_queue("q", SCHEMA)
    for work in (
        lambda: store.create_queue(name, SCHEMA),
        lambda: store.create_consumer(name),
        lambda: store.producer("q", session=name),
        lambda: store.queue(name),
        lambda: store.consumer(name),
        lambda: store.drop_queue(name),
        lambda: store.drop_consumer(name),
    ):
        with pytest.raises(InvalidNameError) as caught:
            work()
        assert "s3cret" not in str(caught.value)
    assert store.queues() == ["q"]


def test_a_queue_has_the_settings_it_was_created_with(store: penstock.Store) -> None:
    retention = penstock.Retention(rows=10, age=timedelta(hours=1), bytes=1 << 20)
    store.create_queue("q", SCHEMA, partitions=3, key=["n", "s"], retention=retention)
    info = store.queue("q").info()
    assert (info.name, info.key, info.retention) == ("q", ("n", "s"), retention)
    assert info.schema.equals(SCHEMA)
    assert [part.partition for part in info.partitions] == [0, 1, 2]
    assert (info.rows, info.bytes, info.consumers) == (0, 0, ())
    assert all(part.last_append is None for part in info.partitions)


def test_a_spark_schema_is_accepted(store: penstock.Store) -> None:
    from pyspark.sql.types import LongType, StringType, StructType

    schema = StructType().add("n", LongType()).add("s", StringType(), nullable=False)
    queue = store.create_queue("q", schema)
    assert queue.schema.equals(pa.schema([("n", pa.int64()), pa.field("s", pa.string(), nullable=False)]))


def test_a_name_can_be_used_only_once(store: penstock.Store) -> None:
    store.create_queue("q", SCHEMA)
    with pytest.raises(AlreadyExistsError, match="'q' already exists"):
        store.create_queue("q", SCHEMA)
    store.create_consumer("c")
    with pytest.raises(AlreadyExistsError, match="'c' already exists"):
        store.create_consumer("c")


def test_only_one_of_many_concurrent_creations_succeeds(store: penstock.Store) -> None:
    outcomes: list[str] = []

    def create() -> None:
        try:
            store.create_queue("q", SCHEMA, partitions=2)
            outcomes.append("created")
        except AlreadyExistsError:
            outcomes.append("exists")

    threads = [threading.Thread(target=create) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(outcomes) == ["created"] + ["exists"] * 7
    assert len(store.queue("q").info().partitions) == 2


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"partitions": 0}, InvalidInputError),
        ({"partitions": 10_001}, InvalidInputError),
        ({"partitions": 1.5}, InvalidInputError),
        ({"partitions": True}, InvalidInputError),
        ({"key": ["nobody"]}, PenstockError),
        ({"key": ["n", "n"]}, PenstockError),
    ],
)
def test_invalid_settings_are_refused(
    store: penstock.Store, options: dict[str, object], error: type[Exception]
) -> None:
    with pytest.raises(error):
        store.create_queue("q", SCHEMA, **options)  # type: ignore[arg-type]
    assert store.queues() == []


@pytest.mark.parametrize(
    "options",
    [
        {"rows": -1},
        {"rows": 1.5},
        {"rows": 2**63},
        {"rows": 2**70},
        {"bytes": -1},
        {"bytes": 2**63},
        {"bytes": "1"},
        {"age": timedelta(-1)},
        {"age": timedelta.max},
        {"age": 5},
        {"rows": True},
    ],
)
def test_an_invalid_retention_is_refused(options: dict[str, object]) -> None:
    with pytest.raises(InvalidInputError):
        penstock.Retention(**options)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "options", [{"rows": 2**63 - 1}, {"bytes": 2**63 - 1}, {"age": timedelta(microseconds=2**63 - 1)}]
)
def test_a_retention_with_the_largest_limits_keeps_all_rows(
    store: penstock.Store, options: dict[str, Any]
) -> None:
    retention = penstock.Retention(**options)
    queue = store.create_queue("q", SCHEMA, retention=retention)
    queue.append([{"n": 1}])
    queue.maintain()
    assert (queue.info().rows, store.queue("q").info().retention) == (1, retention)


def test_a_type_that_spark_lacks_is_refused(store: penstock.Store) -> None:
    with pytest.raises(UnsupportedTypeError, match="uint64"):
        store.create_queue("q", pa.schema([("n", pa.uint64())]))


def test_an_unknown_name_is_reported_with_the_nearest_one(store: penstock.Store) -> None:
    queue = store.create_queue("orders", SCHEMA)
    store.create_consumer("billing")
    with pytest.raises(QueueNotFoundError, match="Did you mean 'orders'"):
        store.queue("order")
    with pytest.raises(QueueNotFoundError, match="Did you mean 'orders'"):
        store.producer("Orders", "s")
    with pytest.raises(ConsumerNotFoundError, match="Did you mean 'billing'"):
        queue.register("biling")
    with pytest.raises(ConsumerNotFoundError):
        store.drop_consumer("nobody")
    with pytest.raises(QueueNotFoundError):
        store.drop_queue("nothing")


def test_the_largest_queue_works(store: penstock.Store) -> None:
    queue = store.create_queue("q", SCHEMA, partitions=10_000)
    queue.append(rows(1), 9_999)
    assert queue.read(9_999, 0).num_rows == 1
    assert store.info().rows == 1


def test_the_longest_names_fit_into_the_index_entries_of_every_table(store: penstock.Store) -> None:
    """Index entries of PostgreSQL are limited to less than 3 kB."""
    import random

    letters = [chr(code) for code in range(0x1F300, 0x1F5FF)]
    longest = ["".join(random.Random(seed).choices(letters, k=255)) for seed in range(3)]
    queue = store.create_queue(longest[0], SCHEMA)
    store.create_consumer(longest[1])
    queue.register(longest[1])
    store.producer(longest[0], longest[2]).append(rows(1), 0)
    ledger = {"sink": f"queue:{longest[0]}:{2**40}", "app_id": longest[1], "batch_id": 2**60, "task": -1}
    assert store.database.run(
        lambda tx: tx.run("insert_ledger", ranges="x" * 10_000, logged=None, row_count=1, now=0, **ledger)
    )
