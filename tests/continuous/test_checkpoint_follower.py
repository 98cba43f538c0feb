"""The checkpoint follows the commits of a sink that also stores the offsets."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from penstock.continuous.driver import checkpoint_follower, checkpoint_log
from penstock.continuous.driver.checkpoint_follower import CheckpointFollower
from penstock.continuous.driver.checkpoint_log import CheckpointLog
from penstock.errors import OwnerFencedError
from tests.support.waiting import wait_until


@pytest.fixture
def checkpoint(tmp_path: Path) -> CheckpointLog:
    return CheckpointLog(str(tmp_path / "ck"))


@pytest.fixture
def follower(checkpoint: CheckpointLog) -> Iterator[CheckpointFollower]:
    follower = CheckpointFollower(checkpoint, 10)
    yield follower
    follower.end()


def offset(number: int) -> dict[str, list[int]]:
    return {"to": [number]}


def logged_epochs(checkpoint: CheckpointLog) -> tuple[list[int], list[int]]:
    return checkpoint.numbers("offsets"), checkpoint.numbers("commits")


class BlockedDisk:
    """Disk that blocks writes until it is released."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.released, self.write_started = threading.Event(), threading.Event()
        write = checkpoint_log.create_durably

        def wait_and_write(path: str, content: bytes) -> None:
            self.write_started.set()
            assert self.released.wait(30)
            write(path, content)

        monkeypatch.setattr(checkpoint_log, "create_durably", wait_and_write)


def test_an_epoch_is_logged_shortly_after_it_is_added(
    checkpoint: CheckpointLog, follower: CheckpointFollower
) -> None:
    follower.add(0, offset(0))
    wait_until(lambda: follower.newest() == (0, offset(0)))
    assert logged_epochs(checkpoint) == ([0], [0])
    assert checkpoint.single_offset(0) == offset(0)


def test_all_waiting_epochs_but_the_last_two_are_skipped(
    checkpoint: CheckpointLog, follower: CheckpointFollower, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Spark resumes from the offsets of the last two epochs."""
    disk = BlockedDisk(monkeypatch)
    follower.add(0, offset(0))
    assert disk.write_started.wait(30)
    for number in range(1, 8):
        follower.add(number, offset(number))
    disk.released.set()
    follower.flush()
    assert logged_epochs(checkpoint) == ([0, 6, 7], [0, 7])
    assert [checkpoint.single_offset(number) for number in (6, 7)] == [offset(6), offset(7)]


def test_flushing_does_not_wait_for_the_next_interval(
    checkpoint: CheckpointLog, follower: CheckpointFollower, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint_follower, "FOLLOW_SECONDS", 3600.0)
    for number in range(3):
        follower.add(number, offset(number))
        follower.flush()
    assert logged_epochs(checkpoint) == ([0, 1, 2], [0, 1, 2])


def test_older_entries_are_pruned(checkpoint: CheckpointLog, follower: CheckpointFollower) -> None:
    for number in range(0, 40, 4):
        follower.add(number, offset(number))
        follower.add(number + 1, offset(number + 1))
        follower.flush()
    assert logged_epochs(checkpoint) == ([28, 29, 32, 33, 36, 37], [29, 33, 37])


def test_an_equal_entry_of_another_driver_is_not_a_conflict(
    checkpoint: CheckpointLog, follower: CheckpointFollower
) -> None:
    """The other driver has found the epoch in the sink."""
    checkpoint.write_offset(0, offset(0))
    checkpoint.write_commit(0)
    follower.add(0, offset(0))
    follower.flush()
    assert follower.newest() == (0, offset(0))


@pytest.mark.parametrize("action", ["flush", "add", "newest"])
def test_a_different_epoch_with_the_same_number_is_an_error_at_the_next_call(
    checkpoint: CheckpointLog, follower: CheckpointFollower, action: str
) -> None:
    checkpoint.write_offset(0, {"to": [99]})
    checkpoint.write_commit(0)
    follower.add(0, offset(0))
    actions: dict[str, Callable[[], object]] = {
        "flush": follower.flush,
        "add": lambda: follower.add(1, offset(1)),
        "newest": follower.newest,
    }
    if action != "flush":
        wait_until(lambda: follower.failure is not None)
    with pytest.raises(OwnerFencedError, match="has other rows in the checkpoint"):
        actions[action]()
    assert checkpoint.single_offset(0) == {"to": [99]}


def test_an_epoch_that_was_begun_and_not_committed_is_replaced(
    checkpoint: CheckpointLog, follower: CheckpointFollower
) -> None:
    checkpoint.write_offset(0, {"to": [99]})
    follower.add(0, offset(0))
    follower.flush()
    assert (logged_epochs(checkpoint), checkpoint.single_offset(0)) == (([0], [0]), offset(0))


def test_after_an_error_the_next_epoch_is_logged(
    checkpoint: CheckpointLog, follower: CheckpointFollower, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = checkpoint_log.create_durably

    def fail_on_full_disk(*args: Any) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(checkpoint_log, "create_durably", fail_on_full_disk)
    follower.add(0, offset(0))
    with pytest.raises(OSError, match="no space"):
        follower.flush()
    monkeypatch.setattr(checkpoint_log, "create_durably", write)
    follower.add(1, offset(1))
    follower.flush()
    assert logged_epochs(checkpoint) == ([1], [1])


def test_a_follower_logs_all_epochs_before_it_ends(
    checkpoint: CheckpointLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint_follower, "FOLLOW_SECONDS", 3600.0)
    follower = CheckpointFollower(checkpoint, 10)
    for number in range(5):
        follower.add(number, offset(number))
    follower.end()
    assert max(checkpoint.numbers("commits")) == 4
    wait_until(lambda: follower.thread is not None and not follower.thread.is_alive())
