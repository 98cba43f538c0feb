"""A task's connections to the driver and to Spark's JVM, and the metadata columns of rows on the way.

A task sends the driver short JSON messages over an authenticated socket. It gets the driver's address with
its pickled function, which Spark sends to executors like all code.

Spark's Python worker passes each record batch to Arrow's stream writer, which writes it in some thirty
pieces, buffer by buffer. In a micro-batch, a file buffer gathers the pieces. Here that buffer is tiny, so
that no rows wait in it (``spark.sql.execution.pandas.udf.buffer.size`` sets the buffers of both directions),
and each piece would be a system call that wakes a thread of the JVM (Spark 4.2, 4.3). So each batch is
written as a whole.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import IO

import pyarrow as pa

from penstock.errors import ContinuousFailedError
from penstock.json_text import Json
from penstock.spark.driver_connection import Connection
from penstock.spark.driver_endpoint import Address

_END_OF_STREAM = b"\xff\xff\xff\xff\0\0\0\0"


class WholeBatchWriter:
    """Replacement for Arrow's stream writer, as far as Spark uses it, for schemas without dictionaries."""

    def __init__(self, stream: IO[bytes], schema: pa.Schema) -> None:
        self._stream = stream
        stream.write(schema.serialize())

    def write_batch(self, batch: pa.RecordBatch) -> None:
        self._stream.write(batch.serialize())

    def close(self) -> None:
        self._stream.write(_END_OF_STREAM)


def with_whole_batches(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Yield the batches, as the last step of a task's generator, so that Spark writes each in one piece.

    Spark creates its stream writer when it gets the first batch.
    """
    original = pa.RecordBatchStreamWriter
    for first in batches:
        pa.RecordBatchStreamWriter = WholeBatchWriter
        try:
            yield first
        finally:
            # The worker's next task gets the original one.
            pa.RecordBatchStreamWriter = original
        yield from batches


KIND, EPOCH = "__penstock_kind", "__penstock_epoch"
MARKER, FILLER = 1, 2
"""Kinds of rows that are not the source's: a marker ends an epoch, and a filler only pushes the rows before
it through the buffers between Spark and its Python workers."""

HIDDEN = pa.schema([pa.field(KIND, pa.int8(), nullable=False), pa.field(EPOCH, pa.int64(), nullable=False)])


def empty_row(rows: pa.RecordBatch) -> pa.RecordBatch:
    """Return a row for markers and fillers: like the first one, with empty values for those of any size."""
    columns = [_emptied(column.slice(0, 1)) for column in rows.columns]
    return pa.RecordBatch.from_arrays(columns, schema=rows.schema)


def _emptied(value: pa.Array) -> pa.Array:
    kind, is_null = value.type, bool(value.null_count)
    if pa.types.is_struct(kind) and not is_null:
        return pa.StructArray.from_arrays([_emptied(part) for part in value.flatten()], fields=list(kind))
    for empty, checks in _EMPTY:
        if not is_null and any(check(kind) for check in checks):
            return pa.array([empty], kind)
    # A slice would keep the other rows alive.
    return value.take(pa.array([0]))


_EMPTY: Sequence[tuple[object, Sequence[Callable[[pa.DataType], bool]]]] = (
    (b"", (pa.types.is_string, pa.types.is_large_string, pa.types.is_binary, pa.types.is_large_binary)),
    ([], (pa.types.is_list, pa.types.is_large_list, pa.types.is_map)),
)
"""Empty values, with the types that have them."""


class Labels:
    """Adds the metadata columns to rows of one schema; not thread-safe."""

    def __init__(self, schema: pa.Schema) -> None:
        self._schema = pa.schema([*schema, *HIDDEN])
        self._epochs = pa.array([], HIDDEN.field(EPOCH).type)
        self._epoch = 0

    def beside(self, rows: pa.RecordBatch, kind: int, epoch: int) -> pa.RecordBatch:
        """Return the rows with the columns of one kind and epoch."""
        count = rows.num_rows
        # Most batches are small, so the columns are made once per epoch and sliced.
        if epoch != self._epoch or count > len(self._epochs):
            self._epoch, self._epochs = epoch, _repeated(EPOCH, epoch, _room(count))
        columns = [*rows.columns, _kinds(kind, _room(count)).slice(0, count), self._epochs.slice(0, count)]
        return pa.RecordBatch.from_arrays(columns, schema=self._schema)


def _room(count: int) -> int:
    return max(1024, 1 << (count - 1).bit_length())


@lru_cache(maxsize=64)
def _kinds(kind: int, count: int) -> pa.Array:
    return _repeated(KIND, kind, count)


def _repeated(name: str, value: int, count: int) -> pa.Array:
    return pa.repeat(pa.scalar(value, HIDDEN.field(name).type), count)


def kinds_of(batch: pa.RecordBatch) -> bytes:
    kinds = batch.column(KIND)
    return bytes(kinds.buffers()[1].slice(kinds.offset, len(kinds)))


READER, WRITER = "reader", "writer"
_LONGEST_WAIT = 1.0


@dataclass(frozen=True)
class CoordinatorAddress(Address):
    """The address of the coordinator of one run."""

    run: str = ""
    """The run's id: the coordinator ignores tasks of other runs."""

    def open(self, role: str, task: int) -> Channel:
        channel = Channel(self.connect())
        channel.send("hello", run=self.run, role=role, task=task)
        return channel


class Channel:
    """A task's connection to the driver; not thread-safe."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def fileno(self) -> int:
        """Return the descriptor for ``select``, which is readable when a message has arrived."""
        return self._connection.fileno()

    def send(self, kind: str, **what: object) -> None:
        try:
            self._connection.send_bytes(encode(kind, **what))
        except OSError as error:
            raise _closed() from error

    def receive(self, timeout: float = 0.0) -> Json | None:
        """Return the next message; None if none arrives within ``timeout`` seconds."""
        try:
            return decode(self._connection.recv_bytes()) if self._connection.poll(timeout) else None
        except (OSError, EOFError) as error:
            raise _closed() from error

    def await_message(self) -> Json:
        while (message := self.receive(_LONGEST_WAIT)) is None:
            pass
        return message

    def wait(self, timeout: float) -> None:
        """Wait for a message, for at most ``timeout`` seconds."""
        self._connection.poll(timeout)

    def close(self) -> None:
        self._connection.close()


def encode(kind: str, **what: object) -> bytes:
    return json.dumps({"kind": kind, **what}).encode()


def decode(message: bytes) -> Json:
    decoded = json.loads(message)
    if not isinstance(decoded, Mapping) or "kind" not in decoded:
        raise EOFError("not a valid message")
    return dict(decoded)


def _closed() -> ContinuousFailedError:
    return ContinuousFailedError(
        "the driver has ended this run of the query", condition="CONTINUOUS_FAILED.HUNG_UP"
    )
