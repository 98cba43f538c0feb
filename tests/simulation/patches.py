"""Patches that make the real code run on a simulated machine.

``use`` replaces clocks, threads, files, sockets, open stores and Spark's task context while a schedule runs.
It also reduces some sizes so that a few rows reach them. The protocol code itself is not replaced.
"""

from __future__ import annotations

import importlib
import logging
import random
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

from penstock.queue.store import Store
from penstock.store.records import catalog
from penstock.store.records.catalog import QueueRecord, dropped
from penstock.store.url import parse_url
from penstock.store.watching import Wake
from tests.simulation.disk import DiskFiles
from tests.simulation.machine import Machine, make_running, running_machine
from tests.simulation.network import SimListener
from tests.simulation.objects import ORPHAN_SECONDS, SimStorage
from tests.simulation.scheduler import World
from tests.simulation.threads import Clock, Threads

BACKLOG_ROWS = 8
"""How many unread rows count as a backlog."""


def _world() -> World:
    return running_machine().world


class _TaskContext:
    """Replacement for the parts of PySpark's ``TaskContext`` that the code uses."""

    @staticmethod
    def get() -> _TaskContext | None:
        return _TaskContext() if _world().in_task and _world().current_task.spark_properties else None

    def partitionId(self) -> int:
        return int(_world().current_task.spark_properties["task"])

    def taskAttemptId(self) -> int:
        return int(_world().current_task.number)

    def getLocalProperty(self, name: str) -> str | None:
        value: str | None = _world().current_task.spark_properties.get(name)
        return value


class _Watch:
    """Replacement for a store's watch, which wakes after every commit."""

    def __init__(self, database: Any, queue: QueueRecord, partitions: Any = None) -> None:
        self._database, self._queue, self.partitions = database, queue, queue.partitions
        self._commits_read = -1
        self._cached_partitions: Any = []

    def wait(self, positions: Any, timeout: float, also: Any = ()) -> Wake:
        world, server = _world(), self._database.server
        deadline = world.now + timeout
        while True:
            ends = self._ends(positions)
            ready = tuple(link for link in also if link._connection.readable)
            if ends or ready or world.now >= deadline:
                return Wake(ends, ready)
            signals = [server.changed, *(link._connection.changed for link in also)]
            world.wait(*signals, seconds=deadline - world.now)

    def _ends(self, positions: Any) -> dict[int, int]:
        """Return the ends of the partitions that have rows after these positions."""
        partitions = self._current_partitions()
        self.partitions = len(partitions)
        return {
            part.partition: part.next_index
            for part in partitions
            if part.partition in positions and part.next_index > positions[part.partition]
        }

    def _current_partitions(self) -> Any:
        """Return the partitions, which are read again after a commit."""
        commits = self._database.server.commits
        if commits != self._commits_read:
            self._cached_partitions = self._database.run(
                lambda tx: catalog.partitions(tx, self._queue), write=False
            )
            self._commits_read = commits
        if not self._cached_partitions:
            raise dropped(self._queue)
        return self._cached_partitions

    def close(self) -> None:
        """Do nothing: a watch holds no resources."""


class _NoLock:
    """Replacement for a lock between threads, of which the simulation has only one."""

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None: ...


def _replacements() -> dict[str, Any]:
    """Return the replacements by the dotted names of what they replace."""
    clock, threads = Clock(_world), Threads(_world)
    SimListener.network = staticmethod(lambda: running_machine().network)
    return {
        "uuid.uuid4": lambda: running_machine().uuid(),
        "secrets.randbits": random.getrandbits,
        "secrets.token_hex": lambda size: random.randbytes(size).hex(),
        "secrets.token_bytes": random.randbytes,
        "penstock.objects.storage.time": clock,
        "penstock.objects.recent.threading": threads,
        "penstock.objects.opened.OpenedStorages.at": lambda self, url: SimStorage(
            url, running_machine().bucket
        ),
        "penstock.store.log.payloads.INLINE_BYTES": 230,
        "penstock.store.log.payloads.OBJECT_BYTES": 450,
        "penstock.store.log.payloads.ORPHAN_AGE": int(ORPHAN_SECONDS * 1_000_000),
        "penstock.store.log.object_cleaning.ORPHAN_AGE": int(ORPHAN_SECONDS * 1_000_000),
        "penstock.store.log.payloads.in_parallel": _in_sequence,
        "penstock.store.log.reading.ahead": iter,
        "penstock.spark.queue_writers.ahead": iter,
        "penstock.store.database.time": clock,
        "penstock.store.records.ledger.KEPT_BATCHES": 2,
        "penstock.store.records.ledger.PRUNE_EVERY": 1,
        "penstock.store.log.partition_log.COMPACTION_FAN_IN": 3,
        "penstock.store.log.reading.PAGE_SEGMENTS": 3,
        "penstock.spark.queue_readers.SMALL_ROWS": 3,
        "penstock.store.log.compact.COMPACTION_FAN_IN": 3,
        "penstock.queue.maintenance.COMPACTION_FAN_IN": 3,
        "penstock.spark.queue_writers.FLUSH_SEGMENTS": 1,
        "penstock.tables.row_encoding.CHUNK_ROWS": 3,
        "penstock.tables.continuous.CHUNK_ROWS": 3,
        "penstock.queue.store.connect": lambda url, **_: running_machine().store(url),
        "penstock.queue.store.parse_url": cache(parse_url),
        "penstock.queue.store._guard": _NoLock(),
        "penstock.queue.store._file": lambda url: None,
        "penstock.queue.store._open": _NoOpenStores(),
        "penstock.queue.maintenance.Maintainer.after_change": lambda self, queue, to_compact: None,
        "penstock.queue.maintenance.Maintainer.close": lambda self: None,
        "penstock.spark.queue_writers.TaskContext": _TaskContext,
        "penstock.spark.internals.python_workers.TaskContext": _TaskContext,
        "penstock.spark.internals.python_workers._freeze": lambda modules: None,
        "penstock.spark.checkpoint._open": lambda location: (
            DiskFiles(running_machine().disk),
            location.rstrip("/"),
        ),
        "penstock.tables.sql.writer.project_rows": lambda frame, layout: frame,
        "penstock.pipeline.micro_batches.connect": lambda url, **_: _StoreContext(url),
        "penstock.pipeline.micro_batches.time": clock,
        "penstock.tables.sql.write_task.TaskContext": _TaskContext,
        "penstock.tables.sink.connect": lambda url, **_: _StoreContext(url),
        "penstock.continuous.connectors.queue.watch": _Watch,
        "penstock.continuous.driver.execution.time": clock,
        "penstock.continuous.driver.execution.threading": threads,
        "penstock.continuous.driver.execution.BEHIND_ROWS": BACKLOG_ROWS,
        "penstock.continuous.driver.execution.MIN_CATCH_UP_ROWS": 3,
        "penstock.continuous.tasks.BEHIND_ROWS": BACKLOG_ROWS,
        "penstock.continuous.tasks.BATCH_ROWS": 3,
        "penstock.continuous.tasks.time": clock,
        "penstock.continuous.catch_up.time": clock,
        "penstock.continuous.catch_up.BATCH_ROWS": 3,
        "penstock.continuous.tasks.TaskContext": _TaskContext,
        "penstock.continuous.tasks.FLUSH_ROWS": 4,
        "penstock.continuous.connectors.queue._AHEAD_ROWS": 5,
        "penstock.continuous.driver.coordinator.time": clock,
        "penstock.continuous.driver.coordinator.threading": threads,
        "penstock.continuous.driver.coordinator.AuthenticatedListener": SimListener,
        "penstock.spark.driver_endpoint.connect": lambda address: running_machine().network.connect(
            address.port
        ),
        "penstock.continuous.driver.checkpoint_follower.time": clock,
        "penstock.continuous.driver.checkpoint_follower.threading": threads,
        "penstock.continuous.driver.checkpoint_log.time": clock,
        "penstock.continuous.driver.checkpoint_log.is_local": lambda files: True,
        "penstock.continuous.driver.checkpoint_log.create_durably": lambda path, content: (
            running_machine().disk.create(path, content)
        ),
        "penstock.continuous.driver.checkpoint_log.replace_durably": lambda path, content, allowed: (
            allowed() and running_machine().disk.replace(path, content)
        ),
        "penstock.instants.time": clock,
    }


def _in_sequence(work: Callable[[Any], Any], items: Iterable[Any]) -> list[Any]:
    """Call a function for each item without threads."""
    return [work(item) for item in items]


class _NoOpenStores(dict[Any, Any]):
    """Replacement for the cache of open stores, which every simulated process has for itself."""

    def get(self, key: Any, default: Any = None) -> None:
        return None

    def __setitem__(self, key: Any, value: Any) -> None:
        """Do nothing: ``Process.stores`` has it."""


class _StoreContext:
    """Store of the running process, which stays open after a ``with`` block."""

    def __init__(self, url: str) -> None:
        self._store = running_machine().store(url)

    def __enter__(self) -> Store:
        return self._store

    def __exit__(self, *_: object) -> None: ...


@contextmanager
def use(machine: Machine) -> Iterator[None]:
    """Run the code inside a ``with`` block on a simulated machine."""
    patches = _patches()
    originals = [getattr(owner, name) for owner, name, _ in patches]
    log_level = logging.root.manager.disable
    random_state = random.getstate()
    random.seed(machine.random.getrandbits(64))
    logging.disable(logging.CRITICAL)
    for owner, name, replacement in patches:
        setattr(owner, name, replacement)
    try:
        with make_running(machine):
            try:
                yield
            finally:
                machine.world.close()
                for server in machine.servers.values():
                    server.close()
    finally:
        for (owner, name, _), original in zip(patches, originals, strict=True):
            setattr(owner, name, original)
        logging.disable(log_level)
        random.setstate(random_state)


@cache
def _patches() -> list[tuple[Any, str, Any]]:
    """Return the module or class, the name of its attribute, and the replacement of each patch."""
    return [(*_find_attribute(path), replacement) for path, replacement in _replacements().items()]


def _find_attribute(path: str) -> tuple[Any, str]:
    """Return the module or class that a dotted name belongs to, and the last part of the name."""
    parts = path.split(".")
    for length in range(len(parts) - 1, 0, -1):
        try:
            owner: Any = importlib.import_module(".".join(parts[:length]))
        except ImportError:
            continue
        for part in parts[length:-1]:
            owner = getattr(owner, part)
        return owner, parts[-1]
    raise ImportError(f"no module has {path}")
