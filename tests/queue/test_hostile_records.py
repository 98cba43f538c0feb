"""Records that another program wrote into a store: readers fail with an error that names the record, and
never loop for ever.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta

import pyarrow as pa
import pytest

from penstock import Consumer, QueueFeed, Retention, Store
from penstock.commit.owner import Owner
from penstock.errors import StoreError
from penstock.feeds.contract import ChangeContract
from penstock.json_text import MOST_CHARACTERS
from penstock.store import staging
from penstock.store.log.segmenting import to_segments
from penstock.store.records import catalog
from penstock.store.staging import Attempt
from tests.support.queues import SCHEMA, rows
from tests.support.raw_sql import bytes_literal, overwrite, run_sql, write_unchecked


def test_a_partition_with_more_rows_than_possible_is_refused_when_it_is_read(store: Store) -> None:
    """Planning tasks for these rows would take all memory."""
    queue = store.create_queue("q", SCHEMA)
    queue.append(rows(1))
    overwrite(store, "partition.next_index", (1 << 62) - 1)
    for read in (
        lambda: queue.read(0, 0),
        queue.info,
        lambda: store.database.run(lambda tx: catalog.partitions(tx, queue.record), write=False),
    ):
        with pytest.raises(
            StoreError, match=r"partition 0 of queue 'q' is not what Penstock writes"
        ) as caught:
            read()
        assert caught.value.condition == "STORE_ERROR.UNREADABLE_RECORD"


@pytest.mark.parametrize("column", ["retention_rows", "retention_age", "retention_bytes"])
def test_a_negative_stored_retention_is_reported_as_an_unreadable_record(store: Store, column: str) -> None:
    store.create_queue("q", SCHEMA)
    overwrite(store, f"queue.{column}", -1)
    with pytest.raises(StoreError, match="the retention of queue 'q' is not what Penstock writes") as caught:
        store.queue("q")
    assert caught.value.condition == "STORE_ERROR.UNREADABLE_RECORD"


def test_the_error_names_a_generation_that_cannot_be_raised(store: Store) -> None:
    store.create_queue("q", SCHEMA)
    consumer = store.create_consumer("c")
    overwrite(store, "store.last_generation", (1 << 63) - 1)
    with pytest.raises(StoreError, match="the last generation is not what Penstock writes") as caught:
        consumer.register("q")
    assert caught.value.condition == "STORE_ERROR.UNREADABLE_RECORD"


def test_a_very_long_record_is_not_parsed(store: Store) -> None:
    store.create_queue("q", SCHEMA)
    overwrite(store, "queue.key_columns", "[" + "[]," * (MOST_CHARACTERS // 3) + "[]]")
    with pytest.raises(StoreError, match=r"the key of queue 'q' is not what Penstock writes .*characters"):
        store.queue("q")


def test_lists_do_not_read_plans_longer_than_penstock_writes(store: Store) -> None:
    """A plan may be as long as the database allows."""
    store.create_queue("q", SCHEMA)
    for name in ("a", "b"):
        store.create_consumer(name).register("q")
    overwrite(store, "registration.plan", "x" * (MOST_CHARACTERS + 1))
    assert [each.plan for each in store.registrations()] == [None, None]
    assert store.queue("q").info().consumers == ("a", "b")


@pytest.mark.parametrize(
    ("column", "value"),
    [("hashes", b""), ("hashes", bytes(10_000)), ("hashes", bytes((1 << 24) + 1)), ("partitions", 0)],
)
def test_the_error_names_records_of_keys_that_penstock_did_not_write(
    store: Store, column: str, value: object
) -> None:
    queue = store.create_queue("q", SCHEMA, key="n")
    queue.append(rows(1))
    queue.add_partitions(1)
    overwrite(store, f"key_home.{column}", value)
    with pytest.raises(StoreError, match="the keys that queue 'q' had when it grew"):
        store.queue("q").append(rows(2))


def test_the_error_names_a_key_that_is_not_a_column(store: Store) -> None:
    store.create_queue("q", SCHEMA, key="n")
    overwrite(store, "queue.key_columns", '["nope"]')
    with pytest.raises(StoreError, match="the key of queue 'q' is not what Penstock writes"):
        store.queue("q").append(rows(1))


def test_an_unreadable_queue_does_not_stop_the_maintenance_of_others(store: Store) -> None:
    for name in ("a bad one", "good"):
        store.create_queue(name, SCHEMA, retention=Retention(rows=1)).append(rows(1))
    queue = store.queue("good")
    for number in range(3):
        queue.append(rows(number))
    run_sql(store.database, "update penstock.queue set partitions = 0 where name = 'a bad one'")
    assert store.queues() == ["a bad one", "good"]
    with pytest.raises(StoreError, match="the number of partitions of queue 'a bad one'"):
        store.maintain()
    assert queue.info().partitions[0].rows == 1


def test_a_time_beyond_any_date_does_not_stop_retention(store: Store) -> None:
    keeps = Retention(rows=1, age=timedelta(days=1))
    queue = store.create_queue("q", SCHEMA, retention=keeps)
    for number in range(3):
        queue.append(rows(number))
    overwrite(store, "partition.last_timestamp", 4_611_686_018_427_380_000)
    queue.maintain()
    (part,) = store.database.run(lambda tx: catalog.partitions(tx, queue.record), write=False)
    assert part.rows == 1


def test_sums_of_numbers_that_other_programs_wrote_do_not_overflow(store: Store) -> None:
    queue = store.create_queue("q", SCHEMA)
    queue.append(rows(1))
    columns = "app_id, batch_id, attempt, task, ordinal, queue_id, segments, bytes, segment_list, created_at"
    segment = bytes_literal(store.database.dialect, bytes(64))
    for ordinal in range(2):
        run_sql(
            store.database,
            f"insert into penstock.staged ({columns}) select 'a', 0, 'x', 0, {ordinal}, queue_id, 1, "
            f"9223372036854775807, {segment}, 1 from penstock.queue",
        )
        run_sql(
            store.database,
            "insert into penstock.ledger (sink, app_id, batch_id, task, ranges, row_count, committed_at) "
            f"values ('table:t', 'a', {ordinal}, -1, '[]', 9223372036854775807, 1)",
        )
    assert store.info().staged_segments == 2
    assert store.clean_up() == 2


def test_a_damaged_list_of_staged_segments_is_refused_and_can_be_dropped(store: Store) -> None:
    queue = store.create_queue("q", SCHEMA)
    segments = to_segments(pa.Table.from_pylist([{"n": 1}], schema=SCHEMA), 0)
    attempt = Attempt("app", 0, 0, "try")
    staging.stage_segments(store.database, queue.record, attempt, segments, 0)
    overwrite(store, "staged.segment_list", b"damaged")
    with pytest.raises(StoreError, match="a list of staged segments is not what Penstock writes") as caught:
        store.database.run(lambda tx: staging.promote(tx, queue.record, "app", 0, {"try": 1}))
    assert caught.value.condition == "STORE_ERROR.UNREADABLE_RECORD"
    store.drop_queue("q")
    assert store.info().staged_segments == 0


DEEP = "[" * 100_000 + "]" * 100_000


def read_key(store: Store, url: str) -> None:
    store.queue("q")


def trim_at_plan(store: Store, url: str) -> None:
    registration = store.consumer("c").registration("q")
    lock = store.database.owner_lock(registration.lock_name(store.uuid))
    assert lock.acquire()
    store.queue("q").trim(0, 1)


def read_feed(store: Store, url: str) -> None:
    QueueFeed("feed", url).open().describe()


def read_commits(store: Store, url: str) -> None:
    feed = QueueFeed("feed", url).open()
    list(feed.commits(feed.beginning, feed.newest(feed.beginning)))


@pytest.mark.timeout(60)
@pytest.mark.parametrize("text", [DEEP, "{", "5", "[{}]"], ids=["deep", "broken", "another kind", "no text"])
@pytest.mark.parametrize(
    ("column", "read"),
    [
        ("queue.key_columns", read_key),
        ("registration.plan", trim_at_plan),
        ("queue.contract", read_feed),
        ("feed_commit.ends", read_commits),
    ],
)
def test_the_error_names_a_record_with_unexpected_json(
    store: Store, store_url: str, column: str, read: Callable[[Store, str], None], text: str
) -> None:
    store.create_queue("q", SCHEMA).append(rows(1, 2, 3))
    store.create_consumer("c")
    store.consumer("c").register("q")
    keys = store.consumer("c").registration("q").keys
    store.database.run(lambda tx: tx.run("open_plan", epoch=0, plan="{}", **keys))
    feed = QueueFeed.create("feed", SCHEMA, ChangeContract(row_id="n"), store=store_url)
    feed.append_commit(1, datetime.now(UTC), [{"n": 1, "_change_type": "insert"}])
    overwrite(store, column, text)
    with pytest.raises(StoreError, match="is not what Penstock writes") as caught:
        read(store, store_url)
    assert caught.value.condition == "STORE_ERROR.UNREADABLE_RECORD"


@pytest.mark.timeout(60)
@pytest.mark.parametrize("partitions", [10**9, 10_001, 0, -1])
def test_an_impossible_number_of_partitions_is_refused(store: Store, partitions: int) -> None:
    """Otherwise maintenance would never end, or no row could be placed."""
    store.create_queue("q", SCHEMA).append(rows(1, 2, 3))
    overwrite(store, "queue.partitions", partitions)
    for work in (lambda: store.queue("q"), store.maintain):
        with pytest.raises(StoreError, match=f"it is {partitions}, and a queue has 1 to 10000") as caught:
            work()
        assert caught.value.condition == "STORE_ERROR.UNREADABLE_RECORD"


@pytest.mark.parametrize("index", [10**12, 2**63 - 1, -5])
@pytest.mark.parametrize("read", [lambda consumer: consumer.pull("q", 0), lambda consumer: consumer.lag("q")])
def test_an_impossible_offset_is_refused(
    store: Store, index: int, read: Callable[[Consumer], object]
) -> None:
    store.create_queue("q", SCHEMA).append(rows(1, 2, 3))
    consumer = store.create_consumer("c")
    consumer.register("q")
    overwrite(store, "position.next_index", index)
    with pytest.raises(
        StoreError, match=f"consumer 'c' on queue 'q', partition 0 .*it is {index}, and"
    ) as caught:
        read(consumer)
    assert caught.value.condition == "STORE_ERROR.UNREADABLE_RECORD"


@pytest.mark.parametrize(
    ("column", "index"), [("first_index", 10**12), ("first_index", -1), ("next_index", -1)]
)
def test_an_impossible_range_of_rows_is_refused(store: Store, column: str, index: int) -> None:
    queue = store.create_queue("q", SCHEMA)
    queue.append(rows(1, 2, 3))
    overwrite(store, f"partition.{column}", index)
    with pytest.raises(StoreError, match="partition 0 of queue 'q' is not what Penstock writes") as caught:
        queue.info()
    assert caught.value.condition == "STORE_ERROR.UNREADABLE_RECORD"


def test_the_error_names_a_number_at_its_limit(store: Store) -> None:
    """The schema allows the number, but the next append would exceed it."""
    queue = store.create_queue("q", pa.schema([("n", pa.int64())]), partitions=2)
    queue.register(store.create_consumer("c").name)
    store.producer("q", "s")
    for change in (
        f"partition set next_index = {1 << 40}",
        f"partition set first_index = 0, next_index = 0, segments = {(1 << 62) - 1}",
        f"partition set segments = 0, bytes = {(1 << 62) - 1}",
        f"partition set bytes = 0, last_timestamp = {(1 << 62) - 1}",
    ):
        run_sql(store.database, f"update penstock.{change}")
        for partition in (0, None):
            with pytest.raises(StoreError, match=r"queue 'q' is not what Penstock writes") as caught:
                queue.append([{"n": 1}, {"n": 2}], partition)
            assert caught.value.condition == "STORE_ERROR.UNREADABLE_RECORD"
    run_sql(store.database, f"update penstock.producer set epoch = {(1 << 62) - 1}")
    with pytest.raises(StoreError, match="producer session 's' of queue 'q' is not what"):
        store.producer("q", "s")
    run_sql(store.database, f"update penstock.registration set epoch = {(1 << 62) - 1}")
    with pytest.raises(StoreError, match="the registration of consumer 'c' on queue 'q' is not what"):
        Owner(store.database, "c", "q")


def test_an_unreadable_queue_can_be_dropped(store: Store, caplog: pytest.LogCaptureFixture) -> None:
    for name in ("bad", "good"):
        store.create_queue(name, pa.schema([("n", pa.int64())])).append([{"n": 1}])
    bad = store.queue("bad").record.queue_id
    write_unchecked(store, f"partition set next_index = {1 << 41} where queue_id = {bad}")
    with pytest.raises(StoreError, match="partition 0 of queue 'bad'"):
        store.maintain()
    assert any("maintenance of queue 'bad' failed" in record.getMessage() for record in caplog.records)
    store.drop_queue("bad")
    store.maintain()
