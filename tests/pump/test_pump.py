"""Pumps: a table's rows and its changes reach the queues once, in whole commits."""

from __future__ import annotations

import random
import sqlite3
import subprocess
import sys
from contextlib import closing
from datetime import datetime
from pathlib import Path

import pyarrow as pa
import pytest

import penstock
from penstock.changes import finality
from penstock.errors import (
    AlreadyExistsError,
    CheckpointMismatchError,
    DataLostError,
    FeedUnavailableError,
    InvalidInputError,
)
from penstock.feeds.postgres import following
from penstock.feeds.queue_feed import QueueFeed
from penstock.instants import moment_of
from penstock.pump import appender
from penstock.store.records import pumps
from penstock.store.records.pumps import PumpPosition
from tests.support.postgres_source import Source, open_transaction
from tests.support.pumped import (
    TABLES,
    SimulatedCrash,
    await_equal,
    change,
    change_rows,
    create_pump,
    fill,
    is_equal,
    pumped_tables,
    running,
    sort_by_commit,
    source_tables,
)
from tests.support.waiting import wait_until


def commits(store_url: str, queue: str) -> list[tuple[int, int]]:
    return [(each.version, each.rows) for each in QueueFeed(queue, store_url).open().commits(-1, 2**62)]


def test_the_queues_have_the_rows_that_were_there_and_each_change(shop: Source, store_url: str) -> None:
    chance = random.Random(1)
    with running(create_pump(shop, store_url)) as failures:
        await_equal(store_url, shop, failures)
        for _ in range(60):
            change(shop, chance)
        await_equal(store_url, shop, failures)
    for _ in range(20):
        change(shop, chance)
    with running(create_pump(shop, store_url)) as failures:
        await_equal(store_url, shop, failures)
    assert not failures


def test_the_first_commit_has_all_rows_that_were_there(shop: Source, store_url: str) -> None:
    with running(create_pump(shop, store_url)) as failures:
        await_equal(store_url, shop, failures)
    (orders,), (stock,) = (commits(store_url, f"{shop.name}.{table}") for table in TABLES)
    assert orders == (stock[0], 500)
    assert stock[1] == 7


def test_a_commit_reaches_all_queues_in_one_transaction(shop: Source, store_url: str) -> None:
    with running(create_pump(shop, store_url)) as failures:
        await_equal(store_url, shop, failures)
        with shop.connection.transaction():
            fill(shop, 501, 510)
        await_equal(store_url, shop, failures)
    last = [commits(store_url, f"{shop.name}.{table}")[-1] for table in TABLES]
    assert [rows for _, rows in last] == [10, 7]
    assert last[0][0] == last[1][0]
    rows = sort_by_commit([row for table in TABLES for row in change_rows(store_url, f"{shop.name}.{table}")])
    assert [row["_commit_sequence"] for row in rows if row["_commit_version"] == last[0][0]] == list(
        range(17)
    )


@pytest.mark.parametrize("partitions", [1, 3])
def test_a_large_transaction_is_appended_in_parts_and_read_whole(
    shop: Source, store_url: str, monkeypatch: pytest.MonkeyPatch, partitions: int
) -> None:
    monkeypatch.setattr(following, "_PART_BYTES", 1 << 14)
    monkeypatch.setattr(following, "_PIECE_ROWS", 60)
    with running(create_pump(shop, store_url, partitions=partitions)) as failures:
        await_equal(store_url, shop, failures)
        with shop.connection.transaction():
            fill(shop, 1001, 9000)
            shop.run(f"UPDATE {shop.name}.stock SET n = 0 WHERE item = 'item 3'")
        shop.run(f"DELETE FROM {shop.name}.orders WHERE id > 8990")
        await_equal(store_url, shop, failures)
    assert not failures
    assert [rows for _, rows in commits(store_url, f"{shop.name}.orders")] == [500, 8000, 10]
    assert [rows for _, rows in commits(store_url, f"{shop.name}.stock")] == [7, 8]


@pytest.mark.parametrize("after_commit", [True, False])
def test_a_pump_that_dies_within_a_large_transaction_goes_on_in_it(
    shop: Source, store_url: str, monkeypatch: pytest.MonkeyPatch, after_commit: bool
) -> None:
    monkeypatch.setattr(following, "_PART_BYTES", 1 << 14)
    monkeypatch.setattr(following, "_PIECE_ROWS", 60)
    move, moved = pumps.move_pump, 0

    def dying(*given: object) -> bool:
        nonlocal moved
        moved += 1
        if moved % 5 == 0 and not after_commit:
            raise SimulatedCrash
        return move(*given)

    monkeypatch.setattr(pumps, "move_pump", dying)
    if after_commit:
        append = appender.append_commits

        def appending(*given: object) -> object:
            append(*given)
            nonlocal moved
            moved += 1
            if moved % 5 == 0:
                raise SimulatedCrash

        monkeypatch.setattr(appender, "append_commits", appending)
    with shop.connection.transaction():
        fill(shop, 1001, 4000)
    for attempt in range(40):
        if attempt == 4:
            with shop.connection.transaction():
                fill(shop, 4001, 9000)
        if not _fails(shop, store_url, expects_end=attempt > 4):
            break
    assert attempt > 4
    assert pumped_tables(store_url, shop) == source_tables(shop)


def _fails(shop: Source, store_url: str, *, expects_end: bool) -> bool:
    """Run a pump until it dies, or it has appended everything; return whether it died."""
    with running(create_pump(shop, store_url)) as failures:
        wait_until(lambda: failures or (expects_end and is_equal(store_url, shop)), 60, "the end")
    assert all(isinstance(each, SimulatedCrash) for each in failures)
    return bool(failures)


def test_the_slot_advances_when_the_tables_do_not_change(shop: Source, store_url: str) -> None:
    with running(create_pump(shop, store_url)) as failures:
        await_equal(store_url, shop, failures)
        for _ in range(5):
            shop.run(f"CREATE TABLE {shop.name}.other AS SELECT n FROM generate_series(1, 20000) AS n")
            shop.run(f"DROP TABLE {shop.name}.other")
        (end,) = shop.rows("SELECT pg_current_wal_flush_lsn() - '0/0'")[0]
        wait_until(lambda: shop.feed().lag().unconfirmed < 100_000, 30, "the slot to advance")
        with penstock.connect(store_url) as store:
            record = store.database.run(lambda tx: pumps.find_pump(tx, shop.name), write=False)
        # The store knows before the server does.
        assert record.position.version >= end - 100_000


def test_a_server_that_ends_its_connections_is_connected_to_again(shop: Source, store_url: str) -> None:
    chance = random.Random(2)
    with running(create_pump(shop, store_url)) as failures:
        await_equal(store_url, shop, failures)
        for _ in range(3):
            shop.run(
                "SELECT pg_terminate_backend(active_pid) FROM pg_replication_slots "
                f"WHERE slot_name = '{shop.name}' AND active_pid IS NOT NULL"
            )
            for _ in range(10):
                change(shop, chance)
            await_equal(store_url, shop, failures)
    assert not failures


def test_one_queue_has_the_rows_of_all_tables_in_one_form(shop: Source, store_url: str) -> None:
    with running(create_pump(shop, store_url, queue="all")):
        wait_until(lambda: _count(store_url, "all") == 507, 60, "the rows")
        with shop.connection.transaction():
            fill(shop, 501, 503)
        wait_until(lambda: _count(store_url, "all") == 517, 60, "the new rows")
    rows = sort_by_commit(change_rows(store_url, "all"))[507:]
    assert [row["_table"].split(".")[1] for row in rows] == ["orders"] * 3 + ["stock"] * 7
    assert rows[0]["orders"] == {"id": 501, "item": "item 4", "price": rows[0]["orders"]["price"]}
    assert rows[0]["stock"] is None
    assert rows[0]["_key"] == '{"id":501}'


def _count(store_url: str, queue: str) -> int:
    try:
        return sum(rows for _, rows in commits(store_url, queue))
    except penstock.PenstockError:
        return 0


def test_a_change_of_a_table_stops_the_pump_after_the_commits_before_it(shop: Source, store_url: str) -> None:
    with running(create_pump(shop, store_url)) as failures:
        await_equal(store_url, shop, failures)
        fill(shop, 501, 502)
        shop.run(f"ALTER TABLE {shop.name}.orders DROP COLUMN item")
        shop.run(f"INSERT INTO {shop.name}.orders VALUES (503, 1)")
        wait_until(lambda: failures, 30, "the pump to stop")
    (failure,) = failures
    assert isinstance(failure, FeedUnavailableError)
    assert failure.condition == "FEED_UNAVAILABLE.COLUMN_DROPPED"
    assert "penstock pump remove" in failure.message
    rows = change_rows(store_url, f"{shop.name}.orders")
    assert max(row["id"] for row in rows) == 502


def test_commits_before_one_that_cannot_be_read_are_appended_even_if_they_come_together(
    shop: Source, store_url: str
) -> None:
    with running(create_pump(shop, store_url)) as failures:
        await_equal(store_url, shop, failures)
    for first in (501, 511):
        fill(shop, first, first + 9)
    with shop.connection.transaction():
        shop.run(f"INSERT INTO {shop.name}.stock VALUES ('torn', 1)")
        shop.run(f"ALTER TABLE {shop.name}.orders RENAME COLUMN item TO article")
        fill_renamed = f"INSERT INTO {shop.name}.orders VALUES (600, 'x', 1)"
        shop.run(fill_renamed)
    with running(create_pump(shop, store_url)) as failures:
        wait_until(lambda: failures, 30, "the pump to stop")
    assert failures[0].condition == "FEED_UNAVAILABLE.COLUMN_DROPPED"
    assert max(row["id"] for row in change_rows(store_url, f"{shop.name}.orders")) == 520
    assert "torn" not in {row["item"] for row in change_rows(store_url, f"{shop.name}.stock")}


@pytest.mark.parametrize("policy", ["evolve", "ignore"])
def test_columns_come_and_go_by_the_policy(shop: Source, store_url: str, policy: str) -> None:
    table, queue = f"{shop.name}.orders", f"{shop.name}.orders"
    pump = create_pump(shop, store_url, schema_changes=policy)
    with running(pump) as failures:
        await_equal(store_url, shop, failures)

    def found() -> list[tuple[object, ...]]:
        rows = sort_by_commit(change_rows(store_url, queue))[500:]
        return [(row["id"], row["item"], row.get("note"), str(row.get("at"))) for row in rows]

    shop.run(
        f"INSERT INTO {table} VALUES (501, 'a', 1)",
        f"ALTER TABLE {table} ADD COLUMN note text DEFAULT 'old', ADD COLUMN at date",
        f"INSERT INTO {table} VALUES (502, 'b', 2, 'new', '2026-01-02')",
        f"ALTER TABLE {table} DROP COLUMN item",
        f"INSERT INTO {table} VALUES (503, 3, 'newer')",
    )
    with running(create_pump(shop, store_url, schema_changes=policy)) as failures:
        wait_until(lambda: failures or len(found()) >= 3, 30, "the rows")
        shop.run(f"ALTER TABLE {table} ADD COLUMN item text")
        wait_until(lambda: failures, 30, "the pump to stop")
    expected = [(501, "a", None, "None"), (502, "b", "new", "2026-01-02"), (503, None, "newer", "None")]
    if policy == "ignore":
        expected = [(number, item, None, "None") for number, item, *_ in expected]
    assert found() == expected
    # A column of the same name is another one: its earlier values are not in the log.
    assert failures[0].condition == "FEED_UNAVAILABLE.COLUMN_REPLACED"


def test_a_renamed_column_is_never_taken_for_one_that_is_gone(shop: Source, store_url: str) -> None:
    with running(create_pump(shop, store_url, schema_changes="evolve")) as failures:
        await_equal(store_url, shop, failures)
        shop.run(f"ALTER TABLE {shop.name}.orders RENAME COLUMN item TO article")
        shop.run(f"INSERT INTO {shop.name}.orders VALUES (503, 'x', 1)")
        wait_until(lambda: failures, 30, "the pump to stop")
    assert failures[0].condition == "FEED_UNAVAILABLE.COLUMN_DROPPED"
    assert "article" in failures[0].message


def test_what_is_not_in_the_log_stops_the_pump(shop: Source, store_url: str) -> None:
    with running(create_pump(shop, store_url)) as failures:
        await_equal(store_url, shop, failures)
        shop.run(f"ALTER PUBLICATION {shop.name} DROP TABLE {shop.name}.stock")
        shop.run(f"UPDATE {shop.name}.stock SET n = 77")
        shop.run(f"ALTER PUBLICATION {shop.name} ADD TABLE {shop.name}.stock")
        wait_until(lambda: failures, 30, "the pump to stop")
    assert failures[0].condition == "FEED_UNAVAILABLE.TABLE_PUBLISHED_AGAIN"


def test_a_store_that_was_restored_from_before_the_slot_is_refused(shop: Source, tmp_path: Path) -> None:
    url, file = f"sqlite:///{tmp_path}/store.db", tmp_path / "store.db"
    with running(create_pump(shop, url)) as failures:
        await_equal(url, shop, failures)
    backup = tmp_path / "backup.db"
    with closing(sqlite3.connect(file)) as connection:
        connection.execute("vacuum into ?", (str(backup),))
    with running(create_pump(shop, url)) as failures:
        fill(shop, 501, 502)
        await_equal(url, shop, failures)
        wait_until(lambda: shop.feed().lag().unconfirmed == 0, 30, "the slot to advance")
    for each in tmp_path.glob("store.db*"):
        each.unlink()
    backup.rename(file)
    file.chmod(0o600)
    with running(create_pump(shop, url)) as failures:
        wait_until(lambda: failures, 30, "the pump to stop")
    assert isinstance(failures[0], DataLostError)
    assert failures[0].condition == "DATA_LOST.SLOT"


def test_a_pump_of_another_feed_needs_another_name(shop: Source, store_url: str) -> None:
    with running(create_pump(shop, store_url)) as failures:
        await_equal(store_url, shop, failures)
    feed = shop.feed(snapshot="initial", tables=["orders"])
    with running(penstock.Pump(feed, store_url)) as failures:
        wait_until(lambda: failures, 30, "the pump to stop")
    assert isinstance(failures[0], CheckpointMismatchError)
    assert failures[0].condition == "CHECKPOINT_MISMATCH.OTHER_SOURCE"


def test_a_queue_with_other_columns_is_refused(shop: Source, store: penstock.Store, store_url: str) -> None:
    store.create_queue(f"{shop.name}.stock", pa.schema([("n", pa.int64())]))
    with running(create_pump(shop, store_url)) as failures:
        wait_until(lambda: failures, 30, "the pump to stop")
    assert isinstance(failures[0], AlreadyExistsError)
    assert failures[0].parameters["column"] == "item"


def test_a_new_pump_waits_for_a_transaction_that_is_open(shop: Source, store_url: str) -> None:
    statement = f"INSERT INTO {shop.name}.orders VALUES (9999, 'open', 1)"
    with open_transaction(shop, statement) as other, running(create_pump(shop, store_url)) as failures:
        other.commit()
        await_equal(store_url, shop, failures)
    assert not failures


@pytest.mark.parametrize(
    "options", [{"queue": "q", "prefix": "p"}, {"prefix": 3}, {"queue": ""}, {"name": "x" * 1000}]
)
def test_wrong_options_are_refused(options: dict[str, object]) -> None:
    with pytest.raises((InvalidInputError, penstock.PenstockError)):
        penstock.Pump("postgresql://x@localhost/x?publication=p", "sqlite:///x.db", **options)


def test_a_pump_needs_no_spark() -> None:
    program = (
        "import sys; sys.modules['pyspark'] = None; import penstock.pump.pump, penstock.cli.commands.pump; "
        "import penstock.feeds.queue_feed"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


def test_the_time_before_which_all_commits_are_in_the_queues_goes_on(shop: Source, store_url: str) -> None:
    pump = create_pump(shop, store_url)
    feed = QueueFeed(f"{shop.name}.orders", store_url).open()

    def passed(moment: object) -> bool:
        known, read = pump.status().finalized_until, feed.finalized_until(feed.newest(-1))
        assert isinstance(moment, datetime)
        return known is not None and known >= moment and read is not None and moment_of(read) >= moment

    with running(pump) as failures:
        await_equal(store_url, shop, failures)
        fill(shop, 501, 510)
        # Also while nothing changes.
        for _ in range(2):
            ((moment,),) = shop.rows("SELECT clock_timestamp()")
            wait_until(lambda moment=moment: failures or passed(moment), 30, "the time to go on")
        assert not failures
        assert is_equal(store_url, shop)
    # A reader that is behind knows the time of what it has read.
    first = next(iter(feed.commits(-1, 2**62)))
    assert feed.finalized_until(first.version) == first.timestamp
    # Later commits have no earlier time.
    fill(shop, 511, 520)
    known = feed.finalized_until(feed.newest(-1))
    with running(create_pump(shop, store_url)) as failures:
        await_equal(store_url, shop, failures)
    assert list(feed.commits(-1, 2**62))[-1].timestamp >= known


def test_a_pump_state_that_is_no_pumps_does_not_hinder_a_reader(shop: Source, store_url: str) -> None:
    with running(create_pump(shop, store_url)) as failures:
        await_equal(store_url, shop, failures)
    feed = QueueFeed(f"{shop.name}.orders", store_url).open()
    newest = feed.newest(-1)
    with penstock.connect(store_url) as store:
        for text in ("[]", "{", '{"queues": [1]}', '{"queues": {"a": {}}, "backfills": 1}'):
            store.database.run(lambda tx, text=text: pumps.create_pump(tx, text, PumpPosition(0, 0), text))
    known = feed.finalized_until(newest)
    assert known is not None
    assert finality.with_time({}, known).keys() == {"finalizedUntil"}
    assert finality.with_time({}, 2**63 - 1) == {}
