"""The passes on rows of every type, in parts, against counts of equal rows: NaN equals NaN, and -0.0 0.0."""

from __future__ import annotations

from collections import Counter

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

import penstock
from penstock.changes.options import ChangeOptions
from penstock.changes.passes.passes import Passes
from penstock.changes.passes.rows import ChangeRows
from penstock.changes.schema import layout_of
from penstock.feeds.protocol import METADATA_FIELDS
from penstock.spark.schemas import to_struct

NAN = float("nan")
STRUCT = pa.struct([("x", pa.float64()), ("y", pa.list_(pa.string()))])
# Each inner list has forms of one value.
VALUES: list[tuple[pa.DataType, list[list[object]]]] = [
    (pa.float64(), [[NAN], [0.0, -0.0], [1.5], [None]]),
    (pa.binary(), [[b""], [b"\0"], [b"\xff\0"], [None]]),
    (pa.int64(), [[-(2**63)], [2**63 - 1], [0], [None]]),
    (pa.date32(), [[-719_162], [0], [2_932_896], [None]]),
    (STRUCT, [[None], [{"x": None, "y": None}], [{"x": 0.0, "y": []}, {"x": -0.0, "y": []}], [{"x": NAN}]]),
    (pa.list_(pa.list_(pa.int32())), [[None], [[]], [[None]], [[[1], []]], [[[], [1]]]]),
]


@pytest.mark.parametrize("mode", ["dropCarryovers", "netChanges"])
@given(data=st.data())
def test_deletes_and_inserts_of_equal_rows_cancel_one_by_one(mode: str, data: st.DataObject) -> None:
    kind, forms = data.draw(st.sampled_from(VALUES))
    schema = pa.schema([("value", kind), *METADATA_FIELDS])
    expected: Counter[tuple[int, int]] = Counter()
    rows: list[tuple[object, str, int, int]] = []
    places: list[int] = []
    for _ in range(data.draw(st.integers(1, 12))):
        place = data.draw(st.integers(0, len(forms) - 1))
        change, version = data.draw(st.sampled_from(["insert", "delete"])), data.draw(st.integers(1, 3))
        rows.append((data.draw(st.sampled_from(forms[place])), change, version, version * 1_000_000))
        places.append(place)
        expected[place, version if mode == "dropCarryovers" else 0] += 1 if change == "insert" else -1

    contract = penstock.ChangeContract(
        "value",
        carryover_rows=True,
        updates_as_delete_and_insert=True,
        intermediate_changes=True,
        nullable_row_id=True,
    )
    passes = Passes.of(contract, ChangeOptions.of(mode, False, None))
    layout = layout_of(to_struct(schema), contract, case_sensitive=True)
    columns = [
        pa.array(column, field.type) for column, field in zip(zip(*rows, strict=True), schema, strict=True)
    ]
    table = pa.Table.from_arrays(columns, schema=schema)
    cut = data.draw(st.integers(0, len(rows)))
    parts = [passes.run_on_part(ChangeRows(part, layout)).table for part in (table[:cut], table[cut:])]
    left = passes.run(ChangeRows(pa.concat_tables(parts), layout)).table

    known = {repr(value): place for value, place in zip(table["value"].to_pylist(), places, strict=True)}
    found: Counter[tuple[int, int]] = Counter()
    for row in left.to_pylist():
        version = row["_commit_version"] if mode == "dropCarryovers" else 0
        found[known[repr(row["value"])], version] += 1 if row["_change_type"] == "insert" else -1
    assert found == {key: count for key, count in expected.items() if count}
    assert left.num_rows == sum(map(abs, expected.values()))
