"""Segments made by an attacker.

None takes more memory than a segment is allowed, or makes a reader access data outside its buffers.
"""

from __future__ import annotations

import gc
import random
import struct
from collections.abc import Callable
from contextlib import suppress
from decimal import Decimal

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.arrow import segments
from penstock.arrow.segments import (
    MAX_DECOMPRESSED,
    any_values,
    decode,
    decode_each,
    decompressed_size,
    encode,
    read_stored_table,
)
from penstock.errors import StoreError
from tests.support.arrow_strategies import tables

WIDE = 1 << 30
Read = Callable[[bytes, pa.Schema], pa.RecordBatch]
READS: list[Read] = [
    lambda payload, schema: decode(payload, schema),
    lambda payload, schema: decode(payload, schema, schema.names),
    lambda payload, schema: next(decode_each([payload], schema)),
]
reads = pytest.mark.parametrize("read", READS, ids=["all", "some", "each"])


def body_of(payload: bytes | bytearray) -> int:
    return 8 + int(struct.unpack_from("<Ii", payload)[1])


def older_form(
    batch: pa.RecordBatch, version: pa.ipc.MetadataVersion, metadata: dict[str, str] | None
) -> bytes:
    sink = pa.BufferOutputStream()
    options = pa.ipc.IpcWriteOptions(metadata_version=version)
    with pa.ipc.new_stream(sink, batch.schema, options=options) as writer:
        writer.write_batch(batch, custom_metadata=metadata)
    stream: bytes = sink.getvalue().to_pybytes()
    return stream[body_of(stream) : -8]


@reads
@pytest.mark.parametrize(
    ("version", "metadata"),
    [
        (pa.ipc.MetadataVersion.V4, {"ARROW:experimental_compression": "zstd"}),
        (pa.ipc.MetadataVersion.V4, None),
        (pa.ipc.MetadataVersion.V5, {"ARROW:experimental_compression": "zstd"}),
    ],
    ids=["4 and compressed", "4", "5 and compressed"],
)
def test_a_bomb_in_an_older_form_of_the_format_is_refused(
    read: Read, version: pa.ipc.MetadataVersion, metadata: dict[str, str] | None
) -> None:
    """Arrow decompresses its buffers although the metadata of the batch does not say so."""
    packed = pa.Codec("zstd").compress(bytes(8 << 20), asbytes=True)
    data = struct.pack("<q", 8 << 20) + packed + bytes(-len(packed) % 8)
    column = pa.Array.from_buffers(pa.int64(), len(data) // 8, [None, pa.py_buffer(data)])
    batch = pa.RecordBatch.from_arrays([column], ["v"])
    payload = older_form(batch, version, metadata)
    before = pa.total_allocated_bytes()
    with pytest.raises(StoreError, match="older or extended form") as caught:
        read(payload, batch.schema)
    assert caught.value.condition == "SEGMENT_UNREADABLE"
    assert pa.total_allocated_bytes() - before < 1 << 20
    with pytest.raises(ValueError, match="older or extended form"):
        read_stored_table(batch.schema.serialize().to_pybytes() + payload)


@reads
def test_a_decompression_bomb_is_refused_before_it_is_unpacked(
    read: Read, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = pa.record_batch({"v": pa.array([bytes(8 << 20)])})
    payload = encode(batch).to_pybytes()
    assert len(payload) < 4096
    assert read(payload, batch.schema).equals(batch)
    monkeypatch.setattr(segments, "_ALWAYS_ALLOWED", 7 << 20)
    gc.collect()  # what other tests left behind is not to go in between
    before = pa.total_allocated_bytes()
    with pytest.raises(StoreError, match="would take 83") as caught:
        read(payload, batch.schema)
    assert caught.value.condition == "SEGMENT_UNREADABLE"
    assert pa.total_allocated_bytes() <= before


@reads
def test_a_large_row_that_compresses_too_well_is_stored_such_that_it_can_be_read(
    read: Read, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(segments, "_ALWAYS_ALLOWED", 1 << 20)
    batch = pa.record_batch({"v": pa.array([bytes(2 << 20)])})
    payload = encode(batch)
    assert payload.size > 2 << 20
    assert read(payload.to_pybytes(), batch.schema).equals(batch)
    varied = pa.record_batch({"v": pa.array([random.Random(1).randbytes(1 << 16) + bytes(2 << 20)])})
    payload = encode(varied)
    assert payload.size < 1 << 17
    assert read(payload.to_pybytes(), varied.schema).equals(varied)


@reads
@pytest.mark.parametrize("size", [MAX_DECOMPRESSED + 1, 1 << 40, (1 << 63) - 1])
def test_a_segment_that_declares_a_wrong_size_is_refused(read: Read, size: int) -> None:
    batch = pa.record_batch({"v": pa.array([bytes(1 << 20)])})
    payload = bytearray(encode(batch).to_pybytes())
    plain = struct.pack("<q", 1 << 20)
    place = payload.rindex(plain)
    struct.pack_into("<q", payload, place, size)
    with pytest.raises(StoreError, match="when it is unpacked"):
        read(bytes(payload), batch.schema)


@given(tables())
def test_the_unpacked_size_is_at_most_the_size_of_the_buffers(
    case: tuple[pa.Schema, list[dict[str, object]]],
) -> None:
    schema, rows = case
    batch = pa.RecordBatch.from_pylist(rows, schema=schema)
    message = pa.ipc.read_message(encode(batch))
    size = decompressed_size(message)
    plain = pa.ipc.read_message(batch.serialize()).body.size
    # Arrow's writer leaves single buffers as they are, where they would not get smaller.
    assert 0 <= size <= plain


@reads
def test_buffers_that_share_bytes_are_refused(read: Read) -> None:
    """A copy of the rows would take many times the size of the segment."""
    arrays = [pa.array([number], pa.int64()) for number in range(64)]
    batch = pa.RecordBatch.from_arrays(arrays, names=[f"c{number}" for number in range(64)])
    payload = bytearray(batch.serialize().to_pybytes())
    read(bytes(payload), batch.schema)
    # Each column has no validity buffer, and then one of 8 bytes.
    listed = payload.index(struct.pack("<4q", 0, 0, 0, 8), 0, body_of(payload))
    for number in range(64):
        struct.pack_into("<qq", payload, listed + 32 * number + 16, 0, 64 * 8)
    with pytest.raises(StoreError, match="its buffers share bytes"):
        read(bytes(payload), batch.schema)


COLUMNS = {
    "text": pa.array(["abc", "def", "ghi"]),
    "bytes": pa.array([b"abc", b"def", b"ghi"]),
    "list": pa.array([[1], [2], [3]], pa.list_(pa.int64())),
    "map": pa.array([[("a", 1)], [("b", 2)], [("c", 3)]], pa.map_(pa.string(), pa.int64())),
    "inside": pa.array([{"a": "abc"}, {"a": "def"}, {"a": "ghi"}]),
}


@reads
@pytest.mark.parametrize("name", COLUMNS)
@pytest.mark.parametrize("offset", [WIDE, -1])
def test_an_offset_outside_its_buffer_is_refused(read: Read, name: str, offset: int) -> None:
    batch = pa.record_batch({"v": COLUMNS[name]})
    payload = bytearray(batch.serialize().to_pybytes())
    offsets = struct.pack("<4i", *(range(4) if name in ("list", "map") else range(0, 12, 3)))
    struct.pack_into("<i", payload, payload.index(offsets, body_of(payload)) + 4, offset)
    with pytest.raises(StoreError) as caught:
        read(bytes(payload), batch.schema)
    assert caught.value.condition == "SEGMENT_UNREADABLE"


@reads
def test_invalid_values_are_read_unchanged(read: Read) -> None:
    wide = pa.array([10**30], pa.decimal128(38, 0))
    batch = pa.record_batch(
        {
            "text": pa.Array.from_buffers(pa.string(), 1, pa.array([b"\xff"]).buffers()),
            "number": pa.Array.from_buffers(pa.decimal128(5, 0), 1, wide.buffers()),
            "time": pa.Array.from_buffers(pa.time64("ns"), 1, pa.array([-1]).buffers()),
        }
    )
    found = read(encode(batch).to_pybytes(), batch.schema)
    assert found.column("text").cast(pa.binary()).to_pylist() == [b"\xff"]
    assert found.column("number").to_pylist() == [Decimal(10**30)]


@given(tables())
def test_any_schema_has_a_form_that_accepts_all_values(
    case: tuple[pa.Schema, list[dict[str, object]]],
) -> None:
    schema, rows = case
    batch = pa.RecordBatch.from_pylist(rows, schema=schema)
    found = pa.ipc.read_record_batch(encode(batch), any_values(schema))
    found.validate(full=True)
    assert found.num_rows == batch.num_rows


@pytest.mark.timeout(60)
@given(st.binary(max_size=400))
def test_arbitrary_bytes_raise_nothing_but_the_expected_errors(data: bytes) -> None:
    batch = pa.record_batch({"v": pa.array(["abc"] * 50)})
    payload = encode(batch).to_pybytes()
    place = body_of(payload) - len(data) // 2
    forged = payload[: max(place, 8)] + data
    forged = forged[: len(payload)] + payload[len(forged) :]
    with suppress(StoreError, UnicodeDecodeError):
        decode(forged, batch.schema).to_pylist()


def stream_of(table: pa.Table, **options: object) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema, options=pa.ipc.IpcWriteOptions(**options)) as writer:
        writer.write_table(table, max_chunksize=2)
    return bytes(sink.getvalue())


@pytest.mark.parametrize("rows", [0, 1, 5])
def test_a_kept_table_is_read_back_unchanged(rows: int) -> None:
    table = pa.table(COLUMNS).slice(0, min(rows, 3))
    table = pa.concat_tables([table, table]) if rows == 5 else table
    for options in ({}, {"compression": "zstd"}):
        found = read_stored_table(stream_of(table, **options))
        assert found.equals(table)
        assert found.schema.equals(table.schema)


@pytest.mark.parametrize(
    "data", [b"", b"\0" * 64, b"nonsense" * 9, pa.schema([("n", pa.int64())]).serialize().to_pybytes()[:40]]
)
def test_bytes_that_are_not_a_table_are_a_value_error(data: bytes) -> None:
    with pytest.raises(ValueError, match=r"."):
        read_stored_table(data)


def test_a_bomb_a_dictionary_or_an_offset_out_of_range_is_a_value_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plain = stream_of(pa.table({"text": COLUMNS["text"]}))
    offsets = struct.pack("<3i", 0, 3, 6)
    forged = bytearray(plain)
    struct.pack_into("<i", forged, forged.index(offsets) + 4, WIDE)
    with pytest.raises(ValueError, match="not an Arrow stream"):
        read_stored_table(bytes(forged))
    with pytest.raises(ValueError, match="dictionary"):
        read_stored_table(stream_of(pa.table({"text": COLUMNS["text"].dictionary_encode()})))
    monkeypatch.setattr(segments, "MAX_DECOMPRESSED", 1 << 20)
    with pytest.raises(ValueError, match="unpacked"):
        read_stored_table(stream_of(pa.table({"v": [bytes(2 << 20)]}), compression="zstd"))
