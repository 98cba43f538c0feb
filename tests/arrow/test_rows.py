from __future__ import annotations

import datetime as dt
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given

from penstock.arrow.coerce import conform
from penstock.arrow.python_rows import to_table
from penstock.arrow.schema import canonical_schema
from penstock.errors import SchemaMismatchError
from tests.support.arrow_strategies import tables

SCHEMA = canonical_schema(
    pa.schema(
        [
            pa.field("id", pa.int64(), nullable=False),
            pa.field("name", pa.string()),
            pa.field("at", pa.timestamp("us", tz="UTC")),
            pa.field("amount", pa.decimal128(10, 2)),
        ]
    )
)


def one(kind: pa.DataType, *, nullable: bool = True) -> pa.Schema:
    return canonical_schema(pa.schema([pa.field("c", kind, nullable=nullable)]))


def refused(rows: Any, schema: pa.Schema) -> dict[str, Any]:
    with pytest.raises(SchemaMismatchError) as found:
        to_table(rows, schema)
    return found.value.parameters


def address(array: pa.Array) -> int:
    found: int = array.buffers()[1].address
    return found


def test_a_table_with_exactly_the_schema_is_returned_unchanged() -> None:
    table = pa.table({"id": [1], "name": ["a"], "at": [None], "amount": [None]}, schema=SCHEMA)
    assert to_table(table, SCHEMA) is table


def test_a_batch_that_declares_everything_nullable_conforms_without_a_copy() -> None:
    relaxed = pa.schema([field.with_nullable(True) for field in SCHEMA])
    batch = pa.record_batch(
        {"id": [1, 2], "name": ["a", None], "at": [None, 5], "amount": [None, None]}, schema=relaxed
    )
    conformed = conform(batch, SCHEMA)
    assert conformed.schema.equals(SCHEMA, check_metadata=True)
    assert all(address(a) == address(b) for a, b in zip(conformed.columns, batch.columns, strict=True))


def test_a_batch_with_its_fields_in_another_time_zone_conforms_without_a_copy() -> None:
    batch = pa.record_batch({"c": pa.array([5], pa.timestamp("us", tz="Europe/Paris"))})
    conformed = conform(batch, one(pa.timestamp("us", tz="UTC")))
    assert address(conformed.column(0)) == address(batch.column(0))


def test_columns_are_matched_by_name_in_any_order_and_missing_ones_are_null() -> None:
    table = to_table(pa.table({"name": ["a"], "id": [7]}), SCHEMA)
    assert table.schema.equals(SCHEMA, check_metadata=True)
    assert table.to_pylist() == [{"id": 7, "name": "a", "at": None, "amount": None}]


def test_names_are_matched_ignoring_case_if_none_matches_exactly() -> None:
    assert to_table(pa.table({"ID": [7], "Name": ["a"]}), SCHEMA).to_pylist()[0]["id"] == 7
    assert to_table([{"ID": 7, "NAME": "a"}, {"id": 8}], SCHEMA).column("id").to_pylist() == [7, 8]


@pytest.mark.parametrize(
    "rows", [pa.table({"id": [7], "ID": [8]}), [{"id": 7, "ID": 8}], [{"Id": 7, "ID": 8}]], ids=str
)
def test_two_names_for_one_column_are_refused(rows: Any) -> None:
    assert refused(rows, SCHEMA)["column"] == "id"


@pytest.mark.parametrize(
    "rows", [pa.table({"id": [7], "amuont": [1]}), [{"id": 7}, {"id": 7, "amuont": 1}]], ids=str
)
def test_an_unknown_name_is_refused_with_the_nearest_as_a_suggestion(rows: Any) -> None:
    with pytest.raises(
        SchemaMismatchError, match=r"MISMATCH.UNKNOWN_COLUMN\].*Did you mean 'amount'"
    ) as found:
        to_table(rows, SCHEMA)
    assert found.value.parameters["column"] == "amuont"
    assert found.value.parameters.get("row") == (1 if isinstance(rows, list) else None)


def test_a_missing_required_column_is_refused() -> None:
    nameless = pa.table({"name": ["a"]})
    for table in (nameless, nameless.slice(1)):
        assert refused(table, SCHEMA) == {
            "column": "id",
            "expected": "int64 not null",
            "found": "no such column",
        }
    assert refused([{"id": 1}, {"name": "a"}], SCHEMA) == {
        "column": "id",
        "expected": "not null",
        "found": "null",
        "row": 1,
    }


LOSSLESS = [
    (pa.array([1, None], pa.int8()), pa.int64(), [1, None]),
    (pa.array([1, 2**31 - 1], pa.int64()), pa.int32(), [1, 2**31 - 1]),
    (pa.array([255], pa.uint8()), pa.int16(), [255]),
    (pa.array([1, None], pa.int32()), pa.float64(), [1.0, None]),
    (pa.array([1.5, None], pa.float32()), pa.float64(), [1.5, None]),
    (pa.array([1.5, float("inf"), None], pa.float64()), pa.float32(), [1.5, float("inf"), None]),
    (pa.array([5, -7, None]), pa.decimal128(10, 2), [Decimal("5.00"), Decimal("-7.00"), None]),
    (pa.array([2**64 - 1], pa.uint64()), pa.decimal128(20, 0), [Decimal(2**64 - 1)]),
    (pa.array([0]), pa.decimal128(38, 38), [Decimal(0)]),
    (pa.array([Decimal("1.50")]), pa.decimal128(10, 1), [Decimal("1.5")]),
    (pa.array([Decimal(1)], pa.decimal256(50, 0)), pa.decimal128(10, 2), [Decimal("1.00")]),
    (pa.array(["a", None], pa.large_string()), pa.string(), ["a", None]),
    (pa.array(["a", None], pa.string_view()), pa.string(), ["a", None]),
    (pa.array(["a", "b", "a"]).dictionary_encode(), pa.string(), ["a", "b", "a"]),
    (pa.array([b"ab"], pa.binary(2)), pa.binary(), [b"ab"]),
    (
        pa.array([1000], pa.timestamp("ns")),
        pa.timestamp("us"),
        [dt.datetime.fromisoformat("1970-01-01T00:00:00.000001")],
    ),
    (pa.array([86_400_000]).view(pa.date64()), pa.date32(), [dt.date(1970, 1, 2)]),
    (pa.array([1], pa.time32("s")), pa.time64("ns"), [dt.time(0, 0, 1)]),
    (pa.array([1], pa.duration("s")), pa.duration("us"), [dt.timedelta(seconds=1)]),
    (pa.nulls(2), pa.map_(pa.string(), pa.int8()), [None, None]),
    (pa.array([[1], None, []], pa.large_list(pa.int8())), pa.list_(pa.int64()), [[1], None, []]),
    (
        pa.array([[1], None, []], pa.list_(pa.field("item", pa.int64()))),
        pa.list_(pa.int64()),
        [[1], None, []],
    ),
    (pa.array([[1, 2], None], pa.list_(pa.int8(), 2)), pa.list_(pa.int64()), [[1, 2], None]),
    (
        pa.array([[("k", 1)], None], pa.map_(pa.large_string(), pa.int8())),
        pa.map_(pa.string(), pa.int64()),
        [[("k", 1)], None],
    ),
    (
        pa.array([{"b": 1, "A": "x"}, None]),
        pa.struct([("a", pa.string()), ("b", pa.int32()), ("c", pa.date32())]),
        [{"a": "x", "b": 1, "c": None}, None],
    ),
]  # fmt: skip


@pytest.mark.parametrize(
    ("given_array", "kind", "expected"), LOSSLESS, ids=[f"{a.type}->{k}" for a, k, _ in LOSSLESS]
)
def test_a_cast_that_keeps_every_value_is_applied(
    given_array: pa.Array, kind: pa.DataType, expected: list[Any]
) -> None:
    schema = one(kind)
    padded = pa.concat_arrays([pa.nulls(3, given_array.type), given_array])
    for source in (pa.table({"c": given_array}), pa.table({"c": padded.slice(3)})):
        table = to_table(source, schema)
        assert table.schema.equals(schema, check_metadata=True)
        assert table.column(0).chunk(0).type.equals(schema.field(0).type, check_metadata=True)
        assert table.column(0).to_pylist() == expected
        table.validate(full=True)


@pytest.mark.parametrize(
    ("values", "kind", "row"),
    [
        (pa.array([1, 2, 2**31]), pa.int32(), 2),
        (pa.array([1, 2**60 + 1]), pa.float64(), 1),
        (pa.array([1.5, None, 0.1]), pa.float32(), 2),
        (pa.array([1.5, 1e300]), pa.float32(), 1),
        (pa.array([1, 1000]), pa.decimal128(4, 2), 1),
        (pa.array([Decimal("1.10"), Decimal("1.11")]), pa.decimal128(10, 1), 1),
        (pa.array([1000, 1001], pa.timestamp("ns")), pa.timestamp("us"), 1),
        (pa.array([1001], pa.duration("ns")), pa.duration("us"), 0),
        (pa.array([0, 5]).view(pa.date64()), pa.date32(), 1),
        (pa.array([[1], None, [2, 300]]), pa.list_(pa.int8()), 2),
        (pa.array([{"a": 1}, {"a": 300}]), pa.struct([("a", pa.int8())]), 1),
    ],
    ids=str,
)
def test_a_cast_that_would_change_a_value_is_refused_with_row_and_value(
    values: pa.Array, kind: pa.DataType, row: int
) -> None:
    chunks = pa.chunked_array([values.slice(0, 1), values.slice(1)])
    about = refused(pa.table({"c": chunks}), one(kind))
    assert about["row"] == row
    assert about["column"].startswith("c")
    assert repr(chunks[row].as_py()) in about["found"]


@pytest.mark.parametrize(
    ("values", "kind"),
    [
        (pa.array(["1"]), pa.int64()),
        (pa.array([1]), pa.string()),
        (pa.array([1.0]), pa.int64()),
        (pa.array([True]), pa.int64()),
        (pa.array([1]), pa.bool_()),
        (pa.array([Decimal("1.5")]), pa.float64()),
        (pa.array([b"a"]), pa.string()),
        (pa.array(["a"]), pa.binary()),
        (pa.array([0], pa.timestamp("us")), pa.timestamp("us", tz="UTC")),
        (pa.array([0], pa.timestamp("us", tz="UTC")), pa.timestamp("us")),
        (pa.array([0], pa.date32()), pa.timestamp("us")),
        (pa.array([0]), pa.timestamp("us")),
        (pa.array([[1]]), pa.int64()),
        (pa.array([{"a": 1}]), pa.map_(pa.string(), pa.int64())),
        (pa.array([["a"]]), pa.list_(pa.int64())),
    ],
    ids=str,
)
def test_an_incompatible_type_is_refused_naming_both_types(values: pa.Array, kind: pa.DataType) -> None:
    about = refused(pa.table({"c": values}), one(kind))
    assert about["column"].startswith("c")
    assert about["expected"] in str(one(kind).field("c").type)
    assert about["found"] in str(values.type)
    assert "row" not in about
    empty = refused(pa.table({"c": values.slice(0, 0)}), one(kind))
    assert empty == about


def test_a_value_below_a_null_struct_is_not_checked() -> None:
    inner = pa.array([1, 2**40])
    column = pa.StructArray.from_arrays([inner], ["a"], mask=pa.array([False, True]))
    table = to_table(pa.table({"c": column}), one(pa.struct([("a", pa.int8())])))
    assert table.column(0).to_pylist() == [{"a": 1}, None]


def test_values_outside_a_slice_are_not_checked() -> None:
    table = pa.table({"c": [[1], [2**40], [3]]})
    assert to_table(table.slice(2), one(pa.list_(pa.int8()))).column(0).to_pylist() == [[3]]


@given(tables())
def test_dicts_and_tables_give_the_same_rows(case: tuple[pa.Schema, list[dict[str, Any]]]) -> None:
    schema, rows = case
    table = to_table(rows, schema)
    table.validate(full=True)
    assert table.schema.equals(schema, check_metadata=True)
    assert table.equals(pa.Table.from_pylist(rows, schema=schema))
    shuffled = pa.table({name: table.column(name) for name in reversed(schema.names)})
    assert to_table(shuffled, schema).equals(table)
    if rows:
        batch = table.slice(1).combine_chunks().to_batches()
        assert not batch or conform(batch[0], schema).to_pylist() == table.slice(1).to_pylist()


def test_no_rows_give_an_empty_table() -> None:
    assert to_table([], SCHEMA).equals(SCHEMA.empty_table())
    assert to_table(iter(()), SCHEMA).equals(SCHEMA.empty_table())


def test_anything_that_exports_an_arrow_stream_is_accepted() -> None:
    class Frame:
        def __arrow_c_stream__(self, requested_schema: object = None) -> object:
            return pa.table({"id": [1]}).__arrow_c_stream__(requested_schema)

    assert to_table(Frame(), SCHEMA).column("id").to_pylist() == [1]


@pytest.mark.parametrize("rows", [{"id": 1}, "id", 5, None], ids=str)
def test_a_single_object_that_is_not_a_list_of_rows_is_refused(rows: Any) -> None:
    with pytest.raises(SchemaMismatchError, match=r"\[SCHEMA_MISMATCH\].*put it in a list"):
        to_table(rows, SCHEMA)
