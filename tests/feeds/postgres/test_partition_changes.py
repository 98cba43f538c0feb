"""Partitions that come, go and are emptied while a query runs, and while it does not."""

from __future__ import annotations

from typing import Any

import pytest

from tests.feeds.postgres.stops import keys, refused, rows_after_restart, started
from tests.support.postgres_source import Source


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
    stream = started(source)
    source.run(
        f"CREATE TABLE {source.name}.p2 PARTITION OF {table} FOR VALUES FROM (10) TO (20)",
        f"INSERT INTO {table} VALUES (11)",
    )
    if root:
        assert keys(stream.drain(), "id") == [("insert", 11)]
        return
    (row,) = rows_after_restart(stream, source, "TABLE_ADDED")
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
    stream = started(source)

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
    stream = started(source)
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


def test_truncate_of_a_partition_is_not_in_the_log_of_its_table(source: Source) -> None:
    """PostgreSQL sends a TRUNCATE only under the name of what it is published as."""
    table, name = f"{source.name}.p", source.name
    source.run(
        f"CREATE TABLE {table} (id int primary key) PARTITION BY RANGE (id)",
        f"CREATE TABLE {name}.p1 PARTITION OF {table} FOR VALUES FROM (0) TO (10)",
        f"ALTER PUBLICATION {name} ADD TABLE {table}",
        f"ALTER PUBLICATION {name} SET (publish_via_partition_root)",
    )
    stream = started(source)
    source.run(f"INSERT INTO {table} VALUES (1)", f"TRUNCATE {name}.p1", f"INSERT INTO {table} VALUES (2)")
    assert keys(stream.drain(), "id") == [("insert", 1), ("insert", 2)]
    source.run(f"TRUNCATE {table}")
    with refused("TRUNCATED"):
        stream.drain()
    source.run(f"ALTER PUBLICATION {name} SET (publish_via_partition_root = false)")
    by_name = started(source, slot=f"{name}_by_name")
    source.run(f"TRUNCATE {name}.p1")
    with refused("TRUNCATED", tables=f"{name}.p1"):
        by_name.drain()
