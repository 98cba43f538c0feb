"""Requests of tasks to their driver, over one authenticated socket.

A task gets the address and the secret with its pickled function, which Spark sends to executors as it sends
all code.

Anybody who reaches the driver's port can connect and send nothing. Tasks must not wait for such a stranger,
so handshakes run concurrently, for at most a second each. When there are too many, the oldest is closed: a
task's handshake takes milliseconds, so the oldest is a stranger's.
"""

from __future__ import annotations

import hmac
import logging
import random
import secrets
import selectors
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection

from pyspark.sql import SparkSession

from penstock.errors import StoreUnavailableError, condition_of
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


@dataclass(frozen=True)
class Address:
    """Where a driver listens, and its secret."""

    host: str
    port: int
    secret: bytes = field(repr=False)

    def ask(self, question: bytes) -> bytes:
        with self._translated_errors(), connect((self.host, self.port), authkey=self.secret) as connection:
            connection.send_bytes(question)
            return connection.recv_bytes()

    def connect(self) -> Connection:
        """Connect to the driver."""
        with self._translated_errors():
            return connect((self.host, self.port), authkey=self.secret)

    @contextmanager
    def _translated_errors(self) -> Iterator[None]:
        try:
            yield
        except AuthenticationError as error:
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


def connect(where: tuple[str, int], authkey: bytes) -> Connection:
    """Connect to a driver, and retry if it closes the connection before the handshake is done.

    It does so after a second, which a task on a busy machine may need, and when strangers crowd its port.
    """
    deadline, pause = time.monotonic() + _CONNECT_SECONDS, _FIRST_PAUSE
    while True:
        try:
            return _connect_once(where, authkey, deadline)
        except ConnectionRefusedError:
            raise
        except (EOFError, ConnectionError):
            if time.monotonic() + pause > deadline:
                raise
        time.sleep(pause * random.uniform(0.5, 1.0))
        pause = min(pause * 2, _LONGEST_PAUSE)


def _connect_once(where: tuple[str, int], authkey: bytes, deadline: float) -> Connection:
    left = max(deadline - time.monotonic(), 1.0)
    sock = socket.create_connection(where, timeout=left)
    sock.setblocking(True)
    send_at_once(sock)
    # The limit also stops a peer that begins to speak and pauses: any process may have another driver's port.
    _set_receive_timeout(sock, left)
    connection = Connection(sock.detach())
    try:
        _prove(connection, authkey, _TASK)
        _require_proof(connection, authkey, _DRIVER)
        with socket.socket(fileno=socket.dup(connection.fileno())) as twin:
            _set_receive_timeout(twin, 0)
    except BlockingIOError:
        connection.close()
        raise TimeoutError("the driver stopped responding") from None
    except BaseException:
        connection.close()
        raise
    return connection


_TASK, _DRIVER = b"penstock task", b"penstock driver"
"""What a proof is for: nobody can pass a proof of one side off as that of the other."""
_CHALLENGE_BYTES = 32
_ACCEPTED, _REFUSED = b"accepted", b"refused"


def _require_proof(connection: Connection, secret: bytes, side: bytes) -> None:
    """Let the peer prove that it is one side and knows the secret, without showing it (HMAC-SHA-256).

    ``multiprocessing`` has a handshake of its own, which takes MD5 before Python 3.12, and does not tell the
    sides apart.
    """
    challenge = secrets.token_bytes(_CHALLENGE_BYTES)
    connection.send_bytes(challenge)
    accepted = hmac.compare_digest(connection.recv_bytes(256), _proof(secret, side, challenge))
    connection.send_bytes(_ACCEPTED if accepted else _REFUSED)
    if not accepted:
        raise AuthenticationError("the peer does not know the secret")


def _prove(connection: Connection, secret: bytes, side: bytes) -> None:
    challenge = connection.recv_bytes(256)
    if len(challenge) != _CHALLENGE_BYTES:
        raise AuthenticationError("the peer speaks another protocol")
    connection.send_bytes(_proof(secret, side, challenge))
    if connection.recv_bytes(256) != _ACCEPTED:
        raise AuthenticationError("the peer has another secret")


def _proof(secret: bytes, side: bytes, challenge: bytes) -> bytes:
    return hmac.digest(secret, side + challenge, "sha256")


def send_at_once(connection: socket.socket) -> None:
    """Do not hold a small message back until the peer has acknowledged the one before, which it may put off
    for 40 ms (Nagle's algorithm and delayed acknowledgements, RFC 896 and RFC 1122).
    """
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def _set_receive_timeout(connection: socket.socket, seconds: float) -> None:
    """Let a blocking read fail after some seconds with a BlockingIOError; 0 for no limit."""
    micros = round(seconds * 1e6)
    connection.setsockopt(
        socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", micros // 1_000_000, micros % 1_000_000)
    )


class _Handshakes:
    """The unfinished handshakes of one socket."""

    def __init__(self, secret: bytes) -> None:
        self._secret = secret
        self._lock = threading.Lock()
        self._open: dict[Connection, float] = {}
        """The deadline of each connection, the oldest first."""

    def begin(self, connection: Connection) -> bool:
        """Give a connection a second for its handshake; return False if the oldest one was closed for it."""
        with self._lock:
            full = len(self._open) >= MAX_HANDSHAKES
            if full:
                self._close(next(iter(self._open)))
            self._open[connection] = time.monotonic() + HANDSHAKE_SECONDS
        return not full

    def authenticate(self, connection: Connection) -> None:
        """Wait until both ends have proved that they know the secret."""
        try:
            _require_proof(connection, self._secret, _TASK)
            _prove(connection, self._secret, _DRIVER)
        finally:
            with self._lock:
                in_time = self._open.pop(connection, None) is not None
        if not in_time:
            raise TimeoutError(
                f"not done within {HANDSHAKE_SECONDS:.0f} s, or {MAX_HANDSHAKES} others have come since"
            )

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
        shut_down(connection)


def shut_down(connection: Connection) -> None:
    """Wake the thread that reads from a connection, which a mere close would not."""
    with suppress(OSError), socket.socket(fileno=socket.dup(connection.fileno())) as twin:
        twin.shutdown(socket.SHUT_RDWR)


class AuthenticatedListener:
    """An authenticated socket of the driver; ``serve`` handles and closes a connection, in its own thread."""

    def __init__(self, bind: str, serve: Callable[[Connection], None], name: str) -> None:
        self.secret = secrets.token_bytes(32)
        self._handshakes = _Handshakes(self.secret)
        self._socket = socket.create_server((bind, 0), backlog=_BACKLOG)
        self._socket.setblocking(False)
        self.port: int = self._socket.getsockname()[1]
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
        connection = Connection(incoming.detach())
        if not self._handshakes.begin(connection) and not self._crowded:
            self._crowded = True
            log.warning(
                "%d connections to the driver's port %d have not authenticated; further ones are closed: "
                "allow only executors to reach that port",
                MAX_HANDSHAKES,
                self.port,
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
        self._host, bind = driver_addresses(spark)
        self._answer = answer
        self._listener = AuthenticatedListener(bind, self._serve, "penstock-endpoint")

    @property
    def address(self) -> Address:
        return Address(self._host, self._listener.port, self._listener.secret)

    def close(self) -> None:
        self._listener.close()

    def _serve(self, connection: Connection) -> None:
        with connection:
            try:
                connection.send_bytes(self._answer(connection.recv_bytes()))
            except (OSError, EOFError):
                return


def driver_addresses(spark: SparkSession) -> tuple[str, str]:
    """Return the address for executors and the address to listen on: the loopback one in local mode."""
    context = spark.sparkContext
    if is_local(str(context.master)):
        return "127.0.0.1", "127.0.0.1"
    settings = context.getConf()
    host = str(settings.get("spark.driver.host"))
    return host, str(settings.get("spark.driver.bindAddress", host))
