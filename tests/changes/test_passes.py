"""The passes on tables, against a model of the feed's table; without Spark."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import permutations
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import penstock
from penstock.changes.options import ChangeOptions, parse_net_window
from penstock.changes.passes.passes import Passes
from penstock.changes.passes.rows import ChangeRows, Layout
from penstock.changes.passes.violations import check_rows
from penstock.changes.schema import layout_of
from penstock.errors import ChangelogContractViolationError
from penstock.spark.schemas import to_struct
from tests.changes import model
from tests.support.change_frames import contract, table, tuples

DATA = ((0,), (1,), (2,), (3,))
LAYOUT = Layout(5, 6, 7, row_id=((0,), (1,)), data=DATA, row_version=(3,))
BY_DATA = Layout(5, 6, 7, row_id=((0,), (1,)), data=DATA)
ORDERED = Layout(5, 6, 7, row_id=((0,), (1,)), data=DATA, row_version=(3,), sequence=(4,))


def passes(
    flags: str, mode: str, *, updates: bool = False, window: str | None = None, sequence: str | None = None
) -> Passes:
    promise = contract(flags, row_id=["a", "b"], sequence=sequence)
    return Passes.of(promise, ChangeOptions(mode, updates, parse_net_window(window)))


def done(chosen: Passes, rows: list[Any], layout: Layout, parts: int = 1) -> list[Any]:
    first = []
    for part in range(parts):
        first += tuples(chosen.run_on_part(ChangeRows(table(rows[part::parts], model.SCHEMA), layout)).table)
    return tuples(chosen.run(ChangeRows(table(first, model.SCHEMA), layout)).table)


@pytest.mark.few(3)
@pytest.mark.parametrize("flags", ["", "C", "U", "CU", "CIU", "IU"])
@given(updates=st.booleans(), layout=st.sampled_from([LAYOUT, BY_DATA]), data=st.data())
def test_replaying_a_feed_gives_its_table(
    flags: str, updates: bool, layout: Layout, data: st.DataObject
) -> None:
    feed = data.draw(model.feeds(flags))
    rows = done(
        passes(flags, "dropCarryovers", updates=updates), feed.rows(), layout, data.draw(st.integers(1, 3))
    )
    assert model.replay(rows, {}) == feed.states[-1]
    for number, touched in enumerate(feed.touched):
        found = [row for row in rows if row[6] == f"{number + 1:04}"]
        assert {row[:2] for row in found} == touched
        if updates and "U" in flags:
            existed = touched & feed.states[number].keys() & feed.states[number + 1].keys()
            kinds = {row[5] for row in found if row[:2] in existed}
            assert kinds <= {"update_preimage", "update_postimage"}


def test_rows_that_are_undecided_within_a_part_are_decided_on_the_whole() -> None:
    chosen = passes("CI", "dropCarryovers")
    rows = [
        change("delete", data="p"),
        change("delete", data="q"),
        change("insert", data="p"),
        change("insert", data="q"),
    ]
    # What belongs together is not in one part here.
    parts = [rows[:2], rows[2:]]
    first = [
        tuples(chosen.run_on_part(ChangeRows(table(part, model.SCHEMA), LAYOUT)).table) for part in parts
    ]
    assert first == parts
    assert done(chosen, rows, LAYOUT) == []
    uneven = [*rows[:2], change("insert", data="s")]
    assert tuples(chosen.run_on_part(of(uneven)).table) == uneven
    with pytest.raises(ChangelogContractViolationError, match="the same row version and different data"):
        done(chosen, uneven, LAYOUT)


@pytest.mark.few(3)
@pytest.mark.parametrize("updates", [False, True])
@pytest.mark.parametrize("flags", ["I", "CI", "IU", "CIU"])
@given(data=st.data())
def test_net_changes_are_the_difference_of_two_snapshots(
    flags: str, updates: bool, data: st.DataObject
) -> None:
    feed = data.draw(model.feeds(flags))
    start = data.draw(st.integers(0, len(feed.commits)))
    rows = done(passes(flags, "netChanges", updates=updates), feed.rows(start), LAYOUT)
    model.check_difference(rows, feed.states[start], feed.states[-1], set().union(*feed.touched[start:]))
    pairs = {row[:2] for row in rows if row[5].startswith("update")}
    both = {row[:2] for row in rows if row[5] in ("delete", "update_preimage")} & {
        row[:2] for row in rows if row[5] in ("insert", "update_postimage")
    }
    assert pairs == (both if updates else set())


@pytest.mark.parametrize("updates", [False, True])
@given(data=st.data())
def test_net_changes_of_a_feed_without_pre_images(updates: bool, data: st.DataObject) -> None:
    steps = data.draw(st.integers(1, 3))
    feed = data.draw(model.feeds("IP", steps=steps))
    start = data.draw(st.integers(0, len(feed.commits)))
    ordered = {"sequence": "step"} if steps > 1 else {}
    chosen = passes("I", "netChanges", updates=updates, **ordered)
    rows = done(chosen, feed.rows(start), ORDERED if ordered else LAYOUT)
    model.check_upserts(rows, feed.states[start], feed.states[-1], set().union(*feed.touched[start:]))


@pytest.mark.parametrize("updates", [False, True])
@pytest.mark.parametrize(
    ("given", "left"),
    [
        (["update_postimage", "delete"], ["delete"]),
        (["update_postimage"], ["update_postimage"]),
        (["update_postimage", "update_postimage"], ["update_postimage"]),
        (["update_postimage", "delete", "insert"], ["update_postimage"]),
        (["insert", "update_postimage"], ["insert"]),
        (["insert", "update_postimage", "delete"], []),
    ],
    ids=" ".join,
)
def test_an_updated_row_is_treated_as_existing_before(
    given: list[str], left: list[str], updates: bool
) -> None:
    rows = [change(kind, data=str(version), version=version) for version, kind in enumerate(given, 1)]
    for window in (None, "1 hour"):
        found = done(passes("I", "netChanges", updates=updates, window=window), rows, LAYOUT)
        assert [row[5] for row in found] == left
        assert [row[2] for row in found] == [str(len(given))] * len(left)


@pytest.mark.parametrize("window", ["commit", "3 seconds"])
@given(feed=model.feeds("CIU"))
def test_net_changes_of_windows(window: str, feed: model.Feed) -> None:
    rows = done(passes("CIU", "netChanges", window=window), feed.rows(), LAYOUT)
    size = 3_000_000
    ends: dict[int, list[int]] = {}
    for number, commit in enumerate(feed.commits):
        if commit:
            ends.setdefault(number if window == "commit" else commit[0][7] // size, []).append(number)
    for numbers in ends.values():
        versions = {f"{number + 1:04}" for number in numbers}
        touched = set().union(*(feed.touched[number] for number in numbers))
        found = [row for row in rows if row[6] in versions]
        model.check_difference(found, feed.states[numbers[0]], feed.states[numbers[-1] + 1], touched)


@pytest.mark.parametrize("mode", ["dropCarryovers", "netChanges"])
@settings(max_examples=40)
@given(data=st.data())
def test_a_sequence_column_orders_several_changes_of_a_row_in_a_commit(
    mode: str, data: st.DataObject
) -> None:
    flags = data.draw(st.sampled_from(["IU", "CIU"]))
    feed = data.draw(model.feeds(flags, steps=3))
    chosen = passes(
        flags, mode, updates=True, sequence="step", window="commit" if mode == "netChanges" else None
    )
    assert model.replay(done(chosen, feed.rows(), ORDERED), {}) == feed.states[-1]
    ever = passes(flags, "netChanges", sequence="step")
    model.check_difference(done(ever, feed.rows(), ORDERED), {}, feed.states[-1], set(feed.states[-1]))


def change(
    kind: str, *, key: int = 1, data: str | None = "p", rv: int = 1, step: int | None = 0, version: int = 1
) -> Any:
    return key, "x", data, rv, step, kind, f"{version:04}", 1_700_000_000_000_000 + version * 1_000_000


def refused(chosen: Passes, rows: list[Any], layout: Layout = LAYOUT) -> ChangelogContractViolationError:
    with pytest.raises(ChangelogContractViolationError) as caught:
        done(chosen, rows, layout)
    return caught.value


def test_several_identical_pairs_in_one_commit_are_all_removed() -> None:
    rows = [change("delete"), change("insert")] * 3
    assert done(passes("C", "dropCarryovers"), rows, LAYOUT) == []


def test_pairs_are_counted_if_one_row_remains() -> None:
    rows = [change("insert"), change("delete"), change("delete")]
    assert [row[5] for row in done(passes("C", "dropCarryovers"), rows, LAYOUT)] == ["delete"]


def test_different_contents_under_one_row_version_require_a_sequence() -> None:
    rows = [change("insert", step=1), change("delete", step=2), change("insert", data="q", step=3)]
    assert "sequence" in refused(passes("CI", "dropCarryovers"), rows).message
    (left,) = done(passes("CIU", "dropCarryovers", updates=True, sequence="step"), rows, ORDERED)
    assert (left[2], left[5]) == ("q", "insert")


def test_of_equal_changes_in_sequence_the_last_insert_or_the_first_delete_remains() -> None:
    rows = [change(kind, step=step) for step, kind in enumerate(["insert", "delete", "insert"])]
    gone = [change(kind, step=step) for step, kind in enumerate(["delete", "insert", "delete"])]
    for several, left in ((rows, 2), (gone, 0)):
        for updates in (False, True):
            for order in permutations(several):
                chosen = passes("CIU", "dropCarryovers", updates=updates, sequence="step")
                assert done(chosen, list(order), ORDERED, parts=2) == [several[left]]


def test_an_update_and_a_carry_over_of_the_same_row() -> None:
    rows = [change("delete"), change("insert"), change("delete"), change("insert", data="q", rv=2)]
    left = done(passes("CU", "dropCarryovers", updates=True), rows, LAYOUT)
    assert sorted((row[5], row[2]) for row in left) == [("update_postimage", "q"), ("update_preimage", "p")]


def test_several_changes_of_a_row_in_a_commit_are_refused() -> None:
    rows = [change("delete", rv=1), change("delete", rv=2), change("insert", rv=3)]
    error = refused(passes("CU", "dropCarryovers", updates=True), rows)
    assert error.condition == "CHANGELOG_CONTRACT_VIOLATION.UNEXPECTED_MULTIPLE_CHANGES_PER_ROW_VERSION"
    assert "intermediate_changes=True" in error.message
    assert "a=1" in error.message
    assert "0001" in error.message
    assert "sequence" in refused(passes("CIU", "dropCarryovers", updates=True), rows).message


def test_an_insert_and_a_delete_of_the_same_content_require_a_sequence() -> None:
    rows = [change("insert", step=1), change("delete", step=2)]
    for mode, updates in (("dropCarryovers", True), ("netChanges", False)):
        assert "unknown order" in refused(passes("IU", mode, updates=updates), rows).message
        assert done(passes("IU", mode, updates=updates, sequence="step"), rows, ORDERED) == []


def test_rows_without_a_key_are_identified_by_all_columns_including_nulls() -> None:
    time = 1_700_000_000_000_000
    rows = [
        (1, None, None, 0, 0, "delete", "2", time),
        (1, None, None, 0, 0, "insert", "2", time),
        (None, "x", "p", 0, 0, "delete", "2", time),
        (None, None, "p", 0, 0, "insert", "2", time),
    ]
    layout = Layout(5, 6, 7, row_id=DATA, data=DATA, nullable_row_id=True)
    check_rows(ChangeRows(table(rows, model.SCHEMA), layout), needs_content=True)
    assert done(passes("C", "dropCarryovers"), rows, layout, parts=2) == rows[2:]
    with pytest.raises(ChangelogContractViolationError, match="is NULL"):
        check_rows(
            ChangeRows(table(rows, model.SCHEMA), replace(layout, nullable_row_id=False)), needs_content=True
        )


KEYLESS = replace(BY_DATA, row_id=DATA, nullable_row_id=True, keyless=True)


@pytest.mark.few(3)
@pytest.mark.parametrize("window", [None, "commit", "3 seconds"])
@pytest.mark.parametrize("flags", ["I", "CIU"])
@given(data=st.data())
def test_net_changes_of_a_table_without_a_key_are_counted(
    flags: str, window: str | None, data: st.DataObject
) -> None:
    time, here, rows = 1_700_000_000_000_000, Counter[object](), []
    groups_by_time: dict[int, Counter[object]] = {}
    for version in range(1, data.draw(st.integers(1, 5)) + 1):
        time += data.draw(st.integers(1, 4_000_000))
        number = {None: 0, "commit": version}.get(window, time // 3_000_000)
        for _ in range(data.draw(st.integers(0, 5))):
            content = (data.draw(st.sampled_from([1, None])), "x", data.draw(model.DATA), None)
            goes = here[content] > 0 and data.draw(st.booleans())
            here[content] += -1 if goes else 1
            groups_by_time.setdefault(number, Counter())[content] += -1 if goes else 1
            images = "U" not in flags and data.draw(st.booleans())
            kind = (
                ("update_preimage" if images else "delete")
                if goes
                else "update_postimage"
                if images
                else "insert"
            )
            rows.append((*content, 0, kind, f"{version:04}", time))
    chosen = passes(flags, "netChanges", updates=data.draw(st.booleans()), window=window)
    left: dict[int, Counter[object]] = {}
    for row in done(chosen, data.draw(st.permutations(rows)), KEYLESS, data.draw(st.integers(1, 3))):
        number = {None: 0, "commit": int(row[6])}.get(window, row[7] // 3_000_000)
        content = left.setdefault(number, Counter())
        assert content[row[:4]] * {"delete": -1, "insert": 1}[row[5]] >= 0, "of one row only one of both"
        content[row[:4]] += -1 if row[5] == "delete" else 1
    changed = {number: {**content} for number, content in left.items()}
    assert changed == {
        number: kept
        for number, content in groups_by_time.items()
        if (kept := {each: count for each, count in content.items() if count})
    }


def test_equal_rows_of_a_table_without_a_key_in_one_commit() -> None:
    twice = [change("insert"), change("insert")]
    assert done(passes("CIU", "dropCarryovers", updates=True), twice, KEYLESS) == twice
    assert done(passes("CU", "dropCarryovers", updates=True), twice, KEYLESS) == twice
    assert done(passes("CIU", "netChanges"), twice, KEYLESS) == twice
    later = [change("delete", version=2), change("insert", version=3), change("insert", version=3)]
    left = done(passes("IU", "netChanges", updates=True), [*twice, *later], KEYLESS)
    assert [(row[5], row[6]) for row in left] == [("insert", "0001"), ("insert", "0003"), ("insert", "0003")]
    gone = [change("delete", version=2)] * 2 + [change("delete", version=1), change("insert", version=1)]
    left = done(passes("IU", "netChanges", updates=True), gone, KEYLESS)
    assert [(row[5], row[6]) for row in left] == [("delete", "0002"), ("delete", "0001")]


def test_which_tables_have_no_key() -> None:
    names = ["a", "b", "data", "rv", "step"]
    schema = to_struct(model.SCHEMA)

    def keyless(row_id: list[str], **more: object) -> bool:
        given = penstock.ChangeContract(row_id, **more)
        return layout_of(schema, given, case_sensitive=False).keyless

    assert keyless(names, nullable_row_id=True)
    assert keyless(names[:4], nullable_row_id=True, sequence="step")
    assert not keyless(names)
    assert not keyless(names[:4], nullable_row_id=True)


def test_rows_with_different_data_do_not_cancel_out_within_a_part() -> None:
    # One commit takes a row from p to q to r, and says one row version for what it wrote.
    rows = [
        change("delete", data="p", rv=5),
        change("insert", data="q"),
        change("delete", data="q"),
        change("insert", data="r"),
    ]
    chosen = passes("CIU", "dropCarryovers", updates=True)
    apart = [[rows[0], rows[1]], [rows[2], rows[3]]], [[rows[0], rows[3]], [rows[1], rows[2]]]
    for parts in (*apart, [[rows[0], rows[2], rows[3]], [rows[1]]], [rows]):
        first = [row for part in parts for row in tuples(chosen.run_on_part(of(part)).table)]
        assert rows[0] in first
        assert rows[3] in first, "what the commit ends with is never taken for what it went through"


def test_changes_with_the_same_sequence_value_are_refused() -> None:
    chosen = passes("IU", "netChanges", updates=True, sequence="step")
    for kind in ("delete", "insert"):
        with pytest.raises(ChangelogContractViolationError, match="with the same step"):
            done(chosen, [change(kind, data="p"), change(kind, data="q")], ORDERED)
    # The two rows of an update may share it, in any order.
    pair = [change("insert", data="q"), change("delete", data="p")]
    expected = {("update_preimage", "p"), ("update_postimage", "q")}
    assert {(row[5], row[2]) for row in done(chosen, pair, ORDERED)} == expected
    with pytest.raises(ChangelogContractViolationError, match="step is NULL"):
        check_rows(of([change("insert", data="p", step=None)], ORDERED), needs_content=False)


def test_several_changes_are_refused_if_the_contract_excludes_them() -> None:
    rows = [change("insert", data="p"), change("insert", data="q")]
    with pytest.raises(ChangelogContractViolationError, match="intermediate_changes=True"):
        done(passes("C", "dropCarryovers"), rows, LAYOUT)
    assert done(passes("CI", "dropCarryovers"), rows, LAYOUT) == rows


def of(rows: list[Any], layout: Layout = LAYOUT) -> ChangeRows:
    return ChangeRows(table(rows, model.SCHEMA), layout)
