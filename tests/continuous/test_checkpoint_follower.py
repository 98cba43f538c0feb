"""The checkpoint follows the commits of a sink that keeps the offsets as well."""

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
def logs(tmp_path: Path) -> CheckpointLog:
    return CheckpointLog(str(tmp_path / "ck"))


@pytest.fixture
def follower(logs: CheckpointLog) -> Iterator[CheckpointFollower]:
    made = CheckpointFollower(logs, 10)
    yield made
    made.end()


def offset(number: int) -> dict[str, list[int]]:
    return {"to": [number]}


def logged(logs: CheckpointLog) -> tuple[list[int], list[int]]:
    return logs.numbers("offsets"), logs.numbers("commits")


class Disk:
    """A disk that stands still until it is released."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.free, self.asked = threading.Event(), threading.Event()
        write = checkpoint_log.create_durably

        def create(path: str, content: bytes) -> None:
            self.asked.set()
            assert self.free.wait(30)
            write(path, content)

        monkeypatch.setattr(checkpoint_log, "create_durably", create)


def test_an_epoch_is_logged_a_moment_later(logs: CheckpointLog, follower: CheckpointFollower) -> None:
    follower.add(0, offset(0))
    wait_until(lambda: follower.newest() == (0, offset(0)))
    assert logged(logs) == ([0], [0])
    assert logs.single_offset(0) == offset(0)


def test_epochs_are_skipped_but_for_the_last_two(
    logs: CheckpointLog, follower: CheckpointFollower, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Spark resumes from the offsets of the last epoch and of the one before."""
    disk = Disk(monkeypatch)
    follower.add(0, offset(0))
    assert disk.asked.wait(30)
    for number in range(1, 8):
        follower.add(number, offset(number))
    disk.free.set()
    follower.flush()
    assert logged(logs) == ([0, 6, 7], [0, 7])
    assert [logs.single_offset(number) for number in (6, 7)] == [offset(6), offset(7)]


def test_flushing_does_not_wait_for_the_next_turn(
    logs: CheckpointLog, follower: CheckpointFollower, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint_follower, "FOLLOW_SECONDS", 3600.0)
    for number in range(3):
        follower.add(number, offset(number))
        follower.flush()
    assert logged(logs) == ([0, 1, 2], [0, 1, 2])


def test_older_entries_are_pruned(logs: CheckpointLog, follower: CheckpointFollower) -> None:
    for number in range(0, 40, 4):
        follower.add(number, offset(number))
        follower.add(number + 1, offset(number + 1))
        follower.flush()
    assert logged(logs) == ([28, 29, 32, 33, 36, 37], [29, 33, 37])


def test_an_entry_that_another_driver_has_written_alike_is_no_conflict(
    logs: CheckpointLog, follower: CheckpointFollower
) -> None:
    """It has found the epoch in the sink."""
    logs.write_offset(0, offset(0))
    logs.write_commit(0)
    follower.add(0, offset(0))
    follower.flush()
    assert follower.newest() == (0, offset(0))


@pytest.mark.parametrize("told", ["flush", "add", "newest"])
def test_another_epoch_under_the_same_number_is_told_to_the_query(
    logs: CheckpointLog, follower: CheckpointFollower, told: str
) -> None:
    logs.write_offset(0, {"to": [99]})
    logs.write_commit(0)
    follower.add(0, offset(0))
    actions: dict[str, Callable[[], object]] = {
        "flush": follower.flush,
        "add": lambda: follower.add(1, offset(1)),
        "newest": follower.newest,
    }
    if told != "flush":
        wait_until(lambda: follower.failure is not None)
    with pytest.raises(OwnerFencedError, match="has other rows in the checkpoint"):
        actions[told]()
    assert logs.single_offset(0) == {"to": [99]}


def test_what_was_begun_and_never_committed_is_replaced(
    logs: CheckpointLog, follower: CheckpointFollower
) -> None:
    logs.write_offset(0, {"to": [99]})
    follower.add(0, offset(0))
    follower.flush()
    assert (logged(logs), logs.single_offset(0)) == (([0], [0]), offset(0))


def test_after_an_error_the_next_epoch_is_logged(
    logs: CheckpointLog, follower: CheckpointFollower, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = checkpoint_log.create_durably

    def full(*given: Any) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(checkpoint_log, "create_durably", full)
    follower.add(0, offset(0))
    with pytest.raises(OSError, match="no space"):
        follower.flush()
    monkeypatch.setattr(checkpoint_log, "create_durably", write)
    follower.add(1, offset(1))
    follower.flush()
    assert logged(logs) == ([1], [1])


def test_it_logs_everything_before_it_ends(logs: CheckpointLog, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint_follower, "FOLLOW_SECONDS", 3600.0)
    made = CheckpointFollower(logs, 10)
    for number in range(5):
        made.add(number, offset(number))
    made.end()
    assert max(logs.numbers("commits")) == 4
    wait_until(lambda: made.thread is not None and not made.thread.is_alive())
