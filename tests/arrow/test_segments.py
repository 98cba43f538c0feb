from __future__ import annotations

import contextlib
import random
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.arrow.segments import decode, decode_each, encode
from penstock.errors import SchemaMismatchError, StoreError
from tests.support.arrow_strategies import tables

SCHEMA = pa.schema(
    [("id", pa.int64()), ("name", pa.string()), ("tags", pa.list_(pa.string())), ("ok", pa.bool_())]
)


def batch_of(rows: int) -> pa.RecordBatch:
    columns = {
        "id": list(range(rows)),
        "name": [f"name {i % 100}" if i % 7 else None for i in range(rows)],
        "tags": [["a", None] * (i % 3) for i in range(rows)],
        "ok": [i % 2 == 0 for i in range(rows)],
    }
    return pa.record_batch(columns, schema=SCHEMA)


def is_compressed(payload: pa.Buffer, schema: pa.Schema) -> bool:
    stream = b"".join((schema.serialize(), payload, b"\xff\xff\xff\xff\0\0\0\0"))
    size = pa.ipc.read_message(payload).body.size
    plain: int = pa.ipc.open_stream(stream).read_next_batch().serialize().size
    return bool(size < plain / 2)


@given(tables(), st.integers(0, 3))
def test_rows_are_read_back_unchanged(case: tuple[pa.Schema, list[dict[str, Any]]], skip: int) -> None:
    schema, rows = case
    whole = pa.RecordBatch.from_pylist(rows, schema=schema)
    for batch in (whole, whole.slice(skip), whole.slice(skip, 1)):
        payload = encode(batch)
        for form in (payload, payload.to_pybytes(), memoryview(payload.to_pybytes())):
            decoded = decode(form, schema)
            decoded.validate(full=True)
            assert decoded.equals(batch)
            assert decoded.schema.equals(schema, check_metadata=True)


@pytest.mark.parametrize("rows", [0, 1, 30, 5000])
def test_columns_are_returned_in_the_requested_order(rows: int) -> None:
    batch = batch_of(rows)
    payload = encode(batch).to_pybytes()
    for names in (["ok", "id"], ["tags"], ["name", "tags", "id", "ok"]):
        assert decode(payload, SCHEMA, names).equals(batch.select(names))


@pytest.mark.parametrize("rows", [0, 1, 5000])
def test_reading_no_columns_still_returns_the_number_of_rows(rows: int) -> None:
    decoded = decode(encode(batch_of(rows)), SCHEMA, [])
    assert (decoded.num_columns, decoded.num_rows) == (0, rows)
    strings = pa.record_batch({"s": ["a"] * rows}, schema=pa.schema([("s", pa.string())]))
    assert decode(encode(strings), strings.schema, []).num_rows == rows


def test_a_segment_is_one_ipc_message_that_any_arrow_reads_after_the_schema() -> None:
    for rows in (1, 5000):
        payload = encode(batch_of(rows))
        stream = b"".join((SCHEMA.serialize(), payload, b"\xff\xff\xff\xff\0\0\0\0"))
        assert pa.ipc.open_stream(stream).read_all().equals(pa.Table.from_batches([batch_of(rows)]))
        assert pa.ipc.read_message(payload).type == "record batch"


def test_many_rows_are_compressed_and_a_tiny_batch_is_not() -> None:
    assert is_compressed(encode(batch_of(5000)), SCHEMA)
    one = batch_of(1)
    assert encode(one).equals(one.serialize())


def test_a_stored_batch_exceeds_its_plain_form_only_by_the_overhead_of_lz4() -> None:
    for rows in (1, 2, 5, 10, 20, 50, 100):
        noise = pa.record_batch({"b": [random.Random(rows).randbytes(40) for _ in range(rows)]})
        assert encode(noise).size <= noise.serialize().size * 1.02 + 64


def nested(rows: int) -> pa.RecordBatch:
    numbers = pa.array(range(rows))
    twice = pa.array(range(0, 2 * rows + 1, 2), pa.int32())
    lists = pa.ListArray.from_arrays(twice, pa.array(range(2 * rows)))
    structs = pa.StructArray.from_arrays([numbers, lists], ["x", "y"])
    texts = numbers.cast(pa.string())
    maps = pa.MapArray.from_arrays(pa.array(range(rows + 1), pa.int32()), texts, structs)
    return pa.record_batch({"n": numbers, "l": lists, "s": structs, "t": texts, "m": maps})


def test_one_row_of_a_large_batch_takes_a_few_hundred_bytes() -> None:
    row = nested(200_000).slice(123_456, 1)
    payload = encode(row)
    assert payload.size < 1500
    assert decode(payload, row.schema).equals(row)


def test_a_slice_of_a_large_batch_takes_only_the_space_of_its_rows() -> None:
    slice_ = nested(200_000).slice(100_000, 5_000)
    fresh = pa.RecordBatch.from_pylist(slice_.to_pylist(), schema=slice_.schema)
    assert encode(slice_).size <= encode(fresh).size * 1.01


def test_uncompressed_rows_are_not_copied() -> None:
    payload = encode(batch_of(1))
    column = decode(payload, SCHEMA).column("id").buffers()[1]
    assert payload.address <= column.address < payload.address + payload.size


@given(tables())
def test_several_segments_are_decoded_one_by_one(case: tuple[pa.Schema, list[dict[str, Any]]]) -> None:
    schema, rows = case
    batches = [
        pa.RecordBatch.from_pylist(rows[start : start + 2], schema=schema) for start in range(len(rows))
    ]
    decoded = list(decode_each([encode(batch) for batch in batches], schema))
    assert len(decoded) == len(batches)
    assert all(one.equals(other) for one, other in zip(decoded, batches, strict=True))


def test_an_unknown_column_is_refused_with_the_nearest_as_a_suggestion() -> None:
    with pytest.raises(SchemaMismatchError, match=r"MISMATCH.UNKNOWN_COLUMN\].*Did you mean 'name'"):
        decode(encode(batch_of(1)), SCHEMA, ["nmae"])


@pytest.mark.parametrize("columns", [None, ["name"]])
@pytest.mark.parametrize("rows", [1, 5000])
def test_a_truncated_or_foreign_payload_is_a_store_error(rows: int, columns: list[str] | None) -> None:
    payload = encode(batch_of(rows)).to_pybytes()
    message = SCHEMA.serialize().to_pybytes()
    cut = [payload[:size] for size in (0, 3, 8, 100, len(payload) // 2, len(payload) - 1)]
    for bad in (*cut, payload + b"\0", b"\0" * 64, b"nonsense" * 10, message, message + payload):
        with pytest.raises(StoreError, match="cannot be read") as found:
            decode(bad, SCHEMA, columns)
        assert found.value.condition == "SEGMENT_UNREADABLE"
        assert found.value.parameters["size"] == len(bad)


@pytest.mark.parametrize("place", [0, 1, 3])
def test_a_truncated_or_foreign_segment_among_several_is_a_store_error(place: int) -> None:
    good = [encode(batch_of(rows)).to_pybytes() for rows in (1, 5000, 2)]
    message = SCHEMA.serialize().to_pybytes()
    cut = [good[1][:size] for size in (0, 3, 8, 100, len(good[1]) // 2, len(good[1]) - 1)]
    end = b"\xff\xff\xff\xff\0\0\0\0"
    for bad in (*cut, b"\0" * 64, b"nonsense" * 10, message, end, good[0] + good[0], good[0] + end):
        with pytest.raises(StoreError, match="cannot be read") as found:
            list(decode_each([*good[:place], bad, *good[place:]], SCHEMA))
        assert found.value.condition == "SEGMENT_UNREADABLE"


@pytest.mark.parametrize("columns", [None, ["n"]])
def test_rows_of_another_schema_are_a_store_error(columns: list[str] | None) -> None:
    payload = encode(pa.record_batch({"n": [1, 2, 3]}))
    with pytest.raises(StoreError):
        decode(payload, pa.schema([("a", pa.int64()), ("n", pa.string()), ("b", pa.int8())]), columns)


@pytest.mark.parametrize("rows", [1, 300])
def test_flipped_bytes_raise_nothing_but_store_errors(rows: int) -> None:
    payload = encode(batch_of(rows)).to_pybytes()
    chance = random.Random(rows)
    for _ in range(500):
        damaged = bytearray(payload)
        for _ in range(chance.choice([1, 2, 8])):
            damaged[chance.randrange(len(damaged))] = chance.randrange(256)
        with contextlib.suppress(StoreError):
            decode(bytes(damaged), SCHEMA, chance.choice([None, ["name"]]))
        with contextlib.suppress(StoreError):
            list(decode_each([payload, bytes(damaged), payload], SCHEMA))
