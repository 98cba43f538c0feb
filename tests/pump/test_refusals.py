"""What a pump refuses, and what it has appended until then."""

from __future__ import annotations

import os
import random
import signal
import sys
import threading
from pathlib import Path

import pyarrow as pa
import pytest

import penstock
from penstock.errors import (
    AlreadyExistsError,
    CheckpointMismatchError,
    FeedUnavailableError,
    InvalidInputError,
    PenstockError,
    QueueNotFoundError,
    StoreUnavailableError,
    condition_of,
)
from penstock.feeds.postgres import following
from penstock.feeds.postgres.replication import Received, ReplicationStream
from penstock.pump.run import RetryPauses
from penstock.store.database import Transaction
from penstock.store.records import pumps
from tests.support.postgres_source import Source, open_transaction
from tests.support.processes import start
from tests.support.pumped import await_equal, change_rows, create_pump, fill, running, sort_by_commit
from tests.support.raw_sql import run_sql
from tests.support.waiting import wait_until


def failure_of(pump: penstock.Pump) -> BaseException:
    with running(pump) as failures:
        wait_until(lambda: failures, 30, "the pump to stop")
    return failures[0]


@pytest.fixture
def copied(shop: Source, store_url: str) -> Source:
    """A shop whose pump has appended what was there, and has stopped."""
    with running(create_pump(shop, store_url)) as failures:
        await_equal(store_url, shop, failures)
    return shop


@pytest.fixture
def together(shop: Source, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the server has to send comes in one piece."""
    read = ReplicationStream.read

    def reading(stream: ReplicationStream, wait: float) -> Received:
        sent = (
            "SELECT sent_lsn >= pg_current_wal_flush_lsn() FROM pg_stat_replication "
            f"WHERE application_name LIKE '%{shop.name}'"
        )
        wait_until(lambda: (True,) in shop.rows(sent), 30, "the server to send")
        return read(stream, wait)

    monkeypatch.setattr(ReplicationStream, "read", reading)


@pytest.mark.usefixtures("together")
def test_columns_that_came_just_before_a_change_that_is_refused_are_appended(
    copied: Source, store_url: str
) -> None:
    table = f"{copied.name}.orders"
    copied.run(
        f"ALTER TABLE {table} ADD COLUMN note text",
        f"INSERT INTO {table} VALUES (503, 'c', 3, 'n3')",
        f"INSERT INTO {table} VALUES (504, 'd', 4, 'n4')",
        f"ALTER TABLE {table} ALTER COLUMN price TYPE text",
        f"INSERT INTO {table} VALUES (505, 'e', '5', 'n5')",
    )
    failure = failure_of(create_pump(copied, store_url, schema_changes="evolve"))
    assert failure.condition == "FEED_UNAVAILABLE.COLUMN_TYPE_CHANGED"
    rows = sort_by_commit(change_rows(store_url, table))[500:]
    assert [(row["id"], row["note"]) for row in rows] == [(503, "n3"), (504, "n4")]


def test_a_commit_that_is_appended_in_part_cannot_be_skipped(
    copied: Source, store_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(following, "_PART_BYTES", 1 << 14)
    with copied.connection.transaction():
        fill(copied, 1001, 3000)
        copied.run(f"INSERT INTO {copied.name}.orders VALUES (3001, 'x', 'NaN')")
    failure = failure_of(create_pump(copied, store_url))
    assert failure.condition == "FEED_UNAVAILABLE.VALUE"
    version = failure.parameters["version"]
    feed = copied.feed(snapshot="initial", skip=[version])
    assert failure_of(penstock.Pump(feed, store_url)).condition == "FEED_UNAVAILABLE.SKIPPED_IN_PART"
    assert len(change_rows(store_url, f"{copied.name}.orders")) == 500
    feed = copied.feed(snapshot="initial", invalid_values="null")
    with running(penstock.Pump(feed, store_url)) as failures:
        wait_until(
            lambda: failures or len(change_rows(store_url, f"{copied.name}.orders")) == 2501, 30, "the rows"
        )
    assert not failures


def test_a_commit_that_never_comes_again_is_not_taken_for_complete(
    copied: Source, store: penstock.Store, store_url: str
) -> None:
    (version,) = run_sql(store.database, "select version from penstock.pump")[0]
    run_sql(store.database, f"update penstock.pump set part_version = {version + 8}, part_rows = 3")
    fill(copied, 501, 502)
    assert failure_of(create_pump(copied, store_url)).condition == "DATA_LOST.HISTORY_CHANGED"
    assert len(change_rows(store_url, f"{copied.name}.orders")) == 500


def test_a_new_pump_does_not_repeat_rows_in_the_queues_of_an_earlier_one(
    copied: Source, store: penstock.Store, store_url: str
) -> None:
    store.database.run(lambda tx: pumps.delete_pump(tx, copied.name))
    copied.drop_slot()
    failure = failure_of(create_pump(copied, store_url))
    assert isinstance(failure, AlreadyExistsError)
    assert "has had rows" in failure.message
    with running(create_pump(copied, store_url, prefix="new.")) as failures:
        wait_until(lambda: failures or _rows(store_url, f"new.{copied.name}.orders") == 500, 30, "the rows")
    assert not failures


def _rows(store_url: str, queue: str) -> int:
    try:
        return len(change_rows(store_url, queue))
    except PenstockError:
        return 0


def test_a_queue_that_was_dropped_is_not_made_again(
    copied: Source, store: penstock.Store, store_url: str
) -> None:
    store.drop_queue(f"{copied.name}.stock")
    assert isinstance(failure_of(create_pump(copied, store_url)), QueueNotFoundError)


def test_partitions_that_log_other_keys_are_refused(source: Source, store_url: str) -> None:
    name = f"{source.name}.parts"
    source.run(
        f"ALTER PUBLICATION {source.name} SET (publish_via_partition_root = true)",
        f"CREATE TABLE {name} (k int, id int, a text) PARTITION BY LIST (k)",
        f"ALTER TABLE {name} REPLICA IDENTITY FULL",
        f"CREATE TABLE {name}_1 PARTITION OF {name} FOR VALUES IN (1)",
        f"ALTER TABLE {name}_1 ADD PRIMARY KEY (id)",
        f"ALTER PUBLICATION {source.name} ADD TABLE {name}",
        f"INSERT INTO {name} VALUES (1, 1, 'x'), (1, 2, 'y')",
    )
    with running(create_pump(source, store_url)) as failures:
        wait_until(lambda: failures or _rows(store_url, name) == 2, 30, "the copy")
        source.run(f"DELETE FROM {name} WHERE id = 2")
        wait_until(lambda: failures, 30, "the pump to stop")
    assert failures[0].condition == "FEED_UNAVAILABLE.KEY_UNKNOWN"


@pytest.mark.parametrize("how", ["ALTER PUBLICATION {0} DROP TABLE {0}.stock", "DROP TABLE {0}.stock"])
def test_a_table_that_leaves_the_publication_ends_the_pump_after_its_rows(
    copied: Source, store_url: str, how: str
) -> None:
    copied.run(f"INSERT INTO {copied.name}.stock VALUES ('last', 1)", how.format(copied.name))
    failure = failure_of(create_pump(copied, store_url))
    assert failure.condition == "FEED_UNAVAILABLE.TABLE_REMOVED"
    assert "last" in {row["item"] for row in change_rows(store_url, f"{copied.name}.stock")}


@pytest.mark.few(2)
@pytest.mark.parametrize("policy", ["refuse", "evolve", "ignore"])
@pytest.mark.parametrize(
    ("more", "condition"),
    [
        ((), "TABLE_RENAMED"),
        (
            ("ALTER PUBLICATION {0} DROP TABLE {0}.goods", "ALTER PUBLICATION {0} ADD TABLE {0}.goods"),
            "TABLE_PUBLISHED_AGAIN",
        ),
    ],
)
def test_a_table_that_is_renamed_ends_the_pump_before_it_has_rows(
    copied: Source, store_url: str, policy: str, more: tuple[str, ...], condition: str
) -> None:
    statements = [each.format(copied.name) for each in more]
    copied.run(f"ALTER TABLE {copied.name}.stock RENAME TO goods", *statements)
    failure = failure_of(create_pump(copied, store_url, schema_changes=policy))
    assert failure.condition == f"FEED_UNAVAILABLE.{condition}"


@pytest.mark.parametrize(
    ("change", "condition"),
    [
        ("RENAME COLUMN note TO remark", "COLUMN_DROPPED"),
        ("ALTER COLUMN note TYPE int USING 1", "COLUMN_TYPE_CHANGED"),
        ("DROP COLUMN note, ADD COLUMN note text", "COLUMN_REPLACED"),
    ],
)
def test_columns_that_a_queue_has_got_are_watched_like_the_others(
    copied: Source, store_url: str, change: str, condition: str
) -> None:
    table = f"{copied.name}.orders"
    with running(create_pump(copied, store_url, schema_changes="evolve")) as failures:
        copied.run(
            f"ALTER TABLE {table} ADD COLUMN note text", f"INSERT INTO {table} VALUES (501, 'a', 1, 'n')"
        )
        wait_until(lambda: failures or _rows(store_url, table) == 501, 30, "the row")
    assert not failures
    copied.run(f"ALTER TABLE {table} {change}", f"INSERT INTO {table} (id) VALUES (502)")
    failure = failure_of(create_pump(copied, store_url, schema_changes="evolve"))
    assert failure.condition == f"FEED_UNAVAILABLE.{condition}"
    assert _rows(store_url, table) == 501


def test_a_table_without_a_key_does_not_evolve(source: Source, store_url: str) -> None:
    table = source.table("a int, b text", "t", f"ALTER TABLE {source.name}.t REPLICA IDENTITY FULL")
    with running(create_pump(source, store_url, schema_changes="evolve")) as failures:
        source.run(f"INSERT INTO {table} VALUES (1, 'x')")
        wait_until(lambda: failures or _rows(store_url, table) == 1, 30, "the row")
        source.run(f"ALTER TABLE {table} ADD COLUMN note text", f"INSERT INTO {table} VALUES (2, 'y', 'z')")
        wait_until(lambda: failures, 30, "the pump to stop")
    assert failures[0].condition in ("FEED_UNAVAILABLE.COLUMN_ADDED", "FEED_UNAVAILABLE.KEY_CHANGED")


def test_tables_without_rows_are_followed(source: Source, store_url: str) -> None:
    table = source.table("id int PRIMARY KEY")
    with running(create_pump(source, store_url)) as failures:
        wait_until(lambda: failures or _exists(store_url, table), 30, "the queue")
        source.run(f"INSERT INTO {table} VALUES (1)")
        wait_until(lambda: failures or _rows(store_url, table) == 1, 30, "the row")
    assert not failures


def _exists(store_url: str, queue: str) -> bool:
    try:
        with penstock.connect(store_url, create=False) as store:
            store.queue(queue)
    except PenstockError:
        return False
    return True


def test_a_table_that_is_added_is_left_out_on_request(copied: Source, store_url: str) -> None:
    copied.table("id int PRIMARY KEY", "added", f"INSERT INTO {copied.name}.added VALUES (1)")
    copied.run(f"INSERT INTO {copied.name}.added VALUES (2)")
    fill(copied, 501, 502)
    with running(create_pump(copied, store_url, schema_changes="ignore")) as failures:
        await_equal(store_url, copied, failures)
    copied.run(f"INSERT INTO {copied.name}.added VALUES (3)")
    failure = failure_of(create_pump(copied, store_url))
    assert failure.condition in ("FEED_UNAVAILABLE.TABLE_ADDED", "FEED_UNAVAILABLE.TABLE_NOT_COPIED")


@pytest.mark.parametrize("when", ["before it starts", "while it runs"])
def test_the_tables_of_a_store_are_not_pumped(source: Source, store_url: str, when: str) -> None:
    """Each append to a store in the database would be a change to append."""
    source.table("id int PRIMARY KEY", "first")
    store = f"{source.name}_store"
    penstock.connect(f"{source.url}?schema={store}", create=True).close()
    publish = f"ALTER PUBLICATION {source.name} ADD TABLES IN SCHEMA {store}"
    try:
        if when == "before it starts":
            source.run(publish)
        with running(create_pump(source, store_url, schema_changes="evolve")) as failures:
            if when == "while it runs":
                wait_until(lambda: failures or _exists(store_url, f"{source.name}.first"), 30, "the queue")
                source.run(publish)
            wait_until(lambda: failures, 30, "the pump to stop")
        assert condition_of(failures[0]) == "FEED_UNAVAILABLE.STORE_PUBLISHED"
        assert not _exists(store_url, f"{store}.segment")
    finally:
        source.run(f"DROP SCHEMA {store} CASCADE")


def test_what_the_server_cannot_decode_ends_the_pump(source: Source, store_url: str) -> None:
    name = f"{source.name}.t"
    source.run(
        f"CREATE TABLE {name} (id int PRIMARY KEY)",
        f"ALTER PUBLICATION {source.name} ADD TABLE {name} WHERE (1 / id > -5)",
    )
    with running(create_pump(source, store_url)) as failures:
        wait_until(lambda: failures or _exists(store_url, name), 30, "the queue")
        source.run(f"INSERT INTO {name} VALUES (0)")
        wait_until(lambda: failures, 30, "the pump to stop")
    assert isinstance(failures[0], FeedUnavailableError)
    assert "division by zero" in failures[0].message


def test_two_tables_with_one_queue_are_refused_before_anything_is_made(
    source: Source, store_url: str
) -> None:
    other = f'public."{source.name}.t"'
    source.table("id int PRIMARY KEY", "t")
    source.run(f"CREATE TABLE {other} (id int PRIMARY KEY)")
    try:
        source.run(f"ALTER PUBLICATION {source.name} ADD TABLE {other}")
        failure = failure_of(create_pump(source, store_url))
    finally:
        source.run(f"DROP TABLE {other}")
    assert isinstance(failure, InvalidInputError)
    assert failure.condition == "INVALID_INPUT.QUEUE_OF_TWO_TABLES"
    assert source.slots() == 0


def test_another_prefix_is_another_pump(copied: Source, store_url: str) -> None:
    assert isinstance(failure_of(create_pump(copied, store_url, prefix="x.")), CheckpointMismatchError)


@pytest.mark.parametrize("state", ['{"feed": 3}', "[]", "no JSON", '{"queues": []}'])
def test_a_state_that_is_not_as_written_is_refused_by_name(
    copied: Source, store: penstock.Store, store_url: str, state: str
) -> None:
    run_sql(store.database, f"update penstock.pump set state = '{state}'")
    failure = failure_of(create_pump(copied, store_url))
    assert isinstance(failure, PenstockError)
    assert f"the state of pump '{copied.name}'" in failure.message


def test_replaced_values_are_logged(copied: Source, store_url: str, caplog: pytest.LogCaptureFixture) -> None:
    copied.run(f"INSERT INTO {copied.name}.orders VALUES (501, 'x', 'NaN')")
    feed = copied.feed(snapshot="initial", invalid_values="null")
    with running(penstock.Pump(feed, store_url)) as failures:
        wait_until(lambda: failures or _rows(store_url, f"{copied.name}.orders") == 501, 30, "the row")
    assert "has 1 values that its type cannot represent" in caplog.text


def test_pauses_end_however_often_something_failed() -> None:
    stopping = threading.Event()
    stopping.set()
    waits = RetryPauses("p", stopping)

    def away() -> None:
        raise StoreUnavailableError("away")

    for _ in range(2000):
        assert waits.attempt(away) is None


def test_a_store_that_is_away_at_the_start_is_waited_for(
    shop: Source, store_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    find, calls = pumps.create_pump, 0

    def away(tx: Transaction, *given: object) -> None:
        nonlocal calls
        calls += 1
        if calls == 1:
            # As after all retries of the store.
            monkeypatch.setattr("penstock.store.database.RETRY_SECONDS", 0.0)
            raise StoreUnavailableError("away")
        monkeypatch.setattr("penstock.store.database.RETRY_SECONDS", 20.0)
        find(tx, *given)

    monkeypatch.setattr(pumps, "create_pump", away)
    with running(create_pump(shop, store_url)) as failures:
        await_equal(store_url, shop, failures)
    assert calls > 1


def test_a_second_signal_ends_a_pump_that_waits(shop: Source, store_url: str, tmp_path: Path) -> None:
    """Such as for a transaction, before it can make its slot."""
    statement = f"INSERT INTO {shop.name}.orders VALUES (9999, 'open', 1)"
    words = ["penstock", "pump", "run", shop.feed(snapshot="initial").url, "--url", store_url]
    with open_transaction(shop, statement):
        child = start([sys.executable, "-m", *words], os.environ, tmp_path / "log")
        try:
            wait_until(lambda: "is created when all transactions" in child.output, 60, "the wait")
            os.kill(child.pid, signal.SIGTERM)
            os.kill(child.pid, signal.SIGINT)
            assert child.wait(30) == 130
        finally:
            child.kill_tree()


def test_a_table_of_pumps_is_shown(copied: Source, store_url: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "penstock", "pump", "list", "--url", store_url]
    child = start(command, os.environ, tmp_path / "log")
    assert child.wait(60) == 0
    assert "stopped" in child.output


def test_a_pump_that_is_not_there_is_named(store_url: str, store: penstock.Store, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "penstock", "pump", "remove", "nope", "--yes", "--url", store_url]
    child = start(command, os.environ, tmp_path / "log")
    assert child.wait(60) == 1
    assert "PUMP_NOT_FOUND" in child.output


@pytest.mark.soak
def test_wide_rows_are_copied_in_steps_of_some_megabytes(
    source: Source, store_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(following, "_PART_BYTES", 1 << 20)
    table = source.table("id int PRIMARY KEY, wide text")
    text = "".join(random.Random(1).choices("abcdefgh", k=100_000))
    source.run(f"INSERT INTO {table} SELECT n, '{text}' || n FROM generate_series(1, 700) AS n")
    sizes = []
    add = following.Step.add

    def adding(step: following.Step, rows: dict[str, list[pa.RecordBatch]]) -> None:
        add(step, rows)
        sizes.append(sum(batch.nbytes for batches in step.rows.values() for batch in batches))

    monkeypatch.setattr(following.Step, "add", adding)
    with running(create_pump(source, store_url)) as failures:
        wait_until(lambda: failures or _rows(store_url, table) == 700, 60, "the rows")
    assert not failures
    # A step ends with the chunk that exceeds the size, which has at most 32 MiB.
    assert max(sizes) <= 33 << 20
