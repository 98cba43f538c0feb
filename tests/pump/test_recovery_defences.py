"""Recoveries of pumps that die, meet one another, or are refused."""

from __future__ import annotations

import logging
import os
import random
import sys
from collections.abc import Callable
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import penstock
from penstock.errors import InvalidInputError, PumpNotFoundError, condition_of
from penstock.feeds.postgres import following
from penstock.feeds.postgres.snapshot import Snapshots
from penstock.pump import deletions, last_changes, recovery
from penstock.pump.deletions import Deletions
from penstock.pump.last_changes import LastChanges
from penstock.pump.recovery import Recovery
from penstock.pump.recovery_records import request_recovery
from penstock.store.database import Transaction
from penstock.store.records import pumps
from tests.support.postgres_source import Source
from tests.support.processes import start
from tests.support.pumped import TABLES, SimulatedCrash, await_equal, change_rows, create_pump, fill, running
from tests.support.recovered import (
    await_recovered,
    change_in_the_gap,
    changes_in_background,
    condition_at_start,
    fold,
    is_recovered,
    queue_rows,
    read_pump,
    read_pump_state,
    recover,
    run_pump_to_end,
)
from tests.support.waiting import wait_until

DEATHS: dict[str, tuple[Any, str, bool]] = {
    "before the request is kept": (Recovery, "_change_state", False),
    "after the request is kept": (Recovery, "_change_state", True),
    "before the slot is dropped": (Snapshots, "recreate_slot", False),
    "after the slot is created": (Snapshots, "recreate_slot", True),
    "before the switch": (recovery, "append_commits", False),
    "after the switch": (recovery, "append_commits", True),
    "while the queue is read": (LastChanges, "_store_changes", True),
    "before deletes are appended": (Deletions, "_deletes", True),
}


@pytest.mark.few(3)
@pytest.mark.parametrize("death", DEATHS)
def test_a_recovery_that_dies_is_completed_by_the_next_process(
    shop: Source, store_url: str, monkeypatch: pytest.MonkeyPatch, death: str
) -> None:
    monkeypatch.setattr(deletions, "_MAX_KEYS", 20)
    monkeypatch.setattr(last_changes, "_PAGE_ROWS", 100)
    run_pump_to_end(shop, store_url)
    shop.drop_slot()
    change_in_the_gap(shop)
    recover(store_url)
    place, name, after = DEATHS[death]
    step, count = getattr(place, name), 0

    def dying(*given: object) -> object:
        nonlocal count
        count += 1
        result = step(*given) if after or count != 2 ** (count.bit_length() - 1) else None
        if count in (1, 2, 4):
            raise SimulatedCrash
        return result

    monkeypatch.setattr(place, name, dying)
    deaths = 0
    for attempt in range(8):
        with running(create_pump(shop, store_url)) as failures:
            wait_until(lambda: failures or is_recovered(store_url), 60, "the end")
        assert all(isinstance(each, SimulatedCrash) for each in failures)
        deaths += len(failures)
        if name == "recreate_slot" and failures:
            # Its slot may be new by now: it is not to look as if the pump could resume.
            assert read_pump_state(store_url)["recovery_request"]["force"]
        fill(shop, 70_000 + 10 * attempt, 70_005 + 10 * attempt)
        if is_recovered(store_url):
            break
    assert deaths >= 1
    with running(create_pump(shop, store_url)) as failures:
        await_recovered(store_url, shop, failures)
    assert shop.slots() == 1


@pytest.mark.crash
def test_recoveries_that_are_killed_at_random_moments_are_completed(
    shop: Source, store_url: str, tmp_path: Path
) -> None:
    chance = random.Random(11)
    run_pump_to_end(shop, store_url)
    shop.drop_slot()
    change_in_the_gap(shop)
    recover(store_url)
    command = [sys.executable, "-m", "penstock", "-v", "pump", "run", shop.feed(snapshot="initial").url]
    with changes_in_background(shop.url, shop.name), ExitStack() as stack:
        for number in range(2):
            child = start([*command, "--url", store_url], os.environ, tmp_path / f"pump{number}.log")
            stack.callback(child.kill_tree)
            child.wait_for_line("starts")
            with suppress(AssertionError):
                wait_until(lambda: is_recovered(store_url), chance.uniform(0.05, 1.0))
            child.kill_tree()
    with running(create_pump(shop, store_url)) as failures:
        await_recovered(store_url, shop, failures)
    assert shop.slots() == 1


def test_pumps_that_start_meanwhile_wait_and_a_second_request_changes_nothing(
    shop: Source, store_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "penstock.pump")
    run_pump_to_end(shop, store_url)
    shop.drop_slot()
    change_in_the_gap(shop)
    recover(store_url)
    recover(store_url)
    first, second = create_pump(shop, store_url), create_pump(shop, store_url)
    with running(first) as failures, running(second) as others:
        wait_until(lambda: failures or others or is_recovered(store_url), 60, "the end of the recovery")
        await_recovered(store_url, shop, [*failures, *others])
        assert [first.status().active, second.status().active].count(True) == 1
    actions = [getattr(record, "action", None) for record in caplog.records]
    assert actions.count("recovery_started") == 1
    assert actions.count("table_recovered") == len(TABLES)


def test_a_recovery_while_another_one_reads_begins_again(
    shop: Source, store_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_pump_to_end(shop, store_url)
    shop.drop_slot()
    change_in_the_gap(shop, 5)
    recover(store_url)
    monkeypatch.setattr(Deletions, "step", lambda *_: None)
    with running(create_pump(shop, store_url)) as failures:
        wait_until(lambda: failures or _all_read(store_url), 60, "the rows")
        assert not failures
    monkeypatch.undo()
    shop.drop_slot()
    change_in_the_gap(shop, 6)
    recover(store_url)
    with running(create_pump(shop, store_url)) as failures:
        await_recovered(store_url, shop, failures)


def _all_read(store_url: str) -> bool:
    recoveries = read_pump_state(store_url).get("recoveries", {})
    return bool(recoveries) and all(each["is_read"] for each in recoveries.values())


def test_a_pump_that_can_resume_does_not_recover_unless_it_is_forced_to(
    shop: Source, store_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    def logged() -> list[str]:
        actions = [getattr(record, "action", "") for record in caplog.records]
        return [action for action in actions if action in ("recovery_declined", "recovery_started")]

    run_pump_to_end(shop, store_url)
    recover(store_url)
    with running(create_pump(shop, store_url)) as failures:
        wait_until(lambda: failures or "recovery_request" not in read_pump_state(store_url), 60, "an answer")
        # One that is asked while it runs looks every few seconds.
        recover(store_url)
        wait_until(
            lambda: failures or "recovery_request" not in read_pump_state(store_url), 60, "another answer"
        )
        assert not failures
        assert logged() == ["recovery_declined"] * 2
        recover(store_url, force=True)
        await_recovered(store_url, shop, failures)
    assert logged()[2:] == ["recovery_started"]


def _slot_start(source: Source) -> object:
    """What a slot keeps for as long as nothing is confirmed."""
    return source.rows(
        f"SELECT restart_lsn, confirmed_flush_lsn FROM pg_replication_slots WHERE slot_name = '{source.name}'"
    )


def test_a_table_that_was_emptied_is_recovered(shop: Source, store_url: str) -> None:
    run_pump_to_end(shop, store_url)
    shop.run(f"TRUNCATE {shop.name}.orders")
    fill(shop, 20, 30)
    assert condition_at_start(create_pump(shop, store_url)) == "FEED_UNAVAILABLE.TRUNCATED"
    recover(store_url, force=True)
    with running(create_pump(shop, store_url)) as failures:
        await_recovered(store_url, shop, failures)


@pytest.mark.parametrize("partitions", [1, 3])
def test_a_commit_of_which_only_a_part_was_appended_is_ended_and_read_again(
    shop: Source, store_url: str, monkeypatch: pytest.MonkeyPatch, partitions: int
) -> None:
    monkeypatch.setattr(following, "_PART_BYTES", 1 << 14)
    move, parts = pumps.move_pump, 0

    def dying(*given: Any) -> bool:
        nonlocal parts
        parts += bool(given[4].part_rows and given[4].version)
        if parts == 5:
            raise SimulatedCrash
        return move(*given)

    with running(create_pump(shop, store_url, partitions=partitions)) as failures:
        await_equal(store_url, shop, failures)
    monkeypatch.setattr(pumps, "move_pump", dying)
    with running(create_pump(shop, store_url)) as failures:
        with shop.connection.transaction():
            shop.run(f"DELETE FROM {shop.name}.orders WHERE id < 20")
            fill(shop, 1001, 9000)
        wait_until(lambda: failures, 60, "the death")
    monkeypatch.setattr(pumps, "move_pump", move)
    assert read_pump(store_url).position.part_rows
    shop.drop_slot()
    change_in_the_gap(shop)
    recover(store_url)
    with running(create_pump(shop, store_url)) as failures:
        await_recovered(store_url, shop, failures)
        fill(shop, 9001, 9010)
        await_recovered(store_url, shop, failures)


def test_deletes_that_a_queue_cannot_show_are_reported(
    shop: Source, store_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    run_pump_to_end(shop, store_url)
    shop.drop_slot()
    name = f"{shop.name}.orders"
    fill(shop, 95_001, 95_010)
    with penstock.connect(store_url) as store:
        queue = store.queue(name)
        queue.trim(0, queue.info().partitions[0].next_index)
    shop.run(f"DELETE FROM {name} WHERE id <= 300", f"DELETE FROM {shop.name}.stock WHERE item = 'item 1'")
    recover(store_url)
    with running(create_pump(shop, store_url)) as failures:
        wait_until(lambda: failures or is_recovered(store_url), 60, "the end of the recovery")
        assert not failures
    unknown = [each for each in caplog.records if getattr(each, "action", "") == "deletes_unknown"]
    assert [each.table for each in unknown] == [name]  # type: ignore[attr-defined]
    assert "reconcile --repair" in unknown[0].getMessage()
    rows = _stored_rows(store_url, name)
    assert not [row for row in rows if row["_change_type"] == "delete"]
    assert {row["id"] for row in rows} == {row[0] for row in shop.rows(f"SELECT id FROM {name}")}
    deleted = [row["item"] for row in queue_rows(store_url, f"{shop.name}.stock")[-1:]]
    assert deleted == ["item 1"]


def _stored_rows(store_url: str, name: str) -> list[dict[str, Any]]:
    with penstock.connect(store_url) as store:
        queue = store.queue(name)
        (bounds,) = queue.info().partitions
        return list(queue.read(0, bounds.first_index).to_pylist())


def test_keys_of_all_types_are_found(source: Source, store_url: str) -> None:
    names = ("b", "n", "r", "d", "p", "t", "y", "day", "at", "z", "u")
    columns = (
        "b boolean, n bigint, r real, d double precision, p numeric(12, 3), t text, y bytea, day date, "
        "at timestamp, z timestamptz, u uuid"
    )
    table = source.table(f"{columns}, v int, PRIMARY KEY ({', '.join(names)})", "typed")
    source.run(
        f"INSERT INTO {table} SELECT n % 2 = 0, n * 1000000007::bigint, n / 7.0, n / 7.0, n / 8.0, 'é' || n, "
        "decode(lpad(to_hex(n), 4, '0'), 'hex'), date '1970-01-01' - 50 + n, timestamp '1969-12-31' + n * "
        "interval '1 h 1 us', timestamptz '1969-12-31' + n * interval '1 h', md5(n::text)::uuid, n "
        "FROM generate_series(-20, 80) AS n"
    )
    _recovered_after(source, store_url, "typed", names, [f"DELETE FROM {table} WHERE v % 3 = 0"], ("v",))


def _recovered_after(
    source: Source,
    store_url: str,
    name: str,
    key: tuple[str, ...],
    gap: list[str],
    others: tuple[str, ...],
    **options: object,
) -> None:
    """Recover a table after changes that are not read: the queue then makes what the table has."""
    table, queue = f"{source.name}.{name}", f"{source.name}.{name}"
    (count,) = source.rows(f"SELECT count(*) FROM {table}")[0]

    def has_copy() -> bool:
        with suppress(penstock.PenstockError):
            return len(change_rows(store_url, queue)) == count
        return False

    with running(create_pump(source, store_url, **options)) as failures:
        wait_until(lambda: failures or has_copy(), 60, "the copy")
        assert not failures
    source.drop_slot()
    source.run(*gap)
    recover(store_url)
    with running(create_pump(source, store_url, **options)) as failures:
        wait_until(lambda: failures or is_recovered(store_url), 60, "the end of the recovery")
        assert not failures
    columns = (*key, *others)
    rows = queue_rows(store_url, queue)
    expected = {tuple(row) for row in source.rows(f"SELECT {', '.join(others)} FROM {table}")}
    made = fold(rows, key, columns)
    assert {tuple(row[name] for name in others) for row in made.values()} == expected
    assert len(made) == len(source.rows(f"SELECT FROM {table}"))


@pytest.mark.parametrize("policy", ["refuse", "evolve"])
def test_columns_that_came_meanwhile_follow_the_policy(source: Source, store_url: str, policy: str) -> None:
    table = source.table("id int PRIMARY KEY, v int, gone int", "t")
    source.run(f"INSERT INTO {table} SELECT n, n, n FROM generate_series(1, 50) AS n")
    gap = [
        f"ALTER TABLE {table} ADD COLUMN added int",
        f"ALTER TABLE {table} DROP COLUMN gone",
        f"UPDATE {table} SET added = id * 2 WHERE id > 25",
        f"DELETE FROM {table} WHERE id = 7",
    ]
    if policy == "evolve":
        _recovered_after(source, store_url, "t", ("id",), gap, ("v", "added"), schema_changes="evolve")
        return
    pump = partial(create_pump, source, store_url, schema_changes=policy)
    with running(pump()) as failures:
        wait_until(lambda: failures or _has_queue(store_url, table), 60, "the copy")
    source.drop_slot()
    source.run(*gap)
    recover(store_url)
    assert condition_at_start(pump()) == "FEED_UNAVAILABLE.COLUMN_DROPPED"
    assert source.slots() == 0


def _has_queue(store_url: str, name: str) -> bool:
    with suppress(penstock.PenstockError):
        return bool(change_rows(store_url, name))
    return False


@pytest.mark.parametrize(
    ("statement", "condition"),
    [
        ("ALTER PUBLICATION {name} DROP TABLE {name}.stock", "FEED_UNAVAILABLE.TABLE_REMOVED"),
        ("ALTER PUBLICATION {name} SET (publish = 'insert')", "FEED_UNAVAILABLE.PARTLY_PUBLISHED"),
        (
            "ALTER TABLE {name}.orders DROP CONSTRAINT orders_pkey, ADD PRIMARY KEY (id, item)",
            "FEED_UNAVAILABLE.KEY_CHANGED",
        ),
    ],
)
def test_tables_that_cannot_be_read_again_are_refused_before_anything_is_dropped(
    shop: Source, store_url: str, statement: str, condition: str
) -> None:
    run_pump_to_end(shop, store_url)
    before = _slot_start(shop), read_pump_state(store_url)
    shop.run(statement.format(name=shop.name))
    recover(store_url, force=True)
    assert condition_at_start(create_pump(shop, store_url)) == condition
    after = read_pump_state(store_url)
    assert after.pop("recovery_request")
    assert (_slot_start(shop), after) == before


def test_nothing_is_deleted_for_a_table_that_was_not_read(shop: Source, store_url: str) -> None:
    run_pump_to_end(shop, store_url)
    shop.drop_slot()
    recover(store_url)
    before = {name: queue_rows(store_url, f"{shop.name}.{name}") for name in TABLES}
    steps: list[object] = []
    step = Deletions.step

    def counted(*given: Any) -> object:
        steps.append(step(*given))
        return steps[-1]

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("penstock.pump.backfills.Backfills.step", lambda *_: None)
        patched.setattr(Deletions, "step", counted)
        with running(create_pump(shop, store_url)) as failures:
            wait_until(lambda: failures or len(steps) > 50, 60, "times to delete")
            assert not failures
    shop.run(f"ALTER PUBLICATION {shop.name} SET (publish = 'insert')")
    assert condition_at_start(create_pump(shop, store_url)) == "FEED_UNAVAILABLE.PARTLY_PUBLISHED"
    assert {name: queue_rows(store_url, f"{shop.name}.{name}") for name in TABLES} == before


def test_a_row_that_comes_again_while_deleted_ones_are_looked_for_stays(
    shop: Source, store_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_pump_to_end(shop, store_url)
    shop.drop_slot()
    name = f"{shop.name}.orders"
    shop.run(f"DELETE FROM {name} WHERE id = (SELECT min(id) FROM {name}) RETURNING id")
    (key,) = (
        {row["id"] for row in _stored_rows(store_url, name)}
        - {row[0] for row in shop.rows(f"SELECT id FROM {name}")}
        - _deleted(store_url, name)
    )
    mark, deletes = Deletions._write_mark, _deletes(store_url, name)

    def after_an_insert(self: Deletions) -> tuple[int, int]:
        # The thread has read the queue by now.
        shop.run(f"INSERT INTO {name} VALUES ({key}, 'again', 1) ON CONFLICT DO NOTHING")
        return mark(self)

    monkeypatch.setattr(Deletions, "_write_mark", after_an_insert)
    recover(store_url)
    with running(create_pump(shop, store_url)) as failures:
        await_recovered(store_url, shop, failures)
    assert [row["_change_type"] for row in queue_rows(store_url, name) if row["id"] == key][-1] == "insert"
    # What was deleted before is not deleted again.
    assert _deletes(store_url, name) == deletes


def _deletes(store_url: str, name: str) -> int:
    return sum(row["_change_type"] == "delete" for row in queue_rows(store_url, name))


def _deleted(store_url: str, name: str) -> set[object]:
    rows = queue_rows(store_url, name)
    return {row["id"] for row in rows if row["_change_type"] == "delete"}


def test_pumps_that_cannot_recover_are_refused_at_once(source: Source, store_url: str) -> None:
    table = source.table("id int", "t")
    source.run(f"ALTER TABLE {table} REPLICA IDENTITY FULL", f"INSERT INTO {table} VALUES (1)")
    with running(create_pump(source, store_url)) as failures:
        wait_until(lambda: failures or _has_queue(store_url, table), 60, "the copy")
    source.run(f"ALTER TABLE {table} ADD PRIMARY KEY (id)")
    with penstock.connect(store_url) as store:
        ask: Callable[[str], None] = partial(request_recovery, store)
        with pytest.raises(InvalidInputError, match="has no primary key"):
            ask(source.name)
        with pytest.raises(PumpNotFoundError):
            ask("nope")

        def enter(tx: Transaction) -> None:
            pumps.create_pump(tx, "new", pumps.PumpPosition(0, 0), "{}")
            pumps.create_pump(tx, "one", pumps.PumpPosition(0, 0), '{"together": "q", "queues": {}}')

        store.database.run(enter)
        with pytest.raises(InvalidInputError, match="run it"):
            ask("new")
        with pytest.raises(InvalidInputError, match="one queue for all tables"):
            ask("one")


def test_a_request_on_the_command_line_is_listed(shop: Source, store_url: str, tmp_path: Path) -> None:
    run_pump_to_end(shop, store_url)

    def penstock_pump(*words: str) -> str:
        child = start(
            [sys.executable, "-m", "penstock", "pump", *words, "--url", store_url],
            os.environ,
            tmp_path / f"log {words[0]}",
        )
        assert child.wait(60) == 0, child.output
        return child.output

    assert "will recover when it runs, unless it can resume" in penstock_pump("recover", shop.name, "--yes")
    assert "requested" in penstock_pump("list")


def test_a_disk_that_is_full_is_named(shop: Source, store_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    run_pump_to_end(shop, store_url)
    note = LastChanges._store_changes

    def full(self: LastChanges, rows: object) -> None:
        self._database.execute("PRAGMA max_page_count = 1")
        note(self, rows)  # type: ignore[arg-type]

    monkeypatch.setattr(LastChanges, "_store_changes", full)
    recover(store_url, force=True)
    with running(create_pump(shop, store_url)) as failures:
        wait_until(lambda: failures, 60, "the end of the pump")
    assert condition_of(failures[0]) == "FEED_UNAVAILABLE.TEMPORARY_FILE"
