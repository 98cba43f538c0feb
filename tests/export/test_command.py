"""``penstock queue export``: killed, suspended and started twice, it exports each row once."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Callable

import pyarrow as pa
import pytest

import penstock
from tests.export.lakes import Lake
from tests.support.processes import ChildProcess
from tests.support.waiting import wait_until

SCHEMA = pa.schema([pa.field("n", pa.int64(), nullable=False)])


@pytest.mark.few(2)
def test_a_run_says_what_it_did(store: penstock.Store, store_url: str, lake: Lake) -> None:
    store.create_queue("orders", SCHEMA).append([{"n": 1}, {"n": 2}])
    table = lake.named("orders")
    command = [sys.executable, "-m", "penstock", "queue", "export", "orders", lake.url, "--table", table]
    done = subprocess.run(
        [*command, "--url", store_url, "--json"], capture_output=True, text=True, check=True
    )
    assert json.loads(done.stdout) == {"queue": "orders", "table": table, "rows": 2, "commits": 1}
    assert lake.numbers("orders") == [1, 2]


@pytest.mark.crash
@pytest.mark.one_kind
@pytest.mark.timeout(300)
def test_exports_that_are_killed_and_suspended_lose_and_repeat_nothing(
    store: penstock.Store, store_url: str, lake: Lake, run_child: Callable[..., ChildProcess]
) -> None:
    queue = store.create_queue("orders", SCHEMA, partitions=3)
    appended, stopping = [0], threading.Event()

    def append() -> None:
        while not stopping.wait(0.01):
            queue.append([{"n": appended[0] + n} for n in range(50)], appended[0] // 50 % 3)
            appended[0] += 50

    def begin() -> ChildProcess:
        return run_child("penstock", "queue", "export", "orders", lake.url, "--table", lake.named("orders"),
                         "--follow", "--every", "0", "--url", store_url)  # fmt: skip

    appending = threading.Thread(target=append)
    appending.start()
    chance = random.Random(7)
    try:
        for round_ in range(6):
            children = [begin(), begin()]
            before = lake.count("orders")
            wait_until(lambda before=before: lake.count("orders") > before, 60)  # type: ignore[misc]
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
    wait_until(lambda: lake.count("orders") >= appended[0], 60)
    last.popen.send_signal(signal.SIGTERM)
    assert last.wait(60) == 0, last.output
    assert lake.numbers("orders") == list(range(appended[0]))
