"""Dropping queues and consumers, cleaning up, info, and a store that many threads use."""

from __future__ import annotations

import gc
import threading
from datetime import timedelta
from itertools import pairwise
from typing import Any

import pyarrow as pa
import pytest

import penstock
from penstock.errors import CommitRefusedError, ConsumerInUseError, InvalidInputError, QueueNotFoundError
from penstock.queue.maintenance import CLEANUP_SECONDS
from penstock.store import staging
from penstock.store.log import segmenting
from penstock.store.staging import Attempt
from penstock.store.store_schema import VERSION
from tests.support.queues import SCHEMA, await_maintenance, everything, rows
from tests.support.raw_sql import run_sql

TABLES = [
    "observed_end",
    "queue",
    "key_home",
    "partition",
    "payload",
    "segment",
    "staged",
    "staged_object",
    "consumer",
    "registration",
    "position",
    "producer",
    "ledger",
    "mark",
]


def _rows_in_tables(store: penstock.Store) -> dict[str, int]:
    database = store.database
    return {table: run_sql(database, f"select count(*) from penstock.{table}")[0][0] for table in TABLES}


def _stage(
    store: penstock.Store, queue: penstock.Queue, app: str, batch: int, attempt: str, *values: int
) -> None:
    segments = segmenting.to_segments(pa.table({"n": values, "s": ["x"] * len(values)}, schema=SCHEMA), 0)
    store.database.run(
        lambda tx: staging.stage(tx, queue.record, Attempt(app, batch, 0, attempt), segments, 0)
    )


def test_a_dropped_queue_leaves_nothing_behind(store: penstock.Store) -> None:
    queue = store.create_queue("q", SCHEMA, partitions=3, key=["n"])
    queue.append(rows(*range(50)))
    queue.add_partitions(1)
    store.create_consumer("c")
    queue.register("c")
    store.producer("q", "s").append(rows(1), 0)
    _stage(store, queue, "app", 0, "try", 1, 2)
    store.drop_queue("q")
    assert {table: count for table, count in _rows_in_tables(store).items() if count} == {"consumer": 1}
    with pytest.raises(QueueNotFoundError):
        queue.info()
    again = store.create_queue("q", SCHEMA)
    assert again.record.generation != queue.record.generation
    assert again.info().rows == 0


def test_queues_of_a_store_and_of_its_restored_backup_have_different_ids(store: penstock.Store) -> None:
    """Otherwise a program with a queue that was created after the backup would append to another queue."""
    ids = [store.create_queue(f"q{number}", SCHEMA).record.queue_id for number in range(4)]
    assert len({after - before for before, after in pairwise(ids)}) == 3


def test_a_handle_of_a_dropped_queue_does_not_access_a_new_queue_of_the_same_name(
    store: penstock.Store,
) -> None:
    old = store.create_queue("q", SCHEMA, partitions=2)
    store.drop_queue("q")
    new = store.create_queue("q", pa.schema([("other", pa.string())]), partitions=3)
    new.append([{"other": "x"}], 0)
    for work in (
        old.info,
        old.refresh,
        old.compact,
        old.maintain,
        lambda: old.append(rows(1), 2),
        lambda: old.trim(0, 1),
        lambda: old.read(2, 0),
        lambda: old.add_partitions(1),
        lambda: old.set_retention(penstock.Retention(rows=0)),
    ):
        with pytest.raises(QueueNotFoundError, match="was dropped"):
            work()
    assert new.info().rows == 1
    assert new.info().retention == penstock.Retention()


def test_a_drop_does_not_affect_other_queues(store: penstock.Store) -> None:
    one, two = store.create_queue("one", SCHEMA), store.create_queue("two", SCHEMA)
    for queue in (one, two):
        queue.append(rows(1, 2, 3))
    store.drop_queue("one")
    assert everything(two) == {0: [1, 2, 3]}


def test_a_queue_with_a_vital_consumer_is_dropped_only_with_force(store: penstock.Store) -> None:
    queue = store.create_queue("q", SCHEMA)
    store.create_consumer("c")
    queue.register("c", vital=True)
    with pytest.raises(ConsumerInUseError, match="unregister it, or drop with force"):
        store.drop_queue("q")
    store.drop_queue("q", force=True)
    assert store.queues() == []


def test_a_dropped_consumer_is_removed_from_its_queues(store: penstock.Store) -> None:
    queue = store.create_queue("q", SCHEMA)
    queue.append(rows(1))
    store.create_consumer("c")
    queue.register("c")
    store.drop_consumer("c")
    assert store.registrations() == []
    assert _rows_in_tables(store)["position"] == 0
    assert queue.info().rows == 1


def test_appends_to_a_queue_that_is_dropped_fail_with_one_clear_error(store: penstock.Store) -> None:
    queue = store.create_queue("q", SCHEMA, partitions=2)
    producer = store.producer("q", "s")
    store.create_consumer("c")
    consumer = queue.register("c")
    failures: list[BaseException] = []

    def until_dropped(work: Any) -> threading.Thread:
        def loop() -> None:
            try:
                while True:
                    work()
            except BaseException as error:
                failures.append(error)

        thread = threading.Thread(target=loop)
        thread.start()
        return thread

    threads = [
        until_dropped(lambda: queue.append(rows(1), 0)),
        until_dropped(lambda: queue.append(rows(1, 2), 1)),
        until_dropped(lambda: producer.append(rows(3))),
        until_dropped(lambda: consumer.seek("q", to="latest")),
    ]
    while queue.info().rows < 30:
        pass
    store.drop_queue("q")
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()
    assert {type(error) for error in failures} <= {QueueNotFoundError, penstock.errors.NotRegisteredError}, (
        failures
    )
    assert {table: count for table, count in _rows_in_tables(store).items() if count} == {"consumer": 1}


def test_old_uncommitted_rows_are_cleaned_up(store: penstock.Store) -> None:
    queue = store.create_queue("q", SCHEMA)
    queue.append(rows(0))
    _stage(store, queue, "dead", 0, "a", 1, 2)
    _stage(store, queue, "live", 0, "b", 3)
    assert (store.info().staged_segments, store.info().rows) == (2, 1)
    assert store.clean_up() == 0
    assert store.clean_up(timedelta.max) == 0
    with pytest.raises(InvalidInputError, match="older_than is a timedelta"):
        store.clean_up(5)  # type: ignore[arg-type]
    assert store.clean_up(timedelta(0)) == 2
    assert (store.info().staged_segments, store.info().staged_bytes) == (0, 0)
    assert _rows_in_tables(store)["payload"] == 1
    assert everything(queue) == {0: [0]}


def test_background_maintenance_cleans_up_old_staged_rows_from_time_to_time(store: penstock.Store) -> None:
    queue = store.create_queue("q", SCHEMA, retention=penstock.Retention(rows=100))
    _stage_long_ago(store, queue)
    _stage(store, queue, "live", 0, "b", 3)
    queue.append(rows(0))
    await_maintenance(store)
    assert store.info().staged_segments == 1
    _stage_long_ago(store, queue)
    queue.append(rows(1))
    await_maintenance(store)
    assert store.info().staged_segments == 2, "not with every maintenance"
    store.maintainer.cleanup_due -= CLEANUP_SECONDS
    queue.append(rows(2))
    await_maintenance(store)
    assert store.info().staged_segments == 1
    assert everything(queue) == {0: [0, 1, 2]}


def test_rows_staged_while_the_clock_was_far_ahead_are_cleaned_up(store: penstock.Store) -> None:
    queue = store.create_queue("q", SCHEMA)
    _stage(store, queue, "dead", 0, "a", 1, 2)
    text = "update penstock.staged set created_at = created_at + 90000000000 where app_id = 'dead'"
    run_sql(store.database, text)
    _stage(store, queue, "live", 0, "b", 3)
    assert store.clean_up() == 1
    assert store.info().staged_segments == 1


def test_staged_rows_of_a_query_that_still_stages_more_are_kept(store: penstock.Store) -> None:
    queue = store.create_queue("q", SCHEMA)
    _stage_long_ago(store, queue)
    _stage(store, queue, "dead", 0, "b", 3)
    assert store.clean_up() == 0
    assert store.info().staged_segments == 2


def test_maintaining_a_store_cleans_up_old_staged_rows(store: penstock.Store) -> None:
    queue = store.create_queue("q", SCHEMA)
    _stage_long_ago(store, queue)
    _stage(store, queue, "live", 0, "b", 3)
    store.maintain()
    assert store.info().staged_segments == 1
    assert _rows_in_tables(store)["payload"] == 1


def _stage_long_ago(store: penstock.Store, queue: penstock.Queue) -> None:
    _stage(store, queue, "dead", 0, "a", 1, 2)
    text = "update penstock.staged set created_at = created_at - 90000000000 where app_id = 'dead'"
    run_sql(store.database, text)


def test_a_commit_whose_rows_were_cleaned_up_is_refused_and_changes_nothing(store: penstock.Store) -> None:
    queue = store.create_queue("q", SCHEMA)
    _stage(store, queue, "app", 0, "a", 1)
    store.clean_up(timedelta(0))
    with pytest.raises(
        CommitRefusedError,
        match=r"removed the others because of their age, .* failed\. No rows of the batch",
    ):
        store.database.run(lambda tx: staging.promote(tx, queue.record, "app", 0, {"a": 1}))
    assert queue.info().rows == 0


def test_a_concurrent_cleanup_and_commit_keep_all_rows_or_none(store: penstock.Store) -> None:
    queue = store.create_queue("q", SCHEMA)
    committed = 0
    for batch in range(25):
        for attempt in ("a", "b"):
            _stage(store, queue, "app", batch, attempt, batch)
        cleaner = threading.Thread(target=store.clean_up, args=(timedelta(0),))
        cleaner.start()
        try:
            store.database.run(
                lambda tx, batch=batch: staging.promote(tx, queue.record, "app", batch, {"a": 1})  # type: ignore[misc]
            )
            committed += 1
        except CommitRefusedError:
            pass
        cleaner.join()
    assert queue.info().rows == committed
    assert queue.read(0, 0).num_rows == committed
    store.clean_up(timedelta(0))
    assert _rows_in_tables(store)["payload"] == queue.info().partitions[0].segments


def test_a_promotion_takes_only_the_acknowledged_attempts(store: penstock.Store) -> None:
    queue = store.create_queue("q", SCHEMA)
    _stage(store, queue, "app", 4, "older", 1)
    _stage(store, queue, "app", 5, "kept", 2)
    _stage(store, queue, "app", 5, "twin", 2)
    _stage(store, queue, "app", 6, "newer", 3)
    _stage(store, queue, "other", 5, "kept", 4)
    store.database.run(lambda tx: staging.promote(tx, queue.record, "app", 5, {"kept": 1}))
    assert everything(queue) == {0: [2]}
    assert store.info().staged_segments == 2
    assert _rows_in_tables(store)["payload"] == 3


def test_info_counts_the_contents_of_a_store(store: penstock.Store) -> None:
    assert (store.info().rows, store.info().bytes, store.info().queues) == (0, 0, 0)
    for name in ("a", "b"):
        store.create_queue(name, SCHEMA, partitions=2, key=["n"]).append(rows(*range(10)))
    store.create_consumer("c")
    info = store.info()
    assert (info.uuid, info.version, info.queues, info.consumers) == (store.uuid, VERSION, 2, 1)
    assert (info.rows, info.commits) == (20, 0)
    assert info.bytes == sum(store.queue(name).info().bytes for name in ("a", "b"))
    assert info.url == store.url


def test_one_store_serves_many_threads(store: penstock.Store) -> None:
    failures: list[BaseException] = []

    def work(number: int) -> None:
        try:
            queue = store.create_queue(
                f"q{number}", SCHEMA, partitions=2, retention=penstock.Retention(rows=50)
            )
            store.create_consumer(f"c{number}")
            consumer = queue.register(f"c{number}", vital=True)
            producer = store.producer(queue.name, "s")
            position = 0
            for n in range(15):
                producer.append(rows(n), n, partition=0)
                pull = consumer.pull(queue.name, 0)
                assert pull.start == position
                consumer.advance(queue.name, 0, old=pull.start, new=pull.end)
                position = pull.end
            assert position == 15
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert len(store.queues()) == 6


def test_a_queue_works_after_its_store_object_is_garbage_collected(store_url: str) -> None:
    queue = penstock.connect(store_url).create_queue("q", SCHEMA)
    gc.collect()
    for n in range(130):
        queue.append(rows(n))
    assert queue.read(0, 0).num_rows == 130


def test_store_maintain_maintains_every_queue(store: penstock.Store) -> None:
    for name in ("a", "b"):
        queue = store.create_queue(name, SCHEMA)
        for n in range(10):
            queue.append(rows(n))
        queue.set_retention(penstock.Retention(rows=3))
    store.maintain()
    assert [store.queue(name).info().rows for name in ("a", "b")] == [3, 3]
