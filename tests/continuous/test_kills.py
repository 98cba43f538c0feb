"""Continuous queries whose driver or Python workers are killed at every step of an epoch."""

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

PATIENCE = 120
SOURCE, SINK = pa.schema([("id", pa.int64())]), pa.schema([("id", pa.int64()), ("twice", pa.int64())])
WORKER_STEPS = ("MARKER", "STAGED", "REPORTED")
DRIVER_STEPS = ("OFFSET", "COMMITTED", "LOGGED")
IN_SHORT = {("driver", "COMMITTED")}


@dataclass
class Copy:
    """A queue that a child copies into another one, or into a table."""

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
    def as_argument(self) -> str:
        """Return the child's argument for it."""
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

    def found(self) -> Counter[tuple[Any, ...]]:
        if self.into_table:
            return Counter(rows(self.url, self.name))
        tables = [self.sink.read(part.partition, 0, part.next_index) for part in self.sink.info().partitions]
        return Counter((row["id"], row["twice"]) for table in tables for row in table.to_pylist())

    def expected(self) -> Counter[tuple[Any, ...]]:
        return Counter((i, 2 * i) for i in range(self.rows) if i % 3)

    def complete(self) -> bool:
        found = self.found()
        if self.guarantee == "exactly_once":
            assert all(count == 1 for count in found.values()), "a row came twice"
        return found.keys() == self.expected().keys()


class Application:
    """Successive children with the same copies."""

    def __init__(self, copies: Sequence[Copy], folder: Path, run_child: Callable[..., ChildProcess]) -> None:
        self.copies, self._folder, self._run_child = copies, folder, run_child
        # Two tasks for each, and a slot to spare.
        self.master = f"local[{2 * len(copies) + 1}]"
        self._count = 0

    def start(self, step: str | None = None) -> ChildProcess:
        """Start a child that stops at a step of an epoch that it has not committed yet."""
        self._count += 1
        faults = {}
        for copy in self.copies:
            copy.marker.unlink(missing_ok=True)
            Path(f"{copy.marker}.released").unlink(missing_ok=True)
            if step is not None:
                faults[copy.name] = {"state": step, "batch": 0, "raises": False, "marker": str(copy.marker)}
        copies = [copy.as_argument for copy in self.copies]
        path = os.pathsep.join([str(FAULTS), os.environ["PYTHONPATH"]])
        environment = {"FAULTS": json.dumps(faults), "PYTHONPATH": path}
        return self._run_child(
            "tests.continuous.child",
            self._folder / f"spark-{self._count}",
            self.master,
            *copies,
            env=environment,
        )

    def reached(self, child: ChildProcess) -> None:
        def all_there() -> bool:
            assert child.returncode is None, child.output
            return all(copy.marker.exists() and copy.marker.read_text() for copy in self.copies)

        wait_until(all_there, PATIENCE, "all have stopped")

    def complete(self, child: ChildProcess) -> None:
        def through() -> bool:
            assert child.returncode is None, child.output
            assert "\nFAILED " not in child.output, child.output
            return all(copy.complete() for copy in self.copies)

        with _telling(child):
            wait_until(through, PATIENCE, "all rows are through")

    def end(self, child: ChildProcess) -> None:
        """End it gracefully, and check that consumers and checkpoints agree."""
        os.kill(child.pid, signal.SIGTERM)
        assert child.wait(PATIENCE) == 0, child.output
        for copy in self.copies:
            assert f"ENDED {copy.name}" in child.output, child.output
            assert copy.store.consumer(copy.name).lag(f"{copy.name} in").rows == 0
            assert copy.complete()


@pytest.fixture
def make(tmp_path: Path, pg_url: str, run_child: Callable[..., ChildProcess]) -> Iterator[Callable[..., Any]]:
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


def _steps(who: str, steps: Sequence[str]) -> list[Any]:
    return [
        pytest.param(step, marks=() if (who, step) in IN_SHORT else pytest.mark.crash_full) for step in steps
    ]


@pytest.mark.parametrize("step", _steps("driver", WORKER_STEPS + DRIVER_STEPS))
def test_a_driver_killed_at_any_step_of_an_epoch_continues_exactly_once(
    make: Callable[..., Application], step: str
) -> None:
    application = make("exactly_once")
    for copy in application.copies:
        copy.add()
    child = application.start(step)
    application.reached(child)
    child.kill_tree()
    for copy in application.copies:
        copy.add()
    child = application.start()
    application.complete(child)
    application.end(child)


@pytest.mark.parametrize("step", _steps("worker", WORKER_STEPS))
def test_a_worker_killed_at_any_step_of_an_epoch_repeats_the_run(
    make: Callable[..., Application], step: str
) -> None:
    application = make("exactly_once")
    for copy in application.copies:
        copy.add()
    child = application.start(step)
    application.reached(child)
    for copy in application.copies:
        os.kill(int(copy.marker.read_text()), signal.SIGKILL)
    application.complete(child)
    for copy in application.copies:
        copy.add()
    application.complete(child)
    application.end(child)


@pytest.mark.crash_full
@pytest.mark.parametrize("kind", ["queue", "table"])
def test_kills_at_random_moments_lose_and_repeat_nothing(make: Callable[..., Application], kind: str) -> None:
    """Twenty kills in about two minutes, of the driver's whole process tree or of a Python worker."""
    rng = random.Random(kind)
    application = make("exactly_once", "at_least_once", kinds=[kind])
    child = application.start()
    child.wait_for_line("STARTED", PATIENCE)
    for kill in range(20):
        for copy in application.copies:
            copy.add(rng.randint(1, 200))
        time.sleep(rng.random() * 2)
        if kill % 5 == 4:
            child.kill_tree()
            child = application.start()
            child.wait_for_line("STARTED", PATIENCE)
        else:
            os.kill(rng.choice(workers(child)), signal.SIGKILL)
            application.complete(child)
    application.complete(child)
    application.end(child)


@pytest.mark.crash_full
def test_a_cluster_that_loses_an_executor_continues(make: Callable[..., Application]) -> None:
    """Tasks connect to the coordinator from processes other than the driver's."""
    application = make("exactly_once", "at_least_once", stores=["postgresql"])
    application.master = "local-cluster[2,4,1024]"
    child = application.start()
    for _ in range(2):
        for copy in application.copies:
            copy.add()
        application.complete(child)
        executors = [
            each for each in child.processes() if any("ExecutorBackend" in word for word in _command(each))
        ]
        os.kill(executors[0].pid, signal.SIGKILL)
    for copy in application.copies:
        copy.add()
    application.complete(child)
    application.end(child)


@contextmanager
def _telling(child: ChildProcess) -> Iterator[None]:
    """Make a child print the stacks of its threads when something fails."""
    try:
        yield
    except BaseException:
        os.kill(child.pid, signal.SIGUSR1)
        child.wait_for_line("most recent call first", 10)
        print(child.output[-20_000:])
        raise


def workers(child: ChildProcess) -> list[int]:
    """Return Spark's Python workers, without the process that forks them."""

    def found() -> list[int]:
        # The JVM's command has the module's name too, in a setting.
        daemons = [each for each in child.processes() if "tests.support.daemon" in _command(each)]
        names = {each.pid for each in daemons}
        return [each.pid for each in daemons if each.ppid() in names]

    with _telling(child):
        there = wait_until(found, PATIENCE, "there are workers")
    assert there
    return there


def _command(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []
