"""What the code takes from the machine it runs on, replaced by a world's.

That is clocks, threads, files, sockets, open stores and Spark's tasks. Nothing of the protocols themselves is
replaced. ``use`` puts a world in the place of the machine for as long as a schedule runs.
"""

from __future__ import annotations

import importlib
import logging
import random
import uuid
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

from penstock.errors import StoreNotFoundError
from penstock.queue.store import Store
from penstock.store.records import catalog
from penstock.store.records.catalog import QueueRecord, dropped
from penstock.store.url import parse_url
from penstock.store.watching import Wake
from tests.simulation.database import SimDatabase
from tests.simulation.disk import Disk, DiskFiles
from tests.simulation.network import Network, SimListening
from tests.simulation.objects import ORPHAN_SECONDS, Bucket, SimStorage
from tests.simulation.scheduler import Task, World
from tests.simulation.server import Server
from tests.simulation.threads import Clock, Threads

SMALL = 8
"""Rows that count as a backlog."""


class Machine:
    """Everything that simulated processes share."""

    def __init__(self, world: World, seed: int) -> None:
        self.world = world
        self.disk = Disk(world)
        self.network = Network(world)
        self.bucket = Bucket(world)
        self.servers: dict[str, Server] = {}
        self.random = random.Random(seed)
        self.repeats = 0
        """How often something was interrupted whose rows are written again."""

    def server(self, name: str, *, rows: bool) -> Server:
        made = Server(self.world, name, str(self.uuid()), rows=rows)
        self.servers[made.url] = made
        return made

    def kill_tasks(self, tasks: list[Task]) -> None:
        """End tasks of a process that lives on, as Spark ends a job's workers: their connections break.
        What they held in memory, such as an object that they were reading for others too, is gone.
        """
        self.world.bury(tasks)
        for process in {task.process for task in tasks}:
            process.held.clear()
        for server in self.servers.values():
            server.break_all(lambda tx: tx.task in tasks)

    def uuid(self) -> uuid.UUID:
        return uuid.UUID(int=self.random.getrandbits(128), version=4)

    def store(self, url: str) -> Store:
        """The running process's store, opened once."""
        process, server = self.world.process, self.servers.get(url)
        if server is None:
            raise StoreNotFoundError(f"there is no store at {url}")
        if url not in process.held:
            process.held[url] = Store(SimDatabase(server, process))
        found: Store = process.held[url]
        return found


_machine: Machine | None = None


def machine() -> Machine:
    assert _machine is not None, "no schedule is running"
    return _machine


def _world() -> World:
    return machine().world


class _TaskContext:
    """In the place of Spark's, as far as the code asks it."""

    @staticmethod
    def get() -> _TaskContext | None:
        return _TaskContext() if _world().running and _world().task.local else None

    def partitionId(self) -> int:
        return int(_world().task.local["task"])

    def taskAttemptId(self) -> int:
        return int(_world().task.number)

    def getLocalProperty(self, name: str) -> str | None:
        found: str | None = _world().task.local.get(name)
        return found


class _Watch:
    """In the place of a store's watch: wakes with every commit."""

    def __init__(self, database: Any, queue: QueueRecord, partitions: Any = None) -> None:
        self._database, self._queue, self.partitions = database, queue, queue.partitions
        self._looked = -1
        self._there: Any = []

    def wait(self, positions: Any, timeout: float, also: Any = ()) -> Wake:
        world, server = _world(), self._database.server
        deadline = world.now + timeout
        while True:
            ends = self._ends(positions)
            ready = tuple(link for link in also if link._connection.readable)
            if ends or ready or world.now >= deadline:
                return Wake(ends, ready)
            gates = [server.changed, *(link._connection.gate for link in also)]
            world.wait(*gates, seconds=deadline - world.now)

    def _ends(self, positions: Any) -> dict[int, int]:
        there = self._now()
        self.partitions = len(there)
        return {
            part.partition: part.next_index
            for part in there
            if part.partition in positions and part.next_index > positions[part.partition]
        }

    def _now(self) -> Any:
        """The partitions; asked for when somebody has committed."""
        commits = self._database.server.commits
        if commits != self._looked:
            self._there = self._database.run(lambda tx: catalog.partitions(tx, self._queue), write=False)
            self._looked = commits
        if not self._there:
            raise dropped(self._queue)
        return self._there

    def close(self) -> None:
        """Nothing is held."""


class _Gone:
    """In the place of a guard of threads: nothing here runs at the same time as anything else."""

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None: ...


def _replacements() -> dict[str, Any]:
    clock, threads = Clock(_world), Threads(_world)
    SimListening.network = staticmethod(lambda: machine().network)  # type: ignore[assignment]
    found: dict[str, Any] = {
        "uuid.uuid4": lambda: machine().uuid(),
        "secrets.randbits": random.getrandbits,
        "secrets.token_hex": lambda size: random.randbytes(size).hex(),
        "secrets.token_bytes": random.randbytes,
        "penstock.objects.storage.time": clock,
        "penstock.objects.recent.threading": threads,
        "penstock.objects.opened.OpenedStorages.at": lambda self, url: SimStorage(url, machine().bucket),
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
        "penstock.queue.store.connect": lambda url, **_: machine().store(url),
        "penstock.queue.store.parse_url": cache(parse_url),
        "penstock.queue.store._guard": _Gone(),
        "penstock.queue.store._file": lambda url: None,
        "penstock.queue.store._open": _Open(),
        "penstock.queue.maintenance.Maintainer.after_change": lambda self, queue, to_compact: None,
        "penstock.queue.maintenance.Maintainer.close": lambda self: None,
        "penstock.spark.queue_writers.TaskContext": _TaskContext,
        "penstock.spark.internals.python_workers.TaskContext": _TaskContext,
        "penstock.spark.internals.python_workers._freeze": lambda modules: None,
        "penstock.spark.checkpoint._open": lambda location: (DiskFiles(machine().disk), location.rstrip("/")),
        "penstock.tables.sql.writer.project_rows": lambda frame, layout: frame,
        "penstock.pipeline.micro_batches.connect": lambda url, **_: _Borrowed(url),
        "penstock.pipeline.micro_batches.time": clock,
        "penstock.tables.sql.write_task.TaskContext": _TaskContext,
        "penstock.tables.sink.connect": lambda url, **_: _Borrowed(url),
        "penstock.continuous.connectors.queue.watch": _Watch,
        "penstock.continuous.driver.execution.time": clock,
        "penstock.continuous.driver.execution.threading": threads,
        "penstock.continuous.driver.execution.BEHIND_ROWS": SMALL,
        "penstock.continuous.driver.execution.MIN_CATCH_UP_ROWS": 3,
        "penstock.continuous.tasks.BEHIND_ROWS": SMALL,
        "penstock.continuous.tasks.BATCH_ROWS": 3,
        "penstock.continuous.tasks.time": clock,
        "penstock.continuous.catch_up.time": clock,
        "penstock.continuous.catch_up.BATCH_ROWS": 3,
        "penstock.continuous.tasks.TaskContext": _TaskContext,
        "penstock.continuous.tasks.FLUSH_ROWS": 4,
        "penstock.continuous.connectors.queue._AHEAD_ROWS": 5,
        "penstock.continuous.driver.coordinator.time": clock,
        "penstock.continuous.driver.coordinator.threading": threads,
        "penstock.continuous.driver.coordinator.AuthenticatedListener": SimListening,
        "penstock.spark.driver_endpoint.connect": lambda address: machine().network.connect(address.port),
        "penstock.continuous.driver.checkpoint_follower.time": clock,
        "penstock.continuous.driver.checkpoint_follower.threading": threads,
        "penstock.continuous.driver.checkpoint_log.time": clock,
        "penstock.continuous.driver.checkpoint_log.is_local": lambda files: True,
        "penstock.continuous.driver.checkpoint_log.create_durably": lambda path, content: (
            machine().disk.create(path, content)
        ),
        "penstock.continuous.driver.checkpoint_log.replace_durably": lambda path, content, allowed: (
            allowed() and machine().disk.replace(path, content)
        ),
        "penstock.instants.time": clock,
    }
    return found


def _in_sequence(work: Callable[[Any], Any], items: Iterable[Any]) -> list[Any]:
    return [work(item) for item in items]


class _Open(dict[Any, Any]):
    """Which stores are open: each simulated process knows its own."""

    def get(self, key: Any, default: Any = None) -> None:
        return None

    def __setitem__(self, key: Any, value: Any) -> None:
        """The process keeps it."""


class _Borrowed:
    """A store that is closed by whoever has opened it."""

    def __init__(self, url: str) -> None:
        self._store = machine().store(url)

    def __enter__(self) -> Store:
        return self._store

    def __exit__(self, *_: object) -> None: ...


@contextmanager
def use(made: Machine) -> Iterator[None]:
    """Run what is inside on a simulated machine."""
    global _machine
    before = [(owner, name, getattr(owner, name)) for owner, name in _places()]
    level = logging.root.manager.disable
    _machine = made
    state = random.getstate()
    random.seed(made.random.getrandbits(64))
    logging.disable(logging.CRITICAL)
    for (owner, name, _), value in zip(before, _values(), strict=True):
        setattr(owner, name, value)
    try:
        yield
    finally:
        made.world.close()
        for server in made.servers.values():
            server.close()
        for owner, name, value in before:
            setattr(owner, name, value)
        logging.disable(level)
        random.setstate(state)
        _machine = None


_found: dict[str, Any] | None = None


def _values() -> list[Any]:
    global _found
    if _found is None:
        _found = _replacements()
    return list(_found.values())


_known: list[tuple[Any, str]] = []


def _places() -> list[tuple[Any, str]]:
    """Where each of them belongs: a module, or a class in one."""
    _values()
    assert _found is not None
    if not _known:
        for path in _found:
            parts = path.split(".")
            for length in range(len(parts) - 1, 0, -1):
                try:
                    owner: Any = importlib.import_module(".".join(parts[:length]))
                except ImportError:
                    continue
                for part in parts[length:-1]:
                    owner = getattr(owner, part)
                _known.append((owner, parts[-1]))
                break
    return _known
