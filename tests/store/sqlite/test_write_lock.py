"""Writers of one SQLite file get the write lock in the order in which they wait for it."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

import penstock
from penstock.errors import StoreLockedError, StoreUnavailableError
from tests.store.programs import SCHEMA
from tests.support.raw_sql import raw_connection


def test_a_writer_waits_for_another_writer_in_sqlite(tmp_path: Path) -> None:
    with penstock.connect(f"sqlite:///{tmp_path}/x.db?busy_timeout=50") as store:
        queue = store.create_queue("q", SCHEMA)
        other = raw_connection(store.database)
        other.execute("begin immediate")
        done = threading.Thread(target=queue.append, args=([{"n": 1}],))
        done.start()
        done.join(0.3)
        assert done.is_alive()
        other.execute("rollback")
        done.join(20)
        assert queue.info().rows == 1
        other.close()


def test_waiting_for_a_writer_that_does_not_finish_times_out_in_sqlite(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.store.database.RETRY_SECONDS", 0.2)
    with penstock.connect(f"sqlite:///{tmp_path}/x.db?busy_timeout=50") as store:
        queue = store.create_queue("q", SCHEMA)
        other = raw_connection(store.database)
        other.execute("begin immediate")
        with pytest.raises(StoreLockedError, match="locked by another writer") as caught:
            queue.append([{"n": 1}])
        assert "another connection of this process" in caught.value.message
        assert queue.info().rows == 0, "readers are not held up"
        other.close()


def test_writers_take_turns_in_sqlite(tmp_path: Path) -> None:
    """A process that writes in a loop does not block the others."""
    url = f"sqlite:///{tmp_path}/x.db?synchronous=normal"
    with penstock.connect(url) as busy, penstock.connect(url) as patient:
        queue = busy.create_queue("q", SCHEMA)
        stop = threading.Event()

        def loop() -> None:
            while not stop.is_set():
                queue.append([{"n": 1}])

        threads = [threading.Thread(target=loop) for _ in range(3)]
        for thread in threads:
            thread.start()
        own = patient.queue("q")
        between = []
        for _ in range(30):
            before = queue.info().rows
            (start, _), *_ = own.append([{"n": 2}]).ranges.values()
            between.append(start - before)
        stop.set()
        for thread in threads:
            thread.join()
    assert sorted(between)[15] < 30


def _ignore() -> None: ...


def test_a_lock_that_stays_taken_is_reported_after_the_timeout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from penstock.store.sqlite.files import StoreFiles
    from penstock.store.sqlite.locks import WriteLock

    monkeypatch.setattr("penstock.store.database.RETRY_SECONDS", 0.2)
    with penstock.connect(f"sqlite:///{tmp_path}/x.db?busy_timeout=100") as store:
        queue = store.create_queue("q", SCHEMA)
        other = WriteLock(f"{tmp_path}/x.db-lock", StoreFiles())
        assert other.acquire(1, _ignore)
        with pytest.raises(StoreUnavailableError, match=r"waited 0.1 s for other writers"):
            queue.append([{"n": 1}])
        assert queue.info().rows == 0
        other.release()
        for n in range(3):
            queue.append([{"n": n}])
        assert queue.info().rows == 3


def test_a_lock_granted_after_the_timeout_is_released(tmp_path: Path) -> None:
    from penstock.store.sqlite.files import StoreFiles
    from penstock.store.sqlite.locks import WriteLock
    from tests.support.waiting import wait_until

    one, two, three = (WriteLock(f"{tmp_path}/lock", StoreFiles()) for _ in range(3))
    assert one.acquire(1, _ignore)
    assert not two.acquire(0.05, _ignore)
    assert not two.acquire(0.05, _ignore)
    one.release()
    wait_until(lambda: three.acquire(0.05, _ignore), 10)
    assert not two.acquire(0.05, _ignore)
    three.release()
    wait_until(lambda: two.acquire(0.05, _ignore), 10)
    one.close()
    two.close()
    three.close()
