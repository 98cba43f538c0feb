"""Schema changes of a table whose copy a table sink keeps: what the docs say to do makes the copy equal."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

import penstock
from penstock.errors import InvalidOptionError, SchemaMismatchError
from tests.feeds.postgres.stops import refused
from tests.support.postgres_source import Source
from tests.support.sql_tables import NOW, named, query, rows, sql_name


@dataclass(frozen=True)
class Change:
    """A change at the source, and what is done about it."""

    source: tuple[str, ...]
    condition: str
    sink: tuple[str, ...] = ()
    then: tuple[str, ...] = ()
    columns: str = "id, code, v"
    only_in: str = ""
    """The kind of store that needs the statements for the sink, if not all do."""


CHANGES = {
    "added": Change(
        ("ALTER TABLE {t} ADD w int", "UPDATE {t} SET w = 5 WHERE id = 1"),
        "COLUMN_ADDED",
        ("alter table {s} add column w integer",),
        columns="id, code, v, w",
    ),
    "added with a default": Change(
        ("ALTER TABLE {t} ADD w int DEFAULT 7", "INSERT INTO {t} VALUES (3, 33, 3)"),
        "COLUMN_ADDED",
        ("alter table {s} add column w integer default 7",),
        columns="id, code, v, w",
    ),
    "renamed": Change(
        ("ALTER TABLE {t} RENAME v TO x", "UPDATE {t} SET x = 5 WHERE id = 1"),
        "COLUMN_DROPPED",
        ("alter table {s} rename column v to x",),
        columns="id, code, x",
    ),
    "dropped": Change(
        ("ALTER TABLE {t} DROP v", "UPDATE {t} SET code = 111 WHERE id = 1"),
        "COLUMN_DROPPED",
        columns="id, code",
    ),
    "wider": Change(
        ("ALTER TABLE {t} ALTER v TYPE bigint", "UPDATE {t} SET v = 1 << 40 WHERE id = 1"),
        "COLUMN_TYPE_CHANGED",
        ("alter table {s} alter column v type bigint",),
        ("UPDATE {t} SET v = v",),
        only_in="postgresql",
    ),
}
OFTEN = ("added", "added with a default")


class Copy:
    """A pipeline from a feed to a table."""

    def __init__(self, spark: SparkSession, source: Source, url: str, folder: Path) -> None:
        self._spark, self._source, self._url, self._folder = spark, source, url, folder
        self.checkpoint = "checkpoint"

    def run(self, key: str = "id") -> None:
        changes = penstock.changes.read_stream(self._spark, self._source.feed(snapshot="initial"))
        sink = penstock.TableSink(named(self._url, "copy"), [key], self._url, apply_changes=True)
        query = penstock.stream(self._spark, changes).write(sink)
        query.start(checkpoint=self._folder / self.checkpoint, trigger=NOW).awaitTermination()


@pytest.fixture
def copy(spark: SparkSession, source: Source, store_url: str, tmp_path: Path) -> Copy:
    source.table("id int primary key, code int not null unique, v int")
    source.run(f"INSERT INTO {source.name}.t VALUES (1, 11, 1), (2, 22, 2)")
    return Copy(spark, source, store_url, tmp_path)


@pytest.mark.parametrize(
    "name", [name if name in OFTEN else pytest.param(name, marks=pytest.mark.soak) for name in CHANGES]
)
def test_a_copy_equals_its_source_after_a_schema_change(
    copy: Copy, source: Source, store_url: str, name: str
) -> None:
    change, table, sink = CHANGES[name], f"{source.name}.t", sql_name(store_url, "copy")
    copy.run()
    source.run(f"DELETE FROM {table} WHERE id = 2")
    source.run(*(statement.format(t=table) for statement in change.source))
    with refused(change.condition):
        copy.run()
    if change.only_in in store_url:
        for statement in change.sink:
            query(store_url, statement.format(s=sink))
    copy.run()
    source.run(*(statement.format(t=table) for statement in change.then))
    source.run(f"INSERT INTO {table} (id, code) VALUES (4, 44)")
    copy.run()
    assert rows(store_url, "copy", change.columns) == sorted(
        source.rows(f"SELECT {change.columns} FROM {table}"), key=repr
    )


def test_a_table_with_another_key_starts_over(copy: Copy, source: Source, store_url: str) -> None:
    table = f"{source.name}.t"
    copy.run()
    source.run(f"ALTER TABLE {table} DROP CONSTRAINT t_pkey, ADD PRIMARY KEY (code)")
    source.run(f"UPDATE {table} SET v = 5 WHERE id = 1")
    with pytest.raises(InvalidOptionError, match=r"LOSES_CHANGES\].*identifies rows by code"):
        copy.run()
    query(store_url, f"create unique index by_code on {sql_name(store_url, 'copy')} (code)")
    with pytest.raises(SchemaMismatchError, match="drop the table to start over"):
        copy.run("code")
    query(store_url, f"drop table {sql_name(store_url, 'copy')}")
    source.drop_slot()
    copy.checkpoint = "another"
    copy.run("code")
    source.run(f"DELETE FROM {table} WHERE code = 22")
    copy.run("code")
    assert rows(store_url, "copy", "id, code, v") == [(1, 11, 5)]
