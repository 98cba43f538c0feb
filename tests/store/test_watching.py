"""A watch of a queue quickly notices appends from any process, and uses few resources while there are
none.
"""

from __future__ import annotations

import os
import socket
import statistics
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

import penstock
from penstock.errors import QueueNotFoundError, StoreError, StoreNotFoundError
from penstock.store.postgres import watch as postgres_watch
from penstock.store.sqlite import wakeups
from penstock.store.sqlite import watch as sqlite_watch
from tests.store.forking import in_a_fork
from tests.store.programs import SCHEMA, unrelated
from tests.store.waits import LONG, NEVER, later, ready
from tests.support.processes import ChildProcess
from tests.support.queues import without_disk_sync
from tests.support.raw_sql import raw_connection

RunChild = Callable[..., ChildProcess]


@pytest.fixture
def no_cap(monkeypatch: pytest.MonkeyPatch) -> None:
    """Switch off polling, so that only notifications end a wait."""
    monkeypatch.setattr(postgres_watch, "CHECK_SECONDS", NEVER)
    monkeypatch.setattr(sqlite_watch, "CHECK_SECONDS", NEVER)
    monkeypatch.setattr(sqlite_watch, "LONGEST_CHECK_SECONDS", NEVER)


@pytest.fixture
def queue(store: penstock.Store) -> penstock.Queue:
    return store.create_queue("q", SCHEMA)


def test_two_processes_that_answer_each_others_rows_take_milliseconds_for_each(
    store: penstock.Store, store_url: str, queue: penstock.Queue, run_child: RunChild
) -> None:
    back = store.create_queue("back", SCHEMA)
    rounds = 60
    child = run_child("tests.store.programs", "echo", without_disk_sync(store_url), rounds)
    child.wait_for_line("ready")
    times = []
    with back.watch() as watch:
        for position in range(rounds):
            began = time.monotonic()
            queue.append([{"n": position}])
            assert watch.wait({0: position}, LONG).ends == {0: position + 1}
            times.append(time.monotonic() - began)
    assert child.wait() == 0, child.output
    assert statistics.median(times) < 0.06, "two appends and two wake-ups"


@pytest.mark.usefixtures("no_cap")
@pytest.mark.one_kind
def test_no_append_of_several_processes_is_missed(
    store: penstock.Store, store_url: str, run_child: RunChild
) -> None:
    queue = store.create_queue("q", SCHEMA, partitions=3)
    appends, writers = 300, 3
    children = [
        run_child("tests.store.programs", "append_many", without_disk_sync(store_url), writer, appends)
        for writer in range(writers)
    ]
    total = writers * appends // 3 * (1 + 2 + 3)
    positions = {0: 0, 1: 0, 2: 0}
    with queue.watch() as watch:
        while sum(positions.values()) < total:
            wake = watch.wait(positions, LONG)
            assert wake.ends, (positions, [child.output for child in children])
            assert all(end > positions[part] for part, end in wake.ends.items())
            positions |= wake.ends
        assert not watch.wait(positions, 0)
    for child in children:
        assert child.wait() == 0, child.output
    assert positions == {part.partition: part.next_index for part in queue.info().partitions}


@pytest.mark.usefixtures("no_cap")
def test_an_append_that_runs_while_the_watch_starts_is_not_missed(queue: penstock.Queue) -> None:
    for position in range(60):
        appender = later(lambda: queue.append([{"n": 1}]))
        with queue.watch() as watch:
            assert watch.wait({0: position}, LONG).ends == {0: position + 1}
        appender.join()


@pytest.mark.usefixtures("no_cap")
def test_an_append_in_the_callers_transaction_is_noticed_when_it_is_committed(
    store: penstock.Store, queue: penstock.Queue
) -> None:
    queue.append([{"n": 0}])
    with queue.watch() as watch:
        positions = ready(watch, queue)
        connection = raw_connection(store.database)
        connection.execute("begin immediate" if store.database.dialect == "sqlite" else "begin")
        queue.append([{"n": 1}], connection=connection)
        assert not watch.wait(positions, 0.1)
        connection.execute("commit")
        assert watch.wait(positions, LONG).ends == {0: 2}
        connection.close()


def test_existing_rows_end_the_wait_immediately(queue: penstock.Queue) -> None:
    queue.append([{"n": 1}] * 5)
    with queue.watch() as watch:
        assert watch.wait({0: 0}, LONG).ends == {0: 5}
        assert watch.wait({0: 4}, LONG).ends == {0: 5}
        assert not watch.wait({0: 5}, 0)
        assert not watch.wait({0: 5}, 0.05)


def test_rows_of_other_partitions_and_queues_do_not_end_the_wait(store: penstock.Store) -> None:
    queue = store.create_queue("q", SCHEMA, partitions=4)
    other = store.create_queue("other", SCHEMA)
    with queue.watch([1, 2]) as watch:
        stop = threading.Event()

        def append() -> None:
            while not stop.is_set():
                queue.append([{"n": 1}], 0)
                queue.append([{"n": 1}], 2)
                other.append([{"n": 1}])

        appender = later(append)
        try:
            assert not watch.wait({1: 0}, 0.3)
        finally:
            stop.set()
            appender.join()
        queue.append([{"n": 1}], 1)
        assert watch.wait({1: 0, 2: 10_000}, LONG).ends == {1: 1}


def test_appends_to_other_queues_of_a_busy_file_cause_few_lookups(store: penstock.Store) -> None:
    """A watch of a quiet queue rarely reads the store, however busy the other queues are."""
    queue = store.create_queue("q", SCHEMA)
    other = unrelated(store, queue)
    appends = 300
    with queue.watch() as watch:
        positions = ready(watch, queue)
        looks = 0
        look = watch.check

        def counted(heard: bool) -> None:
            nonlocal looks
            looks += 1
            look(heard)

        watch.check = counted  # type: ignore[method-assign]
        began = time.monotonic()
        appender = later(lambda: [other.append([{"n": n}]) for n in range(appends)])
        while appender.is_alive():
            assert not watch.wait(positions, 0.05)
        seconds = time.monotonic() - began
        assert looks < 20 + 2 * seconds / 0.02
        queue.append([{"n": 1}])
        assert watch.wait(positions, LONG).ends == {0: 1}


def test_a_readable_or_closed_socket_ends_the_wait(queue: penstock.Queue) -> None:
    ours, theirs = socket.socketpair()
    reader, writer = os.pipe()
    with ours, theirs, queue.watch() as watch:
        assert not watch.wait({0: 0}, 0.05, [ours, reader])
        sender = later(lambda: theirs.send(b"x"))
        wake = watch.wait({0: 0}, LONG, [ours, reader])
        assert (wake.ends, wake.ready) == ({}, (ours,))
        sender.join()
        assert ours.recv(1) == b"x"
        queue.append([{"n": 1}])
        os.write(writer, b"x")
        assert watch.wait({0: 1}, LONG, [ours, reader]).ready == (reader,)
        assert watch.wait({0: 0}, LONG, [ours, reader]).ready == (reader,), "a socket is heard under load too"
        assert os.read(reader, 1) == b"x"
        closed = later(theirs.close)
        assert watch.wait({0: 1}, LONG, [ours, reader]).ready == (ours,)
        closed.join()
    os.close(reader)
    os.close(writer)


def test_waiting_uses_almost_no_cpu(queue: penstock.Queue) -> None:
    queue.append([{"n": 1}])
    with queue.watch() as watch:
        positions = ready(watch, queue)
        before = time.process_time()
        assert not watch.wait(positions, 2)
        assert time.process_time() - before < 0.06, "3 % of a core, where it should be less than 1"


@pytest.mark.usefixtures("no_cap")
def test_a_watch_continues_in_the_parent_of_a_fork_and_ends_in_the_child(queue: penstock.Queue) -> None:
    with queue.watch() as watch:
        positions = ready(watch, queue)

        def child() -> None:
            with pytest.raises(StoreError, match="has been closed"):
                watch.wait(positions, 5)
            watch.close()
            queue.append([{"n": 1}])

        in_a_fork(child)
        assert watch.wait(positions, LONG).ends == {0: 1}
        positions = ready(watch, queue)
        appender = later(lambda: queue.append([{"n": 1}]))
        assert watch.wait(positions, LONG).ends == {0: 2}
        appender.join()


def test_a_watch_notices_that_its_queue_was_dropped_or_has_grown(store: penstock.Store) -> None:
    queue = store.create_queue("q", SCHEMA, partitions=2)
    with queue.watch() as watch:
        assert not watch.wait({0: 0, 1: 0}, 0)
        assert watch.partitions == 2
        queue.add_partitions(1)
        queue.append([{"n": 1}], 2)
        assert watch.wait({0: 0, 1: 0, 2: 0}, LONG).ends == {2: 1}
        assert watch.partitions == 3
        store.drop_queue("q")
        with pytest.raises(QueueNotFoundError, match="queue 'q' was dropped"):
            watch.wait({0: 0}, LONG)
    with pytest.raises(StoreError, match="the watch of queue 'q' has been closed"):
        watch.wait({0: 0}, 5)


@pytest.mark.usefixtures("no_cap")
def test_the_write_ahead_log_may_be_deleted_and_recreated(tmp_path: Path) -> None:
    url, wal = f"sqlite:///{tmp_path}/x.db", tmp_path / "x.db-wal"
    with penstock.connect(url) as store:
        queue = store.create_queue("q", SCHEMA)
    watch = queue.watch()
    assert not wal.exists()
    with watch:
        for position in range(0, 15, 3):
            for behind in (position, position + 1):
                appender = later(lambda: append_alone(url))
                assert watch.wait({0: behind}, LONG).ends == {0: behind + 1}
                appender.join()
                assert not watch.wait({0: behind + 1}, 0.05)
            in_a_fork(lambda: None)  # for which the parent closes its connections
            append_alone(url)
            assert not wal.exists(), "whoever closes last deletes it"
            assert watch.wait({0: position + 2}, LONG).ends == {0: position + 3}


def append_alone(url: str) -> None:
    with penstock.connect(url, create=False) as store:
        store.queue("q").append([{"n": 1}])


def test_the_removal_of_the_store_file_ends_the_wait_with_an_error(tmp_path: Path) -> None:
    with penstock.connect(f"sqlite:///{tmp_path}/x.db") as store:
        watch = store.create_queue("q", SCHEMA).watch()
        assert not watch.wait({0: 0}, 0)
        for file in tmp_path.glob("x.db*"):
            file.unlink()
        with pytest.raises(StoreNotFoundError, match="was removed or replaced"):
            watch.wait({0: 0}, LONG)
        watch.close()


@pytest.mark.usefixtures("no_cap")
def test_without_file_system_events_a_watch_polls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sqlite_watch, "write_events", lambda path: None)
    monkeypatch.setattr(wakeups, "listen", lambda *_: None)
    monkeypatch.setattr(sqlite_watch, "CHECK_SECONDS", 0.02)
    with penstock.connect(f"sqlite:///{tmp_path}/x.db") as store:
        queue = store.create_queue("q", SCHEMA)
        times = []
        with queue.watch() as watch:
            for position in range(20):
                assert not watch.wait({0: position}, 0.05)
                queue.append([{"n": 1}])
                began = time.monotonic()
                assert watch.wait({0: position}, LONG).ends
                times.append(time.monotonic() - began)
    assert statistics.median(times) < 0.1
