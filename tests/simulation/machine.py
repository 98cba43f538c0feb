"""Simulated machine: the disk, network, object storage and database servers that processes share."""

from __future__ import annotations

import random
import uuid
from collections.abc import Iterator
from contextlib import contextmanager

from penstock.errors import StoreNotFoundError
from penstock.queue.store import Store
from tests.simulation.database import SimDatabase
from tests.simulation.disk import Disk
from tests.simulation.network import Network
from tests.simulation.objects import Bucket
from tests.simulation.scheduler import Task, World
from tests.simulation.server import Server


class Machine:
    """Everything that the simulated processes share."""

    def __init__(self, world: World, seed: int) -> None:
        self.world = world
        self.disk = Disk(world)
        self.network = Network(world)
        self.bucket = Bucket(world)
        self.servers: dict[str, Server] = {}
        self.random = random.Random(seed)
        self.reruns = 0
        """How many interruptions may have caused rows to be written again."""

    def add_server(self, name: str, *, row_locks: bool) -> Server:
        server = Server(self.world, name, str(self.uuid()), row_locks=row_locks)
        self.servers[server.url] = server
        return server

    def kill_tasks(self, tasks: list[Task]) -> None:
        """Kill tasks but not their process, as Spark kills the Python workers of a job.

        Their connections break, and the stores of the process are opened again with empty caches.
        """
        self.world.stop_tasks(tasks)
        for process in {task.process for task in tasks}:
            process.stores.clear()
        for server in self.servers.values():
            server.break_connections(lambda tx: tx.task in tasks)

    def uuid(self) -> uuid.UUID:
        return uuid.UUID(int=self.random.getrandbits(128), version=4)

    def store(self, url: str) -> Store:
        """Return the store as the running process has it open."""
        process, server = self.world.current_process, self.servers.get(url)
        if server is None:
            raise StoreNotFoundError(f"there is no store at {url}")
        if url not in process.stores:
            process.stores[url] = Store(SimDatabase(server, process))
        store: Store = process.stores[url]
        return store


_running: Machine | None = None


def running_machine() -> Machine:
    """Return the machine of the schedule that is running."""
    assert _running is not None, "no schedule is running"
    return _running


@contextmanager
def make_running(machine: Machine) -> Iterator[None]:
    """Let :func:`running_machine` return this machine inside a ``with`` block."""
    global _running
    _running = machine
    try:
        yield
    finally:
        _running = None
