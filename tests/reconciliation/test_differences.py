"""Each kind of difference is found exactly, in each kind of copy."""

from __future__ import annotations

import pytest

from penstock.reconciliation import settling
from penstock.reconciliation.report import DifferingRange, DifferingRow
from tests.support.reconciled import CopiedTable


def test_an_equal_copy_is_equal(orders: CopiedTable) -> None:
    found = orders.compare()
    assert found.equal
    assert (found.rows, found.copy_rows, found.differences, found.undecided) == (1000, 1000, 0, 0)
    assert found.differing_rows == found.differing_ranges == ()
    assert 0 < found.first_position <= found.position


def test_a_missing_row_is_found(orders: CopiedTable) -> None:
    orders.delete("id = 7")
    found = orders.compare()
    assert not found.equal
    assert (found.missing, found.extra, found.different) == (1, 0, 0)
    assert found.differing_rows == (DifferingRow({"id": 7}, "missing"),)


def test_an_extra_row_is_found(orders: CopiedTable) -> None:
    orders.insert([{"id": 5000, "item": "x", "price": None}, {"id": -3, "item": None, "price": None}])
    found = orders.compare()
    assert (found.missing, found.extra, found.different) == (0, 2, 0)
    assert {row.key["id"] for row in found.differing_rows} == {5000, -3}


def test_a_different_value_is_found_with_its_column(orders: CopiedTable) -> None:
    orders.update("item", "'other'", "id = 400")
    orders.update("price", "NULL", "id = 401")
    found = orders.compare()
    assert (found.missing, found.extra, found.different) == (0, 0, 2)
    assert sorted(found.differing_rows, key=repr) == [
        DifferingRow({"id": 400}, "different", ("item",)),
        DifferingRow({"id": 401}, "different", ("price",)),
    ]


def test_differences_are_counted_by_range(orders: CopiedTable) -> None:
    orders.delete("id > 250 AND id <= 260")
    orders.update("item", "'other'", "id = 1")
    orders.insert([{"id": 2000, "item": "x", "price": None}])
    found = orders.compare(range_rows=100)
    assert found.ranges == 11
    assert found.differing_ranges == (
        DifferingRange(0, None, {"id": 100}, 0, 0, 1),
        DifferingRange(2, {"id": 200}, {"id": 300}, 10, 0, 0),
        DifferingRange(10, {"id": 1000}, None, 0, 1, 0),
    )


def test_an_empty_copy_lacks_all_rows(orders: CopiedTable) -> None:
    orders.delete("id > 0")
    found = orders.compare(range_rows=300, most_rows=3)
    assert (found.missing, found.extra, found.different) == (1000, 0, 0)
    assert len(found.differing_rows) == 3


def test_rows_are_counted_in_their_ranges_however_few_are_looked_at_together(
    orders: CopiedTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(settling, "MAX_CANDIDATES", 7)
    orders.delete("id <= 150")
    orders.update("item", "'other'", "id >= 990")
    found = orders.compare(range_rows=100)
    assert (found.missing, found.extra, found.different) == (150, 0, 11)
    assert [(each.number, each.missing, each.different) for each in found.differing_ranges] == [
        (0, 100, 0), (1, 50, 0), (9, 0, 11),
    ]  # fmt: skip


def test_an_empty_source_leaves_all_rows_over(orders: CopiedTable) -> None:
    orders.source.run(f"DELETE FROM {orders.table}")
    found = orders.compare(range_rows=300)
    assert (found.missing, found.extra, found.different) == (0, 1000, 0)
    # Of PostgreSQL's copy no more rows are read at a time than of the source.
    assert found.ranges == (3 if orders.kind == "postgresql" else 1)


def test_two_empty_tables_are_equal(orders: CopiedTable) -> None:
    orders.source.run(f"DELETE FROM {orders.table}")
    orders.delete("id > 0")
    assert orders.compare().equal
