from __future__ import annotations

from penstock.names import did_you_mean


def test_the_nearest_known_name_is_offered_whatever_its_case() -> None:
    assert did_you_mean("CUSTOMER_ID", ["amount", "customerId"]) == " Did you mean 'customerId'?"
    assert did_you_mean("amuont", ["amount", "customerId"]) == " Did you mean 'amount'?"


def test_nothing_is_offered_when_nothing_is_near() -> None:
    assert did_you_mean("zzz", ["amount"]) == ""
    assert did_you_mean("zzz", []) == ""
