"""What a snapshot says about consumers, their lag and their owners."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import penstock
from penstock.store.records.queries import QueryRun
from penstock.ui.snapshots import Collector
from tests.ui.conftest import Clock
from tests.ui.filled import ODD, SCHEMA, begin, rows


def test_a_consumer_is_described_with_its_lag(collector: Collector, store: penstock.Store) -> None:
    queue = store.create_queue("q", SCHEMA, partitions=2)
    billing = store.create_consumer(ODD)
    billing.register("q", vital=True)
    for partition in (0, 1):
        queue.append(rows(10), partition=partition)
    billing.advance("q", 0, old=0, new=4)
    (seen,) = collector.collect()["consumers"]
    lag = billing.lag("q")
    assert (seen["consumer"], seen["queue"], seen["vital"]) == (ODD, "q", True)
    assert seen["lag_rows"] == lag.rows == 16
    # Of the rows, where the command line counts whole segments.
    assert 0 < seen["lag_bytes"] < lag.bytes
    assert 0 < seen["lag_seconds"] <= billing.lag("q").seconds
    assert (seen["owner"], seen["stuck"], seen["stuck_seconds"]) == (None, False, None)
    assert seen["partitions"] == [
        {"partition": 0, "offset": 4, "safe_offset": 4, "next_index": 10, "lag_rows": 6},
        {"partition": 1, "offset": 0, "safe_offset": 0, "next_index": 10, "lag_rows": 10},
    ]
    assert [point["lag_rows"] for point in seen["history"]] == [16]


def test_the_lag_in_a_merged_segment_is_that_of_the_first_waiting_row(
    store: penstock.Store, collector: Collector
) -> None:
    queue = store.create_queue("q", SCHEMA)
    consumer = store.create_consumer("c")
    consumer.register("q")
    for number in range(200):
        queue.append([{"id": number, "customer": "x"}])
    queue.maintain()
    assert queue.info().partitions[0].segments < 200
    waiting = []
    for old, new in ((0, 0), (0, 15), (15, 55)):
        consumer.advance("q", 0, old=old, new=new)
        found = collector.collect()
        behind = timedelta(seconds=found["consumers"][0]["lag_seconds"])
        waiting.append(datetime.fromisoformat(found["taken_at"]) - behind)
    first, early, late = waiting
    assert first < early < late
    indeed = datetime.now(UTC) - timedelta(seconds=consumer.lag("q").seconds)
    assert late - first > (indeed - first) / 10


def test_an_owner_is_shown_as_alive_or_dead(collector: Collector, store: penstock.Store) -> None:
    store.create_queue("q", SCHEMA)
    consumer = store.create_consumer("c")
    consumer.register("q")
    registration = consumer.registration("q")
    lock = store.database.owner_lock(registration.lock_name(store.uuid))
    assert lock.acquire()
    store.database.run(lambda tx: tx.all("own_registration", owner="o", **registration.keys))
    store.database.run(lambda tx: tx.run("bind_app", app_id="app", **registration.keys))
    owner = {"app_id": "app", "query": None, "epoch": 1, "alive": True}
    assert collector.collect()["consumers"][0]["owner"] == owner
    begin(store, QueryRun("app", "run", ODD, "micro-batch", 5))
    assert collector.collect()["consumers"][0]["owner"] == owner | {"query": ODD}
    lock.release()
    assert collector.collect()["consumers"][0]["owner"] == owner | {"query": ODD, "alive": False}


def test_a_consumer_that_does_not_move_while_rows_wait_is_stuck_and_listed_first(
    collector: Collector, store: penstock.Store, clock: Clock
) -> None:
    queue = store.create_queue("q", SCHEMA, partitions=2)
    consumers = {name: store.create_consumer(name) for name in ("done", "moving", "one stands", "stuck")}
    for consumer in consumers.values():
        consumer.register("q")
    for partition in (0, 1):
        queue.append(rows(10), partition=partition)
        consumers["done"].advance("q", partition, old=0, new=10)
    collector.collect()
    clock.now += 61
    for partition in (0, 1):
        consumers["moving"].advance("q", partition, old=0, new=1)
    consumers["one stands"].advance("q", 1, old=0, new=1)
    seen = collector.collect()["consumers"]
    assert [(each["consumer"], each["stuck"]) for each in seen] == [
        ("one stands", True),
        ("stuck", True),
        ("moving", False),
        ("done", False),
    ]
    assert [each["stuck_seconds"] for each in seen] == [61, 61, None, None]
    clock.now += 59
    stuck = {each["consumer"] for each in collector.collect()["consumers"] if each["stuck"]}
    assert stuck == {"one stands", "stuck"}
    for partition in (0, 1):
        consumers["stuck"].advance("q", partition, old=0, new=1)
    consumers["one stands"].advance("q", 0, old=0, new=1)
    stuck = {each["consumer"] for each in collector.collect()["consumers"] if each["stuck"]}
    assert stuck == set()


def test_a_consumer_without_waiting_rows_is_not_stuck_when_rows_arrive(
    collector: Collector, store: penstock.Store, clock: Clock
) -> None:
    queue = store.create_queue("q", SCHEMA)
    store.create_consumer("c").register("q")
    collector.collect()
    clock.now += 600
    queue.append(rows(1))
    assert not collector.collect()["consumers"][0]["stuck"]
    clock.now += 61
    assert collector.collect()["consumers"][0]["stuck"]
