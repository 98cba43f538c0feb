from __future__ import annotations

from penstock.arguments import did_you_mean, in_quotes


def test_the_nearest_known_name_is_suggested_whatever_its_case() -> None:
    assert did_you_mean("CUSTOMER_ID", ["amount", "customerId"]) == " Did you mean 'customerId'?"
    assert did_you_mean("amuont", ["amount", "customerId"]) == " Did you mean 'amount'?"


def test_nothing_is_suggested_when_no_name_is_similar() -> None:
    assert did_you_mean("zzz", ["amount"]) == ""
    assert did_you_mean("zzz", []) == ""


def test_the_middle_of_a_long_name_is_left_out() -> None:
    assert in_quotes("it's") == '"it\'s"'
    assert in_quotes("x" * 98) == f"'{'x' * 98}'"
    assert in_quotes("x" * 99) == f"'{'x' * 48}…{'x' * 48}'"
    assert len(in_quotes("\0" * 20_000)) <= 100
