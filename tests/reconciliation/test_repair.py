"""A repair makes the copy equal, and never undoes what is newer."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from deltalake.exceptions import CommitFailedError

from penstock.reconciliation.delta_copy import DeltaCopy
from tests.support.postgres_proxy import proxied
from tests.support.reconciled import CopiedTable


def damage(orders: CopiedTable) -> None:
    orders.delete("id > 250 AND id <= 260")
    orders.update("item", "'other'", "id = 400")
    orders.update("price", "NULL", "id = 401")
    orders.insert([{"id": 5000, "item": "x", "price": None}, {"id": -3, "item": None, "price": None}])


def test_a_repair_makes_the_copy_equal(orders: CopiedTable) -> None:
    damage(orders)
    found = orders.compare(repair=True)
    assert not found.equal
    assert (found.missing, found.extra, found.different, found.repaired) == (10, 2, 2, 14)
    assert orders.compare().equal
    assert orders.rows("id, item, price") == sorted(
        orders.source.rows(
            f"SELECT id, item, price{'::text' * (orders.kind == 'sqlite')} FROM {orders.table}"
        ),
        key=repr,
    )


def test_a_repair_of_an_equal_copy_writes_nothing(orders: CopiedTable) -> None:
    before = orders.delta.version() if orders.kind == "delta" else None
    found = orders.compare(repair=True)
    assert found.equal
    assert not found.repaired
    if before is not None:
        assert orders.delta.version() == before


def test_an_empty_copy_is_filled(orders: CopiedTable) -> None:
    orders.delete("id > 0")
    assert orders.compare(repair=True, range_rows=300).repaired == 1000
    assert orders.compare().equal


def test_a_row_that_changed_since_it_was_compared_is_repaired_as_it_is_now(orders: CopiedTable) -> None:
    """The source's row is read when it is written, not when it was found to differ."""
    orders.update("item", "'other'", "id = 400")
    from penstock.reconciliation import reconcile as module

    original = module._Comparison._add_differences

    def late(self: object, found: object) -> None:
        orders.source.run(f"UPDATE {orders.table} SET item = 'newest' WHERE id = 400")
        original(self, found)  # type: ignore[arg-type]

    module._Comparison._add_differences = late  # type: ignore[method-assign]
    try:
        orders.compare(repair=True)
    finally:
        module._Comparison._add_differences = original  # type: ignore[method-assign]
    assert orders.compare().equal


@pytest.mark.parametrize("kind", ["postgresql"])
def test_repaired_rows_are_counted_whichever_reply_is_lost(orders: CopiedTable) -> None:
    with proxied(orders.url) as server:
        behind_proxy = replace(orders, url=server.url)
        for _ in server.losing_each_commit():
            orders.update("item", "'other'", "id = 400")
            found = behind_proxy.compare(repair=True)
            assert found.differences == found.repaired == 1
    assert orders.compare().equal


@pytest.mark.parametrize("kind", ["delta"])
def test_repaired_rows_of_a_delta_table_are_counted_although_the_reply_is_lost(
    orders: CopiedTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = DeltaCopy._merge

    def merge(self: DeltaCopy, *given: Any) -> None:
        original(self, *given)
        raise CommitFailedError("the answer to the repetition")

    monkeypatch.setattr(DeltaCopy, "_merge", merge)
    orders.update("item", "'other'", "id = 400")
    found = orders.compare(repair=True)
    assert found.differences == found.repaired == 1
    assert orders.compare().equal
