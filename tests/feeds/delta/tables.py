"""Delta tables for tests: their histories, and how a feed describes them."""

from __future__ import annotations

import json
import pickle
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest
from deltalake import DeltaTable, write_deltalake

from penstock.errors import FeedUnavailableError
from penstock.feeds.contract import CHANGE_TYPE, COMMIT_TIMESTAMP, COMMIT_VERSION
from penstock.feeds.delta.feed import OpenDeltaFeed

FEED = {"delta.enableChangeDataFeed": "true"}
SCHEMA = pa.schema([("id", pa.int64()), ("p", pa.string()), ("v", pa.float64())])
WIDER = pa.schema([*SCHEMA, ("extra", pa.string())])
ODD = [None, "", "a", "b/ c=%25", "é ü", "x:y?z#'\"\\", "{n}"]
PLAIN = ["a", "b", None]
State = dict[int, tuple[object, ...]]


def rows(*values: tuple[object, ...], schema: pa.Schema = SCHEMA) -> pa.Table:
    columns = list(zip(*values, strict=True)) or [()] * len(schema)
    return pa.table(
        [pa.array(column, field.type) for column, field in zip(columns, schema, strict=True)], schema=schema
    )


def table_at(path: Path | str, version: int | None = None, storage: Mapping[str, str] | None = None) -> State:
    options = dict(storage) if storage else None
    found = DeltaTable(str(path), version=version, storage_options=options).to_pyarrow_table()
    return {row["id"]: tuple(row.values()) for row in found.to_pylist()}


def replayed(found: pa.Table, state: State, version: int) -> State:
    """A table after the changes of one version; what goes has to be there, and what comes must not."""
    state = dict(state)
    here = found.filter(pc.equal(found[COMMIT_VERSION], version))
    data = here.drop_columns([CHANGE_TYPE, COMMIT_VERSION, COMMIT_TIMESTAMP]).to_pylist()
    both = list(zip(here[CHANGE_TYPE].to_pylist(), (tuple(row.values()) for row in data), strict=True))
    for kind, row in both:
        if kind in ("delete", "update_preimage"):
            assert state.pop(row[0]) == row
    for kind, row in both:
        if kind in ("insert", "update_postimage"):
            assert row[0] not in state
            state[row[0]] = row
    return state


def check_replay(
    path: Path | str, found: pa.Table, first: int = 0, storage: Mapping[str, str] | None = None
) -> None:
    newest = DeltaTable(str(path), storage_options=dict(storage) if storage else None).version()
    state = table_at(path, first - 1, storage) if first else {}
    for version in range(first, newest + 1):
        state = replayed(found, state, version)
        assert state == table_at(path, version, storage), version


class History:
    """A table and what happens to it."""

    def __init__(
        self, path: Path | str, *, feed: bool, partitioned: bool, storage: Mapping[str, str] | None = None
    ) -> None:
        self.path = str(path)
        self.storage = dict(storage) if storage else None
        self.partition_by = ["p"] if partitioned else None
        configuration = FEED if feed else None
        write_deltalake(
            self.path,
            rows(),
            partition_by=self.partition_by,
            configuration=configuration,
            mode="append",
            storage_options=self.storage,
        )

    @property
    def table(self) -> DeltaTable:
        return DeltaTable(self.path, storage_options=self.storage)

    def append(self, new: pa.Table) -> None:
        known = table_at(self.path, storage=self.storage)
        write_deltalake(
            self.path,
            new.filter(pc.invert(pc.is_in(new["id"], pa.array(list(known), pa.int64())))),
            mode="append",
            storage_options=self.storage,
        )

    def overwrite(self, new: pa.Table) -> None:
        write_deltalake(self.path, new, mode="overwrite", storage_options=self.storage)

    def delete(self, new: pa.Table) -> None:
        self.table.delete(f"id % 3 = {new.num_rows % 3}")

    def delete_all(self, new: pa.Table) -> None:
        self.table.delete()

    def update(self, new: pa.Table) -> None:
        self.table.update(predicate=f"id % 3 = {new.num_rows % 3}", updates={"v": "v + 1"})

    def merge(self, new: pa.Table) -> None:
        merge = self.table.merge(new, "s.id = t.id", source_alias="s", target_alias="t")
        merge.when_matched_delete("s.v > 2").when_matched_update_all().when_not_matched_insert_all().execute()

    def optimize(self, new: pa.Table) -> None:
        self.table.optimize.compact()


def switch(path: Path, on: bool) -> None:
    DeltaTable(path).alter.set_table_properties({"delta.enableChangeDataFeed": str(on).lower()})


def log_file(path: Path, version: int) -> Path:
    return path / "_delta_log" / f"{version:020}.json"


def edit(path: Path, version: int, **changes: object) -> None:
    """Change what a commit file says, action by action: its name, and a function."""
    lines = [json.loads(line) for line in log_file(path, version).read_text().splitlines()]
    for action in lines:
        for kind, change in changes.items():
            if kind in action:
                change(action[kind])
    log_file(path, version).write_text("\n".join(map(json.dumps, lines)))


@contextmanager
def refused(condition: str, match: str = "FEED") -> Iterator[pytest.ExceptionInfo[FeedUnavailableError]]:
    """The feed is refused under that condition."""
    with pytest.raises(FeedUnavailableError, match=match) as raised:
        yield raised
    assert raised.value.condition == f"FEED_UNAVAILABLE.{condition}"


def data(found: pa.Table) -> list[dict[str, Any]]:
    return found.drop_columns([CHANGE_TYPE, COMMIT_VERSION, COMMIT_TIMESTAMP]).to_pylist()


def read_as(feed: OpenDeltaFeed, schema: pa.Schema, after: int, upto: int) -> list[dict[str, Any]]:
    """The rows of a range for a query that was planned with a schema."""
    tasks = pickle.loads(pickle.dumps(feed.tasks(after, upto, 100)))
    return [row for task in tasks for batch in feed.read(task, schema) for row in batch.to_pylist()]


def overwrite(path: Path, *values: tuple[object, ...], schema: pa.Schema, **options: object) -> None:
    write_deltalake(path, rows(*values, schema=schema), mode="overwrite", schema_mode="overwrite", **options)


def add_column(path: Path) -> None:
    write_deltalake(path, rows((5, "x", 1.0, "new"), schema=WIDER), mode="append", schema_mode="merge")


def drop_column(path: Path) -> None:
    overwrite(path, (5, "x"), schema=pa.schema(list(SCHEMA)[:2]))


def rename_column(path: Path) -> None:
    overwrite(path, (5, "x", 1.0), schema=pa.schema([*list(SCHEMA)[:2], ("w", pa.float64())]))


def change_type(path: Path) -> None:
    overwrite(path, (5, "x", "1"), schema=pa.schema([*list(SCHEMA)[:2], ("v", pa.string())]))
