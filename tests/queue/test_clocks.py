"""Queues whose clock was far ahead or behind for a while.

Rows with wrong timestamps are not kept for ever, and no rows are deleted too early.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from itertools import pairwise
from typing import Any

import pytest

import penstock
from penstock.store.log import partition_log
from penstock.store.postgres.transaction import PostgresTransaction
from penstock.store.sqlite.database import SqliteTransaction
from tests.support.queues import SCHEMA, await_maintenance, everything, rows
from tests.support.raw_sql import run_sql

MINUTE = 60_000_000
HOUR = 60 * MINUTE
DAY = 24 * HOUR
AGE = timedelta(days=7)


class Clock:
    """The clock of all stores: the real time plus an offset in microseconds."""

    def __init__(self) -> None:
        self.ahead = 0

    def set(self, ahead: int) -> None:
        self.ahead = ahead


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    for kind in (SqliteTransaction, PostgresTransaction):
        real = kind.now
        monkeypatch.setattr(kind, "now", lambda tx, real=real: real(tx) + clock.ahead)
    return clock


def append_under(clock: Clock, queue: penstock.Queue, ahead: int, *values: int, partition: int = 0) -> None:
    """Append once while the clock is ahead by an offset, then correct the clock."""
    clock.set(ahead)
    queue.append(rows(*values), partition)
    clock.set(0)
    database = queue.database
    if database.dialect == "postgres":  # its server's clock cannot be set
        where = f"queue_id = {queue.record.queue_id} and partition = {partition}"
        newest = f"end_index = (select max(end_index) from penstock.segment where {where})"
        for table, columns, which in (
            ("segment", ("first_timestamp", "last_timestamp"), f"{where} and {newest}"),
            ("partition", ("last_timestamp", "last_clock"), where),
        ):
            for column in columns:
                text = f"update penstock.{table} set {column} = {column} + {ahead} where {which}"
                run_sql(database, text)


def times(queue: penstock.Queue, partition: int = 0) -> list[int]:
    """Return the timestamp of each row of a partition."""
    text = (
        "select end_index - start_index, first_timestamp from penstock.segment "
        "where queue_id = {} and partition = {} order by end_index"
    )
    text = text.format(queue.record.queue_id, partition)
    database = queue.database
    found = run_sql(database, text)
    return [timestamp for count, timestamp in found for _ in range(count)]


def observed(store: penstock.Store) -> list[Any]:
    text = "select next_index from penstock.observed_end order by observed_at"
    return [row[0] for row in run_sql(store.database, text)]


def poisoned(
    store: penstock.Store, clock: Clock, ahead: int = 14 * 365 * DAY, **retention: Any
) -> penstock.Queue:
    """A queue with a retention by age and no background maintenance. Its rows 0 and 1 have correct
    timestamps, and row 2 has a wrong one.
    """
    store.maintainer.close()
    queue = store.create_queue("q", SCHEMA)
    queue.append(rows(0, 1), 0)
    append_under(clock, queue, ahead, 2)
    queue.set_retention(penstock.Retention(age=AGE, **retention))
    return queue


def maintained(queue: penstock.Queue, clock: Clock, at: int) -> list[int]:
    """Run maintenance at a time, and return the rows left in partition 0."""
    clock.set(at)
    queue.maintain()
    return everything(queue)[0]


def test_rows_dated_in_the_future_are_trimmed_once_they_are_old_by_the_clock(
    store: penstock.Store, clock: Clock
) -> None:
    queue = poisoned(store, clock)
    queue.append(rows(3), 0)
    assert maintained(queue, clock, 0) == [0, 1, 2, 3]
    clock.set(3 * DAY)
    queue.append(rows(4), 0)
    assert maintained(queue, clock, 3 * DAY) == [0, 1, 2, 3, 4]
    assert maintained(queue, clock, 7 * DAY - HOUR) == [0, 1, 2, 3, 4]
    assert maintained(queue, clock, 7 * DAY + HOUR) == [4]
    assert maintained(queue, clock, 10 * DAY - HOUR) == [4]
    assert maintained(queue, clock, 10 * DAY + HOUR) == []


def test_retention_by_age_works_again_within_one_retention_age(store: penstock.Store, clock: Clock) -> None:
    queue = poisoned(store, clock)
    for day in range(30):
        clock.set(day * DAY)
        queue.append(rows(100 + day), 0)
        queue.maintain()
        kept = [value - 100 for value in everything(queue)[0] if value >= 100]
        # No rows are deleted too early, and the rest at most a sixteenth of the retention age too late.
        assert set(range(max(0, day - 6), day + 1)) <= set(kept)
        assert min(kept) >= day - 8
        assert len(observed(store)) <= 18
    assert sorted(times(queue)) == times(queue)


def test_background_maintenance_records_where_the_rows_end(store: penstock.Store, clock: Clock) -> None:
    queue = store.create_queue("q", SCHEMA, retention=penstock.Retention(age=AGE))
    append_under(clock, queue, 14 * 365 * DAY, 0)
    await_maintenance(store)
    queue.append(rows(1), 0)
    await_maintenance(store)
    assert observed(store)[-1] in (1, 2)


def test_an_explicit_trim_records_where_the_rows_end(store: penstock.Store, clock: Clock) -> None:
    queue = poisoned(store, clock)
    assert queue.trim() == 0
    assert observed(store) == [3]
    clock.set(8 * DAY)
    assert queue.trim() == 3


def test_append_times_never_go_back_and_a_correct_clock_writes_no_record(
    store: penstock.Store, clock: Clock
) -> None:
    queue = store.create_queue("q", SCHEMA, retention=penstock.Retention(age=AGE))
    for n in range(5):
        queue.append(rows(n), 0)
    queue.maintain()
    assert observed(store) == []
    append_under(clock, queue, 30_000_000, 5)
    queue.append(rows(6), 0)
    queue.maintain()
    assert observed(store) == [], "clocks differ by seconds"
    assert sorted(times(queue)) == times(queue)


def test_nothing_is_trimmed_early_after_a_clock_was_behind(store: penstock.Store, clock: Clock) -> None:
    """On a machine that boots in 1970, rows have correct timestamps that are ahead of the clock."""
    queue = store.create_queue("q", SCHEMA, retention=penstock.Retention(age=AGE))
    queue.append(rows(0, 1), 0)
    clock.set(-50 * 365 * DAY)
    queue.maintain()
    assert observed(store) == [2]
    assert maintained(queue, clock, 0) == [0, 1]
    queue.append(rows(2), 0)
    assert maintained(queue, clock, HOUR) == [0, 1, 2]


def test_append_timestamps_are_used_again_once_the_clock_has_caught_up(
    store: penstock.Store, clock: Clock
) -> None:
    queue = poisoned(store, clock, 2 * DAY)
    queue.append(rows(3), 0)
    assert maintained(queue, clock, 0) == [0, 1, 2, 3]
    assert maintained(queue, clock, 7 * DAY + HOUR) == [2, 3], "they are dated two days later"
    assert maintained(queue, clock, 9 * DAY + HOUR) == []


def test_earlier_records_are_ignored_after_another_jump_of_the_clock(
    store: penstock.Store, clock: Clock
) -> None:
    queue = poisoned(store, clock)
    queue.maintain()
    append_under(clock, queue, 20 * 365 * DAY, 3)
    assert maintained(queue, clock, HOUR) == [0, 1, 2, 3]
    assert observed(store) == [4]
    assert maintained(queue, clock, 7 * DAY + 2 * HOUR) == []


def test_a_vital_consumer_that_does_not_move_leaves_few_records(store: penstock.Store, clock: Clock) -> None:
    queue = poisoned(store, clock)
    store.create_consumer("slow").register("q", vital=True)
    for day in range(60):
        clock.set(day * DAY)
        queue.append(rows(day), 0)
        queue.maintain()
    assert len(observed(store)) <= 18
    store.drop_consumer("slow")
    queue.maintain()
    assert everything(queue)[0] == list(range(53, 60))


def test_appends_dated_ahead_of_the_clock_have_random_timestamps(store: penstock.Store, clock: Clock) -> None:
    """So if a queue was restored from a backup and has received rows since, their timestamps differ from
    those before.
    """
    queue = store.create_queue("q", SCHEMA)
    append_under(clock, queue, DAY, 0)
    for value in range(1, 12):
        queue.append(rows(value), 0)
    found = times(queue)
    gaps = [after - before for before, after in pairwise(found)]
    assert all(1 <= gap <= 256 for gap in gaps)
    assert len(set(gaps)) > 1


def test_retention_works_until_the_clock_reaches_the_newest_row(
    store: penstock.Store, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each append has a timestamp shortly after the previous one, so the last is later than the first."""
    monkeypatch.setattr(partition_log, "timestamp_gap", lambda: DAY)
    queue = poisoned(store, clock, 10 * DAY)
    for value in range(3, 23):
        queue.append(rows(value), 0)
    maintained(queue, clock, 0)
    # The clock has passed the timestamp of the append that was ahead.
    for day in (12, 14, 16, 18, 20, 22):
        maintained(queue, clock, day * DAY)
    assert everything(queue)[0] == []


def test_an_append_to_several_partitions_does_not_spread_a_wrong_time(
    store: penstock.Store, clock: Clock
) -> None:
    queue = store.create_queue("q", SCHEMA, partitions=3, key=["n"])
    append_under(clock, queue, 14 * 365 * DAY, next(n for n in range(99) if _home(queue, n) == 0))
    queue.append(rows(*range(50)))
    years = [datetime.fromtimestamp(times(queue, part)[-1] / 1e6, UTC).year for part in range(3)]
    now = datetime.now(UTC).year
    assert years == [now + 14, now, now]
    assert times(queue, 1)[-1] == times(queue, 2)[-1], "it is one append"


def _home(queue: penstock.Queue, n: int) -> int:
    _, placement = queue.current_placement()
    import pyarrow as pa

    return int(placement.targets(pa.table({"n": [n], "s": pa.array([None], pa.string())}, SCHEMA))[0].as_py())


def test_a_seek_to_a_time_skips_rows_that_are_recorded_as_older(store: penstock.Store, clock: Clock) -> None:
    queue = poisoned(store, clock)
    queue.maintain()
    clock.set(DAY)
    queue.append(rows(3), 0)
    queue.maintain()
    consumer = store.create_consumer("c")
    consumer.register("q")
    for ago, index in ((timedelta(hours=1), 3), (timedelta(hours=-1), 4), (timedelta(hours=25), 0)):
        consumer.seek("q", to=datetime.now(UTC) + timedelta(days=1) - ago)
        assert consumer.offsets("q") == {0: index}, ago


def test_a_clock_that_was_ahead_is_logged_once(
    store: penstock.Store, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    queue = poisoned(store, clock)
    with caplog.at_level("WARNING", "penstock"):
        for day in range(3):
            maintained(queue, clock, day * DAY)
    logged = [vars(record) for record in caplog.records]
    assert [(each["action"], each["queue"], each["partition"]) for each in logged] == [
        ("dated_ahead", "q", 0)
    ]


def test_clock_records_are_read_only_when_rows_are_ahead_of_the_clock(
    store: penstock.Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a correct clock the table is not read, since a role with few privileges may lack the right to read
    it.
    """
    queue = store.create_queue("q", SCHEMA, retention=penstock.Retention(age=AGE))
    queue.append(rows(0), 0)
    asked: list[str] = []
    for kind in (SqliteTransaction, PostgresTransaction):
        for method in ("run", "all"):
            real = getattr(kind, method)
            monkeypatch.setattr(
                kind,
                method,
                lambda tx, name, real=real, **parameters: asked.append(name) or real(tx, name, **parameters),
            )
    queue.maintain()
    queue.trim()
    assert asked
    assert [name for name in asked if "observed" in name] == []


@pytest.mark.parametrize("again", ["registered again", "queue recreated"])
def test_generations_ascend_after_the_clock_was_set_back(
    store: penstock.Store, clock: Clock, again: str
) -> None:
    """The store of a query's sink refuses generations older than the one that it has committed."""
    store.create_queue("q", SCHEMA)
    consumer = store.create_consumer("c")

    def generation() -> int:
        return int(consumer.registration("q").generation)

    clock.set(400 * DAY)
    consumer.register("q")
    first = generation()
    clock.set(0)
    if again == "registered again":
        consumer.unregister("q")
    else:
        store.drop_queue("q")
        store.create_queue("q", SCHEMA)
    consumer.register("q")
    second = generation()
    consumer.seek("q", to="latest")
    assert first < second < generation()
