"""Every Spark type can be written to a queue and read back, also after compaction."""

from __future__ import annotations

import datetime as dt
import decimal
import uuid
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings

import penstock
from tests.support.arrow_strategies import tables

ALL = pa.schema(
    [
        ("boolean", pa.bool_()),
        ("byte", pa.int8()),
        ("short", pa.int16()),
        ("int", pa.int32()),
        ("long", pa.int64()),
        ("float", pa.float32()),
        ("double", pa.float64()),
        ("decimal", pa.decimal128(38, 10)),
        ("string", pa.string()),
        ("binary", pa.binary()),
        ("date", pa.date32()),
        ("timestamp", pa.timestamp("us", "UTC")),
        ("timestamp_ntz", pa.timestamp("us")),
        ("time", pa.time64("ns")),
        ("interval", pa.duration("us")),
        ("array", pa.list_(pa.field("element", pa.string()))),
        ("map", pa.map_(pa.string(), pa.list_(pa.field("element", pa.int32())))),
        ("struct", pa.struct([("a", pa.int32()), ("b", pa.struct([("c", pa.decimal128(5, 2))]))])),
        ("deep", pa.list_(pa.field("element", pa.struct([("m", pa.map_(pa.int32(), pa.date32()))])))),
        ("void", pa.null()),
    ]
)
ROW: dict[str, Any] = {
    "boolean": True,
    "byte": -128,
    "short": 32767,
    "int": -(2**31),
    "long": 2**63 - 1,
    "float": 0.5,
    "double": float("-inf"),
    "decimal": decimal.Decimal("-1234567890123456789012345678.0123456789"),
    "string": "nul\0 😀 \u0301",
    "binary": bytes(range(256)),
    "date": dt.date(1, 1, 1),
    "timestamp": dt.datetime(9999, 12, 31, 23, 59, 59, 999999, dt.UTC),
    "timestamp_ntz": dt.datetime(1582, 10, 15, 1, 2, 3, 4),  # noqa: DTZ001 - it has none
    "time": dt.time(23, 59, 59, 999999),
    "interval": dt.timedelta(days=-3, microseconds=1),
    "array": ["a", None, ""],
    "map": [("k", [1, None]), ("", None)],
    "struct": {"a": None, "b": {"c": decimal.Decimal("1.50")}},
    "deep": [{"m": [(1, dt.date(2000, 2, 29))]}, None, {"m": None}],
    "void": None,
}
NULLS = dict.fromkeys(ROW)


def _filled(store: penstock.Store) -> tuple[penstock.Queue, pa.Table]:
    queue = store.create_queue("q", ALL)
    table = pa.Table.from_pylist([ROW, NULLS, ROW], schema=ALL)
    queue.append(table)
    queue.append([ROW, NULLS])
    return queue, pa.concat_tables([table, table.slice(0, 2)])


def test_every_type_is_read_back_unchanged(store: penstock.Store) -> None:
    queue, expected = _filled(store)
    assert queue.schema.equals(ALL)
    assert queue.read(0, 0).equals(expected)
    assert queue.read(0, 0).to_pylist()[0] == ROW


def test_every_type_survives_compaction_and_slicing(store: penstock.Store) -> None:
    queue, expected = _filled(store)
    assert queue.compact() == 1
    assert queue.read(0, 0).equals(expected)
    assert queue.read(0, 1, 4).equals(expected.slice(1, 3))


@pytest.mark.parametrize("name", ALL.names)
def test_a_column_of_every_type_can_be_read_alone(store: penstock.Store, name: str) -> None:
    queue, expected = _filled(store)
    assert queue.read(0, 0, columns=[name]).equals(expected.select([name]))


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(tables())
def test_any_schema_and_rows_are_read_back_unchanged(
    store: penstock.Store, generated: tuple[pa.Schema, list[dict[str, Any]]]
) -> None:
    schema, rows = generated
    queue = store.create_queue(str(uuid.uuid4()), schema)
    expected = pa.Table.from_pylist(rows, schema=schema)
    queue.append(expected)
    queue.append(expected.slice(0, 3))
    expected = pa.concat_tables([expected, expected.slice(0, 3)])
    assert queue.read(0, 0).equals(expected)
    queue.compact()
    assert queue.read(0, 0).equals(expected)
    store.drop_queue(queue.name)
