"""Record batches on their way from a task's Python to the JVM: each in one write.

Spark's Python worker hands each batch to Arrow's stream writer, which writes a batch in some thirty pieces, buffer by buffer. In a
micro-batch a file buffer gathers them; here it is tiny, for rows not to lie in it (``spark.sql.execution.pandas.udf.buffer.size`` is
the size of both directions' buffers), and each piece would be a system call that wakes a thread of the JVM (Spark 4.2, 4.3).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import IO, Any

import pyarrow as pa

from penstock.errors import ContinuousFailed
from penstock.spark.driver_endpoint import CONNECT_ERRORS, connect, unreachable_error

_END_OF_STREAM = b"\xff\xff\xff\xff\0\0\0\0"


class WholeBatchWriter:
    """What Spark uses of Arrow's stream writer, and the same bytes; for schemas without dictionaries."""

    def __init__(self, stream: IO[bytes], schema: pa.Schema) -> None:
        self._stream = stream
        stream.write(schema.serialize())

    def write_batch(self, batch: pa.RecordBatch) -> None:
        self._stream.write(batch.serialize())

    def close(self) -> None:
        self._stream.write(_END_OF_STREAM)


def with_whole_batches(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """The same batches, for the end of a task's generator: whoever makes a stream writer for the first one gets a whole one."""
    usual = pa.RecordBatchStreamWriter
    for first in batches:
        pa.RecordBatchStreamWriter = WholeBatchWriter
        try:
            yield first
        finally:
            # The worker's next task has the usual one.
            pa.RecordBatchStreamWriter = usual
        yield from batches


# ---- link: The line between a task and the driver: short messages in JSON, over an authenticated socket.
#
# A task gets the address with its pickled function, which Spark carries to executors as it carries all code.

READER, WRITER = "reader", "writer"
_LONGEST_WAIT = 1.0


@dataclass(frozen=True)
class CoordinatorAddress:
    """Where the coordinator of one run listens, and the secret that it wants to hear."""

    host: str
    port: int
    run: str
    """The run's id: what the tasks of a run that is over say is not heard."""
    secret: bytes = field(repr=False)

    def link(self, role: str, task: int) -> Channel:
        """Connect a task's reader or writer.

        Raises
        ------
        StoreUnavailable
            When the driver does not answer.
        """
        try:
            connection = connect((self.host, self.port), authkey=self.secret)
        except CONNECT_ERRORS as error:
            raise unreachable_error(self.host, self.port, error) from error
        link = Channel(connection)
        link.tell("hello", run=self.run, role=role, task=task)
        return link


class Channel:
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
