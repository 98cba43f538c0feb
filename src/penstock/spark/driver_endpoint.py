"""Requests of tasks to their driver, over one authenticated socket.

A task gets the address, the secret and the driver's certificate with its pickled function, which Spark sends
to executors like all code. Traffic is encrypted if Spark's own is.

Any process that reaches the driver's port can connect and send nothing. Tasks must not have to wait for such
a stranger, so handshakes run concurrently, for at most a second each. If there are too many, the oldest one
is closed: a task's handshake takes milliseconds, so the oldest is a stranger's.
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
    prove,
    require_proof,
    send_at_once,
)
from penstock.spark.internals.sessions import is_local

log = logging.getLogger("penstock.spark")

Answer = Callable[[bytes], bytes]
HANDSHAKE_SECONDS = 1.0
"""How long a handshake may take."""
MAX_HANDSHAKES = 128
"""How many handshakes may run at the same time."""
_BACKLOG = 128
_CONNECT_SECONDS = 60.0
"""How long a task tries to reach its driver, which may be busy or paused."""
_FIRST_PAUSE, _LONGEST_PAUSE = 0.02, 1.0
_SEND_SECONDS = 30
"""How long a driver waits for a task that receives nothing."""
_READY = b"ready"
"""The end of a handshake. If it does not arrive, the driver was too slow, and the task tries again."""


@dataclass(frozen=True)
class DriverNetwork:
    """How tasks reach a driver."""

    host: str
    """The driver's address for executors."""
    bind: str
    """The address to listen at."""
    encrypted: bool = False


LOOPBACK = "127.0.0.1"
_ENCRYPT = (
    "spark.network.crypto.enabled",
    "spark.ssl.rpc.enabled",
    "spark.authenticate.enableSaslEncryption",
)
"""Spark's settings that encrypt its RPC, each in a different way (Spark 4.3, "Spark Security")."""


def driver_network(spark: SparkSession) -> DriverNetwork:
    """Return how the tasks of an application reach its driver: in local mode nothing leaves the machine."""
    context = spark.sparkContext
    if is_local(str(context.master)):
        return DriverNetwork(LOOPBACK, LOOPBACK)
    settings = context.getConf()
    host = str(settings.get("spark.driver.host"))
    bind = str(settings.get("spark.driver.bindAddress", host))
    encrypted = any(str(settings.get(name, "false")).strip().lower() == "true" for name in _ENCRYPT)
    # Spark puts brackets around an IPv6 address.
    return DriverNetwork(host.strip("[]"), bind.strip("[]"), encrypted)


@dataclass(frozen=True)
class Address:
    """Where a driver listens, and its secret."""

    host: str
    port: int
    secret: bytes = field(repr=False)
    certificate: str | None = field(default=None, repr=False)
    """The driver's certificate in PEM; None if the traffic is not encrypted."""

    def ask(self, question: bytes) -> bytes:
        with self._translated_errors(), connect(self) as connection:
            connection.send_bytes(question)
            return connection.recv_bytes()

    def connect(self) -> Connection:
        """Connect to the driver."""
        with self._translated_errors():
            return connect(self)

    @contextmanager
    def _translated_errors(self) -> Iterator[None]:
        try:
            yield
        except (AuthenticationError, ssl.SSLError) as error:
            raise StoreUnavailableError(
                f"the process at {self.host}:{self.port} is not the driver of this task; that driver has "
                "probably ended: start the query again",
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
    """Connect to a driver, and retry if it closes the connection before the handshake is done.

    The driver does so after a second, which a task on a busy machine may exceed, and when strangers crowd its
    port.
    """
    deadline, pause = time.monotonic() + _CONNECT_SECONDS, _FIRST_PAUSE
    while True:
        try:
            return connect_once(address, deadline)
        except ConnectionRefusedError:
            raise
        except (EOFError, ConnectionError):
            if time.monotonic() + pause > deadline:
                raise
        time.sleep(pause * random.uniform(0.5, 1.0))
        pause = min(pause * 2, _LONGEST_PAUSE)


def connect_once(address: Address, deadline: float) -> Connection:
    left = max(deadline - time.monotonic(), 1.0)
    sock = socket.create_connection((address.host, address.port), timeout=left)
    send_at_once(sock)
    connection = Connection(sock)
    # The limit also stops a peer that sends something and pauses, since any process may have the port by now.
    connection.set_timeout(left)
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
        """The deadline of each connection, the oldest first."""

    def begin(self, connection: Connection) -> bool:
        """Give a connection a second for its handshake; return False if the oldest one had to be closed."""
        with self._lock:
            full = len(self._open) >= MAX_HANDSHAKES
            if full:
                self._close(next(iter(self._open)))
            self._open[connection] = time.monotonic() + HANDSHAKE_SECONDS
        return not full

    def authenticate(self, connection: Connection) -> None:
        """Wait until both ends have proved that they know the secret."""
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
        """Close expired connections, and return the seconds until the next one expires."""
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
    """An authenticated socket of the driver; ``serve`` handles and closes a connection, in its own thread."""

    def __init__(self, network: DriverNetwork, serve: Callable[[Connection], None], name: str) -> None:
        tls = driver_tls() if network.encrypted else None
        secret = secrets.token_bytes(32)
        self._handshakes = _Handshakes(secret, tls)
        family = socket.getaddrinfo(network.bind, 0, type=socket.SOCK_STREAM)[0][0]
        self._socket = socket.create_server((network.bind, 0), family=family, backlog=_BACKLOG)
        self._socket.setblocking(False)
        port: int = self._socket.getsockname()[1]
        self.address = Address(network.host, port, secret, None if tls is None else tls.certificate)
        self._wake, self._woken = socket.socketpair()
        self._serve = serve
        self._crowded = False
        self.closed = False
        self._thread = threading.Thread(target=self._listen, name=name, daemon=True)
        self._thread.start()

    def close(self) -> None:
        if self.closed:
            return
        self.closed = True
        self._wake.send(b"\0")
        self._thread.join()
        self._handshakes.close_all()
        for sock in (self._socket, self._wake, self._woken):
            sock.close()

    def _listen(self) -> None:
        with selectors.DefaultSelector() as ready:
            ready.register(self._socket, selectors.EVENT_READ)
            ready.register(self._woken, selectors.EVENT_READ)
            while not self.closed:
                for key, _ in ready.select(self._handshakes.expire()):
                    if key.fileobj is self._socket:
                        self._accept()
                    else:
                        # A forked child that closes its copy wakes this thread, too.
                        self._woken.recv(64)

    def _accept(self) -> None:
        try:
            incoming, _ = self._socket.accept()
        except BlockingIOError:
            return
        except OSError as error:
            # The peer has disconnected, or this process has too many open files.
            _log_failure(error)
            time.sleep(_FIRST_PAUSE)
            return
        incoming.setblocking(True)
        send_at_once(incoming)
        incoming.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", _SEND_SECONDS, 0))
        connection = Connection(incoming)
        if not self._handshakes.begin(connection) and not self._crowded:
            self._crowded = True
            log.warning(
                "%d connections to the driver's port %d have not authenticated; further ones are closed: "
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
            # A stranger, or a peer that has disconnected.
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
