"""What an Arrow message says of itself, before anything in it is believed."""

from __future__ import annotations

import struct

import pyarrow as pa
import pyarrow.types as pat

MAX_UNPACKED = 1 << 30
"""Bytes of a segment, or of what is kept in a checkpoint, when it is unpacked. A segment that Penstock writes has about 32 MiB, or one row."""
_OFFSET, _FIELD, _COUNT = struct.Struct("<i"), struct.Struct("<H"), struct.Struct("<I")
_BUFFER = struct.Struct("<qq")
_LENGTH = struct.Struct("<q")
# Where fields stand in their tables, by Arrow's Message.fbs.
_HEADER, _BUFFERS, _COMPRESSION = 2, 2, 3


def unpacked_size(message: pa.Message) -> int:
    """Bytes of the buffers of a record batch when they are unpacked; 0 where they are used as they are.

    Each compressed buffer says before its first byte how long it will be, and Arrow sets that aside without a question.

    Parameters
    ----------
    message
        A record-batch message, whose metadata Arrow has verified.
    """
    metadata = memoryview(message.metadata)
    batch = _followed(metadata, _place(metadata, _OFFSET.unpack_from(metadata)[0], _HEADER))
    if batch is None or _place(metadata, batch, _COMPRESSION) is None:
        return 0
    buffers = _followed(metadata, _place(metadata, batch, _BUFFERS))
    if buffers is None:
        return 0
    (count,) = _COUNT.unpack_from(metadata, buffers)
    first, body = buffers + _COUNT.size, memoryview(message.body)
    listed = metadata[first : first + count * _BUFFER.size]
    return sum(_unpacked(body, offset, length) for offset, length in _BUFFER.iter_unpack(listed) if length)


def _unpacked(body: memoryview, offset: int, length: int) -> int:
    if length < _LENGTH.size or not 0 <= offset <= len(body) - _LENGTH.size:
        return 0
    # -1 stands for one that is not compressed.
    return max(int(_LENGTH.unpack_from(body, offset)[0]), 0)


def _place(metadata: memoryview, table: int, field: int) -> int | None:
    """Where a field of a flatbuffer's table is; None where it is left out."""
    layout = table - _OFFSET.unpack_from(metadata, table)[0]
    entry = _FIELD.size * (2 + field)
    if entry >= _FIELD.unpack_from(metadata, layout)[0]:
        return None
    (found,) = _FIELD.unpack_from(metadata, layout + entry)
    return table + int(found) if found else None


def _followed(metadata: memoryview, place: int | None) -> int | None:
    """Where the table or the vector is that a field leads to."""
    return None if place is None else place + int(_COUNT.unpack_from(metadata, place)[0])


def kept_table(data: bytes) -> pa.Table:
    """The rows of an Arrow stream that was kept where somebody else may have written.

    Raises
    ------
    ValueError
        When it is none, leads out of its buffers, or would take more than 1 GiB when it is unpacked.
    """
    try:
        return _kept(pa.py_buffer(data))
    except (pa.ArrowException, OSError, struct.error) as error:
        raise ValueError(f"it is no Arrow stream ({type(error).__name__})") from error


def _kept(data: pa.Buffer) -> pa.Table:
    first, *messages = pa.ipc.MessageReader.open_stream(data)
    schema, size = pa.ipc.read_schema(first), 0
    for message in messages:
        if message.type != "record batch":
            raise ValueError(f"it has a {message.type} message")
        size += unpacked_size(message)
        if size > MAX_UNPACKED:
            raise ValueError(f"it would take more than {MAX_UNPACKED} bytes when it is unpacked")
    batches = [pa.ipc.read_record_batch(message, schema) for message in messages]
    for message, batch in zip(messages, batches, strict=True):
        if not is_sound(batch):
            pa.ipc.read_record_batch(message, any_values(schema)).validate(full=True)
    return pa.Table.from_batches(batches, schema)


def is_sound(batch: pa.RecordBatch) -> bool:
    """Whether all offsets stay within their buffers, and all values within their types; next to unpacking it takes no time."""
    try:
        batch.validate(full=True)
    except pa.ArrowInvalid:
        return False
    return True


def any_values(schema: pa.Schema) -> pa.Schema:
    """The schema of the same buffers that allows any value, so that nothing but their shape is looked at when they are validated."""
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
    # Of the types of a queue these alone have a range.
    return pa.binary(16) if pat.is_decimal(kind) else pa.int64() if pat.is_time64(kind) else kind
