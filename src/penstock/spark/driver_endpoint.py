"""Connections that have not shown the secret yet: only so many, and each for a second only.

Anybody who reaches the driver's port can connect and say nothing. Tasks must not wait for such a stranger, so handshakes run side by
side. When there are too many, the oldest is closed: an honest one takes milliseconds, so the oldest is a stranger's.
"""

from __future__ import annotations

import logging
import random
import secrets
import selectors
import socket
import struct
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge

from pyspark.sql import SparkSession

from penstock.errors import StoreUnavailable, condition_of
from penstock.spark.internals.sessions import is_local

SECONDS = 1.0
"""For how long a handshake may take."""
MOST = 128
"""Handshakes at a time."""


class Handshakes:
    """The handshakes that are under way at one socket."""

    def __init__(self, secret: bytes) -> None:
        self._secret = secret
        self._lock = threading.Lock()
        self._open: dict[Connection, float] = {}
        """When each has to be done, the oldest first."""

    def begin(self, connection: Connection) -> bool:
        """Let a connection shake hands within a second; False when the oldest one had to be closed for it."""
        with self._lock:
            full = len(self._open) >= MOST
            if full:
                self._shut(next(iter(self._open)))
            self._open[connection] = time.monotonic() + SECONDS
        return not full

    def shake(self, connection: Connection) -> None:
        """Wait until both ends have shown that they know the secret.

        Raises
        ------
        OSError, EOFError, AuthenticationError
            When the other end does not know it, takes too long, or has gone away.
        """
        try:
            deliver_challenge(connection, self._secret)
            answer_challenge(connection, self._secret)
        finally:
            with self._lock:
                in_time = self._open.pop(connection, None) is not None
        if not in_time:
            raise TimeoutError(f"not done within {SECONDS:.0f} s, or {MOST} others have come since")

    def expire(self) -> float | None:
        """Close what takes too long; the seconds until the next one does, None when there is none."""
        with self._lock:
            now = time.monotonic()
            for connection, deadline in list(self._open.items()):
                if deadline > now:
                    return deadline - now
                self._shut(connection)
        return None

    def end(self) -> None:
        """Close all of them."""
        with self._lock:
            for connection in list(self._open):
                self._shut(connection)

    def _shut(self, connection: Connection) -> None:
        del self._open[connection]
        shut_down(connection)


def shut_down(connection: Connection) -> None:
    """Wake the thread that reads from a connection, which a mere close would not."""
    with suppress(OSError), socket.socket(fileno=socket.dup(connection.fileno())) as twin:
        twin.shutdown(socket.SHUT_RDWR)


# ---- endpoint: Questions that tasks ask their driver, over one authenticated socket.
#
# A task gets the address with its pickled function, which Spark carries to executors as it carries all code.

log = logging.getLogger("penstock.spark")

Answer = Callable[[bytes], bytes]
CONNECT_ERRORS = (OSError, EOFError, AuthenticationError)
"""The errors of :func:`connect`."""

_BACKLOG = 128
_PATIENCE = 60.0
"""For how many seconds a task tries to reach its driver, which may be busy or stand still."""
_FIRST_PAUSE, _LONGEST_PAUSE = 0.02, 1.0


@dataclass(frozen=True)
class Address:
    """Where a driver listens, and the secret that it wants to hear."""

    host: str
    port: int
    secret: bytes = field(repr=False)

    def ask(self, question: bytes) -> bytes:
        """The driver's answer.

        Raises
        ------
        StoreUnavailable
            When the driver does not answer.
        """
        try:
            with connect((self.host, self.port), authkey=self.secret) as connection:
                connection.send_bytes(question)
                return connection.recv_bytes()
        except CONNECT_ERRORS as error:
            raise unreachable_error(self.host, self.port, error) from error


def unreachable_error(host: str, port: int, error: Exception) -> StoreUnavailable:
    """The error of a task that cannot talk to its driver."""
    if isinstance(error, AuthenticationError):
        return StoreUnavailable(
            f"what listens at {host}:{port} is not the driver of this task, which has probably ended: start the query again",
            condition="STORE_UNAVAILABLE.OTHER_DRIVER",
            host=host,
            port=port,
        )
    return StoreUnavailable(
        f"the driver at {host}:{port} does not answer ({type(error).__name__}): executors must be able to "
        "reach spark.driver.host",
        host=host,
        port=port,
    )


def connect(where: tuple[str, int], authkey: bytes) -> Connection:
    """Connect to a driver, and again when it has hung up before the handshake was done.

    It hangs up on whoever takes longer than a second, as a task on a busy machine may, and when strangers crowd its port.

    Raises
    ------
    OSError, EOFError, AuthenticationError
        When the driver is not there, does not speak, or has another secret.
    """
    deadline, pause = time.monotonic() + _PATIENCE, _FIRST_PAUSE
    while True:
        try:
            return _shaken(where, authkey, deadline)
        except ConnectionRefusedError:
            raise
        except (EOFError, ConnectionError):
            if time.monotonic() + pause > deadline:
                raise
        time.sleep(pause * random.uniform(0.5, 1.0))
        pause = min(pause * 2, _LONGEST_PAUSE)


def _shaken(where: tuple[str, int], authkey: bytes, deadline: float) -> Connection:
    left = max(deadline - time.monotonic(), 1.0)
    found = socket.create_connection(where, timeout=left)
    found.setblocking(True)
    # Also for one that begins to speak and stops: what has another driver's port may be anything.
    _limit(found, left)
    connection = Connection(found.detach())
    try:
        answer_challenge(connection, authkey)
        deliver_challenge(connection, authkey)
        with socket.socket(fileno=socket.dup(connection.fileno())) as twin:
            _limit(twin, 0)
    except BlockingIOError:
        connection.close()
        raise TimeoutError("the driver does not go on") from None
    except BaseException:
        connection.close()
        raise
    return connection


def _limit(connection: socket.socket, seconds: float) -> None:
    """Let a blocking read end after some seconds with a BlockingIOError; 0 for no limit."""
    micros = round(seconds * 1e6)
    connection.setsockopt(
        socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", micros // 1_000_000, micros % 1_000_000)
    )


class AuthenticatedListener:
    """An authenticated socket of the driver's, each connection served in a thread of its own.

    Parameters
    ----------
    bind
        Where to listen.
    serve
        What is done with a connection, which it closes.
    name
        The listening thread's.
    """

    def __init__(self, bind: str, serve: Callable[[Connection], None], name: str) -> None:
        self.secret = secrets.token_bytes(32)
        self._handshakes = Handshakes(self.secret)
        self._socket = socket.create_server((bind, 0), backlog=_BACKLOG)
        self._socket.setblocking(False)
        self.port: int = self._socket.getsockname()[1]
        """Where it listens."""
        self._wake, self._woken = socket.socketpair()
        self._serve = serve
        self._crowded = False
        self.closed = False
        self._thread = threading.Thread(target=self._listen, name=name, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Hear nobody any more."""
        if self.closed:
            return
        self.closed = True
        self._wake.send(b"\0")
        self._thread.join()
        self._handshakes.end()
        for each in (self._socket, self._wake, self._woken):
            each.close()

    def _listen(self) -> None:
        with selectors.DefaultSelector() as ready:
            ready.register(self._socket, selectors.EVENT_READ)
            ready.register(self._woken, selectors.EVENT_READ)
            while not self.closed:
                for key, _ in ready.select(self._handshakes.expire()):
                    if key.fileobj is self._socket:
                        self._accept()
                    else:
                        # Also for a forked child that closes what it has inherited.
                        self._woken.recv(64)

    def _accept(self) -> None:
        try:
            incoming, _ = self._socket.accept()
        except BlockingIOError:
            return
        except OSError as error:
            # It has gone away again, or this process has too many files open.
            _came_to_nothing(error)
            time.sleep(_FIRST_PAUSE)
            return
        incoming.setblocking(True)
        connection = Connection(incoming.detach())
        if not self._handshakes.begin(connection) and not self._crowded:
            self._crowded = True
            log.warning(
                "%d connections to the driver's port %d wait to say who they are: more are closed. Who but its executors reaches "
                "that port?",
                MOST,
                self.port,
                extra={"action": "strangers"},
            )
        try:
            threading.Thread(target=self._meet, args=[connection], daemon=True).start()
        except RuntimeError as error:
            # No thread is to be had. The connection is closed when its second is over.
            _came_to_nothing(error)

    def _meet(self, connection: Connection) -> None:
        try:
            self._handshakes.shake(connection)
        except Exception as error:
            # A stranger, or somebody who went away.
            connection.close()
            _came_to_nothing(error)
            return
        self._serve(connection)


def _came_to_nothing(error: Exception) -> None:
    log.debug(
        "a connection to the driver came to nothing: %s",
        error,
        extra={"action": "stranger", "error": condition_of(error)},
    )


class DriverEndpoint:
    """A socket of the driver's that answers questions."""

    def __init__(self, spark: SparkSession, answer: Answer) -> None:
        self._host, bind = driver_addresses(spark)
        self._answer = answer
        self._listening = AuthenticatedListener(bind, self._serve, "penstock-endpoint")

    @property
    def address(self) -> Address:
        return Address(self._host, self._listening.port, self._listening.secret)

    def close(self) -> None:
        """Hear nobody any more."""
        self._listening.close()

    def _serve(self, connection: Connection) -> None:
        with connection:
            try:
                connection.send_bytes(self._answer(connection.recv_bytes()))
            except (OSError, EOFError):
                return


def driver_addresses(spark: SparkSession) -> tuple[str, str]:
    """Where executors find this driver, and where it listens; on one machine nobody else needs to reach it."""
    context = spark.sparkContext
    if is_local(str(context.master)):
        return "127.0.0.1", "127.0.0.1"
    settings = context.getConf()
    host = str(settings.get("spark.driver.host"))
    return host, str(settings.get("spark.driver.bindAddress", host))
