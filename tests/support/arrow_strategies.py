"""Hypothesis strategies for Arrow schemas and rows."""

from __future__ import annotations

import datetime as dt
import decimal
from typing import Any

import pyarrow as pa
import pyarrow.types as pat
from hypothesis import strategies as st

NAMES = st.text("abcdeé_ ", min_size=1, max_size=4)

_SIMPLE = [
    pa.bool_(),
    pa.int8(),
    pa.int16(),
    pa.int32(),
    pa.int64(),
    pa.float32(),
    pa.float64(),
    pa.string(),
    pa.binary(),
    pa.date32(),
    pa.timestamp("us", tz="UTC"),
    pa.timestamp("us"),
    pa.time64("ns"),
    pa.duration("us"),
    pa.null(),
]


def _decimals() -> st.SearchStrategy[pa.DataType]:
    return st.integers(1, 38).flatmap(lambda p: st.builds(pa.decimal128, st.just(p), st.integers(0, p)))


def field_lists(types: st.SearchStrategy[pa.DataType], *, most: int = 4) -> st.SearchStrategy[list[pa.Field]]:
    names = st.lists(NAMES, min_size=1, max_size=most, unique_by=str.lower)
    one = st.tuples(types, st.booleans())
    return names.flatmap(
        lambda unique_names: st.lists(one, min_size=len(unique_names), max_size=len(unique_names)).map(
            lambda parts: [
                pa.field(name, kind, nullable=nullable or pat.is_null(kind))
                for name, (kind, nullable) in zip(unique_names, parts, strict=True)
            ]
        )
    )


def _lists(types: st.SearchStrategy[pa.DataType]) -> st.SearchStrategy[pa.DataType]:
    return st.builds(
        lambda kind, nullable: pa.list_(pa.field("element", kind, nullable=nullable or pat.is_null(kind))),
        types,
        st.booleans(),
    )


def _maps(types: st.SearchStrategy[pa.DataType]) -> st.SearchStrategy[pa.DataType]:
    return st.builds(
        lambda key, kind, nullable: pa.map_(
            pa.field("key", key, nullable=False),
            pa.field("value", kind, nullable=nullable or pat.is_null(kind)),
        ),
        st.sampled_from([pa.string(), pa.int32(), pa.date32()]),
        types,
        st.booleans(),
    )


def arrow_types() -> st.SearchStrategy[pa.DataType]:
    """Generate canonical types, including nested ones."""
    return st.recursive(
        st.sampled_from(_SIMPLE) | _decimals(),
        lambda inner: _lists(inner) | _maps(inner) | field_lists(inner, most=3).map(pa.struct),
        max_leaves=5,
    )


def schemas() -> st.SearchStrategy[pa.Schema]:
    """Generate canonical schemas."""
    return field_lists(arrow_types()).map(pa.schema)


def _scalars(kind: pa.DataType) -> st.SearchStrategy[Any]:
    if pat.is_integer(kind):
        half = 1 << (kind.bit_width - 1)
        return st.integers(-half, half - 1)
    if pat.is_floating(kind):
        return st.floats(width=kind.bit_width, allow_nan=False)
    if pat.is_decimal(kind):
        largest = 10**kind.precision - 1
        return st.integers(-largest, largest).map(
            lambda unscaled: decimal.Decimal(
                (int(unscaled < 0), tuple(map(int, str(abs(unscaled)))), -kind.scale)
            )
        )
    if pat.is_timestamp(kind):
        return st.datetimes(timezones=st.just(dt.UTC) if kind.tz else st.none())
    return _STRATEGIES_BY_TYPE[kind]


_STRATEGIES_BY_TYPE: dict[pa.DataType, st.SearchStrategy[Any]] = {
    pa.bool_(): st.booleans(),
    pa.string(): st.text(st.characters(exclude_categories=["Cs"]), max_size=20),
    pa.binary(): st.binary(max_size=20),
    pa.date32(): st.dates(),
    pa.time64("ns"): st.times(),
    pa.duration("us"): st.timedeltas(dt.timedelta(days=-100_000), dt.timedelta(days=100_000)),
    pa.null(): st.none(),
}


def values(kind: pa.DataType, *, nullable: bool) -> st.SearchStrategy[Any]:
    """Generate Python values of a canonical type."""
    if pat.is_map(kind):
        pairs = st.tuples(
            values(kind.key_type, nullable=False),
            values(kind.item_type, nullable=kind.item_field.nullable),
        )
        strategy: st.SearchStrategy[Any] = st.lists(pairs, max_size=3, unique_by=lambda pair: pair[0])
    elif pat.is_list(kind):
        strategy = st.lists(values(kind.value_type, nullable=kind.value_field.nullable), max_size=3)
    elif pat.is_struct(kind):
        strategy = rows(list(kind))
    else:
        strategy = _scalars(kind)
    return st.none() | strategy if nullable else strategy


def rows(fields: list[pa.Field]) -> st.SearchStrategy[dict[str, Any]]:
    """Generate dicts with a value for each field."""
    return st.fixed_dictionaries(
        {field.name: values(field.type, nullable=field.nullable) for field in fields}
    )


def tables() -> st.SearchStrategy[tuple[pa.Schema, list[dict[str, Any]]]]:
    """Generate a canonical schema with up to eight rows."""
    return schemas().flatmap(
        lambda schema: st.tuples(st.just(schema), st.lists(rows(list(schema)), max_size=8))
    )
