"""The command: its output, its exit codes, and what it shows of keys."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import urlsplit

import pytest

from tests.support.commands import run_penstock
from tests.support.postgres_source import Source
from tests.support.reconciled import CopiedTable, copied_table


def command(made: CopiedTable, *words: object, code: int = 0) -> object:
    source = made.source.feed(tables=[made.table]).url
    result = run_penstock("reconcile", source, made.name, "--url", made.url, "--settle", 0, *words, code=code)
    assert str(urlsplit(made.source.url).password) not in result.out + result.err
    return result


def test_an_equal_copy_ends_with_0(orders: CopiedTable) -> None:
    assert "equal" in command(orders).out
    found = command(orders, "--json").json
    assert found["equal"] is True
    assert found["rows"] == 1000
    assert "/" in found["position"]


def test_a_copy_that_differs_ends_with_1(orders: CopiedTable) -> None:
    orders.delete("id IN (7, 8)")
    orders.update("item", "'other'", "id = 400")
    text = command(orders, code=1).out
    assert "missing" in text
    assert "id = 400" in text
    found = command(orders, "--json", "-n", 5, code=1).json
    assert (found["missing"], found["different"], found["evidence"]) == (2, 1, "settled")
    assert {"key": {"id": 400}, "kind": "different", "columns": ["item"]} in found["differing_rows"]
    assert found["differing_ranges"] == [
        {"number": 0, "after": None, "upto": None, "missing": 2, "extra": 0, "different": 1}
    ]


def test_a_repaired_copy_ends_with_0(orders: CopiedTable) -> None:
    orders.delete("id IN (7, 8)")
    found = command(orders, "--json", "--repair").json
    assert (found["equal"], found["repaired"]) == (False, 2)
    command(orders)


def test_progress_is_logged(orders: CopiedTable) -> None:
    assert "rows of" in command(orders, "-v", "--range-rows", 100).err


def test_an_error_is_one_line(orders: CopiedTable) -> None:
    source = orders.source.feed(tables=["nothing"]).url
    result = run_penstock("reconcile", source, orders.name, "--url", orders.url, code=1)
    assert result.err.startswith("error: [FEED_UNAVAILABLE.TABLE_NOT_PUBLISHED]")


@pytest.mark.parametrize("kind", ["delta"])
def test_keys_that_json_lacks_are_shown_as_postgresql_writes_them(
    source: Source, kind: str, tmp_path: Path
) -> None:
    table = source.table("b bytea, d numeric(4, 1), at timestamptz, PRIMARY KEY (b, d, at)", "keys")
    source.run(f"INSERT INTO {table} VALUES ('\\x00ff', 1.5, '2026-01-31 12:00+00')")
    with copied_table(source, table, kind, tmp_path) as made:
        made.delete("true")
        found = command(made, "--json", code=1).json
        key = {"b": "\\x00ff", "d": "1.5", "at": "2026-01-31 12:00:00+00:00"}
        assert found["differing_rows"] == [{"key": key, "kind": "missing", "columns": []}]
