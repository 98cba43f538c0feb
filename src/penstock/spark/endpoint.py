"""Questions that tasks ask their driver, over one authenticated socket.

A task gets the address with its pickled function, which Spark carries to executors as it carries all code.
"""

from __future__ import annotations

import logging
import secrets
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Client, Connection, Listener

from pyspark.sql import SparkSession

from penstock.errors import StoreUnavailable, condition_of
from penstock.spark.stores import is_local

log = logging.getLogger("penstock.spark")

Answer = Callable[[bytes], bytes]

_BACKLOG = 128


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
            with Client((self.host, self.port), authkey=self.secret) as connection:
                connection.send_bytes(question)
                return connection.recv_bytes()
        except (OSError, EOFError) as error:
            raise unreachable(self.host, self.port, error) from error


def unreachable(host: str, port: int, error: Exception) -> StoreUnavailable:
    """The error of a task that cannot talk to its driver."""
    return StoreUnavailable(
        f"the driver at {host}:{port} does not answer ({type(error).__name__}): executors must be able to "
        "reach spark.driver.host",
        host=host,
        port=port,
    )


class Listening:
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
        self._listener = Listener((bind, 0), backlog=_BACKLOG, authkey=self.secret)
        self._serve = serve
        self.closed = False
        threading.Thread(target=self._listen, name=name, daemon=True).start()

    @property
    def port(self) -> int:
        """Where it listens."""
        return int(self._listener.address[1])

    def close(self) -> None:
        """Hear nobody any more."""
        self.closed = True
        where = self._listener.address
        # The thread that waits for a connection holds the socket open until it gets one.
        with suppress(OSError):
            socket.create_connection(where, timeout=5).close()
        self._listener.close()

    def _listen(self) -> None:
        while not self.closed:
            try:
                connection = self._listener.accept()
            except Exception as error:
                # A stranger, or somebody who went away.
                log.debug(
                    "a connection to the driver came to nothing: %s",
                    error,
                    extra={"action": "stranger", "error": condition_of(error)},
                )
                continue
            threading.Thread(target=self._serve, args=[connection], daemon=True).start()


class Endpoint:
    """A socket of the driver's that answers questions."""

    def __init__(self, spark: SparkSession, answer: Answer) -> None:
        self._host, bind = names(spark)
        self._answer = answer
        self._listening = Listening(bind, self._serve, "penstock-endpoint")

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


def names(spark: SparkSession) -> tuple[str, str]:
    """Where executors find this driver, and where it listens; on one machine nobody else needs to reach it."""
    context = spark.sparkContext
    if is_local(str(context.master)):
        return "127.0.0.1", "127.0.0.1"
    settings = context.getConf()
    host = str(settings.get("spark.driver.host"))
    return host, str(settings.get("spark.driver.bindAddress", host))
