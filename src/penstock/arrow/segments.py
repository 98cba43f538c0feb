"""The stored form of rows: segments of queues, and tables in checkpoints.

A segment is exactly one Arrow IPC record-batch message, in the encapsulated form: ``FFFFFFFF``, the length
of the metadata (int32, little-endian), the metadata (flatbuffer), the body. It has no schema message and no
end-of-stream marker, because the queue stores its schema once. Body buffers are compressed separately, as
described in the metadata, so that readers can skip columns: as Zstandard frames if the batch is large, as LZ4
frames if it is small. A tiny batch is stored uncompressed. Any Arrow implementation can read a segment after
the queue's schema message.

Any program that may write to the store can create segments, so a segment is checked before it is used: its
decompressed size before it is decompressed, and every offset in it before a value is read. (Arrow itself
would read beyond the end of a buffer.)
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence

import pyarrow as pa
import pyarrow.types as pat

from penstock.arrow.arrays import PerSchema, nested_fields
from penstock.arrow.schema import unknown_column
from penstock.errors import StoreError

MAX_DECOMPRESSED = 1 << 30
"""The maximum decompressed size of a segment or stored table."""
MAX_VALUES_WITHOUT_BYTES = 1 << 24
"""The maximum number of values without bytes, such as those of ``array<void>``, in the lists of a segment."""
_ALWAYS_ALLOWED = 64 << 20
"""The decompressed size that is always allowed. Penstock writes segments of about 32 MiB, or of one row."""
_MAX_RATIO = 128
"""The maximum decompression ratio of larger segments, so that a few stored bytes cannot make readers allocate
much memory."""

# Below this size, an LZ4 frame for each buffer costs more than it saves, and setting up the writer costs more
# than both.
_TINY_BYTES = 1024
# From this size on, Zstandard's first level is as fast as LZ4, which is quicker to set up, and its output is
# about half as large.
_LARGE_BYTES = 64 * 1024

_PREFIX = struct.Struct("<Ii")
_CONTINUATION = 0xFFFFFFFF
_END_OF_STREAM = _PREFIX.pack(_CONTINUATION, 0)

_LZ4 = pa.ipc.IpcWriteOptions(compression="lz4")
_ZSTD = pa.ipc.IpcWriteOptions(compression=pa.Codec("zstd", compression_level=1))


def encode(batch: pa.RecordBatch) -> pa.Buffer:
    """Return a batch as one IPC record-batch message.

    The message is compressed unless the batch is tiny, or so large and uniform that readers would refuse the
    compression ratio. For a slice, only its rows are written.
    """
    uncompressed = batch.serialize() if _may_be_tiny(batch) else None
    if uncompressed is not None and uncompressed.size <= _TINY_BYTES:
        return uncompressed
    compressed = _compress(batch)
    if uncompressed is not None and uncompressed.size <= compressed.size:
        return uncompressed
    if batch.nbytes > _ALWAYS_ALLOWED // 2 and _exceeds_ratio(compressed):
        return batch.serialize()
    return compressed


def _exceeds_ratio(segment: pa.Buffer) -> bool:
    return decompressed_size(pa.ipc.read_message(segment)) > _max_decompressed_size(segment)


def _max_decompressed_size(segment: pa.Buffer) -> int:
    return min(max(_ALWAYS_ALLOWED, int(segment.size) * _MAX_RATIO), MAX_DECOMPRESSED)


def _may_be_tiny(batch: pa.RecordBatch) -> bool:
    # Cheap checks first: a column takes at least one byte for eight rows, and buffers are at least as large
    # as slices of them. Computing the exact size visits all buffers.
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
    """Return the rows of a segment with ``columns``; other columns are not decompressed.

    Uncompressed buffers are not copied, so do not change the payload afterwards. ``schema`` is the queue's
    schema at the time of writing.
    """
    buffer = payload if isinstance(payload, pa.Buffer) else pa.py_buffer(payload)
    _check_frame(buffer)
    try:
        batch = _read(buffer, schema, columns)
        if not _is_valid(batch):
            # Text that is not UTF-8 and numbers outside their type's range are returned as they were written.
            _read(buffer, any_values(schema), columns).validate(full=True)
    except (pa.ArrowException, OSError) as error:
        raise _unreadable(buffer, str(error)) from error
    if _schema_may_lack_bytes(schema) and (count := values_without_bytes(batch)) > MAX_VALUES_WITHOUT_BYTES:
        raise _unreadable(buffer, f"it claims {count} values without any bytes")
    return batch


def decode_each(
    payloads: Sequence[bytes | memoryview | pa.Buffer], schema: pa.Schema
) -> Iterator[pa.RecordBatch]:
    """Yield the rows of several segments, one batch each; much faster than ``decode`` for small segments."""
    for payload in payloads:
        _check_frame(pa.py_buffer(payload))
    stream = pa.py_buffer(b"".join((schema.serialize(), *payloads, _END_OF_STREAM)))
    decoded, may_lack_bytes = 0, _schema_may_lack_bytes(schema)
    try:
        with pa.ipc.open_stream(stream) as reader:
            for batch in reader:
                if not _is_valid(batch) or (
                    may_lack_bytes and values_without_bytes(batch) > MAX_VALUES_WITHOUT_BYTES
                ):
                    decode(payloads[decoded], schema)
                yield batch
                decoded += 1
    except (pa.ArrowException, OSError) as error:
        decode(payloads[decoded], schema)  # raises the error that names the fault
        raise _unreadable(pa.py_buffer(payloads[decoded]), str(error)) from error


def _read(buffer: pa.Buffer, schema: pa.Schema, columns: Sequence[str] | None) -> pa.RecordBatch:
    if columns is None:
        return pa.ipc.read_record_batch(buffer, schema)
    included = sorted({_index(name, schema) for name in columns}) or [_smallest_column(schema)]
    stream = pa.py_buffer(b"".join((schema.serialize(), buffer, _END_OF_STREAM)))
    options = pa.ipc.IpcReadOptions(included_fields=included)
    with pa.ipc.open_stream(stream, options=options) as reader:
        batch = reader.read_next_batch()
    return batch.select(list(columns))


def _index(name: str, schema: pa.Schema) -> int:
    index: int = schema.get_field_index(name)
    if index < 0:
        raise unknown_column(name, schema)
    return index


def _smallest_column(schema: pa.Schema) -> int:
    # For an empty list, Arrow reads all columns. So read one column to count the rows.
    widths = [(field.type.bit_width, i) for i, field in enumerate(schema) if pat.is_primitive(field.type)]
    return min(widths, default=(0, 0))[1]


def _check_frame(buffer: pa.Buffer) -> None:
    if buffer.size < _PREFIX.size:
        raise _unreadable(buffer, "it is shorter than a message prefix")
    marker, metadata_size = _PREFIX.unpack_from(buffer)
    if marker != _CONTINUATION or not 0 < metadata_size <= buffer.size - _PREFIX.size:
        raise _unreadable(buffer, "it does not start with an Arrow message prefix")
    try:
        message = pa.ipc.read_message(buffer)
    except (pa.ArrowException, OSError) as error:
        raise _unreadable(buffer, str(error)) from error
    size = _PREFIX.size + metadata_size + (message.body.size if message.body is not None else 0)
    if message.type != "record batch" or size != buffer.size:
        raise _unreadable(buffer, f"it holds a {message.type} message of {size} bytes")
    try:
        decompressed, limit = decompressed_size(message), _max_decompressed_size(buffer)
    except ValueError as error:
        raise _unreadable(buffer, str(error)) from error
    if decompressed > limit:
        raise _unreadable(
            buffer,
            f"it would take {decompressed} bytes when it is unpacked, but a segment of its size may take "
            f"{limit}",
        )


def _unreadable(buffer: pa.Buffer, reason: str) -> StoreError:
    return StoreError(
        f"a segment of {buffer.size} bytes cannot be read ({reason}): it is damaged or was written with "
        "another schema. Restore the store from a backup, or trim the partition past it",
        condition="SEGMENT_UNREADABLE",
        size=buffer.size,
    )


def read_stored_table(data: bytes) -> pa.Table:
    """Read an Arrow stream that another program may have written.

    Raise ValueError if it is not an Arrow stream, has offsets outside its buffers, or its decompressed size
    is more than 1 GiB.
    """
    try:
        return _read_stored_table(pa.py_buffer(data))
    except (pa.ArrowException, OSError, struct.error) as error:
        raise ValueError(f"it is not an Arrow stream ({type(error).__name__})") from error


def _read_stored_table(data: pa.Buffer) -> pa.Table:
    first, *messages = pa.ipc.MessageReader.open_stream(data)
    schema, size = pa.ipc.read_schema(first), 0
    for message in messages:
        if message.type != "record batch":
            raise ValueError(f"it has a {message.type} message")
        size += decompressed_size(message)
        if size > MAX_DECOMPRESSED:
            raise ValueError(f"it would take more than {MAX_DECOMPRESSED} bytes when it is unpacked")
    batches = [pa.ipc.read_record_batch(message, schema) for message in messages]
    for message, batch in zip(messages, batches, strict=True):
        if not _is_valid(batch):
            pa.ipc.read_record_batch(message, any_values(schema)).validate(full=True)
    return pa.Table.from_batches(batches, schema)


def values_without_bytes(batch: pa.RecordBatch) -> int:
    """Return the length of the longest array inside lists and maps whose values have no bytes.

    A few bytes can claim any number of such values: those of ``array<void>`` and ``array<struct<>>``.
    """
    return max(
        (_longest_without_bytes(column) for column in batch.columns if _may_lack_bytes(column.type)),
        default=0,
    )


@PerSchema
def _schema_may_lack_bytes(schema: pa.Schema) -> bool:
    return any(_may_lack_bytes(field.type) for field in schema)


def _may_lack_bytes(kind: pa.DataType) -> bool:
    """Return whether a list or a map in the type has values without bytes."""
    if not pat.is_nested(kind):
        return False
    if pat.is_struct(kind):
        return any(_may_lack_bytes(field.type) for field in kind)
    nested = [field.type for field in nested_fields(kind)]
    return any(_has_no_bytes(nested_type) or _may_lack_bytes(nested_type) for nested_type in nested)


def _has_no_bytes(kind: pa.DataType) -> bool:
    return pat.is_null(kind) or (pat.is_struct(kind) and all(_has_no_bytes(field.type) for field in kind))


def _longest_without_bytes(array: pa.Array) -> int:
    kind = array.type
    if pat.is_struct(kind):
        children, lengths = [array.field(index) for index in range(kind.num_fields)], []
    else:
        children = (
            [array.keys, array.items] if pat.is_map(kind) else [array.values] if pat.is_list(kind) else []
        )
        lengths = [len(child) for child in children if _has_no_bytes(child.type)]
    return max([*lengths, *map(_longest_without_bytes, children)], default=0)


def _is_valid(batch: pa.RecordBatch) -> bool:
    """Return whether all offsets are within their buffers, and all values within the range of their types.

    This is fast compared to decompression.
    """
    try:
        batch.validate(full=True)
    except pa.ArrowInvalid:
        return False
    return True


def any_values(schema: pa.Schema) -> pa.Schema:
    """Return a schema for the same buffers that allows any values, so that validation only checks offsets."""
    return pa.schema([pa.field(field.name, _any_value(field.type)) for field in schema])


def _any_value(kind: pa.DataType) -> pa.DataType:
    if pat.is_struct(kind):
        return pa.struct([pa.field(field.name, _any_value(field.type)) for field in kind])
    if pat.is_map(kind):
        entry = pa.struct([("key", _any_value(kind.key_type)), ("value", _any_value(kind.item_type))])
        return pa.list_(entry)
    if pat.is_list(kind):
        return pa.list_(_any_value(kind.value_type))
    if pat.is_string(kind):
        return pa.binary()
    # The other types whose values have a limited range.
    return pa.binary(16) if pat.is_decimal(kind) else pa.int64() if pat.is_time64(kind) else kind


_OFFSET, _FIELD, _COUNT = struct.Struct("<i"), struct.Struct("<H"), struct.Struct("<I")
_BUFFER, _LENGTH = struct.Struct("<qq"), struct.Struct("<q")
# The positions of fields in their tables, by Arrow's Message.fbs.
_HEADER, _CUSTOM_METADATA = 2, 4
_BUFFERS, _COMPRESSION = 2, 3
_V5 = pa.ipc.MetadataVersion.V5


def decompressed_size(message: pa.Message) -> int:
    """Return the decompressed size of a record batch's compressed buffers.

    Each compressed buffer begins with its decompressed length, which Arrow allocates without a check. Arrow
    has verified the metadata of the message.

    Raises
    ------
    ValueError
        When the message is not of version 5, or has custom metadata: Arrow 0.17 specified the compression
        there, in version 4, and readers still accept it. Or when buffers share bytes, so that a copy of the
        rows is larger than the message.
    """
    metadata = memoryview(message.metadata)
    root = _OFFSET.unpack_from(metadata)[0]
    if message.metadata_version != _V5 or _field_position(metadata, root, _CUSTOM_METADATA) is not None:
        raise ValueError("it is in an older or extended form of the format")
    batch = _referenced_position(metadata, _field_position(metadata, root, _HEADER))
    if batch is None:
        return 0
    buffers = _referenced_position(metadata, _field_position(metadata, batch, _BUFFERS))
    if buffers is None:
        return 0
    (count,) = _COUNT.unpack_from(metadata, buffers)
    first, body = buffers + _COUNT.size, memoryview(b"" if message.body is None else message.body)
    buffer_list = list(_BUFFER.iter_unpack(metadata[first : first + count * _BUFFER.size]))
    if sum(max(length, 0) for _, length in buffer_list) > len(body):
        raise ValueError("its buffers share bytes")
    if _field_position(metadata, batch, _COMPRESSION) is None:
        return 0
    return sum(_buffer_size(body, offset, length) for offset, length in buffer_list if length)


def _buffer_size(body: memoryview, offset: int, length: int) -> int:
    if length < _LENGTH.size or not 0 <= offset <= len(body) - _LENGTH.size:
        return 0
    # -1 marks an uncompressed buffer.
    return max(int(_LENGTH.unpack_from(body, offset)[0]), 0)


def _field_position(metadata: memoryview, table: int, field: int) -> int | None:
    """Return the position of a field in a flatbuffer's table; None if the field is absent."""
    layout = table - _OFFSET.unpack_from(metadata, table)[0]
    entry = _FIELD.size * (2 + field)
    if entry >= _FIELD.unpack_from(metadata, layout)[0]:
        return None
    (offset,) = _FIELD.unpack_from(metadata, layout + entry)
    return table + int(offset) if offset else None


def _referenced_position(metadata: memoryview, position: int | None) -> int | None:
    """Return the position of the table or vector to which a field points."""
    return None if position is None else position + int(_COUNT.unpack_from(metadata, position)[0])
