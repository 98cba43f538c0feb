"""Tables that change while a query runs, and while it does not: their rows are delivered unchanged, or
refused by name.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from penstock.errors import FeedUnavailableError
from tests.feeds.postgres.source import Row, Source, Stream, apply, open_transaction


def refused(condition: str, **parameters: object) -> pytest.RaisesExc[FeedUnavailableError]:
    def check(error: FeedUnavailableError) -> bool:
        return (
            error.condition == f"FEED_UNAVAILABLE.{condition}"
            and parameters.items() <= error.parameters.items()
        )

    return pytest.RaisesExc(FeedUnavailableError, check=check)


def keys(rows: list[Row], *names: str) -> list[tuple[object, ...]]:
    return [(row["_change_type"], *(row[name] for name in names)) for row in rows]


def running(source: Source, columns: Sequence[str] | None = None, **options: object) -> Stream:
    """A query that has read what is there."""
    stream = Stream()
    stream.start(source.feed(snapshot="initial", **options), columns)
    stream.drain()
    return stream


def goes_on(stream: Stream, source: Source, condition: str, **options: object) -> list[Row]:
    """What a query that stops by name has after it was started again, once."""
    with refused(condition):
        stream.drain()
    before = len(stream.batches)
    stream.start(source.feed(snapshot="initial", **options))
    stream.drain()
    return [row for number in range(before, len(stream.batches)) for row in stream.batches[number]]


OTHER_KEYS = {
    "replica identity by an index": ["ALTER TABLE {t} REPLICA IDENTITY USING INDEX t_code_key"],
    "the primary key on another column": ["ALTER TABLE {t} DROP CONSTRAINT t_pkey",
        "ALTER TABLE {t} ADD PRIMARY KEY (code)"],
    "a key with a column more": ["ALTER TABLE {t} DROP CONSTRAINT t_pkey",
        "ALTER TABLE {t} ADD PRIMARY KEY (id, code)"],
}  # fmt: skip


WHEN = ["while it runs", "while it is down", "after its last micro-batch"]


@pytest.mark.parametrize(
    ("name", "when", "several"),
    [
        *((name, when, False) for name in OTHER_KEYS for when in WHEN),
        *((name, WHEN[0], True) for name in OTHER_KEYS),
    ],
)
def test_a_change_of_the_identifying_columns_ends_the_query(
    source: Source, name: str, when: str, several: bool
) -> None:
    table = source.table("id int primary key, code text not null unique, v int")
    if several:
        source.table("n int primary key", "other")
    source.run(f"INSERT INTO {table} VALUES (1, 'a', 1), (2, 'b', 2)")
    stream = running(source)
    source.run(f"UPDATE {table} SET v = v + 1 WHERE id = 1")
    if when == "while it runs":
        assert len(stream.drain()) == 1
    source.run(*(statement.format(t=table) for statement in OTHER_KEYS[name]))
    source.run(f"UPDATE {table} SET v = 9 WHERE id = 1", f"DELETE FROM {table} WHERE id = 2")
    if when == "while it is down":
        stream.start(source.feed(snapshot="initial"))
        assert len(stream.batches) == 1
    seen = len(stream.rows)
    with refused("KEY_CHANGED", table=table) as caught:
        stream.drain()
    assert "'code'" in caught.value.message
    assert len(stream.rows) == seen + (when != "while it runs")
    # Started again, it reads the rows as they are identified now.
    stream.start(source.feed(snapshot="initial"))
    update, delete = stream.drain()
    if several:
        assert None not in (update["_key"], delete["_key"])
        assert "null" not in update["_key"] + delete["_key"]
        assert '"code":"b"' in delete["_key"]
    else:
        assert (update["code"], update["v"], delete["code"]) == ("a", 9, "b")


@pytest.mark.parametrize("several", [False, True], ids=["one table", "several tables"])
def test_a_renamed_key_column_ends_the_query(source: Source, several: bool) -> None:
    table = source.table("id int primary key, v int")
    if several:
        source.table("n int primary key", "other")
    source.run(f"INSERT INTO {table} VALUES (1, 1), (2, 2)")
    stream = running(source)
    source.run(f"ALTER TABLE {table} RENAME id TO number", f"DELETE FROM {table} WHERE number = 2")
    (row,) = goes_on(stream, source, "KEY_CHANGED")
    if several:
        assert row["_key"] == '{"number":2}'
    else:
        assert (row["_change_type"], row["number"]) == ("delete", 2)


def test_a_new_replica_identity_with_the_same_key_is_accepted(source: Source) -> None:
    table = source.table("id int primary key, v int")
    source.run(f"INSERT INTO {table} VALUES (1, 1)")
    stream = running(source)
    source.run(f"ALTER TABLE {table} REPLICA IDENTITY FULL", f"UPDATE {table} SET v = 2")
    source.run(f"ALTER TABLE {table} REPLICA IDENTITY DEFAULT", f"UPDATE {table} SET v = 3")
    assert keys(stream.drain(), "id", "v") == [
        ("update_preimage", 1, 1),
        ("update_postimage", 1, 2),
        ("update_postimage", 1, 3),
    ]


def test_a_new_primary_key_with_replica_identity_full(source: Source) -> None:
    table = source.table("id int primary key, code text not null, v int")
    source.run(f"ALTER TABLE {table} REPLICA IDENTITY FULL", f"INSERT INTO {table} VALUES (1, 'a', 1)")
    stream = running(source)
    source.run(
        f"ALTER TABLE {table} DROP CONSTRAINT t_pkey",
        f"ALTER TABLE {table} ADD PRIMARY KEY (code)",
        f"UPDATE {table} SET id = 5",
    )
    assert keys(goes_on(stream, source, "KEY_CHANGED"), "id", "code") == [
        ("update_preimage", 1, "a"),
        ("update_postimage", 5, "a"),
    ]


def partitioned(source: Source) -> str:
    """Create a table with one partition, which is published under the table's name."""
    table = f"{source.name}.p"
    source.run(
        f"CREATE TABLE {table} (id int primary key, code int not null) PARTITION BY RANGE (id)",
        f"CREATE TABLE {source.name}.p1 PARTITION OF {table} FOR VALUES FROM (0) TO (10)",
        f"ALTER PUBLICATION {source.name} ADD TABLE {table}",
        f"ALTER PUBLICATION {source.name} SET (publish_via_partition_root)",
    )
    return table


@pytest.mark.parametrize("change", ["DELETE FROM {}", "UPDATE {} SET id = 2 WHERE id = 1"])
@pytest.mark.parametrize("mended", [False, True], ids=["now", "for a while"])
def test_a_partition_with_a_replica_identity_of_its_own_is_refused(
    source: Source, change: str, mended: bool
) -> None:
    """Its log does not say that the table's key has changed, nor which row was deleted."""
    table = partitioned(source)
    source.run(f"INSERT INTO {table} VALUES (1, 1)")
    stream = running(source)
    source.run(
        f"CREATE UNIQUE INDEX p1_code ON {source.name}.p1 (code)",
        f"INSERT INTO {table} VALUES (3, 3)",
        f"ALTER TABLE {source.name}.p1 REPLICA IDENTITY USING INDEX p1_code",
        change.format(table),
    )
    if mended:
        source.run(f"ALTER TABLE {source.name}.p1 REPLICA IDENTITY DEFAULT")
    with refused("KEY_UNKNOWN", table=table):
        stream.drain()
    assert keys(stream.rows, "id") == [("insert", 1), ("insert", 3)]


def test_partitions_do_not_follow_the_replica_identity_of_their_table(source: Source) -> None:
    """PostgreSQL leaves them at the primary key, so their log lacks a part of the table's key."""
    table = partitioned(source)
    source.run(
        f"CREATE UNIQUE INDEX p_code ON {table} (id, code)",
        f"ALTER TABLE {table} REPLICA IDENTITY USING INDEX p_code",
    )
    stream = running(source)
    source.run(f"INSERT INTO {table} VALUES (1, 1)", f"UPDATE {table} SET code = 2")
    with refused("KEY_UNKNOWN", table=table) as caught:
        stream.drain()
    assert "it logs 'id', and rows" in caught.value.message


def test_a_batch_refuses_a_partition_that_lacks_the_key_and_reads_on_after_it(source: Source) -> None:
    table = partitioned(source)
    source.run(
        f"CREATE UNIQUE INDEX p1_code ON {source.name}.p1 (code)",
    )
    source.make_slot()
    feed = source.open()
    source.run(
        f"ALTER TABLE {source.name}.p1 REPLICA IDENTITY USING INDEX p1_code",
        f"INSERT INTO {table} VALUES (1, 1)",
        f"UPDATE {table} SET id = 2",
    )
    first = feed.newest(feed.oldest())
    with refused("KEY_UNKNOWN", table=table):
        feed.tasks(feed.oldest(), first, 100)
    source.run(f"ALTER TABLE {source.name}.p1 REPLICA IDENTITY DEFAULT", f"INSERT INTO {table} VALUES (3, 3)")
    assert len(feed.tasks(first, feed.newest(first), 100)) == 1


def test_a_partition_that_logs_whole_rows_is_read(source: Source) -> None:
    table = partitioned(source)
    stream = running(source)
    source.run(
        f"INSERT INTO {table} VALUES (1, 1)",
        f"ALTER TABLE {source.name}.p1 REPLICA IDENTITY FULL",
        f"UPDATE {table} SET id = 2",
    )
    assert [row[:2] for row in keys(stream.drain(), "id")] == [("insert", 1), ("delete", 1), ("insert", 2)]


def test_rows_from_before_a_rename_keep_their_values(source: Source) -> None:
    table = source.table("id int primary key, v text")
    stream = running(source)
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
    stream, few = running(source), running(source, ["id", "w"], slot=f"{source.name}_few")
    source.run(f"ALTER TABLE {table} DROP v", f"INSERT INTO {table} VALUES (2, 2)")
    assert keys(few.drain(), "id", "w") == [("insert", 2, 2)]
    assert keys(goes_on(stream, source, "COLUMN_DROPPED"), "id", "w") == [("insert", 2, 2)]


def test_an_added_column_ends_only_queries_that_read_all_columns(source: Source) -> None:
    table = source.table("id int primary key, v text")
    source.run(f"INSERT INTO {table} VALUES (1, 'a')")
    stream, few = running(source), running(source, ["id", "v"], slot=f"{source.name}_few")
    source.run(f"ALTER TABLE {table} ADD w int", f"INSERT INTO {table} VALUES (2, 'b', 2)")
    assert keys(few.drain(), "id", "v") == [("insert", 2, "b")]
    assert keys(goes_on(stream, source, "COLUMN_ADDED"), "id", "v", "w") == [("insert", 2, "b", 2)]


def test_a_column_with_a_default_has_it_in_older_rows_once_they_are_sent(source: Source) -> None:
    table = source.table("id int primary key, v text")
    source.run(f"INSERT INTO {table} VALUES (1, 'a')")
    stream = running(source)
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


@pytest.mark.parametrize(
    ("name", "when"),
    [
        *((name, WHEN[0]) for name in RETYPED),
        ("integer to text", WHEN[1]),
        ("another numeric scale", WHEN[1]),
    ],
)
def test_a_changed_type_ends_the_query_and_a_restart_continues(source: Source, name: str, when: str) -> None:
    old, first, new, second = RETYPED[name]
    table = source.table(f"id int primary key, v {old}")
    stream = running(source)
    source.run(f"INSERT INTO {table} VALUES (1, {first})")
    expected = source.rows(f"SELECT v FROM {table}")
    change = f"ALTER TABLE {table} ALTER v TYPE {new} USING v::text::{new}"
    source.run(change, f"INSERT INTO {table} VALUES (2, {second})")
    expected += source.rows(f"SELECT v FROM {table} WHERE id = 2")
    if when == "while it is down":
        stream.start(source.feed(snapshot="initial"))
    rows = goes_on(stream, source, "COLUMN_TYPE_CHANGED")
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
    stream = running(source)
    source.run(f"INSERT INTO {table} VALUES (1, {first})", f"ALTER TABLE {table} ALTER v TYPE {new}")
    source.run(f"INSERT INTO {table} VALUES (2, {second})")
    rows = stream.drain()
    assert [(row["v"],) for row in rows] == source.rows(f"SELECT v FROM {table} ORDER BY id")


def test_a_domain_is_read_as_its_base_type(source: Source) -> None:
    source.run(f"CREATE DOMAIN {source.name}.price AS numeric(9, 2)")
    table = source.table("id int primary key, v numeric(9, 2)")
    stream = running(source)
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
    stream, few = running(source), running(source, ["id"], slot=f"{source.name}_few")
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


def test_names_swapped_and_swapped_back_between_two_micro_batches(source: Source) -> None:
    table = source.table("id int primary key, v int, w int")
    stream = running(source)
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
    stream = running(source)
    source.run(
        f"ALTER TABLE {table} RENAME v TO x", f"ALTER TABLE {table} DROP w, ADD y int, ALTER x TYPE bigint"
    )
    stream.start(source.feed(snapshot="initial"))
    with caplog.at_level(logging.WARNING, "penstock.feeds"):
        for _ in range(3):
            stream.drain()
    (record,) = [record for record in caplog.records if record.action == "columns_changed"]  # type: ignore[attr-defined] # by extra
    for told in ("v was renamed to x", "w was dropped", "y was added", "x has another type"):
        assert told in record.message


def test_a_change_that_is_reverted_between_two_micro_batches(source: Source) -> None:
    table = source.table("id int primary key, v int")
    stream = running(source)
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
    stream = running(source)
    source.run(f"INSERT INTO {table} VALUES (1, 7)")
    source.run(f"ALTER TABLE {table} ALTER v TYPE text", f"INSERT INTO {table} VALUES (2, '007')")
    assert stream.step(die=die)
    stream.start(source.feed(snapshot="initial"))
    with refused("COLUMN_TYPE_CHANGED"):
        stream.drain()
    stream.start(source.feed(snapshot="initial"))
    stream.drain()
    assert [row["v"] for row in stream.rows] == [7, "007"]


RECREATED = {
    "dropped and recreated": ["DROP TABLE {t}", "CREATE TABLE {t} (id int primary key, v int)",
        "ALTER PUBLICATION {p} ADD TABLE {t}"],
    "swapped": ["CREATE TABLE {t}_new (id int primary key, v int)", "ALTER PUBLICATION {p} ADD TABLE {t}_new",
                "ALTER TABLE {t} RENAME TO t_old", "ALTER TABLE {t}_new RENAME TO t",
                "ALTER PUBLICATION {p} DROP TABLE {p}.t_old"],
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "when", "chosen"),
    [
        *((name, WHEN[0], chosen) for name in RECREATED for chosen in (False, True)),
        *((name, WHEN[1], False) for name in RECREATED),
    ],
)
def test_a_recreated_table_ends_the_query_until_that_is_accepted(
    source: Source, name: str, when: str, chosen: bool
) -> None:
    table = source.table("id int primary key, v int")
    options = {"tables": ("t",)} if chosen else {}
    source.run(f"INSERT INTO {table} VALUES (1, 1)")
    stream = running(source, **options)
    source.run(*(statement.format(t=table, p=source.name) for statement in RECREATED[name]))
    if when == "while it is down":
        stream.start(source.feed(snapshot="initial", **options))
    with refused("TABLE_RECREATED", table=table) as caught:
        stream.drain()
    source.run(f"INSERT INTO {table} VALUES (2, 2)")
    accept = caught.value.parameters["accept"]
    assert str(accept) in caught.value.message
    for _ in range(2):
        stream.start(source.feed(snapshot="initial", **options))
        with refused("TABLE_RECREATED"):
            stream.drain()
    stream.start(source.feed(snapshot="initial", accept=accept, **options))
    assert keys(stream.drain(), "id", "v") == [("insert", 2, 2)]
    # Once it has gone on, nothing needs to be accepted any more.
    source.run(f"INSERT INTO {table} VALUES (3, 3)")
    stream.start(source.feed(snapshot="initial", **options))
    assert keys(stream.drain(), "id", "v") == [("insert", 3, 3)]


def test_a_second_table_ends_a_query_of_all_tables(source: Source) -> None:
    table = source.table("id int primary key")
    stream = running(source)
    chosen = running(source, tables=("t",), slot=f"{source.name}_chosen")
    source.run(f"INSERT INTO {table} VALUES (1)")
    other = source.table("n int primary key", "other")
    source.run(f"INSERT INTO {other} VALUES (5)", f"INSERT INTO {table} VALUES (2)")
    with refused("TABLE_NOT_COPIED", table=other) as caught:
        stream.drain()
    stream.start(source.feed(snapshot="initial", accept=caught.value.parameters["accept"]))
    rows = stream.drain()
    assert [(row["_table"], row["_key"]) for row in rows] == [
        (table, '{"id":1}'),
        (other, '{"n":5}'),
        (table, '{"id":2}'),
    ]
    assert keys(chosen.drain(), "id") == [("insert", 1), ("insert", 2)]


def test_a_new_table_of_a_publication_of_all_tables(source: Source) -> None:
    if source.version < 15:
        pytest.skip("publications of schemas came with PostgreSQL 15")
    table = source.table("id int primary key")
    source.run(f"ALTER PUBLICATION {source.name} SET TABLES IN SCHEMA {source.name}")
    stream = running(source)
    source.run(f"INSERT INTO {table} VALUES (1)", f"CREATE TABLE {source.name}.other (n int primary key)")
    source.run(f"INSERT INTO {source.name}.other VALUES (5)", f"INSERT INTO {table} VALUES (2)")
    # All of its rows are in the log, so starting again is enough.
    rows = goes_on(stream, source, "TABLE_ADDED")
    assert keys(stream.batches[1], "id") == [("insert", 1)]
    assert [row["_key"] for row in rows] == ['{"n":5}', '{"id":2}']


def test_a_table_created_changed_and_dropped_between_two_micro_batches(source: Source) -> None:
    table = source.table("id int primary key")
    stream = running(source)
    source.run(f"INSERT INTO {table} VALUES (1)")
    stream.drain()
    source.run(f"INSERT INTO {table} VALUES (2)")
    other = source.table("n int primary key", "other")
    source.run(
        f"INSERT INTO {other} VALUES (5)",
        f"ALTER TABLE {other} ADD w int",
        f"INSERT INTO {other} VALUES (6, 6)",
        f"DROP TABLE {other}",
        f"INSERT INTO {table} VALUES (3)",
    )
    conditions = []
    for _ in range(6):
        try:
            stream.drain()
        except FeedUnavailableError as error:
            conditions.append(error.condition.partition(".")[2])
            stream.start(source.feed(snapshot="initial"))
    assert conditions == ["TABLE_ADDED", "COLUMN_ADDED", "TABLE_REMOVED"]
    assert keys([row for row in stream.rows if "id" in row], "id") == [("insert", 1), ("insert", 2)]
    assert [row["_key"] for row in stream.rows if "_key" in row] == ['{"n":5}', '{"n":6}', '{"id":3}']


def test_a_table_that_joins_and_leaves_the_publication_between_two_micro_batches(source: Source) -> None:
    table = source.table("id int primary key")
    stream = running(source)
    other = f"{source.name}.other"
    source.run(
        f"CREATE TABLE {other} (n int primary key, v int)",
        f"INSERT INTO {other} VALUES (5, 5)",
        f"ALTER PUBLICATION {source.name} ADD TABLE {other}",
        f"UPDATE {other} SET v = 6",
        f"ALTER PUBLICATION {source.name} DROP TABLE {other}",
        f"INSERT INTO {table} VALUES (1)",
    )
    for _ in range(2):
        # Its row was inserted before it was published: starting again does not bring it.
        with refused("TABLE_NOT_COPIED", table=other) as caught:
            stream.drain()
        stream.start(source.feed(snapshot="initial"))
    assert stream.rows == []
    stream.start(source.feed(snapshot="initial", accept=caught.value.parameters["accept"]))
    with refused("TABLE_REMOVED", table=other):
        stream.drain()
    assert [row["_key"] for row in stream.rows] == ['{"n":5}', '{"id":1}']


def test_a_table_that_leaves_the_publication_ends_the_query(source: Source) -> None:
    table = source.table("id int primary key")
    other = source.table("n int primary key", "other")
    stream = running(source)
    source.run(f"INSERT INTO {other} VALUES (1)", f"ALTER PUBLICATION {source.name} DROP TABLE {other}")
    source.run(f"INSERT INTO {table} VALUES (2)")
    assert [row["_key"] for row in goes_on(stream, source, "TABLE_REMOVED")] == []
    assert [row["_key"] for row in stream.rows] == ['{"n":1}', '{"id":2}']
    source.run(f"INSERT INTO {table} VALUES (3)")
    assert keys(stream.drain(), "id") == [("insert", 3)]


def test_unread_rows_of_a_dropped_table_are_delivered_first(source: Source) -> None:
    table = source.table("id int primary key")
    other = source.table("n int primary key", "other")
    stream = running(source)
    source.run(f"INSERT INTO {other} VALUES (1)", f"DROP TABLE {other}", f"INSERT INTO {table} VALUES (2)")
    stream.start(source.feed(snapshot="initial"))
    with refused("TABLE_REMOVED", table=other):
        stream.drain()
    assert [row["_key"] for row in stream.rows] == ['{"n":1}', '{"id":2}']
    source.run(f"INSERT INTO {table} VALUES (3)")
    stream.start(source.feed(snapshot="initial"))
    assert keys(stream.drain(), "id") == [("insert", 3)]


def test_a_table_that_left_the_publication_temporarily_lacks_rows(source: Source) -> None:
    table = source.table("id int primary key")
    stream = running(source)
    source.run(
        f"ALTER PUBLICATION {source.name} DROP TABLE {table}",
        f"INSERT INTO {table} VALUES (1)",
        f"ALTER PUBLICATION {source.name} ADD TABLE {table}",
        f"INSERT INTO {table} VALUES (2)",
    )
    with refused("TABLE_PUBLISHED_AGAIN", table=table) as caught:
        stream.drain()
    stream.start(source.feed(snapshot="initial", accept=caught.value.parameters["accept"]))
    assert keys(stream.drain(), "id") == [("insert", 2)]


def test_a_publication_that_publishes_less_temporarily(source: Source) -> None:
    table = source.table("id int primary key")
    stream = running(source)
    source.run(f"ALTER PUBLICATION {source.name} SET (publish = 'insert, update')")
    with refused("PUBLICATION_CHANGED") as caught:
        stream.drain()
    stream.start(source.feed(snapshot="initial", accept=caught.value.parameters["accept"]))
    source.run(f"INSERT INTO {table} VALUES (2)")
    assert keys(stream.drain(), "id") == [("insert", 2)]


@pytest.mark.parametrize("root", [False, True], ids=["partitions by name", "under the root's name"])
def test_a_partition_created_while_the_query_runs(source: Source, root: bool) -> None:
    table = f"{source.name}.p"
    source.run(
        f"CREATE TABLE {table} (id int primary key) PARTITION BY RANGE (id)",
        f"CREATE TABLE {source.name}.p1 PARTITION OF {table} FOR VALUES FROM (0) TO (10)",
        f"ALTER PUBLICATION {source.name} ADD TABLE {table}",
        f"ALTER PUBLICATION {source.name} SET (publish_via_partition_root = {root})",
        f"INSERT INTO {table} VALUES (1)",
    )
    stream = running(source)
    source.run(
        f"CREATE TABLE {source.name}.p2 PARTITION OF {table} FOR VALUES FROM (10) TO (20)",
        f"INSERT INTO {table} VALUES (11)",
    )
    if root:
        assert keys(stream.drain(), "id") == [("insert", 11)]
        return
    (row,) = goes_on(stream, source, "TABLE_ADDED")
    assert (row["_table"], row["_key"]) == (f"{source.name}.p2", '{"id":11}')


@pytest.mark.parametrize("when", ["while it runs", "while it is down"])
def test_partitions_attached_and_detached_with_their_rows(source: Source, when: str) -> None:
    table, name = f"{source.name}.p", source.name
    source.run(
        f"CREATE TABLE {table} (id int primary key) PARTITION BY RANGE (id)",
        f"CREATE TABLE {name}.p1 PARTITION OF {table} FOR VALUES FROM (0) TO (10)",
        f"ALTER PUBLICATION {name} ADD TABLE {table}",
        f"ALTER PUBLICATION {name} SET (publish_via_partition_root)",
        f"INSERT INTO {table} VALUES (1)",
    )
    stream = running(source)

    def stops(condition: str, **options: object) -> Any:
        if when == "while it is down":
            stream.start(source.feed(snapshot="initial", **options))
        with refused(condition, table=table) as caught:
            stream.drain()
        return caught.value.parameters["accept"]

    source.run(f"CREATE TABLE {name}.p2 (id int primary key)", f"INSERT INTO {name}.p2 VALUES (11)")
    source.run(f"ALTER TABLE {table} ATTACH PARTITION {name}.p2 FOR VALUES FROM (10) TO (20)")
    accept = stops("PARTITION_ATTACHED")
    source.run(f"INSERT INTO {table} VALUES (12)")
    stream.start(source.feed(snapshot="initial", accept=accept))
    assert keys(stream.drain(), "id") == [("insert", 12)]
    source.run(f"ALTER TABLE {table} DETACH PARTITION {name}.p1")
    accept = stops("PARTITION_DETACHED")
    source.run(f"INSERT INTO {table} VALUES (13)")
    stream.start(source.feed(snapshot="initial", accept=accept))
    assert keys(stream.drain(), "id") == [("insert", 13)]
    # Where rows may stay that were emptied out, so may those of partitions that go.
    source.run(f"DROP TABLE {name}.p2")
    stops("PARTITION_DETACHED")
    stream.start(source.feed(snapshot="initial", truncate="skip"))
    stream.drain()


def test_a_partition_created_and_dropped_between_two_micro_batches(source: Source) -> None:
    table, name = f"{source.name}.p", source.name
    source.run(
        f"CREATE TABLE {table} (id int primary key, v int) PARTITION BY RANGE (id)",
        f"CREATE TABLE {name}.p1 PARTITION OF {table} FOR VALUES FROM (0) TO (10)",
        f"ALTER PUBLICATION {name} ADD TABLE {table}",
        f"ALTER PUBLICATION {name} SET (publish_via_partition_root)",
    )
    stream = running(source)
    source.run(
        f"CREATE TABLE {name}.p2 (id int primary key, v int)",
        f"INSERT INTO {name}.p2 VALUES (11, 1)",
        f"ALTER TABLE {table} ATTACH PARTITION {name}.p2 FOR VALUES FROM (10) TO (20)",
        f"UPDATE {table} SET v = 2",
        f"DROP TABLE {name}.p2",
        f"INSERT INTO {table} VALUES (1, 1)",
    )
    with refused("PARTITION_DETACHED", table=f"{name}.p2") as caught:
        stream.drain()
    stream.start(source.feed(snapshot="initial", accept=caught.value.parameters["accept"]))
    assert keys(stream.drain(), "id") == [("update_postimage", 11), ("insert", 1)]


def test_a_commit_with_rows_from_before_and_after_a_change(source: Source) -> None:
    table = source.table("id int primary key, v int")
    stream = running(source)
    source.run(f"INSERT INTO {table} VALUES (1, 1)")
    with source.connection.transaction():
        source.run(
            f"INSERT INTO {table} VALUES (2, 2)",
            f"ALTER TABLE {table} ADD w int",
            f"INSERT INTO {table} VALUES (3, 3, 3)",
        )
    source.run(f"INSERT INTO {table} VALUES (4, 4, 4)")
    for _ in range(2):
        with refused("CHANGED_IN_COMMIT", table=table) as caught:
            stream.drain()
        assert "'w'" in caught.value.message
        stream.start(source.feed(snapshot="initial"))
    stream.start(source.feed(snapshot="initial", skip=[caught.value.parameters["version"]]))
    stream.drain()
    assert [(row["id"], row.get("w")) for row in stream.rows] == [(1, None), (4, 4)]


def test_a_table_dropped_before_its_snapshot_was_read(source: Source) -> None:
    table = source.table("id int primary key")
    other = source.table("n int primary key", "other")
    source.run(f"INSERT INTO {other} VALUES (1)")
    stream = Stream()
    stream.start(source.feed(snapshot="initial"))
    source.run(f"DROP TABLE {other}", f"INSERT INTO {table} VALUES (2)")
    stream.start(source.feed(snapshot="initial"))
    with refused("TABLE_REMOVED", table=other):
        stream.drain()
    assert [row["_key"] for row in stream.rows] == ['{"n":1}', '{"id":2}']
    stream.start(source.feed(snapshot="initial"))
    source.run(f"INSERT INTO {table} VALUES (3)")
    assert keys(stream.drain(), "id") == [("insert", 3)]


def test_a_renamed_table(source: Source) -> None:
    table = source.table("id int primary key")
    stream = running(source)
    source.run(f"ALTER TABLE {table} RENAME TO u", f"INSERT INTO {source.name}.u VALUES (1)")
    assert keys(stream.drain(), "id") == [("insert", 1)], "of one table the name does not matter"
    other = source.table("n int primary key", "other")
    several = running(source, slot=f"{source.name}_several")
    source.run(f"ALTER TABLE {other} RENAME TO another", f"INSERT INTO {source.name}.another VALUES (1)")
    with refused("TABLE_RENAMED") as caught:
        several.drain()
    mend = f"alter table {source.name}.another rename to other"
    assert mend in caught.value.message
    source.run(mend, f"INSERT INTO {other} VALUES (2)")


@pytest.mark.parametrize("end", ["commit", "rollback"])
def test_rows_of_other_tables_are_delivered_while_a_table_is_being_changed(source: Source, end: str) -> None:
    table = source.table("id int primary key, v int")
    other = source.table("n int primary key", "other")
    stream = running(source)
    with open_transaction(source, f"ALTER TABLE {table} ADD w int") as connection:
        connection.execute(f"INSERT INTO {table} (id) VALUES (1)".encode())
        source.run(f"INSERT INTO {other} VALUES (1)")
        with ThreadPoolExecutor() as threads:
            drained = threads.submit(stream.drain)
            try:
                assert [row["_key"] for row in drained.result(20)] == ['{"n":1}']
            finally:
                getattr(connection, end)()
    source.run(f"INSERT INTO {other} VALUES (2)")
    if end == "commit":
        with refused("COLUMN_ADDED", table=table):
            stream.drain()
        stream.start(source.feed(snapshot="initial"))
    rows = stream.drain()
    assert [row["_key"] for row in rows] == ['{"id":1}'] * (end == "commit") + ['{"n":2}']


def test_a_table_recreated_while_another_one_was_being_changed(source: Source) -> None:
    table = source.table("id int primary key, v int")
    other = source.table("n int primary key", "other")
    stream = running(source)
    source.run(f"INSERT INTO {table} VALUES (1, 1)")
    stream.drain()
    with open_transaction(source, f"LOCK TABLE {other} IN ACCESS EXCLUSIVE MODE"):
        source.run(f"DROP TABLE {table}")
        source.table("id int primary key, v int")
        stream.drain()
    source.run(f"INSERT INTO {other} VALUES (1)")
    with refused("TABLE_RECREATED", table=table):
        stream.drain()


def test_truncate_ends_the_query_after_earlier_rows_are_delivered(source: Source) -> None:
    table = source.table("id int primary key")
    stream = running(source)
    source.run(f"INSERT INTO {table} VALUES (1)", f"TRUNCATE {table}", f"INSERT INTO {table} VALUES (2)")
    for _ in range(2):
        with refused("TRUNCATED"):
            stream.drain()
        assert keys(stream.rows, "id") == [("insert", 1)]
        stream.start(source.feed(snapshot="initial"))
    stream.start(source.feed(snapshot="initial", truncate="skip"))
    assert keys(stream.drain(), "id") == [("insert", 2)]


def test_a_copy_follows_its_table_through_schema_changes(source: Source) -> None:
    table = source.table("id int primary key, v int")
    source.run(f"INSERT INTO {table} SELECT i, i FROM generate_series(1, 5) i")
    stream = running(source)
    source.run(f"UPDATE {table} SET v = 10 WHERE id = 1", f"ALTER TABLE {table} ADD w text")
    source.run(f"UPDATE {table} SET w = 'x' WHERE id < 3", f"DELETE FROM {table} WHERE id = 5")
    with refused("COLUMN_ADDED"):
        stream.drain()
    stream.start(source.feed(snapshot="initial"))
    stream.drain()
    copy: dict[object, Row] = {}
    apply([{"w": None, **row} for row in stream.rows], ("id",), ("id", "v", "w"), copy)
    assert sorted(tuple(row.values()) for row in copy.values()) == source.rows(
        f"SELECT * FROM {table} ORDER BY id"
    )
