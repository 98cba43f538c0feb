from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest

from penstock.arrow.coerce import conform
from penstock.arrow.python_rows import to_table
from penstock.errors import SchemaMismatchError


def strict(kind: pa.DataType) -> pa.Field:
    return pa.field("element", kind, nullable=False)


X = pa.field("x", pa.int64(), nullable=False)
LIST = pa.list_(strict(pa.int64()))
STRUCT = pa.struct([X])
MAP = pa.map_(pa.field("key", pa.string(), nullable=False), pa.field("value", pa.int64(), nullable=False))

CASES = [
    (pa.field("c", pa.int64(), nullable=False), 1, None, "c"),
    (pa.field("c", LIST), [1, 2], [1, None], "c.element"),
    (pa.field("c", STRUCT), {"x": 1}, {"x": None}, "c.x"),
    (pa.field("c", MAP), [("k", 1)], [("k", None)], "c.value"),
    (pa.field("c", pa.list_(pa.field("element", STRUCT))), [{"x": 1}, None], [{"x": None}], "c.element.x"),
    (
        pa.field("c", pa.struct([pa.field("m", MAP)])),
        {"m": None},
        {"m": [("a", 1), ("b", None)]},
        "c.m.value",
    ),
    (pa.field("c", pa.list_(pa.field("element", LIST))), [None, [1]], [[1], [None]], "c.element.element"),
]
IDS = [path for *_, path in CASES]


def relaxed(kind: pa.DataType) -> pa.DataType:
    if pa.types.is_map(kind):
        return pa.map_(kind.key_type, relaxed(kind.item_type))
    if pa.types.is_list(kind):
        return pa.list_(pa.field("element", relaxed(kind.value_type)))
    if pa.types.is_struct(kind):
        return pa.struct([pa.field(each.name, relaxed(each.type)) for each in kind])
    return kind


@pytest.mark.parametrize(("field", "good", "bad", "path"), CASES, ids=IDS)
def test_a_null_in_a_required_column_is_refused_with_path_and_first_row(
    field: pa.Field, good: Any, bad: Any, path: str
) -> None:
    schema = pa.schema([field])
    fine = [] if not field.nullable else [None]
    values = [good, *fine, good, bad, good, bad]
    row = values.index(bad) if bad is not None else 2
    declared = pa.array(values, field.type)
    undeclared = pa.array(values, relaxed(field.type))
    sources = [
        [{"c": value} for value in values],
        pa.table({"c": declared}, schema=schema),
        pa.table({"c": undeclared}),
        pa.table(
            {"c": pa.chunked_array([undeclared.slice(0, 1), undeclared.slice(1, 2), undeclared.slice(3)])}
        )
        if field.nullable
        else pa.table({"c": pa.chunked_array([declared.slice(0, 1), declared.slice(1)])}),
    ]
    for source in sources:
        with pytest.raises(SchemaMismatchError) as found:
            to_table(source, schema)
        assert found.value.parameters["column"] == path
        assert found.value.parameters["row"] == row
        assert found.value.condition == "SCHEMA_MISMATCH.NULL_VALUE"


@pytest.mark.parametrize(("field", "good", "bad", "path"), CASES, ids=IDS)
def test_nulls_outside_a_slice_do_not_count(field: pa.Field, good: Any, bad: Any, path: str) -> None:
    schema = pa.schema([field])
    for kind in (field.type, relaxed(field.type)):
        batch = pa.record_batch({"c": pa.array([bad, good, good, bad], kind)})
        assert (
            conform(batch.slice(1, 2), schema).column(0).to_pylist()
            == pa.array([good, good], kind).to_pylist()
        )
        with pytest.raises(SchemaMismatchError):
            conform(batch.slice(1, 3), schema)


def test_fields_of_a_null_struct_may_be_null() -> None:
    column = pa.array([{"x": 1}, None], pa.struct([pa.field("x", pa.int64())]))
    assert to_table(pa.table({"c": column}), pa.schema([pa.field("c", STRUCT)])).column(0).to_pylist() == [
        {"x": 1},
        None,
    ]


def test_fields_of_a_null_map_value_may_be_null() -> None:
    """Whatever the buffers contain there: some writers put a null in the field, some a zero."""
    loose = pa.map_(pa.string(), pa.struct([pa.field("x", pa.int64())]))
    strict = pa.map_(pa.string(), pa.struct([pa.field("x", pa.int64(), nullable=False)]))
    value = [[("a", {"x": 1}), ("b", None)], None, [("c", {"x": 3})]]
    column = pa.array(value, loose)
    below = pa.StructArray.from_buffers(
        strict.item_type, 3, column.items.buffers()[:1], children=[pa.array([1, None, 3])]
    )
    declared = pa.MapArray.from_arrays(column.offsets, column.keys, below, type=strict, mask=column.is_null())
    for given in (column, declared):
        assert (
            to_table(pa.table({"c": given}), pa.schema([pa.field("c", strict)])).column(0).to_pylist()
            == value
        )
        assert (
            conform(pa.record_batch({"c": given}).slice(1), pa.schema([pa.field("c", strict)]))
            .column(0)
            .to_pylist()
            == value[1:]
        )
