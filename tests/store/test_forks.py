"""A forked child shares nothing with its parent but the store's URL."""

from __future__ import annotations

import os
import threading
import traceback
from collections.abc import Callable

import penstock
from tests.store.programs import SCHEMA


def _in_a_fork(work: Callable[[], object]) -> None:
    child = os.fork()
    if child == 0:
        code = 1
        try:
            work()
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


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
        _in_a_fork(child)
        queue.append([{"n": 0}])
    assert queue.read(0, 0).num_rows == 37


def test_a_child_has_an_upkeep_of_its_own(store: penstock.Store) -> None:
    queue = store.create_queue("q", SCHEMA)
    for n in range(70):
        queue.append([{"n": n}])

    def child() -> None:
        for n in range(130):
            queue.append([{"n": n}])
        store.close()
        with penstock.connect(_url(store)) as again:
            assert again.queue("q").info().partitions[0].segments < 130

    _in_a_fork(child)
    assert queue.read(0, 0).num_rows == 200


def _url(store: penstock.Store) -> str:
    database = store.database
    if database.dialect == "sqlite":
        return str(database.url)
    from tests.support.postgres import with_schema

    return with_schema(database.url.target, database.url.options["schema"])


def test_an_owner_stays_with_the_parent(store: penstock.Store) -> None:
    lock = store.database.owner_lock("x")
    assert lock.acquire()

    def child() -> None:
        assert not lock.acquire()
        lock.release()
        assert lock.held_elsewhere()

    _in_a_fork(child)
    assert lock.acquire()
    assert store.database.owner_lock("x").held_elsewhere()


def test_a_fork_while_others_work_leaves_the_child_free_to_work(store: penstock.Store) -> None:
    queue = store.create_queue("q", SCHEMA)
    stop = threading.Event()

    def others() -> None:
        while not stop.is_set():
            queue.append([{"n": 1}])

    threads = [threading.Thread(target=others) for _ in range(2)]
    for thread in threads:
        thread.start()

    def child() -> None:
        assert store.database._pool._slots.acquire(blocking=False)
        assert store.database._pool._guard.acquire(blocking=False)

    try:
        for _ in range(5):
            _in_a_fork(child)
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    count = queue.info().rows
    assert queue.read(0, 0).num_rows == count
