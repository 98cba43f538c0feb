"""Many processes at one partition: no gap, no reuse, and readers see prefixes alone."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

import penstock
from tests.queue.programs import check
from tests.queue.support import SCHEMA, hurried
from tests.support.processes import ChildProcess

RunChild = Callable[..., ChildProcess]
WRITERS, APPENDS = 8, 40


def _rows_of(writer: int) -> int:
    random_ = random.Random(writer)
    return sum(random_.randint(1, 4) for _ in range(APPENDS))


def _table(queue: penstock.Queue) -> list[tuple[int, str]]:
    table = queue.read(0, 0)
    return list(zip(table["n"].to_pylist(), table["s"].to_pylist(), strict=True))


def test_eight_processes_append_while_two_read(
    store: penstock.Store, store_url: str, tmp_path: Path, run_child: RunChild
) -> None:
    queue = store.create_queue("q", SCHEMA)
    go = tmp_path / "go"
    total = sum(_rows_of(writer) for writer in range(WRITERS))
    writers = [
        run_child("tests.queue.programs", "append_numbered", hurried(store_url), "q", writer, APPENDS, go)
        for writer in range(WRITERS)
    ]
    readers = [
        run_child("tests.queue.programs", "read_prefixes", hurried(store_url), "q", total) for _ in range(2)
    ]
    for child in writers + readers:
        child.wait_for_line("ready")
    go.touch()
    for child in writers + readers:
        assert child.wait() == 0, child.output
    seen = _table(queue)
    assert len(seen) == total == queue.info().rows
    check(seen)


@pytest.mark.crash
def test_killed_appenders_leave_whole_appends_alone(
    store: penstock.Store, store_url: str, tmp_path: Path, run_child: RunChild
) -> None:
    """SIGKILL in the middle of a loop of appends, over and over; whoever comes after goes on."""
    queue = store.create_queue("q", SCHEMA)
    go = tmp_path / "go"
    go.touch()
    random_ = random.Random(7)
    survivor = run_child("tests.queue.programs", "append_numbered", store_url, "q", 0, 200, go)
    for writer in range(1, 4):
        child = run_child("tests.queue.programs", "append_numbered", store_url, "q", writer, 100_000, go)
        child.wait_for_line("appended")
        try:
            child.popen.wait(random_.random() / 5)
        except Exception:
            os.kill(child.pid, signal.SIGKILL)
        assert child.wait() == -signal.SIGKILL
        check(_table(queue))
    assert survivor.wait() == 0, survivor.output
    seen = _table(queue)
    check(seen)
    assert {value % 1000 for value, _ in seen} == {0, 1, 2, 3}
    assert len([1 for value, text in seen if value % 1000 == 0 and text.startswith("0/")]) == 200
    assert queue.append([{"n": 5, "s": ""}]).ranges == {0: (len(seen), len(seen) + 1)}
