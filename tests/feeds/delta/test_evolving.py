"""Random histories of a Delta table whose columns and partitions change: its changes turn each version into
the next.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path

import pyarrow as pa
import pytest
from deltalake import DeltaTable, write_deltalake
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from penstock.feeds.contract import CHANGE_TYPE, COMMIT_TIMESTAMP, COMMIT_VERSION
from penstock.feeds.delta import DeltaFeed
from tests.feeds.delta.tables import (
    History,
    State,
    replayed,
    rows,
)
from tests.feeds.running import RunningQuery
from tests.support.feed_reading import changes, passed


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "table"


class Evolving(History):
    """A table that gets other columns and partitions, and goes back to what it was."""

    def go(self, operation: str, ids: Sequence[int]) -> None:
        getattr(self, operation)(rows(*((number, "ab"[number % 2], 1.0) for number in ids)))

    def columns(self) -> list[pa.Field]:
        return list(pa.schema(self.table.schema().to_arrow()))

    def made(self, new: pa.Table, columns: Sequence[pa.Field], ids: Collection[int] = ()) -> pa.Table:
        """Rows with those columns: of the new ones, those whose ids are not there yet."""
        fresh = [row for row in new.to_pylist() if row["id"] not in ids]
        known = {"x": "x", "w": 7, "W": 8}
        values = [tuple(known.get(field.name, row.get(field.name)) for field in columns) for row in fresh]
        return rows(*values, schema=pa.schema([(field.name, field.type) for field in columns]))

    def append(self, new: pa.Table) -> None:
        ids = set(self.table.to_pyarrow_table()["id"].to_pylist())
        write_deltalake(self.path, self.made(new, self.columns(), ids), mode="append")

    def add_column(self, new: pa.Table) -> None:
        there = self.columns()
        more = [pa.field("x", pa.string())] if "x" not in {field.name for field in there} else []
        ids = set(self.table.to_pyarrow_table()["id"].to_pylist())
        write_deltalake(self.path, self.made(new, [*there, *more], ids), mode="append", schema_mode="merge")

    def replace_columns(self, new: pa.Table) -> None:
        names = {0: ["id", "p"], 1: ["id", "p", "w"], 2: ["W", "p", "id"]}[new.num_rows % 3]
        kinds = {"id": pa.int64(), "p": pa.string()}
        columns = [pa.field(name, kinds.get(name, pa.int32())) for name in names]
        by = ["p"] if new.num_rows % 2 else None
        write_deltalake(
            self.path, self.made(new, columns), mode="overwrite", schema_mode="overwrite", partition_by=by
        )

    def update(self, new: pa.Table) -> None:
        self.table.update(predicate=f"id % 3 = {new.num_rows % 3}", updates={"p": "'q'"})

    def restore(self, new: pa.Table) -> None:
        if newest := self.table.version():
            self.table.restore(new.num_rows % newest)

    def checkpoint(self, new: pa.Table) -> None:
        self.table.create_checkpoint()


EVOLUTION = [
    "append",
    "append",
    "update",
    "delete",
    "add_column",
    "replace_columns",
    "restore",
    "optimize",
    "checkpoint",
]


STEPS = st.tuples(st.sampled_from(EVOLUTION), st.lists(st.integers(0, 8), unique=True, max_size=5))


@pytest.mark.parametrize("feed_on", [True, False], ids=["feed", "files"])
@settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(steps=st.lists(STEPS, min_size=3, max_size=9))
def test_the_changes_of_an_evolving_table_turn_each_version_into_the_next(
    tmp_path_factory: pytest.TempPathFactory, feed_on: bool, steps: list[tuple[str, list[int]]]
) -> None:
    path = tmp_path_factory.mktemp("evolving") / "table"
    history = Evolving(path, feed=feed_on, partitioned=True)
    for operation, ids in steps:
        history.go(operation, ids)
    feed = DeltaFeed(path, "id").open()
    names = feed.describe().schema.names[:-3]
    found = changes(feed)
    state: State = {}
    for version in range(history.table.version() + 1):
        state = replayed(passed(feed, keyed(found, names)), state, version)
        held = [
            {name.lower(): value for name, value in row.items()}
            for row in DeltaTable(path, version=version).to_pyarrow_table().to_pylist()
        ]
        expected = {
            row["id"]: tuple(row.get(name.lower()) for name in ["id", *(n for n in names if n != "id")])
            for row in held
        }
        assert state == expected, version


@pytest.mark.parametrize("feed_on", [True, False], ids=["feed", "files"])
@settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(steps=st.lists(STEPS | st.just("read"), min_size=4, max_size=14))
def test_a_running_query_of_an_evolving_table_keeps_an_exact_copy(
    tmp_path_factory: pytest.TempPathFactory, feed_on: bool, steps: list[tuple[str, list[int]] | str]
) -> None:
    path = tmp_path_factory.mktemp("evolving") / "table"
    history = Evolving(path, feed=feed_on, partitioned=True)

    def columns_at(version: int) -> list[str]:
        return [field.name.lower() for field in DeltaTable(path, version=version).schema().fields]

    query = RunningQuery(
        lambda: DeltaFeed(path, "id").open(), lambda names: [*map(str.lower, names)], "id", -1
    )
    for step in [*steps, "read"]:
        if step != "read":
            history.go(*step)
            continue
        for version in query.read():
            assert set(columns_at(version)) == set(query.columns)
        held = DeltaTable(path, version=query.position).to_pyarrow_table()
        held = held.rename_columns([name.lower() for name in held.column_names])
        query.check(held.column_names, held.to_pylist())


def keyed(found: pa.Table, names: Sequence[str]) -> pa.Table:
    """The change rows with the id first."""
    return found.select(
        ["id", *(name for name in names if name != "id"), CHANGE_TYPE, COMMIT_VERSION, COMMIT_TIMESTAMP]
    )


# A query that is running.
