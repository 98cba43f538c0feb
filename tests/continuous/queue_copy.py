"""Continuous queries that copy one queue into another, without Spark."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import penstock
from penstock.continuous import tasks
from penstock.continuous.connectors.protocol import SinkDriver
from penstock.continuous.connectors.queue import QueueSinkDriver, QueueSourceDriver
from penstock.continuous.driver.checkpoint_log import CheckpointLog
from penstock.continuous.driver.coordinator import Limit
from penstock.continuous.driver.execution import ContinuousExecution, Settings
from penstock.errors import PenstockError
from penstock.json_text import Json
from penstock.queue.store import open_store
from penstock.spark.options import SinkOptions, SourceOptions
from tests.continuous.local_engine import LocalEngine
from tests.support.waiting import wait_until

SCHEMA = pa.schema([("id", pa.int64())])
TIMEOUT = 30


class SimulatedCrash(PenstockError):
    """Simulated crash of the driver's process. The driver does not retry after it."""


def run_until_crash_after(
    monkeypatch: pytest.MonkeyPatch, query: ContinuousExecution, component: object, method: str
) -> None:
    """Start a query, and wait until its driver crashes after calling a method of one of its components."""
    crash_after(monkeypatch, query, component, method)
    query.start()
    assert query.join(TIMEOUT)
    assert isinstance(query.failure, SimulatedCrash)


def crash_after(
    monkeypatch: pytest.MonkeyPatch, query: ContinuousExecution, component: object, method: str
) -> None:
    """Make a query's driver crash after it next calls a method of one of its components."""
    original = getattr(component, method)

    def call_and_crash(*args: object, **kwargs: object) -> Any:
        original(*args, **kwargs)
        # A crashed process cleans up nothing.
        source: Any = query.source
        source.release = lambda failure: source._release_owner()
        raise SimulatedCrash("simulated crash")

    monkeypatch.setattr(component, method, call_and_crash)


class Pause:
    """Suspension of a query's driver when it next calls a method of one of its components.

    Parameters
    ----------
    after
        Suspend the driver after the call instead of before it.
    """

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, component: object, method: str, *, after: bool = False
    ) -> None:
        self._suspended, self._resumed = threading.Event(), threading.Event()
        self._method: Callable[..., Any] = getattr(component, method)
        self._after = after
        monkeypatch.setattr(component, method, self._call_suspended)

    def _call_suspended(self, *args: object, **kwargs: object) -> Any:
        result = self._method(*args, **kwargs) if self._after else None
        self._suspended.set()
        assert self._resumed.wait(2 * TIMEOUT), "the driver was not resumed in time"
        return result if self._after else self._method(*args, **kwargs)

    def wait_until_suspended(self) -> None:
        """Wait until the driver is suspended."""
        assert self._suspended.wait(TIMEOUT), "the driver has not called the method"

    def resume(self) -> None:
        """Resume the driver, now and at every later call."""
        self._resumed.set()


def stop_reading_once_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make tasks stop reading once they report a backlog, so that it remains until the driver reacts."""
    read = tasks.ReadLoop._read

    def read_unless_behind(loop: tasks.ReadLoop) -> pa.RecordBatch | None:
        return None if "behind" in loop._reported else read(loop)

    monkeypatch.setattr(tasks.ReadLoop, "_read", read_unless_behind)


class Copy:
    """A source queue, a target queue, and queries that copy from one to the other."""

    schema = SCHEMA
    key: tuple[str, ...] = ()
    """The key columns of the target queue."""

    def __init__(
        self, url: str, folder: Path, *, partitions: int = 2, guarantee: str = "exactly_once"
    ) -> None:
        self.url, self.folder, self.guarantee = url, folder, guarantee
        self.consumer: str | None = "c"
        self.fail_on_data_loss = True
        self.stores_plans = False
        """Whether the source stores the plan of each epoch, as it does for a sink in another store."""
        self.store = penstock.connect(url)
        self.queue = self.store.create_queue("in", self.schema, partitions=partitions)
        self.out = self.store.create_queue("out", self.schema, partitions=partitions, key=self.key)
        self.store.create_consumer("c").register("in")
        self.running: list[ContinuousExecution] = []
        self.next_id = 0

    def close(self) -> None:
        """Stop the queries and close this process's connections, because a server allows few."""
        for query in self.running:
            query.stop(5)
        open_store(self.url).close()
        self.store.close()

    def add(self, count: int = 4) -> Copy:
        """Append rows to the partitions in turn."""
        for _ in range(count):
            partition = self.next_id % len(self.queue.info().partitions)
            self.queue.append([self.make_row(self.next_id)], partition=partition)
            self.next_id += 1
        return self

    def make_row(self, number: int) -> Json:
        return {"id": number}

    def create_query(
        self,
        *,
        interval: float = 0.01,
        start: bool = True,
        limit: Limit | None = None,
        **engine_options: object,
    ) -> ContinuousExecution:
        options = SourceOptions(
            self.url,
            "in",
            self.consumer,
            fail_on_data_loss=self.fail_on_data_loss,
            moved_by_sink=not self.stores_plans and self.guarantee == "exactly_once",
        )
        source = QueueSourceDriver(options)
        checkpoint = CheckpointLog(str(self.folder / "ck"))
        sink = self.create_sink(checkpoint.query_id())
        self.engine = LocalEngine(source, **engine_options)
        query = ContinuousExecution(
            "copy", source, sink, self.engine, checkpoint, Settings(interval, retain=3), limit=limit
        )
        self.running.append(query)
        if start:
            query.start()
        return query

    def create_sink(self, query_id: str) -> SinkDriver:
        return QueueSinkDriver(SinkOptions(self.url, "out"), query_id, self.guarantee == "exactly_once")

    def wait_until_committed(self, query: ContinuousExecution) -> None:
        """Wait until a query has committed all rows, and logged the commit in its checkpoint."""
        ends = {part.partition: part.next_index for part in self.queue.info().partitions}
        waiter = threading.Thread(
            target=query.await_offsets, args=[lambda offsets: offsets == ends], daemon=True
        )
        waiter.start()
        waiter.join(2 * TIMEOUT)
        assert query.failure is None, query.failure
        assert not waiter.is_alive(), "the query has not committed all rows in time"
        wait_until(
            lambda: query.failure or not query.committed.checkpoint_lags,
            TIMEOUT,
            "the checkpoint has all committed epochs",
        )
        assert query.failure is None, query.failure

    def ids(self) -> list[int]:
        return sorted(row_id for ids in self.ids_by_partition() for row_id in ids)

    def ids_by_partition(self) -> list[list[int]]:
        tables = [self.out.read(part.partition, 0, part.next_index) for part in self.out.info().partitions]
        return [table["id"].to_pylist() for table in tables]

    def expected_ids(self) -> list[int]:
        return list(range(self.next_id))

    def logged_epochs(self, log: str) -> list[int]:
        return sorted(int(path.name) for path in (self.folder / "ck" / log).iterdir() if path.name.isdigit())
