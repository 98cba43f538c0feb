"""Sockets between a driver and its tasks, in memory: sending and receiving are steps."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

from penstock.spark.driver_endpoint import Address, DriverNetwork
from tests.simulation.scheduler import Gate, Process, World


class Network:
    """Who listens where."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.listening: dict[int, SimListening] = {}
        self._ports = 1000

    def listen(self, listening: SimListening) -> int:
        self._ports += 1
        self.listening[self._ports] = listening
        return self._ports

    def connect(self, port: int) -> SimConnection:
        self.world.step(f"connect to {port}")
        there = self.listening.get(port)
        if there is None or not there.process.alive:
            raise ConnectionRefusedError(port)
        mine, other = pair(self.world, self.world.process, there.process)
        there.accept(other)
        return mine


class SimListening:
    """In the place of ``driver_endpoint.AuthenticatedListener``."""

    network: Callable[[], Network]

    def __init__(self, at: DriverNetwork, serve: Callable[[Any], None], name: str) -> None:
        network = type(self).network()
        self.closed = False
        self._serve, self._name = serve, name
        self.process = network.world.process
        self.address = Address(at.host, network.listen(self), b"secret")

    def accept(self, connection: SimConnection) -> None:
        if self.closed:
            connection.close()
            return
        self.process.spawn(lambda: self._serve(connection), self._name)

    def close(self) -> None:
        self.closed = True


class SimConnection:
    """One end of a connection; what is sent arrives in its order, and at once."""

    def __init__(self, world: World, process: Process) -> None:
        self._world, self._process = world, process
        self._arrived: deque[bytes] = deque()
        self.gate = Gate()
        self.other: SimConnection | None = None
        self.closed = False

    def send_bytes(self, message: bytes) -> None:
        self._world.step(f"send {message[:80].decode(errors='replace')}")
        other = self.other
        if self.closed or other is None or other.closed:
            raise BrokenPipeError
        other._arrived.append(message)
        other.gate.open()

    def recv_bytes(self, most: int | None = None) -> bytes:
        while not self._arrived:
            if self.closed:
                raise OSError("closed")
            if self.other is None or self.other.closed:
                raise EOFError
            self._world.wait(self.gate)
        self._world.step("receive")
        return self._arrived.popleft()

    def poll(self, timeout: float | None = 0.0) -> bool:
        if not self.readable and timeout:
            self._world.wait(self.gate, seconds=timeout)
        return self.readable

    @property
    def readable(self) -> bool:
        return bool(self._arrived) or self.closed or self.other is None or self.other.closed

    def fileno(self) -> int:
        return id(self)

    def shut_down(self) -> None:
        self.close()

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            self.gate.open()
            if self.other is not None:
                self.other.gate.open()

    def __enter__(self) -> SimConnection:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def pair(world: World, first: Process, second: Process) -> tuple[SimConnection, SimConnection]:
    one, two = SimConnection(world, first), SimConnection(world, second)
    one.other, two.other = two, one
    first.at_death.append(one.close)
    second.at_death.append(two.close)
    return one, two
