"""In-memory network between a driver and its tasks. Each send and each receive is a step."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

from penstock.spark.driver_endpoint import Address, DriverNetwork
from tests.simulation.scheduler import Process, Signal, World


class Network:
    """Listeners by port."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.listeners: dict[int, SimListener] = {}
        self._last_port = 1000

    def listen(self, listener: SimListener) -> int:
        self._last_port += 1
        self.listeners[self._last_port] = listener
        return self._last_port

    def connect(self, port: int) -> SimConnection:
        self.world.step(f"connect to {port}")
        listener = self.listeners.get(port)
        if listener is None or not listener.process.alive:
            raise ConnectionRefusedError(port)
        client, server = connection_pair(self.world, self.world.current_process, listener.process)
        listener.accept(server)
        return client


class SimListener:
    """Replacement for ``driver_endpoint.AuthenticatedListener``."""

    network: Callable[[], Network]

    def __init__(self, at: DriverNetwork, serve: Callable[[Any], None], name: str) -> None:
        network = type(self).network()
        self.closed = False
        self._serve, self._name = serve, name
        self.process = network.world.current_process
        self.address = Address(at.host, network.listen(self), b"secret")

    def accept(self, connection: SimConnection) -> None:
        if self.closed:
            connection.close()
            return
        self.process.spawn(lambda: self._serve(connection), self._name)

    def close(self) -> None:
        self.closed = True


class SimConnection:
    """One end of a connection, which delivers messages in order and without delay."""

    def __init__(self, world: World, process: Process) -> None:
        self._world, self._process = world, process
        self._received: deque[bytes] = deque()
        self.changed = Signal()
        self.peer: SimConnection | None = None
        self.closed = False

    def send_bytes(self, message: bytes) -> None:
        self._world.step(f"send {message[:80].decode(errors='replace')}")
        peer = self.peer
        if self.closed or peer is None or peer.closed:
            raise BrokenPipeError
        peer._received.append(message)
        peer.changed.notify_all()

    def recv_bytes(self, maxlength: int | None = None) -> bytes:
        while not self._received:
            if self.closed:
                raise OSError("closed")
            if self.peer is None or self.peer.closed:
                raise EOFError
            self._world.wait(self.changed)
        self._world.step("receive")
        return self._received.popleft()

    def poll(self, timeout: float | None = 0.0) -> bool:
        if not self.readable and timeout:
            self._world.wait(self.changed, seconds=timeout)
        return self.readable

    @property
    def readable(self) -> bool:
        return bool(self._received) or self.closed or self.peer is None or self.peer.closed

    def fileno(self) -> int:
        return id(self)

    def shut_down(self) -> None:
        self.close()

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            self.changed.notify_all()
            if self.peer is not None:
                self.peer.changed.notify_all()

    def __enter__(self) -> SimConnection:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def connection_pair(
    world: World, client_process: Process, server_process: Process
) -> tuple[SimConnection, SimConnection]:
    client, server = SimConnection(world, client_process), SimConnection(world, server_process)
    client.peer, server.peer = server, client
    client_process.on_exit.append(client.close)
    server_process.on_exit.append(server.close)
    return client, server
