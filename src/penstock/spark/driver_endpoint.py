"""Requests of tasks to their driver, over one authenticated socket.

The driver's address, secret and certificate are part of the function that Spark pickles and sends to the
executors. Traffic is encrypted if Spark's own traffic is.

Any process that reaches the driver's port can connect and send nothing. So that tasks need not wait for such
strangers, handshakes run concurrently, and each may take a second. If there are too many, the oldest is
closed. It is a stranger's, because a task's handshake takes milliseconds.
"""

from __future__ import annotations

import logging
import random
import secrets
import selectors
import socket
import ssl
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing import AuthenticationError

from pyspark.sql import SparkSession

from penstock.errors import StoreUnavailableError, condition_of
from penstock.spark.driver_certificate import DriverTls, driver_tls, task_context
from penstock.spark.driver_connection import (
    DRIVER,
    TASK,
    Connection,
    disable_nagle,
    prove,
    require_proof,
)
from penstock.spark.internals.sessions import is_local

log = logging.getLogger("penstock.spark")

Answer = Callable[[bytes], bytes]
HANDSHAKE_SECONDS = 1.0
"""The longest time for a handshake."""
MAX_HANDSHAKES = 128
"""The maximum number of handshakes at the same time."""
_BACKLOG = 128
_CONNECT_SECONDS = 60.0
"""How long a task tries to reach its driver, which may be busy or paused."""
_FIRST_PAUSE_SECONDS, _MAX_PAUSE_SECONDS = 0.02, 1.0
_SEND_SECONDS = 30
"""How long a driver waits to send to a task that does not receive."""
_READY = b"ready"
"""The end of a handshake. If it does not arrive, the handshake has expired, and the task tries again."""


@dataclass(frozen=True)
class DriverNetwork:
    """How tasks reach their driver."""

    host: str
    """The driver's address for executors."""
    bind_address: str
    """The address at which the driver listens."""
    encrypted: bool = False


LOOPBACK = "127.0.0.1"
_ENCRYPTION_SETTINGS = (
    "spark.network.crypto.enabled",
    "spark.ssl.rpc.enabled",
    "spark.authenticate.enableSaslEncryption",
)
"""Spark's settings that encrypt its RPC in different ways (Spark 4.3, "Spark Security")."""


def driver_network(spark: SparkSession) -> DriverNetwork:
    """Return how the tasks of an application reach its driver; in local mode, over the loopback interface."""
    context = spark.sparkContext
    if is_local(str(context.master)):
        return DriverNetwork(LOOPBACK, LOOPBACK)
    settings = context.getConf()
    host = str(settings.get("spark.driver.host"))
    bind_address = str(settings.get("spark.driver.bindAddress", host))
    encrypted = any(
        str(settings.get(name, "false")).strip().lower() == "true" for name in _ENCRYPTION_SETTINGS
    )
    # Spark puts brackets around an IPv6 address.
    return DriverNetwork(host.strip("[]"), bind_address.strip("[]"), encrypted)


@dataclass(frozen=True)
class Address:
    """Where a driver listens, and its secret."""

    host: str
    port: int
    secret: bytes = field(repr=False)
    certificate: str | None = field(default=None, repr=False)
    """The driver's certificate in PEM; None if the traffic is not encrypted."""

    def ask(self, question: bytes) -> bytes:
        with self._translating_errors(), connect(self) as connection:
            connection.send_bytes(question)
            return connection.recv_bytes()

    def connect(self) -> Connection:
        """Connect to the driver."""
        with self._translating_errors():
            return connect(self)

    @contextmanager
    def _translating_errors(self) -> Iterator[None]:
        try:
            yield
        except (AuthenticationError, ssl.SSLError) as error:
            raise StoreUnavailableError(
                f"the process at {self.host}:{self.port} is not the driver of this task, which has probably "
                "ended: start the query again",
                condition="STORE_UNAVAILABLE.OTHER_DRIVER",
                host=self.host,
                port=self.port,
            ) from error
        except (OSError, EOFError) as error:
            raise StoreUnavailableError(
                f"the driver at {self.host}:{self.port} does not answer ({type(error).__name__}): executors "
                "must be able to reach spark.driver.host",
                condition="STORE_UNAVAILABLE.DRIVER",
                host=self.host,
                port=self.port,
            ) from error


def connect(address: Address) -> Connection:
    """Connect to a driver; retry if it closes the connection before the end of the handshake.

    The driver does that after a second, which may be too short on a busy machine, or if too many strangers
    connect.
    """
    deadline, pause = time.monotonic() + _CONNECT_SECONDS, _FIRST_PAUSE_SECONDS
    while True:
        try:
            return connect_once(address, deadline)
        except ConnectionRefusedError:
            raise
        except (EOFError, ConnectionError):
            if time.monotonic() + pause > deadline:
                raise
        time.sleep(pause * random.uniform(0.5, 1.0))
        pause = min(pause * 2, _MAX_PAUSE_SECONDS)


def connect_once(address: Address, deadline: float) -> Connection:
    seconds_left = max(deadline - time.monotonic(), 1.0)
    sock = socket.create_connection((address.host, address.port), timeout=seconds_left)
    disable_nagle(sock)
    connection = Connection(sock)
    # Another process may have the port by now, and may send something and pause.
    connection.set_timeout(seconds_left)
    try:
        if address.certificate is not None:
            connection.encrypt(task_context(address.certificate), server=False)
        prove(connection, address.secret, TASK)
        require_proof(connection, address.secret, DRIVER)
        if connection.recv_bytes(256) != _READY:
            raise AuthenticationError("the peer speaks another protocol")
        connection.set_timeout(None)
    except BaseException:
        connection.close()
        raise
    return connection


class _Handshakes:
    """The unfinished handshakes of one socket."""

    def __init__(self, secret: bytes, tls: DriverTls | None) -> None:
        self._secret, self._tls = secret, tls
        self._lock = threading.Lock()
        self._open: dict[Connection, float] = {}
        """The deadline of each connection, oldest first."""

    def begin(self, connection: Connection) -> bool:
        """Give a connection a second for its handshake; return False if the oldest one was closed for it."""
        with self._lock:
            is_full = len(self._open) >= MAX_HANDSHAKES
            if is_full:
                self._close(next(iter(self._open)))
            self._open[connection] = time.monotonic() + HANDSHAKE_SECONDS
        return not is_full

    def authenticate(self, connection: Connection) -> None:
        """Wait until both sides have proved that they know the secret."""
        try:
            if self._tls is not None:
                connection.encrypt(self._tls.context, server=True)
            require_proof(connection, self._secret, TASK)
            prove(connection, self._secret, DRIVER)
        finally:
            with self._lock:
                in_time = self._open.pop(connection, None) is not None
        if not in_time:
            raise TimeoutError(
                f"not done within {HANDSHAKE_SECONDS:.0f} s, or {MAX_HANDSHAKES} others have connected since"
            )
        connection.send_bytes(_READY)

    def expire(self) -> float | None:
        """Close expired connections; return the seconds until the next one expires."""
        with self._lock:
            now = time.monotonic()
            for connection, deadline in list(self._open.items()):
                if deadline > now:
                    return deadline - now
                self._close(connection)
        return None

    def close_all(self) -> None:
        with self._lock:
            for connection in list(self._open):
                self._close(connection)

    def _close(self, connection: Connection) -> None:
        del self._open[connection]
        connection.shut_down()


class AuthenticatedListener:
    """An authenticated socket of the driver. ``serve`` runs in a thread per connection, and closes it."""

    def __init__(self, network: DriverNetwork, serve: Callable[[Connection], None], name: str) -> None:
        tls = driver_tls() if network.encrypted else None
        secret = secrets.token_bytes(32)
        self._handshakes = _Handshakes(secret, tls)
        family = socket.getaddrinfo(network.bind_address, 0, type=socket.SOCK_STREAM)[0][0]
        self._socket = socket.create_server((network.bind_address, 0), family=family, backlog=_BACKLOG)
        self._socket.setblocking(False)
        port: int = self._socket.getsockname()[1]
        self.address = Address(network.host, port, secret, None if tls is None else tls.certificate)
        self._wake_sender, self._wake_receiver = socket.socketpair()
        self._serve = serve
        self._has_warned = False
        self.closed = False
        self._thread = threading.Thread(target=self._listen, name=name, daemon=True)
        self._thread.start()

    def close(self) -> None:
        if self.closed:
            return
        self.closed = True
        self._wake_sender.send(b"\0")
        self._thread.join()
        self._handshakes.close_all()
        for sock in (self._socket, self._wake_sender, self._wake_receiver):
            sock.close()

    def _listen(self) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self._socket, selectors.EVENT_READ)
            selector.register(self._wake_receiver, selectors.EVENT_READ)
            while not self.closed:
                for key, _ in selector.select(self._handshakes.expire()):
                    if key.fileobj is self._socket:
                        self._accept()
                    else:
                        # A forked child that closes its copy also wakes this thread.
                        self._wake_receiver.recv(64)

    def _accept(self) -> None:
        try:
            sock, _ = self._socket.accept()
        except BlockingIOError:
            return
        except OSError as error:
            # The peer has disconnected, or this process has too many open files.
            _log_failure(error)
            time.sleep(_FIRST_PAUSE_SECONDS)
            return
        sock.setblocking(True)
        disable_nagle(sock)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", _SEND_SECONDS, 0))
        connection = Connection(sock)
        if not self._handshakes.begin(connection) and not self._has_warned:
            self._has_warned = True
            log.warning(
                "%d connections to the driver's port %d have not authenticated; the oldest are closed: "
                "allow only executors to reach that port",
                MAX_HANDSHAKES,
                self.address.port,
                extra={"action": "strangers"},
            )
        try:
            threading.Thread(target=self._authenticate_and_serve, args=[connection], daemon=True).start()
        except RuntimeError as error:
            # No thread is available. The connection expires after a second.
            _log_failure(error)

    def _authenticate_and_serve(self, connection: Connection) -> None:
        try:
            self._handshakes.authenticate(connection)
        except Exception as error:
            # The peer is a stranger or has disconnected.
            connection.close()
            _log_failure(error)
            return
        self._serve(connection)


def _log_failure(error: Exception) -> None:
    log.debug(
        "a connection to the driver failed: %s",
        error,
        extra={"action": "stranger", "error": condition_of(error)},
    )


class DriverEndpoint:
    """A socket of the driver that answers the questions of tasks."""

    def __init__(self, spark: SparkSession, answer: Answer) -> None:
        self._answer = answer
        self._listener = AuthenticatedListener(driver_network(spark), self._serve, "penstock-endpoint")
        self.address = self._listener.address

    def close(self) -> None:
        self._listener.close()

    def _serve(self, connection: Connection) -> None:
        with connection:
            try:
                connection.send_bytes(self._answer(connection.recv_bytes()))
            except (OSError, EOFError):
                return
