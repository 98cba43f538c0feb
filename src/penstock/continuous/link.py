"""The line between a task and the driver: short messages in JSON, over an authenticated socket.

A task gets the address with its pickled function, which Spark carries to executors as it carries all code.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

from penstock.errors import ContinuousFailed
from penstock.spark.driver_endpoint import NO_DRIVER, connect, unreachable

READER, WRITER = "reader", "writer"
_LONGEST_WAIT = 1.0


@dataclass(frozen=True)
class Address:
    """Where the coordinator of one run listens, and the secret that it wants to hear."""

    host: str
    port: int
    run: str
    """The run's id: what the tasks of a run that is over say is not heard."""
    secret: bytes = field(repr=False)

    def link(self, role: str, task: int) -> Link:
        """Connect a task's reader or writer.

        Raises
        ------
        StoreUnavailable
            When the driver does not answer.
        """
        try:
            connection = connect((self.host, self.port), authkey=self.secret)
        except NO_DRIVER as error:
            raise unreachable(self.host, self.port, error) from error
        link = Link(connection)
        link.tell("hello", run=self.run, role=role, task=task)
        return link


class Link:
    """One end of the line; not for several threads at once."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def fileno(self) -> int:
        """For ``select``: readable when something has come."""
        return self._connection.fileno()

    def tell(self, kind: str, **what: object) -> None:
        """Send a message.

        Raises
        ------
        ContinuousFailed
            When the other end has hung up.
        """
        try:
            self._connection.send_bytes(encode(kind, **what))
        except OSError as error:
            raise _hung_up() from error

    def heard(self, timeout: float = 0.0) -> dict[str, Any] | None:
        """The next message; None when none comes within ``timeout`` seconds.

        Raises
        ------
        ContinuousFailed
            When the other end has hung up.
        """
        try:
            return decode(self._connection.recv_bytes()) if self._connection.poll(timeout) else None
        except (OSError, EOFError) as error:
            raise _hung_up() from error

    def answer(self) -> dict[str, Any]:
        """The next message, however long it takes.

        Raises
        ------
        ContinuousFailed
            When the other end has hung up.
        """
        while (message := self.heard(_LONGEST_WAIT)) is None:
            pass
        return message

    def waits(self, timeout: float) -> None:
        """Wait until the other end says something, or for ``timeout`` seconds."""
        self._connection.poll(timeout)

    def close(self) -> None:
        """Hang up."""
        self._connection.close()


def encode(kind: str, **what: object) -> bytes:
    return json.dumps({"kind": kind, **what}).encode()


def decode(message: bytes) -> dict[str, Any]:
    found = json.loads(message)
    if not isinstance(found, Mapping) or "kind" not in found:
        raise EOFError("this is no message")
    return dict(found)


def _hung_up() -> ContinuousFailed:
    return ContinuousFailed(
        "the driver has ended this run of the query", condition="CONTINUOUS_FAILED.HUNG_UP"
    )
