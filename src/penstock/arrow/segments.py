"""The stored form of a run of rows.

A segment is exactly one Arrow IPC record-batch message, in the encapsulated form: ``FFFFFFFF``, the length of the metadata
(int32, little-endian), the metadata (flatbuffer), the body. There is no schema message and no end-of-stream mark: the queue
holds its schema once. Body buffers are compressed one by one, which the metadata says, so that a reader can leave out
columns: as Zstandard frames where there is much to compress, as LZ4 frames where it is little; a tiny batch is stored as it is. Any Arrow implementation can read it behind the queue's schema message.

Whoever may write to the store makes segments, so what a segment says of itself is checked before it is used: how much memory it would take
before it is unpacked, and every offset in it before a value is looked at. (Arrow itself would read beyond the end of a buffer.)
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence

import pyarrow as pa
import pyarrow.types as pat

from penstock.arguments import did_you_mean, in_quotes
from penstock.arrow.ipc_messages import MAX_UNPACKED, any_values, is_sound, unpacked_size
from penstock.errors import SchemaMismatch, StoreError

# Below this an LZ4 frame for each buffer costs more than it saves, and the writer's set-up more than both.
_TINY_BYTES = 1024

_PREFIX = struct.Struct("<Ii")
_CONTINUATION = 0xFFFFFFFF
_END_OF_STREAM = _PREFIX.pack(_CONTINUATION, 0)
# LZ4 is quicker to set up. From here on Zstandard's first level takes as long and writes about half as much.
_LARGE_BYTES = 64 * 1024

_LZ4 = pa.ipc.IpcWriteOptions(compression="lz4")
_ZSTD = pa.ipc.IpcWriteOptions(compression=pa.Codec("zstd", compression_level=1))


def encode(batch: pa.RecordBatch) -> pa.Buffer:
    """Return the batch as one IPC record-batch message, without its schema.

    Parameters
    ----------
    batch
        Rows in the queue's canonical schema. Of a slice, only the slice's rows are written.

    Returns
    -------
    pa.Buffer
        What ``decode`` reads; compressed unless the batch is tiny.
    """
    plain = batch.serialize() if _may_be_tiny(batch) else None
    if plain is not None and plain.size <= _TINY_BYTES:
        return plain
    compressed = _compress(batch)
    return plain if plain is not None and plain.size <= compressed.size else compressed


def _may_be_tiny(batch: pa.RecordBatch) -> bool:
    # Cheap questions first: a column takes at least a byte for eight rows, whole buffers are no less than what a slice has of
    # them, and asking for its real size walks all of them.
    if batch.num_rows > 8 * _TINY_BYTES:
        return False
    return bool(batch.get_total_buffer_size() <= 2 * _TINY_BYTES or batch.nbytes <= 2 * _TINY_BYTES)


def _compress(batch: pa.RecordBatch) -> pa.Buffer:
    sink = pa.BufferOutputStream()
    options = _ZSTD if batch.nbytes >= _LARGE_BYTES else _LZ4
    with pa.ipc.new_stream(sink, batch.schema, options=options) as writer:
        writer.write_batch(batch)
    stream = sink.getvalue()
    _, metadata_size = _PREFIX.unpack_from(stream)
    start = _PREFIX.size + metadata_size
    return stream.slice(start, stream.size - start - len(_END_OF_STREAM))


def decode(
    payload: bytes | memoryview | pa.Buffer, schema: pa.Schema, columns: Sequence[str] | None = None
) -> pa.RecordBatch:
    """Return the rows of a segment.

    Parameters
    ----------
    payload
        What ``encode`` returned. Uncompressed buffers are not copied: keep nothing mutable behind it.
    schema
        The queue's schema, the one that the rows were written with.
    columns
        The columns to return, in this order; the others are not decompressed. ``None`` returns all.

    Raises
    ------
    StoreError
        The payload is not a whole segment of this schema.
    SchemaMismatch
        The schema has no column of a wanted name.
    """
    buffer = payload if isinstance(payload, pa.Buffer) else pa.py_buffer(payload)
    _check_frame(buffer)
    try:
        batch = _unpacked(buffer, schema, columns)
        if not is_sound(batch):
            # A text that is no UTF-8, or a number out of its type's range, is what its writer wrote.
            _unpacked(buffer, any_values(schema), columns).validate(full=True)
    except (pa.ArrowException, OSError) as error:
        raise _corrupt(buffer, str(error)) from error
    return batch


def _unpacked(buffer: pa.Buffer, schema: pa.Schema, columns: Sequence[str] | None) -> pa.RecordBatch:
    if columns is None:
        return pa.ipc.read_record_batch(buffer, schema)
    return _decode_some(buffer, schema, columns)


def decode_each(
    payloads: Sequence[bytes | memoryview | pa.Buffer], schema: pa.Schema
) -> Iterator[pa.RecordBatch]:
    """The rows of several segments, a batch for each, as they are asked for; small ones cost a fraction of a ``decode`` each.

    Parameters
    ----------
    payloads, schema
        As for ``decode``, which is asked about the first one that cannot be read.

    Raises
    ------
    StoreError
        As ``decode``.
    """
    for payload in payloads:
        _check_frame(pa.py_buffer(payload))
    stream = pa.py_buffer(b"".join((schema.serialize(), *payloads, _END_OF_STREAM)))
    done = 0
    try:
        with pa.ipc.open_stream(stream) as reader:
            for batch in reader:
                if not is_sound(batch):
                    decode(payloads[done], schema)
                yield batch
                done += 1
    except (pa.ArrowException, OSError) as error:
        decode(payloads[done], schema)
        raise _corrupt(pa.py_buffer(payloads[done]), str(error)) from error


def _decode_some(buffer: pa.Buffer, schema: pa.Schema, columns: Sequence[str]) -> pa.RecordBatch:
    wanted = sorted({_index(name, schema) for name in columns}) or [_cheapest(schema)]
    stream = pa.py_buffer(b"".join((schema.serialize(), buffer, _END_OF_STREAM)))
    options = pa.ipc.IpcReadOptions(included_fields=wanted)
    with pa.ipc.open_stream(stream, options=options) as reader:
        batch = reader.read_next_batch()
    return batch.select(list(columns))


def _index(name: str, schema: pa.Schema) -> int:
    index: int = schema.get_field_index(name)
    if index < 0:
        raise SchemaMismatch(
            f"There is no column {in_quotes(name)}; the columns are "
            f"{', '.join(schema.names)}.{did_you_mean(name, schema.names)}",
            column=name,
        )
    return index


def _cheapest(schema: pa.Schema) -> int:
    # Arrow reads an empty choice as "all", so a reader who wants no column but the number of rows pays for one small one.
    widths = [(field.type.bit_width, i) for i, field in enumerate(schema) if pat.is_primitive(field.type)]
    return min(widths, default=(0, 0))[1]


def _check_frame(buffer: pa.Buffer) -> None:
    if buffer.size < _PREFIX.size:
        raise _corrupt(buffer, "it is shorter than a message prefix")
    mark, metadata_size = _PREFIX.unpack_from(buffer)
    if mark != _CONTINUATION or not 0 < metadata_size <= buffer.size - _PREFIX.size:
        raise _corrupt(buffer, "it does not start with an Arrow message prefix")
    try:
        message = pa.ipc.read_message(buffer)
    except (pa.ArrowException, OSError) as error:
        raise _corrupt(buffer, str(error)) from error
    found = _PREFIX.size + metadata_size + (message.body.size if message.body is not None else 0)
    if message.type != "record batch" or found != buffer.size:
        raise _corrupt(buffer, f"it holds a {message.type} message of {found} bytes")
    unpacked = unpacked_size(message)
    if unpacked > MAX_UNPACKED:
        raise _corrupt(
            buffer,
            f"it would take {unpacked} bytes when it is unpacked, and no segment has more than {MAX_UNPACKED}",
        )


def _corrupt(buffer: pa.Buffer, reason: str) -> StoreError:
    return StoreError(
        f"A segment of {buffer.size} bytes cannot be read: {reason}. It is damaged or was written with another schema; "
        "restore the store from a backup, or trim the partition past it.",
        condition="SEGMENT_UNREADABLE",
        size=buffer.size,
    )
