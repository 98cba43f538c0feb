"""Copies of a queue into another one by a continuous query without Spark."""

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
from tests.continuous.local import LocalEngine
from tests.support.waiting import wait_until

SCHEMA = pa.schema([("id", pa.int64())])
PATIENCE = 30


class Died(PenstockError):
    """Simulated death of the driver's process, after which it repeats nothing."""


def die_behind(
    monkeypatch: pytest.MonkeyPatch, query: ContinuousExecution, part: object, method: str
) -> None:
    """Start a query whose driver dies after a call of a method of one of its parts; wait for its death."""
    will_die_behind(monkeypatch, query, part, method)
    query.start()
    assert query.join(PATIENCE)
    assert isinstance(query.failure, Died)


def will_die_behind(
    monkeypatch: pytest.MonkeyPatch, query: ContinuousExecution, part: object, method: str
) -> None:
    """Make a query's driver die after its next call of a method of one of its parts."""
    done = getattr(part, method)

    def dies(*arguments: object, **named: object) -> Any:
        done(*arguments, **named)
        # At its end nobody is there who could put anything right.
        source: Any = query.source
        source.release = lambda ended: source._release_owner()
        raise Died("at this step")

    monkeypatch.setattr(part, method, dies)


class Pause:
    """Suspension of a query's driver at its next call of a method of one of its parts, until it is resumed.

    Parameters
    ----------
    after
        Whether it is suspended after the call.
    """

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, part: object, method: str, *, after: bool = False
    ) -> None:
        self._reached, self._woken = threading.Event(), threading.Event()
        self._call: Callable[..., Any] = getattr(part, method)
        self._after = after
        monkeypatch.setattr(part, method, self._stands)

    def _stands(self, *arguments: object, **named: object) -> Any:
        found = self._call(*arguments, **named) if self._after else None
        self._reached.set()
        assert self._woken.wait(2 * PATIENCE), "nobody has woken it"
        return found if self._after else self._call(*arguments, **named)

    def reached(self) -> None:
        """Wait until the driver is suspended."""
        assert self._reached.wait(PATIENCE), "it has not come there"

    def wake(self) -> None:
        """Resume it for good."""
        self._woken.set()


def read_no_further_when_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stop a task's reads once it has reported a backlog: rows are left however slow the driver is."""
    read = tasks.ReadLoop._read

    def reads(loop: tasks.ReadLoop) -> pa.RecordBatch | None:
        return None if "behind" in loop._reported else read(loop)

    monkeypatch.setattr(tasks.ReadLoop, "_read", reads)


class Copy:
    """A source queue, a target queue, and queries that copy between them."""

    schema = SCHEMA
    key: tuple[str, ...] = ()
    """The key of the queue that is written."""

    def __init__(
        self, url: str, folder: Path, *, partitions: int = 2, guarantee: str = "exactly_once"
    ) -> None:
        self.url, self.folder, self.guarantee = url, folder, guarantee
        self.consumer: str | None = "c"
        self.fail_on_data_loss = True
        self.plans = False
        """Whether the source stores a plan of each epoch, as with a sink in another store."""
        self.store = penstock.connect(url)
        self.queue = self.store.create_queue("in", self.schema, partitions=partitions)
        self.out = self.store.create_queue("out", self.schema, partitions=partitions, key=self.key)
        self.store.create_consumer("c").register("in")
        self.running: list[ContinuousExecution] = []
        self.next_id = 0

    def close(self) -> None:
        """End its queries and close this process's connections, of which a server has few."""
        for query in self.running:
            query.stop(5)
        open_store(self.url).close()
        self.store.close()

    def add(self, count: int = 4) -> Copy:
        """Append so many rows, in turn over the partitions."""
        for _ in range(count):
            partition = self.next_id % len(self.queue.info().partitions)
            self.queue.append([self.row(self.next_id)], partition=partition)
            self.next_id += 1
        return self

    def row(self, number: int) -> Json:
        return {"id": number}

    def query(
        self, *, interval: float = 0.01, start: bool = True, limit: Limit | None = None, **more: object
    ) -> ContinuousExecution:
        options = SourceOptions(
            self.url,
            "in",
            self.consumer,
            fail_on_data_loss=self.fail_on_data_loss,
            moved_by_sink=not self.plans and self.guarantee == "exactly_once",
        )
        source = QueueSourceDriver(options)
        logs = CheckpointLog(str(self.folder / "ck"))
        sink = self.sink(logs.query_id())
        self.engine = LocalEngine(source, **more)
        found = ContinuousExecution(
            "copy", source, sink, self.engine, logs, Settings(interval, retain=3), limit=limit
        )
        self.running.append(found)
        if start:
            found.start()
        return found

    def sink(self, query_id: str) -> SinkDriver:
        return QueueSinkDriver(SinkOptions(self.url, "out"), query_id, self.guarantee == "exactly_once")

    def through(self, query: ContinuousExecution) -> None:
        """Wait until everything is committed and in the checkpoint."""
        ends = {part.partition: part.next_index for part in self.queue.info().partitions}
        waiting = threading.Thread(target=query.await_offsets, args=[lambda at: at == ends], daemon=True)
        waiting.start()
        waiting.join(2 * PATIENCE)
        assert query.failure is None, query.failure
        assert not waiting.is_alive(), "it has not come so far"
        wait_until(
            lambda: query.failure or not query.committed.checkpoint_lags, PATIENCE, "the checkpoint follows"
        )
        assert query.failure is None, query.failure

    def ids(self) -> list[int]:
        return sorted(row for ids in self.by_partition() for row in ids)

    def by_partition(self) -> list[list[int]]:
        tables = [self.out.read(part.partition, 0, part.next_index) for part in self.out.info().partitions]
        return [table["id"].to_pylist() for table in tables]

    def all(self) -> list[int]:
        return list(range(self.next_id))

    def files(self, name: str) -> list[int]:
        return sorted(int(path.name) for path in (self.folder / "ck" / name).iterdir() if path.name.isdigit())
