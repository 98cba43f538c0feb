"""Trimming and retention: which rows are deleted, and which are kept."""

from __future__ import annotations

import json
import threading
from dataclasses import replace
from datetime import timedelta

import pytest

import penstock
from penstock.errors import InvalidInputError, PartitionNotFoundError
from penstock.queue.maintenance import limits_of, trim_partition
from tests.support.queues import SCHEMA, await_maintenance, backdate, everything, numbers, rows
from tests.support.waiting import wait_until


def _filled(store: penstock.Store, retention: penstock.Retention | None = None) -> penstock.Queue:
    """Append ten times one row, and two rows to another partition."""
    queue = store.create_queue("q", SCHEMA, partitions=2, retention=retention)
    for n in range(10):
        queue.append(rows(n), 0)
    queue.append(rows(100, 101), 1)
    return queue


def test_rows_before_an_index_are_dropped_and_indexes_do_not_change(store: penstock.Store) -> None:
    queue = _filled(store)
    assert queue.trim(0, 4) == 4
    assert queue.trim(0, 4) == 0
    assert queue.trim(0, 2) == 0
    part = queue.info().partitions[0]
    assert (part.first_index, part.next_index, part.rows, part.segments) == (4, 10, 6, 6)
    assert everything(queue) == {0: [4, 5, 6, 7, 8, 9], 1: [100, 101]}
    assert queue.append(rows(10), 0).ranges == {0: (10, 11)}


def test_a_queue_can_be_trimmed_completely_and_appends_continue(store: penstock.Store) -> None:
    queue = _filled(store)
    assert queue.trim(before=10**9) == 12
    assert [(part.first_index, part.bytes, part.segments) for part in queue.info().partitions] == [
        (10, 0, 0),
        (2, 0, 0),
    ]
    assert everything(queue) == {0: [], 1: []}
    assert queue.append(rows(10), 0).ranges == {0: (10, 11)}
    assert numbers(queue.read(0, 10)) == [10]


def test_a_trim_inside_a_segment_hides_the_rows_before_it(store: penstock.Store) -> None:
    queue = _filled(store)
    queue.compact()
    assert queue.trim(0, 4) == 4
    part = queue.info().partitions[0]
    assert (part.first_index, part.segments) == (4, 1)
    assert numbers(queue.read(0, 4)) == [4, 5, 6, 7, 8, 9]
    with pytest.raises(penstock.errors.DataLostError):
        queue.read(0, 3)
    for n in range(10, 14):
        queue.append(rows(n), 0)
    queue.compact()
    assert numbers(queue.read(0, 4)) == list(range(4, 14))
    assert queue.trim(0, 14) == 10
    assert queue.info().partitions[0].bytes == 0


def test_nothing_is_trimmed_without_a_retention(store: penstock.Store) -> None:
    queue = _filled(store)
    assert queue.trim() == 0
    store.maintain()
    assert queue.info().rows == 12


def test_invalid_trims_are_refused(store: penstock.Store) -> None:
    queue = _filled(store)
    with pytest.raises(PartitionNotFoundError):
        queue.trim(2, 1)
    for before in ("1", 1.5, True):
        with pytest.raises(InvalidInputError):
            queue.trim(0, before)  # type: ignore[arg-type]
    assert queue.trim(0, -5) == 0


@pytest.mark.few(6)
@pytest.mark.parametrize(("keep", "left"), [(0, 0), (1, 1), (4, 4), (10, 10), (99, 10)])
def test_retention_by_rows_keeps_the_newest_rows(store: penstock.Store, keep: int, left: int) -> None:
    queue = _filled(store, penstock.Retention(rows=keep))
    queue.maintain()
    await_maintenance(store)
    assert queue.info().partitions[0].rows == left
    assert everything(queue)[0] == list(range(10 - left, 10))


@pytest.mark.parametrize("merged", [False, True])
def test_retention_by_age_is_exact_to_the_row(store: penstock.Store, merged: bool) -> None:
    queue = store.create_queue("q", SCHEMA)
    for n in range(10):
        queue.append(rows(n, n))
        backdate(store, 60)
    queue.append(rows(10))
    if merged:
        queue.compact()
    queue.set_retention(penstock.Retention(age=timedelta(seconds=60 * 4 + 30)))
    queue.maintain()
    assert everything(queue) == {0: [6, 6, 7, 7, 8, 8, 9, 9, 10]}
    queue.set_retention(penstock.Retention(age=timedelta(0)))
    wait_until(lambda: queue.maintain() or queue.info().rows == 0, 5)


def test_retention_by_bytes_drops_whole_segments_and_keeps_the_newest(store: penstock.Store) -> None:
    queue = _filled(store)
    one = queue.info().partitions[0].bytes // 10
    queue.set_retention(penstock.Retention(bytes=one * 4))
    queue.maintain()
    assert everything(queue) == {0: [6, 7, 8, 9], 1: [100, 101]}
    queue.set_retention(penstock.Retention(bytes=0))
    queue.maintain()
    assert everything(queue) == {0: [9], 1: [100, 101]}


def test_the_limit_that_is_reached_first_applies(store: penstock.Store) -> None:
    queue = _filled(store, penstock.Retention(rows=8, age=timedelta(hours=1), bytes=1 << 30))
    queue.maintain()
    await_maintenance(store)
    assert queue.info().partitions[0].rows == 8
    backdate(store, 7200)
    queue.append(rows(10), 0)
    queue.maintain()
    await_maintenance(store)
    assert everything(queue)[0] == [10]


def test_a_trim_by_index_also_applies_the_retention(store: penstock.Store) -> None:
    queue = _filled(store, penstock.Retention(rows=3))
    assert queue.trim(0, 9) + 3 <= 10
    assert queue.info().partitions[0].first_index == 7


def test_retention_is_applied_in_the_background_after_appends(store: penstock.Store) -> None:
    queue = store.create_queue("q", SCHEMA, retention=penstock.Retention(rows=5))
    for n in range(30):
        queue.append(rows(n))
    wait_until(lambda: queue.info().rows == 5, 10, "the last append's trim has run as well")
    assert everything(queue) == {0: [25, 26, 27, 28, 29]}


def test_closing_a_store_finishes_a_pending_trim(store_url: str) -> None:
    with penstock.connect(store_url) as store:
        queue = store.create_queue("q", SCHEMA, retention=penstock.Retention(rows=5))
        for n in range(30):
            queue.append(rows(n))
    with penstock.connect(store_url) as store:
        assert store.queue("q").info().rows == 5


def test_a_retention_changed_by_another_process_applies(store: penstock.Store, store_url: str) -> None:
    """A long-running producer has read the old retention."""
    queue = _filled(store, penstock.Retention(rows=2))
    queue.maintain()
    await_maintenance(store)
    with penstock.connect(store_url) as other:
        other.queue("q").set_retention(penstock.Retention())
    for n in range(10, 20):
        queue.append(rows(n), 0)
    store.close()
    with penstock.connect(store_url) as other:
        assert everything(other.queue("q"))[0] == list(range(8, 20))


def test_a_trim_applies_the_current_retention(store: penstock.Store) -> None:
    """The process that trims may have read the retention long ago."""
    queue = _filled(store)
    queue.set_retention(penstock.Retention(rows=8))
    stale = replace(queue.record, retention=limits_of(penstock.Retention(rows=2)))
    assert trim_partition(store.database, stale, 0, None) == (0, 2)


def test_trimming_waits_for_vital_consumers(store: penstock.Store) -> None:
    queue = _filled(store)
    for name, vital in (("slow", True), ("fast", True), ("other", False)):
        store.create_consumer(name)
        queue.register(name, vital=vital)
    queue.set_retention(penstock.Retention(rows=0))
    store.consumer("fast").advance("q", 0, old=0, new=8)
    assert queue.trim() == 0
    store.consumer("slow").advance("q", 0, old=0, new=3)
    store.consumer("slow").advance("q", 1, old=0, new=1)
    queue.maintain()
    await_maintenance(store)
    assert everything(queue)[0] == [3, 4, 5, 6, 7, 8, 9]
    assert queue.trim(0, 10) == 0
    store.consumer("slow").register("q", vital=False)
    queue.maintain()
    assert everything(queue)[0] == [8, 9]
    store.drop_consumer("fast")
    queue.maintain()
    assert everything(queue) == {0: [], 1: []}


def test_rows_are_trimmed_when_a_vital_consumer_advances(store: penstock.Store) -> None:
    queue = _filled(store)
    store.create_consumer("c")
    consumer = queue.register("c", vital=True)
    queue.set_retention(penstock.Retention(rows=0))
    for n in range(10):
        consumer.advance("q", 0, old=n, new=n + 1)
    wait_until(lambda: queue.info().partitions[0].rows == 0, 10)
    assert queue.info().partitions[1].rows == 2


def test_trimming_stops_at_the_safe_offset_and_not_at_the_offset(store: penstock.Store) -> None:
    queue = _filled(store)
    store.create_consumer("c")
    consumer = queue.register("c", vital=True)
    keys = consumer.registration("q").keys
    store.database.run(lambda tx: tx.run("advance_position", partition=0, old=0, new=6, safe=0, **keys))
    assert queue.trim(0, 10) == 0
    store.database.run(lambda tx: tx.run("raise_safe", partition=0, safe_index=5, **keys))
    assert queue.trim(0, 10) == 5


@pytest.mark.parametrize("vital", [False, True])
def test_trimming_stops_at_a_live_plan(store: penstock.Store, vital: bool) -> None:
    queue = _filled(store)
    store.create_consumer("c")
    consumer = queue.register("c", vital=vital)
    consumer.advance("q", 0, old=0, new=4)
    registration = consumer.registration("q")
    plan = json.dumps({"from": [4, 0], "to": [10, 2]})
    store.database.run(lambda tx: tx.run("open_plan", epoch=0, plan=plan, **registration.keys))
    lock = store.database.owner_lock(registration.lock_name(store.uuid))
    assert lock.acquire()
    assert queue.trim(0, 10) == 4
    assert queue.trim(1, 2) == 0
    lock.release()
    assert queue.trim(0, 10) == (0 if vital else 6)


def test_a_consumer_registered_during_a_trim_finds_its_rows(store: penstock.Store) -> None:
    """Whichever comes first, a vital consumer ends up at a row that exists."""
    queue = _filled(store)
    for n in range(10, 60):
        queue.append(rows(n), 0)
    stop = threading.Event()
    failures: list[BaseException] = []

    def trimming() -> None:
        try:
            before = 0
            while not stop.is_set() and before < 60:
                queue.trim(0, before)
                before += 1
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=trimming)
    thread.start()
    for n in range(12):
        store.create_consumer(f"c{n}")
        consumer = queue.register(f"c{n}", vital=True)
        assert consumer.pull("q", 0, max_rows=1).table.num_rows == 1
        store.drop_consumer(f"c{n}")
    stop.set()
    thread.join()
    assert failures == []
