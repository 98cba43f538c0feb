"""Owner locks have one holder, and are released when its process dies."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

import penstock
from penstock.errors import ConsumerInUseError
from penstock.testing import temporary_store
from tests.store.programs import SCHEMA
from tests.support.processes import ChildProcess
from tests.support.waiting import wait_until

RunChild = Callable[..., ChildProcess]
NAME = "owner / of 'it'\nü"


def test_a_lock_has_one_holder_even_within_a_process(store: penstock.Store) -> None:
    one, two = (store.database.owner_lock(NAME) for _ in range(2))
    other = store.database.owner_lock(NAME + "!")
    assert one.acquire()
    assert one.acquire(), "its holder may ask again"
    assert not two.acquire()
    assert other.acquire()
    assert two.held_elsewhere()
    assert not one.held_elsewhere()
    one.release()
    one.release()
    assert not two.held_elsewhere()
    assert two.acquire()


def test_checking_a_lock_does_not_disturb_the_next_holder(store: penstock.Store) -> None:
    one, two = (store.database.owner_lock(NAME) for _ in range(2))
    for _ in range(20):
        assert not one.held_elsewhere()
        assert two.acquire()
        two.release()


@pytest.mark.parametrize("program", ["hold_owner", "hold_owner_and_fork"])
def test_a_lock_is_released_when_its_process_dies(
    store: penstock.Store, store_url: str, run_child: RunChild, program: str
) -> None:
    child = run_child("tests.store.programs", program, store_url, NAME)
    said = child.wait_for_line("held").split()
    assert said[1] == "True"
    lock = store.database.owner_lock(NAME)
    assert lock.held_elsewhere()
    assert not lock.acquire()
    os.kill(child.pid, signal.SIGKILL)
    wait_until(lambda: not lock.held_elsewhere(), 10, "the lock is free")
    assert lock.acquire()


def test_a_garbage_collected_lock_is_released(store: penstock.Store) -> None:
    lock = store.database.owner_lock(NAME)
    assert lock.acquire()
    del lock
    wait_until(lambda: not store.database.owner_lock(NAME).held_elsewhere(), 10)


def test_a_store_has_the_same_lock_through_a_symlink(tmp_path: Path) -> None:
    with penstock.connect(f"sqlite:///{tmp_path}/x.db") as store:
        (tmp_path / "link.db").symlink_to(tmp_path / "x.db")
        lock = store.database.owner_lock(NAME)
        assert lock.acquire()
        with penstock.connect(f"sqlite:///{tmp_path}/link.db") as same:
            assert same.database.owner_lock(NAME).held_elsewhere()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link.db", "x.db", "x.db-lock", "x.db-owners"]


def test_checking_a_lock_creates_no_file(tmp_path: Path) -> None:
    with penstock.connect(f"sqlite:///{tmp_path}/x.db") as store:
        assert not store.database.owner_lock(NAME).held_elsewhere()
        assert not (tmp_path / "x.db-owners").exists()


def test_a_lock_whose_session_was_killed_is_reacquired_or_reported_as_lost(pg_url: str) -> None:
    from tests.support.raw_sql import run_sql

    with temporary_store(pg_url) as store:
        lock, other = (store.database.owner_lock(NAME) for _ in range(2))
        assert lock.acquire()
        run_sql(
            store.database,
            "select pg_terminate_backend(pid) from pg_locks where locktype = 'advisory' and pid <> "
            "pg_backend_pid()",
        )
        wait_until(lambda: not other.held_elsewhere(), 10)
        assert lock.acquire()
        assert not other.acquire()
        run_sql(
            store.database,
            "select pg_terminate_backend(pid) from pg_locks where locktype = 'advisory' and pid <> "
            "pg_backend_pid()",
        )
        wait_until(other.acquire, 10)
        assert not lock.acquire()
        lock.release()
        other.release()


def test_seeks_and_drops_are_refused_while_an_owner_lives(store: penstock.Store) -> None:
    queue = store.create_queue("q", SCHEMA)
    queue.append([{"n": 1}])
    consumer = store.create_consumer("c")
    queue.register("c")
    lock = store.database.owner_lock(consumer.registration("q").lock_name(store.uuid))
    assert lock.acquire()
    for refused in (
        lambda: consumer.seek("q", to="latest"),
        lambda: consumer.unregister("q"),
        lambda: store.drop_consumer("c"),
        lambda: store.drop_queue("q"),
        lambda: store.drop_queue("q", force=True),
    ):
        with pytest.raises(ConsumerInUseError, match="stop the query first"):
            refused()
    assert consumer.seek("q", to="latest", dry_run=True) == {0: 1}
    assert consumer.offsets("q") == {0: 0}
    lock.release()
    assert consumer.seek("q", to="latest") == {0: 1}
