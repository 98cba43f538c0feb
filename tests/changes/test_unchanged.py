"""Values that a change omits are taken from earlier changes of its row; without Spark."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

import penstock
from penstock.changes.options import ChangeOptions, parse_net_window
from penstock.changes.passes.passes import Passes
from penstock.changes.passes.rows import ChangeRows
from penstock.changes.schema import layout_of
from penstock.errors import ChangelogContractViolationError, InvalidChangelogSchemaError
from penstock.spark.schemas import to_struct
from tests.support.change_frames import table

METADATA = [
    ("_change_type", pa.string()),
    ("_commit_version", pa.int64()),
    ("_commit_timestamp", pa.timestamp("us", tz="UTC")),
]
NOTES = [("step", pa.int64()), ("_unchanged", pa.list_(pa.string())), *METADATA]
SCHEMA = pa.schema([("id", pa.int64()), ("a", pa.string()), ("b", pa.string()), *NOTES])
CONTRACT = penstock.ChangeContract("id", intermediate_changes=True, sequence="step", unchanged="_unchanged")
Change = tuple[str, str | None, str | None, list[str]]


def net(rows: pa.Table, contract: penstock.ChangeContract, window: str | None = None) -> list[dict[str, Any]]:
    layout = layout_of(to_struct(rows.schema), contract, case_sensitive=True)
    passes = Passes.of(contract, ChangeOptions("netChanges", False, parse_net_window(window)))
    found: list[dict[str, Any]] = passes.run(ChangeRows(rows, layout)).table.to_pylist()
    return found


def history(*changes: Change, id: int = 1) -> list[tuple[object, ...]]:
    return [
        (id, a, b, step, unchanged or None, kind, step, 1_700_000_000_000_000 + step)
        for step, (kind, a, b, unchanged) in enumerate(changes)
    ]


@pytest.mark.parametrize(
    ("changes", "left"),
    [
        # From the insert; from the update behind it; not at all, where the row was there before.
        ([("insert", "x", "y", []), ("update_postimage", "z", None, ["b"])], ("z", "y", None)),
        ([("insert", "x", "y", []), ("update_postimage", None, "z", ["a"]),
            ("update_postimage", None, None, ["a", "b"])], ("x", "z", None)),
        ([("update_postimage", None, "z", ["a"]), ("update_postimage", "x", None, ["b"])], ("x", "z", None)),
        ([("update_postimage", None, "z", ["a"]),
            ("update_postimage", None, "w", ["a"])], (None, "w", ["a"])),
        ([("update_postimage", None, None, ["a", "b"]),
            ("update_postimage", None, "w", ["a"])], (None, "w", ["a"])),
        # NULL is a value.
        ([("insert", None, "y", []), ("update_postimage", None, "z", ["a"])], (None, "z", None)),
        # A row that goes and comes again is another row.
        ([("insert", "x", "y", []), ("delete", None, None, []), ("insert", "p", "q", []),
            ("update_postimage", None, "r", ["a"])], ("p", "r", None)),
        # The value is known later.
        ([("insert", None, "y", ["a"]), ("update_postimage", "z", None, ["b"])], ("z", "y", None)),
    ],
)  # fmt: skip
def test_net_changes_have_the_known_values(
    changes: list[Change], left: tuple[str | None, str | None, list[str] | None]
) -> None:
    (last,) = [
        row for row in net(table(history(*changes), SCHEMA), CONTRACT) if row["_change_type"] != "delete"
    ]
    assert (last["a"], last["b"], last["_unchanged"]) == left
    sliced = table([*history(*changes, id=0), *history(*changes)], SCHEMA).slice(len(changes))
    assert net(sliced, CONTRACT)[-1] == last


@given(data=st.data())
def test_net_changes_equal_the_row_after_any_updates(data: st.DataObject) -> None:
    rows, expected = [], {}
    for id in range(data.draw(st.integers(1, 4))):
        state = {"a": data.draw(st.sampled_from("xyz")), "b": data.draw(st.sampled_from("xyz"))}
        changes: list[Change] = [("insert", state["a"], state["b"], [])]
        for _ in range(data.draw(st.integers(0, 4))):
            unchanged = data.draw(st.lists(st.sampled_from("ab"), unique=True))
            state |= {name: data.draw(st.sampled_from("xyz")) for name in "ab" if name not in unchanged}
            values = [None if name in unchanged else state[name] for name in "ab"]
            changes.append(("update_postimage", values[0], values[1], unchanged))
        rows += history(*changes, id=id)
        expected[id] = dict(state)
    chosen = table(data.draw(st.permutations(rows)), SCHEMA)
    found = {row["id"]: {"a": row["a"], "b": row["b"]} for row in net(chosen, CONTRACT)}
    assert found == expected


def test_values_inside_the_struct_of_a_table() -> None:
    form = pa.struct([("a", pa.string()), ("n", pa.int64())])
    schema = pa.schema([("_table", pa.string()), ("_key", pa.string()), ("one", form), ("two", form), *NOTES])
    contract = penstock.ChangeContract(
        ("_table", "_key"), intermediate_changes=True, sequence="step", unchanged="_unchanged"
    )
    rows = [
        ("one", "1", {"a": "x", "n": 1}, None, 0, None, "insert", 0, 0),
        ("two", "1", None, {"a": "y", "n": 1}, 1, None, "insert", 1, 1),
        ("two", "1", None, {"a": None, "n": 2}, 2, ["a"], "update_postimage", 2, 2),
        ("one", "1", {"a": None, "n": 3}, None, 3, ["a"], "update_postimage", 3, 3),
    ]
    found = {row["_table"]: (row["one"], row["two"]) for row in net(table(rows, schema), contract)}
    assert found == {"one": ({"a": "x", "n": 3}, None), "two": (None, {"a": "y", "n": 2})}


def test_an_insert_without_a_value_is_refused() -> None:
    moved = history(("insert", "x", None, ["b"]), ("update_postimage", "z", None, ["b"]), id=5)
    with pytest.raises(ChangelogContractViolationError, match=r"'b'.*REPLICA IDENTITY FULL.*id=5") as caught:
        net(table([*history(("insert", "x", "y", [])), *moved], SCHEMA), CONTRACT)
    assert caught.value.condition == "CHANGELOG_CONTRACT_VIOLATION.UNKNOWN_VALUE"
    gone_before = ("insert", "x", "y", []), ("delete", None, None, [])
    with pytest.raises(ChangelogContractViolationError, match="'b'"):
        net(table(history(*gone_before, ("insert", "z", None, ["b"])), SCHEMA), CONTRACT)
    # It went again, so nobody needs the value.
    gone = history(("insert", "x", None, ["b"]), ("delete", None, None, []))
    assert net(table(gone, SCHEMA), CONTRACT) == []


def test_the_column_of_omitted_names_must_be_a_list() -> None:
    with pytest.raises(InvalidChangelogSchemaError, match="'a' is string, not array<string>"):
        net(table([], SCHEMA), penstock.ChangeContract("id", unchanged="a"))


def test_omitted_values_of_columns_that_are_not_read_are_allowed() -> None:
    """A row whose key moved comes without what it has out of line; who does not read that column has all it
    wants."""
    moved: list[Change] = [("insert", "x", None, ["b"])]
    with pytest.raises(ChangelogContractViolationError, match="b"):
        net(table(history(*moved), SCHEMA), CONTRACT)
    narrow = table(history(*moved), SCHEMA).drop_columns(["b"])
    (left,) = net(narrow, CONTRACT)
    assert (left["a"], left["_unchanged"]) == ("x", ["b"])
