"""A pump that cannot resume recovers: its queues get what their tables have, and lose and repeat nothing."""

from __future__ import annotations

from collections.abc import Iterator
from operator import eq

import pytest

import penstock
from penstock.pump import backfills
from tests.support.backfilled import hold_chunk
from tests.support.postgres import start_postgres
from tests.support.postgres_source import Source, source_at
from tests.support.pumped import (
    TABLES,
    create_pump,
    fill,
    running,
)
from tests.support.recovered import (
    await_recovered,
    change_in_the_gap,
    failure_of,
    fold,
    is_recovered,
    queue_rows,
    read_pump_state,
    recover,
    recovery_during_changes,
    run_pump_to_end,
)
from tests.support.waiting import wait_until


def test_a_slot_that_was_dropped_is_recovered(shop: Source, store_url: str) -> None:
    run_pump_to_end(shop, store_url)
    shop.drop_slot()
    change_in_the_gap(shop)
    failure = failure_of(create_pump(shop, store_url))
    assert failure.condition == "FEED_UNAVAILABLE.SLOT_MISSING"
    assert f"penstock pump recover {shop.name}" in failure.message
    before = {name: queue_rows(store_url, f"{shop.name}.{name}") for name in TABLES}
    with recovery_during_changes(shop, store_url):
        pass
    assert shop.slots() == 1
    assert read_pump_state(store_url)["offset"] == 0
    for name, rows in before.items():
        assert queue_rows(store_url, f"{shop.name}.{name}")[: len(rows)] == rows
    with running(create_pump(shop, store_url)) as failures:
        fill(shop, 90_001, 90_010)
        await_recovered(store_url, shop, failures)


@pytest.fixture
def forgetful() -> Iterator[Source]:
    """A server that removes log that a slot needs once there is more than 16 MiB of it."""
    server = start_postgres(max_slot_wal_keep_size="16MB", max_wal_size="48MB", min_wal_size="32MB")
    try:
        with source_at(server.url) as source:
            for name, columns in TABLES.items():
                source.table(columns, name)
            fill(source, 1, 500)
            yield source
    finally:
        server.stop()


def invalidate(source: Source) -> None:
    """Write log until the slot has lost what it needs."""

    def is_lost() -> bool:
        source.run("SELECT pg_logical_emit_message(false, 'fill', repeat('x', 10000000))")
        source.run("SELECT pg_switch_wal()", "CHECKPOINT")
        state = source.rows(f"SELECT wal_status FROM pg_replication_slots WHERE slot_name = '{source.name}'")
        return state == [("lost",)]

    wait_until(is_lost, 60, "the slot to be lost")


def test_a_slot_that_was_invalidated_is_recovered(forgetful: Source, store_url: str) -> None:
    run_pump_to_end(forgetful, store_url)
    change_in_the_gap(forgetful)
    invalidate(forgetful)
    failure = failure_of(create_pump(forgetful, store_url))
    assert failure.condition == "DATA_LOST.SLOT_INVALIDATED"
    assert "penstock pump recover" in failure.message
    with recovery_during_changes(forgetful, store_url):
        pass
    slots = forgetful.rows("SELECT slot_name, wal_status FROM pg_replication_slots")
    assert slots == [(forgetful.name, "reserved")]


@pytest.fixture
def wide(source: Source, monkeypatch: pytest.MonkeyPatch) -> Source:
    """A table whose rows have long values, which updates of other columns do not log."""
    monkeypatch.setattr(backfills, "_CHUNK_ROWS", 50)
    source.table("id int PRIMARY KEY, v int, big text", "wide")
    name = f"{source.name}.wide"
    source.run(
        f"ALTER TABLE {name} ALTER big SET STORAGE EXTERNAL",
        f"INSERT INTO {name} SELECT n, n, repeat('x', 3000) FROM generate_series(1, 400) AS n",
    )
    return source


def wide_rows(source: Source, store_url: str) -> tuple[object, object]:
    """What the queue makes of the wide table, and what the table has."""
    names = ("id", "v", "big")
    found = source.rows(f"SELECT id, v, big FROM {source.name}.wide")
    return (
        fold(queue_rows(store_url, f"{source.name}.wide"), ("id",), names),
        {(row[0],): dict(zip(names, row, strict=True)) for row in found},
    )


def await_wide(source: Source, store_url: str, failures: list[BaseException]) -> None:
    wait_until(
        lambda: failures or (is_recovered(store_url) and eq(*wide_rows(source, store_url))),
        60,
        "the rows of the wide table",
        interval=0.25,
    )
    assert not failures


def without_slot(source: Source, store_url: str) -> None:
    """A pump of the wide table whose slot is gone, and with it new long values of some rows."""
    with running(create_pump(source, store_url)) as failures:
        wait_until(lambda: failures or queue_of(source, store_url) == 400, 60, "the copy")
        assert not failures
    source.drop_slot()
    source.run(f"UPDATE {source.name}.wide SET big = repeat('n', 3000) WHERE id IN (70, 301, 303)")


def queue_of(source: Source, store_url: str) -> int:
    try:
        return len(queue_rows(store_url, f"{source.name}.wide"))
    except penstock.PenstockError:
        return 0


@pytest.mark.parametrize("after_read", [True, False])
def test_values_that_changes_meanwhile_do_not_log_are_read(
    wide: Source, store_url: str, monkeypatch: pytest.MonkeyPatch, after_read: bool
) -> None:
    without_slot(wide, store_url)
    recover(store_url)
    name = f"{wide.name}.wide"
    with (
        hold_chunk(monkeypatch, 2, after_read=after_read) as (reached, released),
        running(create_pump(wide, store_url)) as failures,
    ):
        wait_until(lambda: failures or reached.is_set(), 60, "the second chunk")
        wide.run(
            # The chunk that is held up has it, perhaps without this update.
            f"UPDATE {name} SET v = -1 WHERE id = 70",
            # Not read yet under its old key; and the chunk that is held up may not have the new one.
            f"DELETE FROM {name} WHERE id IN (11, 72)",
            f"UPDATE {name} SET id = 11 WHERE id = 301",
            f"UPDATE {name} SET id = 72 WHERE id = 303",
        )
        wait_until(
            lambda: failures or {(11,), (72,)} <= set(wide_rows(wide, store_url)[0]), 60, "the new keys"
        )
        released.set()
        await_wide(wide, store_url, failures)
