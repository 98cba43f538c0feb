"""Many processes use one partition: there are no gaps or reused indexes, and readers see only prefixes."""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pyarrow as pa
import pytest

import penstock
from penstock.store import staging
from penstock.store.database import Transaction
from penstock.store.log import segmenting
from penstock.store.records import consumers
from penstock.store.staging import Attempt
from tests.queue.programs import check, check_widths
from tests.support.processes import ChildProcess
from tests.support.queues import SCHEMA, without_disk_sync

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
        run_child(
            "tests.queue.programs", "append_numbered", without_disk_sync(store_url), "q", writer, APPENDS, go
        )
        for writer in range(WRITERS)
    ]
    readers = [
        run_child("tests.queue.programs", "read_prefixes", without_disk_sync(store_url), "q", total)
        for _ in range(2)
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
@pytest.mark.one_kind
def test_killed_writers_leave_no_partial_appends(
    store: penstock.Store, store_url: str, tmp_path: Path, run_child: RunChild
) -> None:
    """Processes that append in a loop are killed repeatedly with SIGKILL, and other processes can
    continue.
    """
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


@pytest.mark.crash
@pytest.mark.one_kind
def test_rows_keep_their_values_when_processes_that_add_columns_are_killed(
    store: penstock.Store, store_url: str, run_child: RunChild
) -> None:
    """SIGKILL hits processes that add columns, append with and without the new columns, and compact."""
    queue = store.create_queue("q", pa.schema([("n", pa.int64()), ("width", pa.int64())]))
    random_ = random.Random(7)
    for _ in range(2):
        children = [
            run_child("tests.queue.programs", "add_columns", without_disk_sync(store_url), "q", n)
            for n in range(2)
        ]
        for child in children:
            child.wait_for_line("appended")
        for child in children:
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.popen.wait(random_.random() / 3)
            os.kill(child.pid, signal.SIGKILL)
            assert child.wait() == -signal.SIGKILL, child.output
        queue.refresh()
        check_widths(queue.read(0, 0).to_pylist())
        queue.compact()
        check_widths(queue.read(0, 0).to_pylist())
    assert queue.schema.names == ["n", "width", *(f"c{n}" for n in range(2, len(queue.schema)))]
    assert len(queue.schema) > 2


def test_no_two_operations_deadlock(store: penstock.Store, caplog: pytest.LogCaptureFixture) -> None:
    """All operations that take locks run concurrently and repeatedly, and the database never has to abort
    one.
    """
    queue = store.create_queue("q", SCHEMA, partitions=3, key=["n"])
    store.create_queue("r", SCHEMA, partitions=2)
    for name in ("a", "b"):
        store.create_consumer(name)
        queue.register(name, vital=name == "a")
    producer = store.producer("q", "s")
    numbers = itertools.count()

    def append() -> None:
        queue.append([{"n": n} for n in range(30)])

    def commit() -> None:
        """Lock as the commit of a micro-batch does: the consumers by name, then the partitions."""
        batch = next(numbers)
        table = pa.table({"n": [1, 2], "s": ["x", "y"]}, schema=SCHEMA)
        other = store.queue("r").record
        attempt = Attempt("app", batch, 0, "try")
        store.database.run(lambda tx: staging.stage(tx, other, attempt, segmenting.to_segments(table, 1), 0))

        def work(tx: Transaction) -> None:
            for name in ("a", "b"):
                consumers.find_registration(tx, name, "q", lock=True)
            staging.promote(tx, other, "app", batch, {"try": 1})

        store.database.run(work)

    def come_and_go() -> None:
        name = f"c{next(numbers)}"
        store.create_consumer(name)
        store.queue("q").register(name, vital=True, start="latest")
        store.drop_consumer(name)

    operations: list[Callable[[], object]] = [
        append,
        append,
        lambda: producer.append([{"n": n} for n in range(20)]),
        commit,
        come_and_go,
        lambda: store.consumer("a").seek("q", to="latest"),
        lambda: store.consumer("b").register("q", vital=bool(next(numbers) % 2)),
        lambda: store.queue("q").trim(before=next(numbers)),
        lambda: store.queue("q").compact(),
        lambda: store.queue("q").add_partitions(1) if store.queue("q").partitions < 12 else None,
        lambda: store.clean_up(timedelta(hours=1)),
        lambda: store.queue("q").add_columns(pa.field(f"c{next(numbers) % 20}", pa.int64())),
    ]
    failures: list[BaseException] = []
    deadline = time.monotonic() + 3

    def loop(operation: Callable[[], object]) -> None:
        try:
            while time.monotonic() < deadline and not failures:
                operation()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=loop, args=(operation,)) for operation in operations]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert "deadlock" not in caplog.text
    assert caplog.text == ""
