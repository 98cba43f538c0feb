"""Rows that have one of some keys are found whatever order they are in."""

from __future__ import annotations

import uuid
from collections.abc import Sequence

import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st

from penstock.tables.changes.lookup_keys import LookupKeys, from_arrow_stream, to_arrow_stream

NUMBERS = st.lists(st.integers(-3, 12) | st.none(), max_size=25)
KINDS = [
    *(pa.int8(), pa.int32(), pa.int64(), pa.uint8(), pa.date32(), pa.decimal128(9, 2), pa.bool_()),
    *(pa.timestamp("us"), pa.timestamp("us", "UTC"), pa.string(), pa.large_string(), pa.binary(), pa.uuid()),
]
ORDERS = ["none", "ascending", "descending"]


@given(rows=NUMBERS, keys=NUMBERS, kind=st.sampled_from(KINDS), order=st.sampled_from(ORDERS))
def test_rows_of_keys_are_found(
    rows: list[int | None], keys: list[int | None], kind: pa.DataType, order: str
) -> None:
    if order != "none":
        rows = sorted((row for row in rows if row is not None), reverse=order == "descending")
    if pa.types.is_boolean(kind) or pa.types.is_unsigned_integer(kind):
        most = 2 if pa.types.is_boolean(kind) else 5
        rows, keys = ([each and abs(each) % most for each in some] for some in (rows, keys))
    wanted = LookupKeys(pa.table({"other": column(kind, keys)}))
    expected = [place for place, row in enumerate(rows) if row is not None and row in keys]
    stored = pa.chunked_array([column(kind, rows[:7]), column(kind, rows[7:])])
    assert wanted.positions_in(pa.table({"k": stored})).tolist() == expected
    two = LookupKeys(pa.table({"other": column(kind, keys), "more": pa.array(keys, pa.int64())}))
    assert two.positions_in(pa.table({"k": stored, "n": pa.array(rows, pa.int64())})).tolist() == expected


@given(rows=NUMBERS, keys=NUMBERS, sizes=st.lists(st.integers(1, 5), min_size=25, max_size=25))
def test_rows_are_found_batch_by_batch(
    rows: list[int | None], keys: list[int | None], sizes: list[int]
) -> None:
    table = pa.table({"k": pa.array(rows, pa.int64()), "v": range(len(rows))})
    batches, at = [], 0
    for size in sizes:
        batches += table.slice(at, size).combine_chunks().to_batches()
        at += size
    found = list(LookupKeys(pa.table({"k": pa.array(keys, pa.int64())})).rows_in(batches))
    expected = [place for place, row in enumerate(rows) if row is not None and row in keys]
    assert [place for places, _ in found for place in places.tolist()] == expected
    assert [row for _, batch in found for row in batch.column("v").to_pylist()] == expected


def test_found_rows_arrive_as_they_were() -> None:
    rows = pa.table({"k": [1, 2], "v": [None, "é"]})
    for each in (rows, rows.slice(0, 0)):
        assert from_arrow_stream(to_arrow_stream(each)).equals(each)


def column(kind: pa.DataType, values: Sequence[int | None]) -> pa.Array:
    numbers = pa.array(values, pa.int32())
    if kind == pa.uuid():
        return pa.array([None if each is None else uuid.UUID(int=each + 9).bytes for each in values], kind)
    if pa.types.is_date(kind) or pa.types.is_decimal(kind):
        return numbers.cast(kind) if pa.types.is_date(kind) else numbers.cast(pa.decimal128(10, 0)).cast(kind)
    if pa.types.is_binary(kind):
        return numbers.cast(pa.string()).cast(kind)
    return numbers.cast(pa.int64()).cast(kind)
