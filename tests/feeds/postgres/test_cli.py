"""`penstock changes` on a PostgreSQL feed: it reads, and leaves the server unchanged."""

from __future__ import annotations

import re
from urllib.parse import urlsplit

import pytest

from tests.support.commands import run_penstock
from tests.support.postgres_source import Source


def left_behind(source: Source) -> list[tuple[int, ...]]:
    return source.rows(
        "SELECT (SELECT count(*) FROM pg_replication_slots),"
        " (SELECT count(*) FROM pg_class WHERE relnamespace = to_regnamespace('penstock_snapshots'))"
    )


@pytest.mark.parametrize("command", ["show", "tail", "lag"])
def test_a_missing_slot_is_not_created(source: Source, command: str) -> None:
    table = source.table("id int primary key")
    source.run(f"INSERT INTO {table} VALUES (1)")
    before = left_behind(source)
    url = f"{source.url}?publication={source.name}"
    error = run_penstock("changes", command, url, "--json", code=1).error
    assert error["error"] == "FEED_UNAVAILABLE.SLOT_MISSING"
    assert f"no replication slot 'penstock_{source.name}'" in error["message"]
    assert "pg_create_logical_replication_slot" in error["message"]
    assert left_behind(source) == before
    with_slot = run_penstock("changes", command, f"{url}&slot={source.name}", code=1)
    assert f"no replication slot '{source.name}'" in with_slot.err
    assert str(urlsplit(source.url).password) not in with_slot.err
    assert left_behind(source) == before


def test_changes_that_were_shown_can_still_be_read(source: Source) -> None:
    table = source.table("id int primary key, v text")
    source.make_slot()
    source.run(f"INSERT INTO {table} VALUES (1, 'a')")
    url = f"{source.url}?publication={source.name}&slot={source.name}"
    for _ in range(2):
        (row,) = run_penstock("changes", "show", url, "--json").lines
        assert (row["_change_type"], row["id"], row["v"]) == ("insert", 1, "a")


def test_the_lag_of_a_slot(source: Source) -> None:
    table = source.table("id int primary key, v text")
    source.make_slot()
    url = f"{source.url}?publication={source.name}&slot={source.name}"
    before = run_penstock("changes", "lag", url, "--json").json
    source.run(f"INSERT INTO {table} VALUES (1, repeat('x', 100000))")
    after = run_penstock("changes", "lag", url, "--json").json
    assert after["slot"] == source.name
    assert after["retained_bytes"] >= after["unconfirmed_bytes"] > before["unconfirmed_bytes"]
    shown = run_penstock("changes", "lag", url)
    assert [line.rsplit("  ")[0].strip() for line in shown.out.splitlines()] == [
        "slot",
        "kept on the server",
        "not read and logged",
    ]
    # A slot that keeps too much is reported by every command.
    for command in ("show", "lag"):
        assert "check that its query runs" in run_penstock("changes", command, f"{url}&lag_warning=1").err


def test_changes_on_both_sides_of_a_new_column(source: Source) -> None:
    table = source.table("id int primary key, v text")
    source.make_slot()
    source.run(f"INSERT INTO {table} VALUES (1, 'a')", f"ALTER TABLE {table} ADD w int")
    source.run(f"INSERT INTO {table} VALUES (2, 'b', 8)")
    url = f"{source.url}?publication={source.name}&slot={source.name}"
    error = run_penstock("changes", "show", url, "--json", code=1).error
    assert error["error"] == "FEED_UNAVAILABLE.COLUMN_ADDED"
    first, last, version = re.findall(r"_version=(\d+)", error["message"])
    (row,) = run_penstock("changes", "show", url, "--json", "--from", version).lines
    assert (row["id"], row["w"]) == (2, 8)
    (row,) = run_penstock("changes", "show", url, "--json", "--from", first, "--to", last).lines
    assert (row["id"], "w" in row) == (1, False)
