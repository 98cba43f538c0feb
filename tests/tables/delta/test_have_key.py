"""Rows that have one of some keys are found whatever order they are in."""

from __future__ import annotations

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.tables.delta.stored_files import have_key

NUMBERS = st.lists(st.integers(-3, 12) | st.none(), max_size=12)


@pytest.mark.parametrize("kind", [pa.int64(), pa.int8(), pa.timestamp("us"), pa.date32(), pa.string()])
@given(rows=NUMBERS, keys=NUMBERS, in_order=st.booleans())
def test_rows_of_keys_are_found(
    kind: pa.DataType, rows: list[int | None], keys: list[int | None], in_order: bool
) -> None:
    if in_order:
        rows = sorted(row for row in rows if row is not None)
    stored, wanted = (pa.table({"k": pa.array(each, pa.int32()).cast(pa.int64())}) for each in (rows, keys))
    expected = [row is not None and row in keys for row in rows]
    known = wanted.filter(wanted["k"].is_valid())
    types = pa.schema([("k", kind)])
    if pa.types.is_date(kind):
        stored, known = (table.cast(pa.schema([("k", pa.int32())])) for table in (stored, known))
    found = have_key(stored.cast(types), known.cast(types))
    assert found.tolist() == expected
    two = (table.append_column("j", table["k"]) for table in (stored.cast(types), known.cast(types)))
    assert have_key(*two).tolist() == expected
