"""The driver or Python workers of continuous queries are killed at every step of an epoch."""

from __future__ import annotations

import json
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pyarrow as pa
import pytest

import penstock
from penstock.testing import temporary_store_url
from tests.support.crash.children import FAULTS
from tests.support.processes import ChildProcess
from tests.support.sql_tables import named, query, rows, sql_name
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.crash, pytest.mark.timeout(900)]

TIMEOUT = 120
SOURCE, SINK = pa.schema([("id", pa.int64())]), pa.schema([("id", pa.int64()), ("twice", pa.int64())])
WORKER_STEPS = ("MARKER", "STAGED", "REPORTED")
DRIVER_STEPS = ("OFFSET", "COMMITTED", "LOGGED")
FAST_CASES = {("driver", "COMMITTED")}


@dataclass
class Copy:
    """Queue that a child copies into another queue or into a table."""

    name: str
    url: str
    folder: Path
    guarantee: str
    into_table: bool = False
    rows: int = 0

    def __post_init__(self) -> None:
        self.store = penstock.connect(self.url)
        self.queue = self.store.create_queue(f"{self.name} in", SOURCE, partitions=2)
        if self.into_table:
            query(self.url, f"create table {sql_name(self.url, self.name)} (id bigint, twice bigint)")
        else:
            self.sink = self.store.create_queue(self.name, SINK, partitions=2)
        self.store.create_consumer(self.name).register(f"{self.name} in")

    @property
    def child_argument(self) -> str:
        """Argument of the child program that describes the copy."""
        table = named(self.url, self.name) if self.into_table else None
        return json.dumps([self.name, self.url, self.guarantee, table])

    @property
    def marker(self) -> Path:
        return self.folder / f"{self.name}.marker"

    def add(self, count: int = 20) -> None:
        for partition in range(2):
            ids = range(self.rows + partition, self.rows + count, 2)
            self.queue.append([{"id": i} for i in ids], partition=partition)
        self.rows += count

    def copied_rows(self) -> Counter[tuple[Any, ...]]:
        if self.into_table:
            return Counter(rows(self.url, self.name))
        tables = [self.sink.read(part.partition, 0, part.next_index) for part in self.sink.info().partitions]
        return Counter((row["id"], row["twice"]) for table in tables for row in table.to_pylist())

    def expected_rows(self) -> Counter[tuple[Any, ...]]:
        return Counter((i, 2 * i) for i in range(self.rows) if i % 3)

    def is_complete(self) -> bool:
        counts = self.copied_rows()
        if self.guarantee == "exactly_once":
            assert all(count == 1 for count in counts.values()), "a row was copied more than once"
        return counts.keys() == self.expected_rows().keys()


class Application:
    """Successive child programs that run the same copies."""

    def __init__(self, copies: Sequence[Copy], folder: Path, run_child: Callable[..., ChildProcess]) -> None:
        self.copies, self._folder, self._run_child = copies, folder, run_child
        # Two tasks for each copy, and a spare slot.
        self.master = f"local[{2 * len(copies) + 1}]"
        self._count = 0

    def start(self, step: str | None = None) -> ChildProcess:
        """Start a child. If a step is given, it stops at that step of its first uncommitted epoch."""
        self._count += 1
        faults = {}
        for copy in self.copies:
            copy.marker.unlink(missing_ok=True)
            Path(f"{copy.marker}.released").unlink(missing_ok=True)
            if step is not None:
                faults[copy.name] = {"state": step, "batch": 0, "raises": False, "marker": str(copy.marker)}
        copies = [copy.child_argument for copy in self.copies]
        path = os.pathsep.join([str(FAULTS), os.environ["PYTHONPATH"]])
        environment = {"FAULTS": json.dumps(faults), "PYTHONPATH": path}
        return self._run_child(
            "tests.continuous.child",
            self._folder / f"spark-{self._count}",
            self.master,
            *copies,
            env=environment,
        )

    def wait_until_stopped(self, child: ChildProcess) -> None:
        def all_stopped() -> bool:
            assert child.returncode is None, child.output
            return all(copy.marker.exists() and copy.marker.read_text() for copy in self.copies)

        wait_until(all_stopped, TIMEOUT, "all copies have stopped")

    def wait_until_complete(self, child: ChildProcess) -> None:
        def all_complete() -> bool:
            assert child.returncode is None, child.output
            assert "\nFAILED " not in child.output, child.output
            return all(copy.is_complete() for copy in self.copies)

        with _stacks_on_failure(child):
            wait_until(all_complete, TIMEOUT, "all rows are copied")

    def stop(self, child: ChildProcess) -> None:
        """Stop a child gracefully, and check that all consumers have caught up."""
        os.kill(child.pid, signal.SIGTERM)
        assert child.wait(TIMEOUT) == 0, child.output
        for copy in self.copies:
            assert f"ENDED {copy.name}" in child.output, child.output
            assert copy.store.consumer(copy.name).lag(f"{copy.name} in").rows == 0
            assert copy.is_complete()


@pytest.fixture
def create_application(
    tmp_path: Path, pg_url: str, run_child: Callable[..., ChildProcess]
) -> Iterator[Callable[..., Any]]:
    urls = {"sqlite": f"sqlite:///{tmp_path}/store.db"}

    def application(
        *guarantees: str,
        stores: Sequence[str] = ("sqlite", "postgresql"),
        kinds: Sequence[str] = ("queue", "table"),
    ) -> Application:
        copies = [
            Copy(f"{guarantee} {store} {kind}", urls[store], tmp_path, guarantee, kind == "table")
            for store in stores
            for guarantee in guarantees
            for kind in kinds
        ]
        return Application(copies, tmp_path, run_child)

    with temporary_store_url(pg_url) as urls["postgresql"]:
        yield application


def _step_params(process: str, steps: Sequence[str]) -> list[Any]:
    return [
        pytest.param(step, marks=() if (process, step) in FAST_CASES else pytest.mark.crash_full)
        for step in steps
    ]


@pytest.mark.parametrize("step", _step_params("driver", WORKER_STEPS + DRIVER_STEPS))
def test_a_driver_killed_at_any_step_of_an_epoch_continues_exactly_once(
    create_application: Callable[..., Application], step: str
) -> None:
    application = create_application("exactly_once")
    for copy in application.copies:
        copy.add()
    child = application.start(step)
    application.wait_until_stopped(child)
    child.kill_tree()
    for copy in application.copies:
        copy.add()
    child = application.start()
    application.wait_until_complete(child)
    application.stop(child)


@pytest.mark.parametrize("step", _step_params("worker", WORKER_STEPS))
def test_a_worker_killed_at_any_step_of_an_epoch_repeats_the_run(
    create_application: Callable[..., Application], step: str
) -> None:
    application = create_application("exactly_once")
    for copy in application.copies:
        copy.add()
    child = application.start(step)
    application.wait_until_stopped(child)
    for copy in application.copies:
        os.kill(int(copy.marker.read_text()), signal.SIGKILL)
    application.wait_until_complete(child)
    for copy in application.copies:
        copy.add()
    application.wait_until_complete(child)
    application.stop(child)


@pytest.mark.crash_full
@pytest.mark.parametrize("kind", ["queue", "table"])
def test_kills_at_random_moments_lose_and_repeat_nothing(
    create_application: Callable[..., Application], kind: str
) -> None:
    """Kill the driver's whole process tree or a Python worker twenty times in about two minutes."""
    rng = random.Random(kind)
    application = create_application("exactly_once", "at_least_once", kinds=[kind])
    child = application.start()
    child.wait_for_line("STARTED", TIMEOUT)
    for kill in range(20):
        for copy in application.copies:
            copy.add(rng.randint(1, 200))
        time.sleep(rng.random() * 2)
        if kill % 5 == 4:
            child.kill_tree()
            child = application.start()
            child.wait_for_line("STARTED", TIMEOUT)
        else:
            os.kill(rng.choice(workers(child)), signal.SIGKILL)
            application.wait_until_complete(child)
    application.wait_until_complete(child)
    application.stop(child)


@pytest.mark.crash_full
def test_a_cluster_that_loses_an_executor_continues(create_application: Callable[..., Application]) -> None:
    """Tasks connect to the coordinator from other processes than the driver's."""
    application = create_application("exactly_once", "at_least_once", stores=["postgresql"])
    application.master = "local-cluster[2,4,1024]"
    child = application.start()
    for _ in range(2):
        for copy in application.copies:
            copy.add()
        application.wait_until_complete(child)
        executors = [
            process
            for process in child.processes()
            if any("ExecutorBackend" in argument for argument in _command(process))
        ]
        os.kill(executors[0].pid, signal.SIGKILL)
    for copy in application.copies:
        copy.add()
    application.wait_until_complete(child)
    application.stop(child)


@contextmanager
def _stacks_on_failure(child: ChildProcess) -> Iterator[None]:
    """Print the stacks of a child's threads if the block fails."""
    try:
        yield
    except BaseException:
        os.kill(child.pid, signal.SIGUSR1)
        child.wait_for_line("most recent call first", 10)
        print(child.output[-20_000:])
        raise


def workers(child: ChildProcess) -> list[int]:
    """Return the process ids of Spark's Python workers, without the daemon that forks them."""

    def find_workers() -> list[int]:
        # Compare whole arguments: the JVM's command contains the module's name too, in a setting.
        processes = [process for process in child.processes() if "tests.support.daemon" in _command(process)]
        pids = {process.pid for process in processes}
        return [process.pid for process in processes if process.ppid() in pids]

    with _stacks_on_failure(child):
        pids = wait_until(find_workers, TIMEOUT, "Python workers")
    assert pids
    return pids


def _command(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []
