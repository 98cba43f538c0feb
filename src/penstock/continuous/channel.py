"""A task's connections to the driver and to Spark's JVM, and the metadata columns of its rows.

A task sends short JSON messages to the driver over an authenticated socket. The driver's address is part of
the function that Spark pickles and sends to the executors.

Spark's Python worker passes each record batch to Arrow's stream writer, which writes about thirty pieces,
buffer by buffer. In a micro-batch, a file buffer collects the pieces. In a continuous query, that buffer is
tiny, so that no rows wait in it (``spark.sql.execution.pandas.udf.buffer.size`` sets the buffers of both
directions). Each piece would then be a system call that wakes a thread of the JVM (Spark 4.2, 4.3). So the
task writes each batch with one call.
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
    """Replacement for the part of Arrow's stream writer that Spark uses; for schemas without dictionaries."""

    def __init__(self, stream: IO[bytes], schema: pa.Schema) -> None:
        self._stream = stream
        stream.write(schema.serialize())

    def write_batch(self, batch: pa.RecordBatch) -> None:
        self._stream.write(batch.serialize())

    def close(self) -> None:
        self._stream.write(_END_OF_STREAM)


def with_whole_batches(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Yield batches that Spark writes with one call each; the last step of a task's generator.

    Spark creates its stream writer when it gets the first batch.
    """
    original = pa.RecordBatchStreamWriter
    for first in batches:
        pa.RecordBatchStreamWriter = WholeBatchWriter
        try:
            yield first
        finally:
            # The worker's next task gets the original writer.
            pa.RecordBatchStreamWriter = original
        yield from batches


KIND, EPOCH = "__penstock_kind", "__penstock_epoch"
MARKER, FILLER = 1, 2
"""Kinds of rows that are not from the source. A marker ends an epoch. A filler pushes the rows before it
through the buffers between Spark and its Python workers."""

METADATA_COLUMNS = pa.schema(
    [pa.field(KIND, pa.int8(), nullable=False), pa.field(EPOCH, pa.int64(), nullable=False)]
)


def empty_row(rows: pa.RecordBatch) -> pa.RecordBatch:
    """Return a small row for markers and fillers: the first row, with empty strings, lists and maps."""
    columns = [_empty_value(column.slice(0, 1)) for column in rows.columns]
    return pa.RecordBatch.from_arrays(columns, schema=rows.schema)


def _empty_value(value: pa.Array) -> pa.Array:
    data_type, is_null = value.type, bool(value.null_count)
    if pa.types.is_struct(data_type) and not is_null:
        return pa.StructArray.from_arrays(
            [_empty_value(part) for part in value.flatten()], fields=list(data_type)
        )
    for empty, checks in _EMPTY_VALUES:
        if not is_null and any(check(data_type) for check in checks):
            return pa.array([empty], data_type)
    # A slice would keep the other rows alive.
    return value.take(pa.array([0]))


_EMPTY_VALUES: Sequence[tuple[object, Sequence[Callable[[pa.DataType], bool]]]] = (
    (b"", (pa.types.is_string, pa.types.is_large_string, pa.types.is_binary, pa.types.is_large_binary)),
    ([], (pa.types.is_list, pa.types.is_large_list, pa.types.is_map)),
)
"""Empty values, and the checks for their types."""


class RowLabeler:
    """Adds the metadata columns to rows of one schema; not thread-safe."""

    def __init__(self, schema: pa.Schema) -> None:
        self._schema = pa.schema([*schema, *METADATA_COLUMNS])
        self._epochs = pa.array([], METADATA_COLUMNS.field(EPOCH).type)
        self._epoch = 0

    def label(self, rows: pa.RecordBatch, kind: int, epoch: int) -> pa.RecordBatch:
        """Return the rows with the metadata columns for a kind and an epoch."""
        count = rows.num_rows
        # Most batches are small, so the columns are built once per epoch and sliced.
        if epoch != self._epoch or count > len(self._epochs):
            self._epoch, self._epochs = epoch, _constant_column(EPOCH, epoch, _padded_length(count))
        columns = [
            *rows.columns,
            _kind_column(kind, _padded_length(count)).slice(0, count),
            self._epochs.slice(0, count),
        ]
        return pa.RecordBatch.from_arrays(columns, schema=self._schema)


def _padded_length(count: int) -> int:
    return max(1024, 1 << (count - 1).bit_length())


@lru_cache(maxsize=64)
def _kind_column(kind: int, count: int) -> pa.Array:
    return _constant_column(KIND, kind, count)


def _constant_column(name: str, value: int, count: int) -> pa.Array:
    return pa.repeat(pa.scalar(value, METADATA_COLUMNS.field(name).type), count)


def kinds_of(batch: pa.RecordBatch) -> bytes:
    kinds = batch.column(KIND)
    return bytes(kinds.buffers()[1].slice(kinds.offset, len(kinds)))


READER, WRITER = "reader", "writer"
_MAX_WAIT_SECONDS = 1.0


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
        """Return the file descriptor for ``select``; it is readable when a message has arrived."""
        return self._connection.fileno()

    def send(self, kind: str, **fields: object) -> None:
        try:
            self._connection.send_bytes(encode(kind, **fields))
        except OSError as error:
            raise _closed_error() from error

    def receive(self, timeout: float = 0.0) -> Json | None:
        """Return the next message; None if no message arrives within ``timeout`` seconds."""
        try:
            return decode(self._connection.recv_bytes()) if self._connection.poll(timeout) else None
        except (OSError, EOFError) as error:
            raise _closed_error() from error

    def await_message(self) -> Json:
        while (message := self.receive(_MAX_WAIT_SECONDS)) is None:
            pass
        return message

    def wait(self, timeout: float) -> None:
        """Wait for a message, for at most ``timeout`` seconds."""
        self._connection.poll(timeout)

    def close(self) -> None:
        self._connection.close()


def encode(kind: str, **fields: object) -> bytes:
    return json.dumps({"kind": kind, **fields}).encode()


def decode(message: bytes) -> Json:
    decoded = json.loads(message)
    if not isinstance(decoded, Mapping) or "kind" not in decoded:
        raise EOFError("not a valid message")
    return dict(decoded)


def _closed_error() -> ContinuousFailedError:
    return ContinuousFailedError(
        "the driver has ended this run of the query", condition="CONTINUOUS_FAILED.HUNG_UP"
    )
