"""Equal values have equal codes, and no others do, for every type."""

from __future__ import annotations

import math
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.spark.factorize import factorize, factorize_column, order_codes

SMALL = st.integers(0, 3)
TEXT = st.sampled_from(["", "a", "b", "ab", "☂"])
KINDS: dict[str, tuple[pa.DataType, st.SearchStrategy[Any]]] = {
    "bigint": (pa.int64(), st.sampled_from([0, 1, -1, 2**63 - 1, -(2**63)])),
    "small": (pa.int8(), SMALL),
    "string": (pa.string(), TEXT),
    "binary": (pa.binary(), TEXT.map(str.encode)),
    "boolean": (pa.bool_(), st.booleans()),
    "double": (pa.float64(), st.sampled_from([0.0, -0.0, 1.5, math.nan, -math.nan, math.inf])),
    "decimal": (pa.decimal128(20, 2), SMALL.map(Decimal)),
    "timestamp": (pa.timestamp("us", tz="UTC"), st.sampled_from([0, 1, 10**15])),
    "date": (pa.date32(), SMALL),
    "list": (pa.list_(pa.int64()), st.lists(st.none() | SMALL, max_size=3)),
    "nested list": (
        pa.list_(pa.list_(pa.string())),
        st.lists(st.none() | st.lists(TEXT, max_size=2), max_size=2),
    ),
    "struct": (
        pa.struct([("a", pa.int64()), ("b", pa.string())]),
        st.fixed_dictionaries({"a": st.none() | SMALL, "b": st.none() | TEXT}),
    ),
    "map": (
        pa.map_(pa.string(), pa.int64()),
        st.dictionaries(TEXT, st.none() | SMALL, max_size=3).map(lambda d: list(d.items())),
    ),
    "list of structs": (
        pa.list_(pa.struct([("a", pa.list_(pa.int64()))])),
        st.lists(st.fixed_dictionaries({"a": st.none() | st.lists(SMALL, max_size=2)}), max_size=2),
    ),
}  # fmt: skip


def canonical(value: Any) -> Any:
    if isinstance(value, float):
        return "nan" if math.isnan(value) else value + 0.0
    if isinstance(value, dict):
        return tuple((key, canonical(each)) for key, each in sorted(value.items()))
    if isinstance(value, list):
        parts = [canonical(each) for each in value]
        return tuple(sorted(parts, key=repr)) if parts and isinstance(value[0], tuple) else tuple(parts)
    if isinstance(value, tuple):
        return tuple(canonical(each) for each in value)
    return value


@pytest.mark.parametrize("name", KINDS)
@given(data=st.data())
def test_codes_are_equal_exactly_when_values_are(name: str, data: st.DataObject) -> None:
    kind, values = KINDS[name]
    drawn = data.draw(st.lists(st.none() | values, max_size=8))
    cut = data.draw(st.integers(0, len(drawn)))
    codes = factorize_column(pa.array(drawn, kind).slice(cut))
    kept = [canonical(value) for value in drawn[cut:]]
    assert len(codes.values) == len(kept)
    assert all(0 <= code < codes.size for code in codes.values.tolist())
    for one, left in zip(codes.values.tolist(), kept, strict=True):
        for other, right in zip(codes.values.tolist(), kept, strict=True):
            assert (one == other) == (left == right), (left, right)


def test_the_order_of_a_maps_entries_does_not_count() -> None:
    maps = [[("z", 9)], [("a", 1), ("b", 2)], [("b", 2), ("a", 1)], [("a", 2), ("b", 1)], None]
    codes = factorize_column(pa.array(maps, pa.map_(pa.string(), pa.int64())).slice(1)).values.tolist()
    assert codes[0] == codes[1]
    assert len({*codes}) == 3


@given(st.lists(st.tuples(st.none() | SMALL, TEXT, st.sampled_from([0, 2**62, -(2**62)])), max_size=10))
def test_several_columns_are_factorized_together(rows: list[tuple[Any, ...]]) -> None:
    kinds = [pa.int64(), pa.string(), pa.int64()]
    columns = [pa.array([row[place] for row in rows], kind) for place, kind in enumerate(kinds)]
    codes = factorize([*columns, *columns])
    pairs = set(zip(codes.values.tolist(), rows, strict=True))
    assert len(pairs) == len({code for code, _ in pairs}) == len(set(rows))
    dense = codes.dense()
    assert set(dense.values.tolist()) == set(range(dense.size if rows else 0))


@given(st.lists(TEXT | st.none(), max_size=10))
def test_text_is_ordered_by_its_bytes(values: list[str | None]) -> None:
    ranks = order_codes(pa.array(values, pa.string())).tolist()
    known = sorted({value.encode() for value in values if value is not None})
    expected = [len(known) if value is None else known.index(value.encode()) for value in values]
    assert sorted(range(len(values)), key=ranks.__getitem__) == sorted(
        range(len(values)), key=expected.__getitem__
    )
