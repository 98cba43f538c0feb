"""``penstock queue export``: killed, suspended and started twice, it exports each row once."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pytest
from deltalake import DeltaTable

import penstock
from tests.support.processes import ChildProcess
from tests.support.waiting import wait_until

SCHEMA = pa.schema([pa.field("n", pa.int64(), nullable=False)])


def _exported(lake: Path) -> list[int]:
    found: list[int] = DeltaTable(str(lake / "orders")).to_pyarrow_table()["n"].to_pylist()
    return sorted(found)


def test_a_run_says_what_it_did(store: penstock.Store, store_url: str, tmp_path: Path) -> None:
    store.create_queue("orders", SCHEMA).append([{"n": 1}, {"n": 2}])
    command = [sys.executable, "-m", "penstock", "queue", "export", "orders", f"delta://{tmp_path}"]
    done = subprocess.run(
        [*command, "--url", store_url, "--json"], capture_output=True, text=True, check=True
    )
    assert json.loads(done.stdout) == {"queue": "orders", "table": "orders", "rows": 2, "commits": 1}
    assert _exported(tmp_path) == [1, 2]


@pytest.mark.crash
@pytest.mark.timeout(300)
def test_exports_that_are_killed_and_suspended_lose_and_repeat_nothing(
    store: penstock.Store, store_url: str, tmp_path: Path, run_child: Callable[..., ChildProcess]
) -> None:
    queue = store.create_queue("orders", SCHEMA, partitions=3)
    appended, stopping = [0], threading.Event()

    def append() -> None:
        while not stopping.wait(0.01):
            queue.append([{"n": appended[0] + n} for n in range(50)], appended[0] // 50 % 3)
            appended[0] += 50

    def begin() -> ChildProcess:
        target = f"delta://{tmp_path}"
        return run_child("penstock", "queue", "export", "orders", target, "--follow", "--every", "0",
                         "--url", store_url)  # fmt: skip

    appending = threading.Thread(target=append)
    appending.start()
    chance = random.Random(7)
    try:
        for round_ in range(6):
            children = [begin(), begin()]
            before = _count(tmp_path)
            wait_until(lambda before=before: _count(tmp_path) > before, 60)  # type: ignore[misc]
            threading.Event().wait(chance.random() * 0.5)
            if round_ % 2:
                # It wakes up when another one has its place.
                for child in children:
                    child.popen.send_signal(signal.SIGSTOP)
                third = begin()
                threading.Event().wait(chance.random())
                for child in children:
                    child.popen.send_signal(signal.SIGCONT)
                children.append(third)
                threading.Event().wait(chance.random() * 0.5)
            for child in children:
                child.popen.kill()
                child.popen.wait()
    finally:
        stopping.set()
        appending.join()
    last = begin()
    wait_until(lambda: _count(tmp_path) >= appended[0], 60)
    last.popen.send_signal(signal.SIGTERM)
    assert last.wait(60) == 0, last.output
    assert _exported(tmp_path) == list(range(appended[0]))


def _count(lake: Path) -> int:
    if not DeltaTable.is_deltatable(str(lake / "orders")):
        return 0
    return int(sum(pa.table(DeltaTable(str(lake / "orders")).get_add_actions())["num_records"].to_pylist()))
