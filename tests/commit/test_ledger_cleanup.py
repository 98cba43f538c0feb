"""Cleanup of the ledger and the marks deletes all entries of dropped queues, and all but the newest entries
of stopped apps.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

import penstock
from penstock import connect
from penstock.commit.protocol import append_task
from penstock.errors import CheckpointRewoundError, StoreReadOnlyError
from penstock.queue import maintenance
from penstock.store.log import segmenting
from penstock.store.records import ledger
from penstock.store.records.catalog import queue_sink
from penstock.store.records.ledger import LedgerKey
from tests.commit.protocol import Pair, make_pair, numbers, rows_of
from tests.support.queues import await_maintenance
from tests.support.raw_sql import run_sql

LONG_AGO = ledger.IDLE_MICROSECONDS + 3_600_000_000


@pytest.fixture
def pair(store: penstock.Store) -> Pair:
    return make_pair(store)


def sql(store: penstock.Store, text: str) -> list[tuple[Any, ...]]:
    return run_sql(store.database, text)


def commit(pair: Pair, app: str, *batch_ids: int) -> None:
    for batch_id in batch_ids:
        pair.commit(pair.batch(app, batch_id, ids=[batch_id]))


def long_ago(store: penstock.Store, app: str, micros: int = LONG_AGO) -> None:
    sql(store, f"update penstock.ledger set committed_at = committed_at - {micros} where app_id = '{app}'")


def remembered(store: penstock.Store, app: str) -> list[int]:
    text = f"select batch_id from penstock.ledger where app_id = '{app}' order by batch_id, task"
    return [row[0] for row in sql(store, text)]


def test_the_newest_micro_batches_of_an_idle_app_are_kept(pair: Pair) -> None:
    commit(pair, "stopped", *range(20))
    commit(pair, "running", *range(20))
    commit(pair, "young", *range(5))
    long_ago(pair.into, "stopped")
    long_ago(pair.into, "young")
    sql(pair.into, f"update penstock.ledger set committed_at = committed_at - {LONG_AGO} where batch_id < 19")
    pair.into.maintain()
    assert remembered(pair.into, "stopped") == list(range(9, 20))
    assert remembered(pair.into, "running") == list(range(20)), "its newest one is of today"
    assert remembered(pair.into, "young") == list(range(5)), "it has no more"


def test_an_app_restarted_after_a_long_time_repeats_nothing(pair: Pair) -> None:
    commit(pair, "app", *range(20))
    long_ago(pair.into, "app")
    pair.into.maintain()
    assert pair.commit(pair.batch("app", 19, ids=[19])) is None
    with pytest.raises(CheckpointRewoundError, match="old copy"):
        pair.commit(pair.batch("app", 8, ids=[8]))
    commit(pair, "app", 20)
    assert rows_of(pair.sink) == list(range(21))


def test_the_tasks_of_the_newest_micro_batches_are_kept(pair: Pair) -> None:
    def write(batch_id: int, task: int) -> object:
        key = LedgerKey(queue_sink(pair.sink.record), "app", batch_id, task)
        return append_task(
            pair.into.database, pair.sink.record, key, segmenting.to_segments(numbers(0, 1), 0)
        )

    for batch_id in range(20):
        for task in range(2):
            write(batch_id, task)
        pair.commit(pair.batch("app", batch_id, tasks={0: 1, 1: 1}))
    long_ago(pair.into, "app")
    pair.into.maintain()
    assert remembered(pair.into, "app") == sorted(3 * [*range(9, 20)])
    assert write(19, 1) is None
    with pytest.raises(CheckpointRewoundError):
        write(3, 0)


def test_one_run_of_the_cleanup_deletes_a_limited_number_of_entries(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    for app in ("a", "b", "c"):
        commit(pair, app, *range(12))
        long_ago(pair.into, app)
    monkeypatch.setattr(ledger, "CLEANUP_LIMIT", 2)
    assert ledger.clean_up(pair.into.database) == 2
    assert ledger.clean_up(pair.into.database) == 1
    assert ledger.clean_up(pair.into.database) == 0


def test_dropping_a_queue_removes_its_ledger_entries(pair: Pair) -> None:
    other = Pair(pair.store, pair.source, pair.into.create_queue("copy", pair.source.schema), pair.into)
    commit(pair, "app", 0)
    commit(other, "copier", 0)
    pair.into.drop_queue("big")
    assert (remembered(pair.into, "app"), remembered(pair.into, "copier")) == ([], [0])


def test_only_entries_that_an_earlier_version_left_of_dropped_queues_are_removed(pair: Pair) -> None:
    commit(pair, "app", 0)
    for sink in ("queue:big:1", "queue:gone:17", 'table:"main"."gone"', "a:queue:gone:17"):
        sql(
            pair.into,
            "insert into penstock.ledger (sink, app_id, batch_id, task, ranges, row_count, committed_at) "
            f"values ('{sink}', 'left', 0, -1, '', 0, 0)",
        )
    pair.into.maintain()
    left = sql(pair.into, "select sink from penstock.ledger where app_id = 'left' order by sink")
    assert {row[0] for row in left} == {'table:"main"."gone"', "a:queue:gone:17"}
    assert remembered(pair.into, "app") == [0]


@pytest.fixture
def apart(store: penstock.Store, tmp_path: Path) -> Iterator[Pair]:
    """A pair whose source is in another store, for which the sink's store keeps a mark."""
    with connect(f"sqlite:///{tmp_path}/source.db") as source:
        yield make_pair(source, into=store)


def test_marks_are_removed_with_the_queue_they_belong_to(apart: Pair) -> None:
    owner = apart.own()
    offset = apart.planned(owner, (0, 0), (5, 2))
    second = Pair(apart.store, apart.source, apart.into.create_queue("copy", apart.source.schema), apart.into)
    apart.commit(apart.batch("app", 0, offset, ids=None))
    second.commit(second.batch("copier", 0, offset, ids=None))
    for app in ("app", "copier"):
        long_ago(apart.into, app)
    apart.into.maintain()
    assert marks(apart) == ["app", "copier"], "a mark keeps rows from being repeated, however old it is"
    apart.into.drop_queue("big")
    apart.into.maintain()
    assert marks(apart) == ["copier"]


def test_a_mark_is_kept_while_its_app_writes_to_another_sink(apart: Pair) -> None:
    offset = apart.planned(apart.own(), (0, 0), (5, 2))
    second = Pair(apart.store, apart.source, apart.into.create_queue("copy", apart.source.schema), apart.into)
    apart.commit(apart.batch("app", 0, offset, ids=None))
    second.commit(second.batch("app", 0, offset, ids=None))
    apart.into.drop_queue("big")
    apart.into.maintain()
    assert marks(apart) == ["app"]
    assert second.commit(second.batch("app", 0, offset, ids=None)) is None


def marks(pair: Pair) -> list[str]:
    return [row[0] for row in sql(pair.into, "select distinct app_id from penstock.mark order by app_id")]


def test_background_maintenance_cleans_up_the_ledger_from_time_to_time(pair: Pair) -> None:
    commit(pair, "app", *range(20))
    long_ago(pair.into, "app")
    pair.sink.set_retention(maintenance_retention())
    pair.sink.append([{"id": 1}])
    await_maintenance(pair.into)
    assert remembered(pair.into, "app") == list(range(9, 20))


def test_a_role_without_the_right_to_clean_up_gets_no_warning(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(database: object) -> int:
        raise StoreReadOnlyError("permission denied for table ledger")

    monkeypatch.setattr(maintenance.ledger, "clean_up", refuse)
    pair.sink.set_retention(maintenance_retention())
    with caplog.at_level("WARNING", "penstock"):
        pair.sink.append([{"id": 1}])
        await_maintenance(pair.into)
    assert caplog.records == []
    with pytest.raises(StoreReadOnlyError):
        pair.into.maintain()


def maintenance_retention() -> penstock.Retention:
    from penstock import Retention

    return Retention(age=timedelta(days=1))
