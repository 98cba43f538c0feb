"""Dicts as rows: Arrow would silently change some Python values."""

from __future__ import annotations

import datetime as dt
from collections import OrderedDict
from decimal import Decimal
from types import MappingProxyType
from typing import Any
from zoneinfo import ZoneInfo

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from pyspark.sql import Row

from penstock.arrow.python_rows import to_table
from penstock.arrow.schema import canonical_schema
from penstock.errors import SchemaMismatchError

UTC = dt.UTC
NAIVE = dt.datetime.fromisoformat("2024-01-01T05:00:00")


def one(kind: pa.DataType) -> pa.Schema:
    return canonical_schema(pa.schema([("ok", pa.int8()), ("c", kind)]))


TAKEN = [
    (pa.int64(), np.int32(5), 5),
    (pa.int8(), -128, -128),
    (pa.float64(), 5, 5.0),
    (pa.float64(), np.float32(0.5), 0.5),
    (pa.float32(), 0.1, np.float32(0.1).item()),
    (pa.float32(), float("inf"), float("inf")),
    (pa.decimal128(5, 2), 7, Decimal("7.00")),
    (pa.decimal128(5, 2), np.int64(7), Decimal("7.00")),
    (pa.decimal128(5, 2), Decimal("7.1"), Decimal("7.10")),
    (pa.binary(), bytearray(b"a"), b"a"),
    (pa.binary(), memoryview(b"abc")[::2], b"ac"),
    (pa.bool_(), np.bool_(True), True),
    (
        pa.timestamp("us", tz="UTC"),
        dt.datetime(2024, 1, 1, 1, tzinfo=ZoneInfo("Europe/Paris")),
        dt.datetime(2024, 1, 1, tzinfo=UTC),
    ),
    (pa.timestamp("us", tz="UTC"), pd.Timestamp("2024-01-01", tz="UTC"), dt.datetime(2024, 1, 1, tzinfo=UTC)),
    (pa.timestamp("us"), NAIVE.replace(microsecond=7), NAIVE.replace(microsecond=7)),
    (pa.time64("ns"), dt.time(1, 2, 3, 4), dt.time(1, 2, 3, 4)),
    (pa.duration("us"), dt.timedelta(microseconds=-1), dt.timedelta(microseconds=-1)),
    (pa.list_(pa.int64()), (1, None), [1, None]),
    (pa.list_(pa.int64()), np.array([1, 2]), [1, 2]),
    (pa.map_(pa.string(), pa.int64()), {"a": 1, "b": None}, [("a", 1), ("b", None)]),
    (pa.map_(pa.string(), pa.int64()), [("a", 1)], [("a", 1)]),
    (pa.struct([("x", pa.int64()), ("y", pa.string())]), {"Y": "a"}, {"x": None, "y": "a"}),
    (pa.struct([("x", pa.int64())]), Row(x=1), {"x": 1}),
]  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "value", "stored"), TAKEN, ids=[f"{k}-{type(v).__name__}" for k, v, _ in TAKEN]
)
def test_a_value_that_fits_is_stored_unchanged(kind: pa.DataType, value: Any, stored: Any) -> None:
    assert to_table([{"c": value}, {"c": None}], one(kind)).column("c").to_pylist() == [stored, None]
    nested = to_table([{"c": [value, None]}], one(pa.list_(kind)))
    assert nested.column("c").to_pylist() == [[stored, None]]


REFUSED = [
    (pa.int64(), 1.5),
    (pa.int64(), 1.0),
    (pa.int64(), True),
    (pa.int64(), "1"),
    (pa.int64(), float("nan")),
    (pa.int8(), 128),
    (pa.int64(), 2**63),
    (pa.float64(), 2**60 + 1),
    (pa.float64(), True),
    (pa.float64(), "1"),
    (pa.float64(), Decimal("1.1")),
    (pa.float32(), 1e300),
    (pa.decimal128(5, 2), Decimal("1.111")),
    (pa.decimal128(5, 2), Decimal("12345")),
    (pa.decimal128(5, 2), 1.5),
    (pa.decimal128(5, 2), Decimal("NaN")),
    (pa.decimal128(5, 2), True),
    (pa.string(), b"a"),
    (pa.string(), 1),
    (pa.string(), "\ud800"),
    (pa.binary(), "a"),
    (pa.bool_(), 1),
    (pa.date32(), NAIVE),
    (pa.date32(), 5),
    (pa.timestamp("us", tz="UTC"), NAIVE),
    (pa.timestamp("us", tz="UTC"), 5),
    (pa.timestamp("us", tz="UTC"), dt.date(2024, 1, 1)),
    (pa.timestamp("us", tz="UTC"), pd.Timestamp(1, tz="UTC")),
    (pa.timestamp("us"), dt.datetime(2024, 1, 1, tzinfo=UTC)),
    (pa.time64("ns"), dt.time(1, tzinfo=UTC)),
    (pa.time64("ns"), 5),
    (pa.duration("us"), 5),
    (pa.duration("us"), pd.Timedelta(1)),
    (pa.null(), 1),
    (pa.list_(pa.string()), "abc"),
    (pa.list_(pa.int64()), {1, 2}),
    (pa.list_(pa.int64()), [1, 1.5]),
    (pa.map_(pa.string(), pa.int64()), {"a": 1.5}),
    (pa.map_(pa.string(), pa.int64()), {None: 1}),
    (pa.map_(pa.string(), pa.int64()), ["ab", "cde"]),
    (pa.map_(pa.string(), pa.int64()), 5),
    (pa.struct([("x", pa.int64())]), {"x": 1, "y": 2}),
    (pa.struct([("x", pa.int64())]), {"x": "1"}),
    (pa.struct([("x", pa.int64())]), (1,)),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "value"), REFUSED, ids=[f"{k}-{v!r}" for k, v in REFUSED])
def test_a_value_that_does_not_fit_is_refused_with_its_row(kind: pa.DataType, value: Any) -> None:
    for schema, bad in ((one(kind), value), (one(pa.list_(kind)), [value])):
        with pytest.raises(SchemaMismatchError) as found:
            to_table([{"c": None}, {"c": None}, {"c": bad}], schema)
        assert found.value.parameters["row"] == 2
        assert found.value.parameters["column"].startswith("c")
        unknown = isinstance(value, dict) and "y" in value
        assert str(found.value).startswith(
            f"[SCHEMA_MISMATCH.{'UNKNOWN_COLUMN' if unknown else 'VALUE'}] row 2: "
        )


def test_rows_may_be_any_mapping_or_spark_rows() -> None:
    rows: list[Any] = [{"c": 1}, OrderedDict(c=2), MappingProxyType({"c": 3}), Row(c=4), Row(ok=1, c=5)]
    assert to_table(rows, one(pa.int64())).column("c").to_pylist() == [1, 2, 3, 4, 5]


def test_a_row_that_is_not_a_mapping_is_refused_with_its_number() -> None:
    with pytest.raises(SchemaMismatchError, match=r"\[SCHEMA_MISMATCH\] row 1: a row has to be a mapping"):
        to_table([{"c": 1}, (2,)], one(pa.int64()))


def test_a_long_value_is_truncated_in_the_message() -> None:
    with pytest.raises(SchemaMismatchError) as found:
        to_table([{"c": "x" * 10_000}], one(pa.int64()))
    assert len(str(found.value)) < 400
