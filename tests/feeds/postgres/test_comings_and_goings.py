"""Tables and partitions that leave a publication and come back before the query has looked again: what was
written to them meanwhile is not in the log.
"""

from __future__ import annotations

import pytest

from tests.feeds.postgres.stops import keys, refused, started
from tests.support.postgres_source import Source, Stream

WHEN = ["while it runs", "while it is down"]


def partitioned(source: Source, *, root: bool = True) -> str:
    """Create a table with partitions on two levels."""
    table, name = f"{source.name}.p", source.name
    source.run(
        f"CREATE TABLE {table} (id int primary key, v int) PARTITION BY RANGE (id)",
        f"CREATE TABLE {name}.p1 PARTITION OF {table} FOR VALUES FROM (0) TO (10)",
        f"CREATE TABLE {name}.p2 PARTITION OF {table} FOR VALUES FROM (10) TO (30) PARTITION BY RANGE (id)",
        f"CREATE TABLE {name}.p3 PARTITION OF {name}.p2 FOR VALUES FROM (10) TO (20)",
        f"ALTER PUBLICATION {name} ADD TABLE {table}",
        f"ALTER PUBLICATION {name} SET (publish_via_partition_root = {root})",
    )
    return table


def refused_until_accepted(stream: Stream, source: Source, condition: str, when: str, table: str) -> None:
    for _ in range(2):
        if when == "while it is down":
            stream.start(source.feed(snapshot="initial"))
        with refused(condition, table=table) as caught:
            stream.drain()
        stream.start(source.feed(snapshot="initial"))
    accept = caught.value.parameters["accept"]
    assert str(accept) in caught.value.message
    stream.start(source.feed(snapshot="initial", accept=accept))
    stream.drain()


@pytest.mark.parametrize("when", WHEN)
@pytest.mark.parametrize("level", ["p1", "p2"])
def test_a_partition_that_was_detached_and_attached_again_lacks_rows(
    source: Source, level: str, when: str
) -> None:
    table, name = partitioned(source), source.name
    stream = started(source)
    low, high, leaf = (0, 10, "p1") if level == "p1" else (10, 30, "p3")
    source.run(
        f"ALTER TABLE {table} DETACH PARTITION {name}.{level}",
        f"INSERT INTO {name}.{level} VALUES ({low + 1}, 1)",
        f"ALTER TABLE {table} ATTACH PARTITION {name}.{level} FOR VALUES FROM ({low}) TO ({high})",
        f"INSERT INTO {table} VALUES ({low + 2}, 2)",
    )
    refused_until_accepted(stream, source, "PARTITION_ATTACHED_AGAIN", when, table)
    assert keys(stream.rows, "id") == [("insert", low + 2)]
    source.run(f"INSERT INTO {name}.{leaf} VALUES ({low + 3}, 3)")
    assert keys(stream.drain(), "id") == [("insert", low + 3)]


@pytest.mark.parametrize("when", WHEN)
def test_a_partition_that_was_published_through_its_table_and_left_it_for_a_while(
    source: Source, when: str
) -> None:
    table, name = partitioned(source, root=False), source.name
    stream = started(source)
    source.run(
        f"ALTER TABLE {table} DETACH PARTITION {name}.p1",
        f"INSERT INTO {name}.p1 VALUES (1, 1)",
        f"ALTER TABLE {table} ATTACH PARTITION {name}.p1 FOR VALUES FROM (0) TO (10)",
        f"INSERT INTO {table} VALUES (2, 2)",
    )
    refused_until_accepted(stream, source, "TABLE_PUBLISHED_AGAIN", when, f"{name}.p1")
    assert [row["_key"] for row in stream.rows] == ['{"id":2}']


def test_a_partition_that_was_detached_for_a_while_before_its_table_left_the_publication(
    source: Source,
) -> None:
    table, name = partitioned(source), source.name
    stream = started(source)
    source.run(
        f"ALTER TABLE {table} DETACH PARTITION {name}.p1",
        f"INSERT INTO {name}.p1 VALUES (1, 1)",
        f"ALTER TABLE {table} ATTACH PARTITION {name}.p1 FOR VALUES FROM (0) TO (10)",
        f"UPDATE {table} SET v = 2",
        f"ALTER PUBLICATION {name} DROP TABLE {table}",
    )
    with refused("TABLE_REMOVED", table=table):
        stream.drain()
    assert stream.rows == []


def test_a_partition_that_is_published_itself_may_be_detached_and_attached(source: Source) -> None:
    table, name = partitioned(source, root=False), source.name
    source.run(f"ALTER PUBLICATION {name} SET TABLE {name}.p1, {name}.p3")
    stream = started(source)
    source.run(
        f"ALTER TABLE {table} DETACH PARTITION {name}.p1",
        f"INSERT INTO {name}.p1 VALUES (1, 1)",
        f"ALTER TABLE {table} ATTACH PARTITION {name}.p1 FOR VALUES FROM (0) TO (10)",
        f"INSERT INTO {table} VALUES (2, 2)",
    )
    assert [row["_key"] for row in stream.drain()] == ['{"id":1}', '{"id":2}']


@pytest.mark.parametrize("root", [True, False], ids=["under the root's name", "partitions by name"])
def test_an_unlogged_partition_is_refused(source: Source, root: bool) -> None:
    table, name = partitioned(source, root=root), source.name
    stream = started(source)
    source.run(f"ALTER TABLE {name}.p3 SET UNLOGGED", f"INSERT INTO {table} VALUES (11, 1)")
    parameters = {"table": table if root else f"{name}.p3", "partition": f"{name}.p3"}
    for _ in range(2):
        with refused("PARTITION_UNLOGGED", **parameters) as caught:
            stream.drain()
        assert f"alter table {name}.p3 set logged" in caught.value.message
        stream.start(source.feed(snapshot="initial"))
    new = Stream()
    with refused("PARTITION_UNLOGGED", **parameters):
        new.start(source.feed(snapshot="initial", slot=f"{name}_new"))
    source.run(f"ALTER TABLE {name}.p3 SET LOGGED")
    new.start(source.feed(snapshot="initial", slot=f"{name}_new"))
    assert [row["v"] if root else row["p3"]["v"] for row in new.drain()] == [1]


@pytest.fixture
def elsewhere(source: Source) -> str:
    """A schema that is not published, beside one that is."""
    name = f"{source.name}_o"
    source.run(f"CREATE SCHEMA {name}", f"ALTER PUBLICATION {source.name} SET TABLES IN SCHEMA {source.name}")
    return name


@pytest.mark.parametrize("when", WHEN)
@pytest.mark.parametrize("renamed", [False, True])
def test_a_table_that_was_in_another_schema_for_a_while_lacks_rows(
    source: Source, elsewhere: str, renamed: bool, when: str
) -> None:
    table = f"{source.name}.t"
    source.run(f"CREATE TABLE {table} (id int primary key)")
    stream = started(source)
    source.run(
        f"ALTER TABLE {table} SET SCHEMA {elsewhere}",
        f"INSERT INTO {elsewhere}.t VALUES (1)",
        f"ALTER TABLE {elsewhere}.t SET SCHEMA {source.name}",
        f"INSERT INTO {table} VALUES (2)",
    )
    if renamed:
        source.run(f"ALTER TABLE {table} RENAME TO u")
    refused_until_accepted(
        stream, source, "TABLE_PUBLISHED_AGAIN", when, f"{source.name}.{'u' if renamed else 't'}"
    )
    assert keys(stream.rows, "id") == [("insert", 2)]


def test_a_partition_whose_table_was_in_another_schema_for_a_while(source: Source, elsewhere: str) -> None:
    """The publication has the partition because it has the schema of its table."""
    table = f"{source.name}.p"
    source.run(
        f"CREATE TABLE {table} (id int primary key) PARTITION BY RANGE (id)",
        f"CREATE TABLE {elsewhere}.p1 PARTITION OF {table} FOR VALUES FROM (0) TO (10)",
    )
    stream = started(source)
    source.run(
        f"ALTER TABLE {table} SET SCHEMA {elsewhere}",
        f"INSERT INTO {elsewhere}.p1 VALUES (1)",
        f"ALTER TABLE {elsewhere}.p SET SCHEMA {source.name}",
    )
    with refused("TABLE_PUBLISHED_AGAIN", table=f"{elsewhere}.p1"):
        stream.drain()


def test_changes_that_leave_a_table_in_its_schema_are_carried(source: Source, elsewhere: str) -> None:
    table = f"{source.name}.t"
    source.run(f"CREATE TABLE {table} (id int primary key, v text)")
    stream = started(source)
    source.run(
        f"ALTER TABLE {table} ALTER v TYPE varchar(20)",
        f"ALTER TABLE {table} ALTER v TYPE text",
        f"VACUUM FULL {table}",
        f"ALTER TABLE {table} OWNER TO CURRENT_USER",
        f"INSERT INTO {table} VALUES (1, 'a')",
    )
    assert keys(stream.drain(), "id") == [("insert", 1)]


def test_a_table_that_is_published_itself_may_leave_its_schema(source: Source, elsewhere: str) -> None:
    table = source.table("id int primary key")
    stream = started(source)
    source.run(
        f"ALTER TABLE {table} SET SCHEMA {elsewhere}",
        f"INSERT INTO {elsewhere}.t VALUES (1)",
        f"ALTER TABLE {elsewhere}.t SET SCHEMA {source.name}",
    )
    assert keys(stream.drain(), "id") == [("insert", 1)]


@pytest.mark.parametrize("when", WHEN)
def test_a_table_that_left_the_publication_and_came_back_under_another_name(
    source: Source, when: str
) -> None:
    table, name = source.table("id int primary key"), source.name
    stream = started(source)
    source.run(
        f"ALTER PUBLICATION {name} DROP TABLE {table}",
        f"INSERT INTO {table} VALUES (1)",
        f"ALTER TABLE {table} RENAME TO u",
        f"ALTER PUBLICATION {name} ADD TABLE {name}.u",
        f"INSERT INTO {name}.u VALUES (2)",
    )
    refused_until_accepted(stream, source, "TABLE_PUBLISHED_AGAIN", when, f"{name}.u")
    assert keys(stream.rows, "id") == [("insert", 2)]


def test_a_partition_detached_from_a_table_that_was_renamed(source: Source) -> None:
    table, name = partitioned(source), source.name
    source.run(f"INSERT INTO {table} VALUES (1, 1)")
    stream = started(source)
    source.run(f"ALTER TABLE {table} DETACH PARTITION {name}.p1", f"ALTER TABLE {table} RENAME TO q")
    with refused("PARTITION_DETACHED", table=f"{name}.q"):
        stream.drain()
