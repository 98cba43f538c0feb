"""A forked child shares only the store's URL with its parent."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from typing import Any

import pytest

import penstock
from penstock.store import pool
from penstock.store.database import Transaction
from penstock.store.forks import ForkSafeLock
from tests.store.forking import in_a_fork
from tests.store.programs import SCHEMA


def test_parent_and_child_both_append_after_a_fork(store: penstock.Store) -> None:
    queue = store.create_queue("q", SCHEMA)
    queue.append([{"n": 0}])

    def child() -> None:
        for n in range(10):
            queue.append([{"n": n}])
            queue.read(0, 0)
        store.close()

    for _ in range(3):
        queue.append([{"n": 0}])
        in_a_fork(child)
        queue.append([{"n": 0}])
    assert queue.read(0, 0).num_rows == 37


def test_parent_and_child_append_at_the_same_time(store: penstock.Store) -> None:
    queue = store.create_queue("q", SCHEMA)
    queue.append([{"n": 0}])
    reader, writer = os.pipe()

    def work() -> None:
        for n in range(40):
            queue.append([{"n": n}])
            assert queue.read(0, 0, 1).num_rows == 1

    def child() -> None:
        os.write(writer, b"!")
        work()

    def parent() -> None:
        os.read(reader, 1)
        work()

    thread = threading.Thread(target=parent)
    thread.start()
    in_a_fork(child)
    thread.join()
    os.close(reader)
    os.close(writer)
    assert queue.read(0, 0).num_rows == 81


def test_a_childs_appends_survive_when_its_parent_closes_the_store(store: penstock.Store) -> None:
    """If the child shared the parent's SQLite file locks, the parent could remove the log to which the child
    writes.
    """
    queue = store.create_queue("q", SCHEMA)
    queue.append([{"n": 0}])
    from_child, to_parent = os.pipe()
    from_parent, to_child = os.pipe()

    def child() -> None:
        queue.append([{"n": 1}])
        os.write(to_parent, b"!")
        os.read(from_parent, 1)
        queue.append([{"n": 2}])

    def parent() -> None:
        os.read(from_child, 1)
        store.close()
        os.write(to_child, b"!")

    thread = threading.Thread(target=parent)
    thread.start()
    in_a_fork(child)
    thread.join()
    with penstock.connect(_url(store), create=False) as again:
        assert [row["n"] for row in again.queue("q").read(0, 0).to_pylist()] == [0, 1, 2]


def test_a_fork_waits_for_the_transactions_of_other_threads(store: penstock.Store) -> None:
    """SQLite also has locks in the process's memory. In the child, the locks of a call in progress would
    never be released.
    """
    queue = store.create_queue("q", SCHEMA)
    forked = threading.Event()

    def append() -> None:
        while not forked.is_set():
            queue.append([{"n": 1}])

    def child() -> None:
        signal.alarm(20)
        # Closing an inherited file would release the locks that this process takes on it.
        assert _inherited_files("penstock.db") == []
        queue.append([{"n": 2}])

    threads = [threading.Thread(target=append) for _ in range(3)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(15):
            in_a_fork(child)
    finally:
        forked.set()
        for thread in threads:
            thread.join()
    assert queue.read(0, 0)["n"].to_pylist().count(2) == 15


def test_a_fork_gets_its_turn_among_threads_that_are_always_busy(store: penstock.Store) -> None:
    done = threading.Event()

    def read() -> None:
        while not done.is_set():
            store.queues()

    threads = [threading.Thread(target=read) for _ in range(4)]
    for thread in threads:
        thread.start()
    try:
        began = time.monotonic()
        for _ in range(4):
            in_a_fork(lambda: None)
        taken = time.monotonic() - began
    finally:
        done.set()
        for thread in threads:
            thread.join()
    # Otherwise each fork would wait for its whole time limit.
    assert taken < 2 * pool.FORK_WAIT_SECONDS


def test_a_fork_does_not_wait_for_a_thread_that_is_connecting(store_url: str) -> None:
    """The thread already holds a slot of the pool."""
    with penstock.connect(store_url, create=True) as store:
        store.create_queue("q", SCHEMA)
        connecting, connect = threading.Event(), store.database._connect

        def slowly() -> Any:
            connecting.set()
            time.sleep(0.3)
            return connect()

        store.database.pool.connect = slowly
        store.database.pool.drain()
        thread = threading.Thread(target=store.queues)
        thread.start()
        assert connecting.wait(20)
        began = time.monotonic()
        in_a_fork(lambda: None)
        assert time.monotonic() - began < pool.FORK_WAIT_SECONDS
        thread.join()


def test_locks_held_by_a_thread_of_the_parent_are_free_in_the_child() -> None:
    guard = ForkSafeLock()
    held, done = threading.Event(), threading.Event()

    def hold() -> None:
        with guard:
            held.set()
            done.wait(20)

    def child() -> None:
        signal.alarm(10)
        with guard:
            pass

    thread = threading.Thread(target=hold)
    thread.start()
    assert held.wait(20)
    try:
        in_a_fork(child)
    finally:
        done.set()
        thread.join()


def test_a_child_can_open_its_full_number_of_connections(
    store: penstock.Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The parent's threads use all of theirs, which are never returned in the child."""
    monkeypatch.setattr(pool, "FORK_WAIT_SECONDS", 0.2)
    queue = store.create_queue("q", SCHEMA)
    inside, done = threading.Barrier(pool.POOL_SIZE + 1), threading.Event()

    def use(tx: Transaction) -> None:
        inside.wait(20)
        done.wait(20)

    threads = [
        threading.Thread(target=store.database.run, args=(use,), kwargs={"write": False})
        for _ in range(pool.POOL_SIZE)
    ]
    for thread in threads:
        thread.start()
    inside.wait(20)

    def child() -> None:
        signal.alarm(20)
        queue.append([{"n": 1}])

    try:
        in_a_fork(child)
    finally:
        done.set()
        for thread in threads:
            thread.join()
    assert queue.info().rows == 1


def test_a_child_runs_its_own_maintenance(store: penstock.Store) -> None:
    queue = store.create_queue("q", SCHEMA)
    for n in range(70):
        queue.append([{"n": n}])

    def child() -> None:
        for n in range(130):
            queue.append([{"n": n}])
        store.close()
        with penstock.connect(_url(store)) as again:
            assert again.queue("q").info().partitions[0].segments < 130

    in_a_fork(child)
    assert queue.read(0, 0).num_rows == 200


def _inherited_files(name: str) -> list[str]:
    found = []
    for number in os.listdir("/proc/self/fd") if os.path.exists("/proc/self/fd") else ():
        with contextlib.suppress(FileNotFoundError):
            found.append(os.path.basename(os.readlink(f"/proc/self/fd/{number}")))
    return [each for each in found if each == name or each == f"{name}-wal"]


def _url(store: penstock.Store) -> str:
    database = store.database
    if database.dialect == "sqlite":
        return str(database.url)
    from penstock.testing.stores import with_schema

    return with_schema(database.url.target, database.url.options["schema"])


def test_an_owner_lock_stays_with_the_parent(store: penstock.Store) -> None:
    lock = store.database.owner_lock("x")
    assert lock.acquire()

    def child() -> None:
        assert not lock.acquire()
        lock.release()
        assert lock.held_elsewhere()

    in_a_fork(child)
    assert lock.acquire()
    assert store.database.owner_lock("x").held_elsewhere()
