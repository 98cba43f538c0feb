"""Columns that change while a query runs, and while it does not."""

from __future__ import annotations

import logging
import re

import pytest

from tests.feeds.postgres.stops import TIMES_OF_CHANGE, keys, refused, rows_after_restart, started
from tests.support.postgres_source import Row, Source, Stream, apply


def test_rows_from_before_a_rename_keep_their_values(source: Source) -> None:
    table = source.table("id int primary key, v text")
    stream = started(source)
    source.run(f"INSERT INTO {table} VALUES (1, 'a')", f"ALTER TABLE {table} RENAME v TO w")
    source.run(f"INSERT INTO {table} VALUES (2, 'b')")
    # The rows from before the change come as they were written, then it ends by name.
    assert "v" in stream.start(source.feed(snapshot="initial")).names
    with refused("COLUMN_DROPPED", table=table, column="v") as caught:
        stream.drain()
    assert "'w'" in caught.value.message
    assert keys(stream.rows, "id", "v") == [("insert", 1, "a")]
    assert "w" in stream.start(source.feed(snapshot="initial")).names
    assert keys(stream.drain(), "id", "w") == [("insert", 2, "b")]


def test_a_dropped_column_ends_only_queries_that_read_it(source: Source) -> None:
    table = source.table("id int primary key, v text, w int")
    source.run(f"INSERT INTO {table} VALUES (1, 'a', 1)")
    stream, few = started(source), started(source, ["id", "w"], slot=f"{source.name}_few")
    source.run(f"ALTER TABLE {table} DROP v", f"INSERT INTO {table} VALUES (2, 2)")
    assert keys(few.drain(), "id", "w") == [("insert", 2, 2)]
    assert keys(rows_after_restart(stream, source, "COLUMN_DROPPED"), "id", "w") == [("insert", 2, 2)]


def test_an_added_column_ends_only_queries_that_read_all_columns(source: Source) -> None:
    table = source.table("id int primary key, v text")
    source.run(f"INSERT INTO {table} VALUES (1, 'a')")
    stream, few = started(source), started(source, ["id", "v"], slot=f"{source.name}_few")
    source.run(f"ALTER TABLE {table} ADD w int", f"INSERT INTO {table} VALUES (2, 'b', 2)")
    assert keys(few.drain(), "id", "v") == [("insert", 2, "b")]
    assert keys(rows_after_restart(stream, source, "COLUMN_ADDED"), "id", "v", "w") == [("insert", 2, "b", 2)]


def test_a_column_with_a_default_has_it_in_older_rows_once_they_are_sent(source: Source) -> None:
    table = source.table("id int primary key, v text")
    source.run(f"INSERT INTO {table} VALUES (1, 'a')")
    stream = started(source)
    source.run(f"INSERT INTO {table} VALUES (2, 'b')", f"ALTER TABLE {table} ADD w int DEFAULT 7")
    source.run(f"INSERT INTO {table} (id) VALUES (3)")
    with refused("COLUMN_ADDED", table=table, column="w") as caught:
        stream.drain()
    # Those from before it are without the column, and not with NULL in it.
    assert [row.keys() & {"v", "w"} for row in stream.rows] == [{"v"}, {"v"}]
    stream.start(source.feed(snapshot="initial"))
    assert keys(stream.drain(), "id", "w") == [("insert", 3, 7)]
    mend = re.search("update .* = w", caught.value.message)
    assert mend
    source.run(mend[0])
    assert sorted(row["w"] for row in stream.drain()) == [7, 7, 7]


RETYPED = {
    "integer to text": ("int", "7", "text", "'007'"),
    "text to integer": ("text", "'007'", "int", "8"),
    "real to double precision": ("real", "1.5", "double precision", "16777217.123456789"),
    "double precision to real": ("double precision", "0.1", "real", "0.5"),
    "integer to bigint": ("int", "7", "bigint", "5000000000"),
    "timestamp to timestamptz": ("timestamp", "'2026-01-01'", "timestamptz", "'2026-01-01 00:00+05'"),
    "timestamptz to timestamp": ("timestamptz", "'2026-01-01'", "timestamp", "'2026-01-01 12:00'"),
    "another numeric scale": ("numeric(10, 2)", "1.25", "numeric(10, 3)", "1.255"),
    "a smaller numeric scale": ("numeric(10, 3)", "1.255", "numeric(10, 2)", "1.25"),
    "numeric without a precision": ("numeric(10, 2)", "1.25", "numeric", "'NaN'"),
    "text to date": ("text", "'2026-01-01'", "date", "'2026-01-02'"),
    "boolean to text": ("boolean", "true", "text", "'t'"),
    "text to bytea": ("text", "'ab'", "bytea", "'\\x00'"),
    "uuid to text": ("uuid", "'00000000-0000-0000-0000-000000000001'", "text", "'x'"),
}  # fmt: skip


@pytest.mark.few(5)
@pytest.mark.parametrize(
    ("name", "when"),
    [
        *((name, TIMES_OF_CHANGE[0]) for name in RETYPED),
        ("integer to text", TIMES_OF_CHANGE[1]),
        ("another numeric scale", TIMES_OF_CHANGE[1]),
    ],
)
def test_a_changed_type_ends_the_query_and_a_restart_continues(source: Source, name: str, when: str) -> None:
    old, first, new, second = RETYPED[name]
    table = source.table(f"id int primary key, v {old}")
    stream = started(source)
    source.run(f"INSERT INTO {table} VALUES (1, {first})")
    expected = source.rows(f"SELECT v FROM {table}")
    change = f"ALTER TABLE {table} ALTER v TYPE {new} USING v::text::{new}"
    source.run(change, f"INSERT INTO {table} VALUES (2, {second})")
    expected += source.rows(f"SELECT v FROM {table} WHERE id = 2")
    if when == "while it is down":
        stream.start(source.feed(snapshot="initial"))
    rows = rows_after_restart(stream, source, "COLUMN_TYPE_CHANGED")
    found = [row["v"] for row in [*stream.batches[1], *rows]]
    assert [str(value) for value in found] == [str(value) for (value,) in expected]


CARRIED = {
    "bigint to integer": ("bigint", "5000", "int", "7"),
    "text to varchar without a limit": ("text", "'a'", "varchar", "'b'"),
    "a longer varchar": ("varchar(3)", "'abc'", "varchar(9)", "'abcdefghi'"),
    "varchar to text": ("varchar(3)", "'abc'", "text", "'abcdefghi'"),
    "fewer digits before the point": ("numeric(10, 2)", "1.25", "numeric(8, 2)", "9.75"),
    "more digits of a second": ("timestamp(0)", "'2026-01-01 00:00:01'", "timestamp",
        "'2026-01-01 00:00:01.5'"),
}  # fmt: skip


@pytest.mark.parametrize("case", CARRIED.values(), ids=CARRIED.keys())
def test_a_new_type_that_fits_into_the_planned_one_is_accepted(
    source: Source, case: tuple[str, str, str, str]
) -> None:
    old, first, new, second = case
    table = source.table(f"id int primary key, v {old}")
    stream = started(source)
    source.run(f"INSERT INTO {table} VALUES (1, {first})", f"ALTER TABLE {table} ALTER v TYPE {new}")
    source.run(f"INSERT INTO {table} VALUES (2, {second})")
    rows = stream.drain()
    assert [(row["v"],) for row in rows] == source.rows(f"SELECT v FROM {table} ORDER BY id")


def test_a_domain_is_read_as_its_base_type(source: Source) -> None:
    source.run(f"CREATE DOMAIN {source.name}.price AS numeric(9, 2)")
    table = source.table("id int primary key, v numeric(9, 2)")
    stream = started(source)
    source.run(
        f"ALTER TABLE {table} ALTER v TYPE {source.name}.price", f"INSERT INTO {table} VALUES (1, 2.5)"
    )
    stream.start(source.feed(snapshot="initial"))
    assert [str(row["v"]) for row in stream.drain()] == ["2.50"]


REPLACED = {
    "dropped and added again": ["ALTER TABLE {t} DROP w", "ALTER TABLE {t} ADD w int"],
    "names exchanged": ["ALTER TABLE {t} RENAME v TO x", "ALTER TABLE {t} RENAME w TO v",
        "ALTER TABLE {t} RENAME x TO w"],
}  # fmt: skip


@pytest.mark.parametrize("change", REPLACED.values(), ids=REPLACED.keys())
@pytest.mark.parametrize("when", ["while it runs", "while it is down"])
def test_a_column_that_replaces_another_one_ends_the_query(
    source: Source, change: list[str], when: str
) -> None:
    table = source.table("id int primary key, v int, w int")
    source.run(f"INSERT INTO {table} VALUES (1, 10, 20)")
    stream, few = started(source), started(source, ["id"], slot=f"{source.name}_few")
    source.run(
        *(statement.format(t=table) for statement in change), f"INSERT INTO {table} (id, w) VALUES (2, 5)"
    )
    if when == "while it is down":
        stream.start(source.feed(snapshot="initial"))
    with refused("COLUMN_REPLACED", table=table) as caught:
        stream.drain()
    assert len(stream.rows) == 1
    stream.start(source.feed(snapshot="initial", accept=caught.value.parameters["accept"]))
    stream.drain()
    mend = re.search("update .* = [vw]", caught.value.message)
    assert mend
    source.run(mend[0])
    stream.drain()
    copy: dict[object, Row] = {}
    apply(stream.rows, ("id",), ("id", "v", "w"), copy)
    assert [tuple(row.values()) for row in copy.values()] == source.rows(
        f"SELECT id, v, w FROM {table} ORDER BY id"
    )
    assert keys(few.drain(), "id") == [("insert", 2), ("update_postimage", 1), ("update_postimage", 2)]


REWRITTEN = {
    "COLUMN_REPLACED": REPLACED["names exchanged"],
    "COLUMN_TYPE_CHANGED": [
        "ALTER TABLE {t} ALTER v TYPE jsonb USING jsonb_build_array(v), ALTER w TYPE jsonb USING to_jsonb(v)"
    ],
}


@pytest.mark.parametrize("condition", REWRITTEN)
def test_long_values_that_are_not_in_the_log_are_sent_as_the_error_says(
    source: Source, condition: str
) -> None:
    table = source.table("id int primary key, v text, w text")
    hashes = "SELECT string_agg(md5(({first} + n)::text), '') FROM generate_series(1, 200) AS n"
    long = [f"({hashes.format(first=number)})" for number in (1000, 2000)]
    source.run(f"INSERT INTO {table} VALUES (1, {long[0]}, {long[1]})")
    stream = started(source)
    source.run(*(statement.format(t=table) for statement in REWRITTEN[condition]))
    source.run(f"INSERT INTO {table} VALUES (2, '1', '2')")
    with refused(condition) as caught:
        stream.drain()
    accept = caught.value.parameters.get("accept")
    stream.start(source.feed(snapshot="initial", accept=accept))
    assert keys(stream.drain(), "id") == [("insert", 2)]
    assert "long values are sent only with replica identity full" in caught.value.message
    source.run(
        f"ALTER TABLE {table} REPLICA IDENTITY FULL",
        f"UPDATE {table} SET v = v, w = w",
        f"ALTER TABLE {table} REPLICA IDENTITY DEFAULT",
    )
    stream.drain()
    copy: dict[object, Row] = {}
    apply(stream.rows, ("id",), ("id", "v", "w"), copy, unchecked=("v", "w"))
    assert [tuple(row.values()) for row in copy.values()] == source.rows(
        f"SELECT id, v::text, w::text FROM {table} ORDER BY id"
    )


ADDED_AGAIN = {
    "dropped and added again": ["ALTER TABLE {t} DROP x", "ALTER TABLE {t} ADD x int"],
    "renamed and added again": ["ALTER TABLE {t} RENAME x TO y", "ALTER TABLE {t} ADD x int"],
    "behind another one": ["ALTER TABLE {t} ADD y int", "ALTER TABLE {t} DROP x",
        "ALTER TABLE {t} ADD x int"],
}  # fmt: skip


@pytest.mark.parametrize("change", ADDED_AGAIN.values(), ids=ADDED_AGAIN.keys())
@pytest.mark.parametrize("most_commits", [1, 100])
def test_a_column_added_filled_and_replaced_between_two_micro_batches(
    source: Source, change: list[str], most_commits: int
) -> None:
    table = source.table("id int primary key, v int")
    stream = Stream(maxCommitsPerTrigger=str(most_commits))
    stream.start(source.feed(snapshot="initial"))
    assert not stream.drain()
    source.run(
        f"INSERT INTO {table} VALUES (1, 10)",
        f"INSERT INTO {table} VALUES (2, 20)",
        f"ALTER TABLE {table} ADD x int",
        f"INSERT INTO {table} VALUES (3, 30, 300)",
        *(statement.format(t=table) for statement in change),
    )
    with refused("COLUMN_ADDED", table=table, column="x"):
        stream.drain()
    assert keys(stream.rows, "id") == [("insert", 1), ("insert", 2)]
    stream.start(source.feed(snapshot="initial"))
    with refused("COLUMN_REPLACED", table=table):
        stream.drain()
    assert keys(stream.rows, "id") == [("insert", 1), ("insert", 2)]


@pytest.mark.parametrize("when", ["a running query", "a new query that reads rows from before"])
@pytest.mark.parametrize("restarted", [False, True], ids=["", "restarted in between"])
def test_a_column_dropped_and_later_added_again_ends_the_query(
    source: Source, when: str, restarted: bool
) -> None:
    """No row says so: those that the copy has keep the values of the column that is gone."""
    table = source.table("id int primary key, v text")
    source.make_slot()
    stream = Stream()
    if when == "a running query":
        stream.start(source.feed())
    source.run(f"INSERT INTO {table} VALUES (1, 'a'), (2, 'b')", f"ALTER TABLE {table} DROP v")
    if when != "a running query":
        stream.start(source.feed())
    assert [row["v"] for row in stream.drain()] == ["a", "b"]
    source.run("SELECT pg_switch_wal()", "CHECKPOINT")
    assert stream.drain() == []
    source.run(f"ALTER TABLE {table} ADD v text")
    if restarted:
        stream.start(source.feed())
    with refused("COLUMN_REPLACED", table=table) as caught:
        stream.drain()
    stream.start(source.feed(accept=caught.value.parameters["accept"]))
    source.run(f"UPDATE {table} SET v = v")
    stream.drain()
    copy: dict[object, Row] = {}
    for row in stream.rows:
        copy[row["id"]] = row["v"]
    assert copy == {1: None, 2: None}
    stream.start(source.feed())
    source.run(f"INSERT INTO {table} VALUES (3, 'c')")
    assert [row["v"] for row in stream.drain()] == ["c"]


def test_names_swapped_and_swapped_back_between_two_micro_batches(source: Source) -> None:
    table = source.table("id int primary key, v int, w int")
    stream = started(source)
    source.run(f"INSERT INTO {table} VALUES (1, 10, 20)")
    exchange = [statement.format(t=table) for statement in REPLACED["names exchanged"]]
    source.run(*exchange, f"INSERT INTO {table} (id, v, w) VALUES (2, 200, 100)", *exchange)
    with refused("COLUMN_REPLACED", table=table) as caught:
        stream.drain()
    assert keys(stream.rows, "id", "v", "w") == [("insert", 1, 10, 20)]
    stream.start(source.feed(snapshot="initial"))
    # The columns have their names back, and the next rows are from when they had not.
    with refused("COLUMN_REPLACED", table=table) as exchanged:
        stream.drain()
    stream.start(source.feed(snapshot="initial", accept=exchanged.value.parameters["accept"]))
    stream.drain()
    mend = re.search("update .* = w", caught.value.message)
    assert mend
    source.run(mend[0])
    with refused("COLUMN_REPLACED"):
        stream.drain()
    stream.start(source.feed(snapshot="initial"))
    stream.drain()
    copy: dict[object, Row] = {}
    apply(stream.rows, ("id",), ("id", "v", "w"), copy)
    assert [tuple(row.values()) for row in copy.values()] == [(1, 10, 20), (2, 100, 200)]


def test_a_restarted_query_reports_how_columns_changed(
    source: Source, caplog: pytest.LogCaptureFixture
) -> None:
    table = source.table("id int primary key, v int, w int")
    source.run(f"INSERT INTO {table} VALUES (1, 10, 20)")
    stream = started(source)
    source.run(
        f"ALTER TABLE {table} RENAME v TO x", f"ALTER TABLE {table} DROP w, ADD y int, ALTER x TYPE bigint"
    )
    stream.start(source.feed(snapshot="initial"))
    with caplog.at_level(logging.WARNING, "penstock.feeds"):
        for _ in range(3):
            stream.drain()
    (record,) = [record for record in caplog.records if record.action == "columns_changed"]  # type: ignore[attr-defined] # by extra
    for text in ("v was renamed to x", "w was dropped", "y was added", "x has another type"):
        assert text in record.message


def test_a_change_that_is_reverted_between_two_micro_batches(source: Source) -> None:
    table = source.table("id int primary key, v int")
    stream = started(source)
    source.run(
        f"INSERT INTO {table} VALUES (1, 1)",
        f"ALTER TABLE {table} ALTER v TYPE text",
        f"INSERT INTO {table} VALUES (2, '007')",
        f"ALTER TABLE {table} ALTER v TYPE int USING v::int",
        f"INSERT INTO {table} VALUES (3, 3)",
    )
    with refused("COLUMN_TYPE_CHANGED"):
        stream.drain()
    stream.start(source.feed(snapshot="initial"))
    with refused("COLUMN_TYPE_CHANGED"):
        stream.drain()
    stream.start(source.feed(snapshot="initial"))
    rows = stream.drain()
    assert [row["v"] for row in stream.rows] == [1, "007", 3]
    assert len(rows) == 1


@pytest.mark.parametrize("die", ["logged", "written"])
def test_a_query_killed_before_a_change_repeats_the_same_rows(source: Source, die: str) -> None:
    table = source.table("id int primary key, v int")
    stream = started(source)
    source.run(f"INSERT INTO {table} VALUES (1, 7)")
    source.run(f"ALTER TABLE {table} ALTER v TYPE text", f"INSERT INTO {table} VALUES (2, '007')")
    assert stream.step(die=die)
    stream.start(source.feed(snapshot="initial"))
    with refused("COLUMN_TYPE_CHANGED"):
        stream.drain()
    stream.start(source.feed(snapshot="initial"))
    stream.drain()
    assert [row["v"] for row in stream.rows] == [7, "007"]


@pytest.mark.parametrize("when", ["while it runs", "while it is down"])
def test_a_column_that_was_replaced_in_a_renamed_table_ends_the_query(source: Source, when: str) -> None:
    table = source.table("id int primary key, v int")
    source.run(f"INSERT INTO {table} VALUES (1, 1)")
    stream = started(source)
    source.run(
        f"ALTER TABLE {table} DROP v",
        f"ALTER TABLE {table} ADD v int DEFAULT 9",
        f"ALTER TABLE {table} RENAME TO u",
        f"INSERT INTO {source.name}.u VALUES (2, 2)",
    )
    if when == "while it is down":
        stream.start(source.feed(snapshot="initial"))
    with refused("COLUMN_REPLACED", table=f"{source.name}.u"):
        stream.drain()


def test_a_column_that_was_replaced_after_unread_rows_of_another_name(source: Source) -> None:
    table = source.table("id int primary key, v int")
    source.run(f"INSERT INTO {table} VALUES (1, 1)")
    stream = started(source)
    source.run(
        f"INSERT INTO {table} VALUES (2, 2)",
        f"ALTER TABLE {table} RENAME TO u",
        f"ALTER TABLE {source.name}.u DROP v",
        f"ALTER TABLE {source.name}.u ADD v int DEFAULT 9",
    )
    stream.start(source.feed(snapshot="initial"))
    with refused("COLUMN_REPLACED", table=f"{source.name}.u"):
        stream.drain()


def test_a_generated_column_that_becomes_an_ordinary_one_is_a_new_column(source: Source) -> None:
    table = source.table("id int primary key, v int, total int GENERATED ALWAYS AS (v * 2) STORED")
    stream = started(source)
    source.run(
        f"INSERT INTO {table} VALUES (1, 1)",
        f"ALTER TABLE {table} ALTER total DROP EXPRESSION",
        f"INSERT INTO {table} VALUES (2, 2, 9)",
    )
    rows = rows_after_restart(stream, source, "COLUMN_ADDED")
    assert [(row["id"], "total" in row) for row in stream.rows] == [(1, False), (2, True)]
    assert keys(rows, "id", "total") == [("insert", 2, 9)]
