"""Delta tables whose columns, partitions or identity change: their rows are delivered exactly, or
refused by name.
"""

from __future__ import annotations

import json
import pickle
import shutil
from collections.abc import Callable, Collection, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable, write_deltalake
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pyspark.sql import SparkSession

import penstock
from penstock.errors import DataLostError, FeedUnavailableError, InvalidChangelogSchemaError
from penstock.feeds.contract import CHANGE_TYPE, COMMIT_TIMESTAMP, COMMIT_VERSION
from penstock.feeds.delta import DeltaFeed
from penstock.feeds.delta.feed import OpenDeltaFeed
from tests.feeds.delta.tables import (
    FEED,
    SCHEMA,
    History,
    State,
    check_replay,
    edit,
    log_file,
    refused,
    replayed,
    rows,
)
from tests.feeds.reading import changes, passed
from tests.feeds.running import RunningQuery
from tests.support.change_frames import Sink

WIDER = pa.schema([*SCHEMA, ("extra", pa.string())])


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "table"


def data(found: pa.Table) -> list[dict[str, Any]]:
    return found.drop_columns([CHANGE_TYPE, COMMIT_VERSION, COMMIT_TIMESTAMP]).to_pylist()


def read_as(feed: OpenDeltaFeed, schema: pa.Schema, after: int, upto: int) -> list[dict[str, Any]]:
    """The rows of a range for a query that was planned with a schema."""
    tasks = pickle.loads(pickle.dumps(feed.tasks(after, upto, 100)))
    return [row for task in tasks for batch in feed.read(task, schema) for row in batch.to_pylist()]


def overwrite(path: Path, *values: tuple[object, ...], schema: pa.Schema, **options: object) -> None:
    write_deltalake(path, rows(*values, schema=schema), mode="overwrite", schema_mode="overwrite", **options)


# Whatever a table goes through.


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


def add_column(path: Path) -> None:
    write_deltalake(path, rows((5, "x", 1.0, "new"), schema=WIDER), mode="append", schema_mode="merge")


def drop_column(path: Path) -> None:
    overwrite(path, (5, "x"), schema=pa.schema(list(SCHEMA)[:2]))


def rename_column(path: Path) -> None:
    overwrite(path, (5, "x", 1.0), schema=pa.schema([*list(SCHEMA)[:2], ("w", pa.float64())]))


def change_type(path: Path) -> None:
    overwrite(path, (5, "x", "1"), schema=pa.schema([*list(SCHEMA)[:2], ("v", pa.string())]))


@pytest.mark.parametrize("feed_on", [True, False], ids=["feed", "files"])
@pytest.mark.parametrize(
    ("change", "text"),
    [
        (add_column, "'extra' was added"),
        (drop_column, "'v' was dropped"),
        (rename_column, "'v' was dropped, 'w' was added"),
        (change_type, "'v' is string now, not double"),
    ],
)
def test_a_running_query_stops_before_a_version_with_other_columns(
    path: Path, feed_on: bool, change: Callable[[Path], None], text: str
) -> None:
    History(path, feed=feed_on, partitioned=False).append(rows((1, "a", 1.0)))
    feed = DeltaFeed(path, "id").open()
    planned = feed.describe().planned_schema
    change(path)
    assert [row["id"] for row in read_as(feed, planned, -1, 1)] == [1]
    with refused("SCHEMA_CHANGED", text) as raised:
        read_as(feed, planned, 1, 2)
    assert raised.value.parameters["version"] == 2
    assert "start the query again" in raised.value.message
    if change is change_type:
        # What the version removed has the old type.
        with refused("SCHEMA_CHANGED", "version 2 .*load the earlier rows"):
            read_as(feed, feed.describe().planned_schema, 1, 2)
        return
    # One that is planned now has the version.
    assert 5 in [
        row["id"]
        for row in read_as(feed, feed.describe().planned_schema, 1, 2)
        if row[CHANGE_TYPE] == "insert"
    ]


def test_a_read_of_selected_columns_is_affected_by_those_alone(path: Path) -> None:
    History(path, feed=True, partitioned=False).append(rows((1, "a", 1.0)))
    feed = DeltaFeed(path, "id").open()
    planned = feed.describe().planned_schema
    chosen = planned.remove(planned.get_field_index("v"))
    add_column(path)
    assert [row["id"] for row in read_as(feed, chosen, -1, 2)] == [1, 5]
    overwrite(path, (6, 1), schema=pa.schema([("id", pa.int64()), ("p", pa.int32())]))
    with refused("SCHEMA_CHANGED", "'p' is int32 now, not string"):
        read_as(feed, chosen, 2, 3)


def test_comments_and_column_order_do_not_affect_a_running_query(path: Path) -> None:
    history = History(path, feed=True, partitioned=False)
    feed = DeltaFeed(path).open()
    planned = feed.describe().planned_schema
    history.table.alter.set_column_metadata("v", {"comment": "a value"})
    history.append(rows((1, "a", 1.0)))
    backwards = rows((2, "b", 2.0)).select(["v", "p", "id"])
    write_deltalake(path, backwards, mode="overwrite", schema_mode="overwrite")
    assert [row["id"] for row in read_as(feed, planned, 1, 3) if row[CHANGE_TYPE] == "insert"] == [1, 2]


def test_a_stream_stops_at_an_added_column_and_has_its_values_after_a_restart(
    spark: SparkSession, path: Path, tmp_path: Path
) -> None:
    history = History(path, feed=True, partitioned=False)
    history.append(rows((1, "a", 1.0)))
    sink = Sink(tmp_path)
    frame = penstock.changes.read_stream(spark, DeltaFeed(path), options={"maxCommitsPerTrigger": 1})
    assert [row[0] for row in sink.run(frame).elements()] == [1]
    history.append(rows((2, "b", 1.0)))
    add_column(path)
    sink.batches.clear()
    with pytest.raises(Exception, match=r"(?s)SCHEMA_CHANGED.*'extra' was added"):
        sink.run(frame)
    assert [row[0] for row in sink.rows().elements()] == [2]
    # The micro-batch that failed is planned: it is read again with the new columns.
    sink.batches.clear()
    again = penstock.changes.read_stream(spark, DeltaFeed(path), options={"maxCommitsPerTrigger": 1})
    assert [row[:4] for row in sink.run(again).elements()] == [(5, "x", 1.0, "new")]
    batch = penstock.changes.read(spark, DeltaFeed(path))
    overwrite(path, (7, "x"), schema=pa.schema(list(SCHEMA)[:2]))
    with pytest.raises(Exception, match=r"(?s)SCHEMA_CHANGED.*'v'"):
        batch.collect()


# Versions from before the query was planned.


def test_names_that_differ_only_in_case_are_one_column(path: Path) -> None:
    write_deltalake(
        path, pa.table({"id": [1], "Name": ["x"], "Part": ["p"]}), partition_by=["Part"], configuration=FEED
    )
    overwrite(
        path,
        (2, "y", "q"),
        schema=pa.schema([("id", pa.int64()), ("name", pa.string()), ("part", pa.string())]),
        partition_by=["part"],
    )
    old, new = {"id": 1, "name": "x", "part": "p"}, {"id": 2, "name": "y", "part": "q"}
    assert data(changes(DeltaFeed(path).open())) == [old, old, new]


def test_a_struct_field_whose_name_changes_case_is_refused(path: Path) -> None:
    def struct(name: str) -> pa.Schema:
        return pa.schema([("id", pa.int64()), ("s", pa.struct([(name, pa.int64())]))])

    write_deltalake(path, rows((1, {"A": 1}), schema=struct("A")), configuration=FEED)
    overwrite(path, (2, {"a": 2}), schema=struct("a"))
    with refused("SCHEMA_CHANGED", "version 0 .*'s'"):
        changes(DeltaFeed(path).open())


def test_nested_fields_that_are_added_removed_or_widened(path: Path) -> None:
    def nested(*fields: tuple[str, pa.DataType], number: pa.DataType) -> pa.Schema:
        struct = pa.struct(list(fields))
        return pa.schema([("s", struct), ("l", pa.list_(struct)), ("m", pa.map_(pa.string(), number))])

    first = nested(("a", pa.int32()), ("b", pa.string()), number=pa.int32())
    second = nested(("c", pa.string()), ("a", pa.int64()), number=pa.int64())
    write_deltalake(
        path, rows(({"a": 1, "b": "x"}, [{"a": 2, "b": "y"}], [("k", 3)]), schema=first), configuration=FEED
    )
    overwrite(path, ({"c": "z", "a": 2**40}, [], []), schema=second)
    found = data(changes(DeltaFeed(path).open()))
    assert found[0] == {"s": {"c": None, "a": 1}, "l": [{"c": None, "a": 2}], "m": [("k", 3)]}
    assert found[2]["s"] == {"c": "z", "a": 2**40}


@pytest.mark.parametrize("zones", [(None, "UTC"), ("UTC", None)], ids=["to instants", "from instants"])
def test_times_with_and_without_a_zone_are_not_confused(
    path: Path, zones: tuple[str | None, str | None]
) -> None:
    before, after = (pa.schema([("id", pa.int64()), ("t", pa.timestamp("us", zone))]) for zone in zones)
    day = datetime.fromisoformat("2026-01-01")
    write_deltalake(path, rows((1, day), schema=before), configuration=FEED)
    overwrite(path, (2, day), schema=after)
    with refused("SCHEMA_CHANGED", "version 0 .*'t' is timestamp"):
        changes(DeltaFeed(path).open())
    assert len(data(changes(DeltaFeed(path, "id").open(), 1))) == 0


def test_timestamps_in_parquets_legacy_format_are_read(path: Path) -> None:
    schema = pa.schema(
        [
            ("id", pa.int64()),
            ("t", pa.timestamp("us", "UTC")),
            ("s", pa.struct([("t", pa.timestamp("us", "UTC"))])),
        ]
    )
    moment = datetime(2026, 1, 31, 12, 0, 0, 5, tzinfo=UTC)
    write_deltalake(path, rows((1, moment, {"t": moment}), schema=schema), configuration=FEED)
    (file,) = path.glob("*.parquet")
    pq.write_table(pq.read_table(file), file, use_deprecated_int96_timestamps=True)
    assert data(changes(DeltaFeed(path).open())) == [{"id": 1, "t": moment, "s": {"t": moment}}]


def test_types_widened_by_delta_are_widened(path: Path) -> None:
    schema = pa.schema(
        [
            ("id", pa.int64()),
            ("b", pa.int8()),
            ("f", pa.float32()),
            ("i", pa.int32()),
            ("d", pa.decimal128(5, 2)),
            ("t", pa.date32()),
            ("p", pa.int32()),
        ]
    )
    day = datetime.fromisoformat("2026-01-31")
    write_deltalake(
        path, rows((1, 5, 0.5, 7, 1, day.date(), 9), schema=schema), partition_by=["p"], configuration=FEED
    )
    types = {
        "b": "short",
        "f": "double",
        "i": "decimal(14,2)",
        "d": "decimal(9,3)",
        "t": "timestamp_ntz",
        "p": "long",
    }

    def widen(found: dict[str, Any]) -> None:
        text = json.loads(found["schemaString"])
        for field in text["fields"]:
            wider = types.get(field["name"])
            if wider is not None:
                field["metadata"]["delta.typeChanges"] = [{"fromType": field["type"], "toType": wider}]
                field["type"] = wider
        found["schemaString"] = json.dumps(text)

    edit(path, 0, metaData=widen)
    (row,) = data(changes(DeltaFeed(path).open()))
    assert {name: str(value) for name, value in row.items()} == {
        "id": "1", "b": "5", "f": "0.5", "i": "7.00", "d": "1.000", "t": str(day), "p": "9",
    }  # fmt: skip


def test_a_dropped_column_is_left_out_and_a_new_one_of_its_name_has_its_old_values(path: Path) -> None:
    History(path, feed=True, partitioned=False).append(rows((1, "a", 1.0)))
    drop_column(path)
    assert {tuple(row) for row in data(changes(DeltaFeed(path).open()))} == {("id", "p")}
    write_deltalake(path, rows((6, "x", 2.0)), mode="append", schema_mode="merge")
    feed = DeltaFeed(path, "id").open()
    assert [row["v"] for row in data(changes(feed))] == [1.0, 1.0, None, 2.0]


@pytest.mark.parametrize("feed_on", [True, False], ids=["feed", "files"])
def test_a_table_whose_partitioning_changes(path: Path, feed_on: bool) -> None:
    history = History(path, feed=feed_on, partitioned=False)
    history.append(rows((1, "a", 1.0), (2, "b", 2.0)))
    for partitions in (["p"], ["v"], ["v", "p"], None):
        overwrite(path, (1, "a", 1.0), (3, "b", 2.0), schema=SCHEMA, partition_by=partitions)
        history.update(rows((1, "a", 1.0)))
    feed = DeltaFeed(path, "id").open()
    check_replay(path, passed(feed, changes(feed)))


def test_a_removed_file_of_a_formerly_partitioned_table_is_refused_without_its_partition(
    path: Path,
) -> None:
    write_deltalake(path, rows((1, "a", 1.0)), partition_by=["p"], configuration=FEED)
    DeltaTable.create(path, SCHEMA, mode="overwrite", configuration=FEED)
    edit(path, 1, remove=lambda action: action.pop("partitionValues"))
    with refused("PARTITION_UNKNOWN", "version 1"):
        DeltaFeed(path).open().tasks(-1, 1, 10)


def test_a_row_id_that_the_table_lacks_is_refused(path: Path) -> None:
    History(path, feed=True, partitioned=False)
    with pytest.raises(InvalidChangelogSchemaError, match="Did you mean 'id'") as raised:
        DeltaFeed(path, "idd").open().describe()
    assert raised.value.condition == "INVALID_CHANGELOG_SCHEMA.MISSING_COLUMN"
    assert DeltaFeed(path, "ID").open().describe().contract is not None


@pytest.mark.parametrize("mode", ["name", "id"])
def test_versions_with_mapped_columns_are_refused_even_after_the_mapping_was_removed(
    path: Path, mode: str
) -> None:
    history = History(path, feed=True, partitioned=False)
    actions = [json.loads(line) for line in log_file(path, 0).read_text().splitlines()]
    plain = next(action for action in actions if "metaData" in action)
    edit(path, 0, metaData=lambda found: found["configuration"].update({"delta.columnMapping.mode": mode}))
    with refused("COLUMN_MAPPING", f"by {mode}"):
        DeltaFeed(path).open().describe()
    for number in range(2):
        history.append(rows((number, "a", 1.0)))
    with log_file(path, 2).open("a") as file:
        file.write("\n" + json.dumps(plain))
    feed = DeltaFeed(path).open()
    with refused("COLUMN_MAPPING", "version 0 .*begin after the version") as raised:
        feed.tasks(-1, 2, 10)
    assert raised.value.parameters["version"] == 0
    assert changes(feed, 1)["id"].to_pylist() == [1]


def with_mapping(path: Path, mode: str, dropped_in: int) -> History:
    """A table whose columns were mapped from version 0 on, until a version that drops the mapping."""
    history = History(path, feed=True, partitioned=False)
    for number in range(dropped_in):
        history.append(rows((number, "a", 1.0)))
    actions = [json.loads(line) for line in log_file(path, 0).read_text().splitlines()]
    plain = next(action for action in actions if "metaData" in action)
    edit(path, 0, metaData=lambda found: found["configuration"].update({"delta.columnMapping.mode": mode}))
    with log_file(path, dropped_in).open("a") as file:
        file.write("\n" + json.dumps(plain))
    return history


def clean_up(history: History, first: int) -> None:
    """Delete the commits before a version, and all checkpoints but one of the newest version."""
    history.table.create_checkpoint()
    for version in range(first):
        log_file(Path(history.path), version).unlink()


def test_versions_whose_columns_the_log_no_longer_has_are_gone(path: Path) -> None:
    """Commits are deleted by age, so the first ones that are left may be older than any checkpoint."""
    history = with_mapping(path, "name", dropped_in=3)
    history.append(rows((7, "a", 1.0)))
    clean_up(history, 1)
    feed = DeltaFeed(path).open()
    assert feed.oldest() == 2
    for after in (0, 1):
        with pytest.raises(DataLostError, match=r"depends on a commit .* versions 3 to 4 are left") as raised:
            feed.tasks(after, 4, 10)
        assert raised.value.condition == "DATA_LOST.DELTA"
    assert changes(feed, 2)["id"].to_pylist() == [2, 7]


def test_a_version_that_removes_files_of_an_unknown_version_is_gone(path: Path) -> None:
    history = with_mapping(path, "name", dropped_in=3)
    with log_file(path, 3).open("a") as file:
        file.write("\n" + json.dumps({"remove": {"path": "old.parquet", "dataChange": True}}))
    history.append(rows((7, "a", 1.0)))
    clean_up(history, 1)
    with pytest.raises(DataLostError, match=r"version 3 .* depends on a commit .* versions 4 to 4 are left"):
        DeltaFeed(path).open().tasks(2, 4, 10)


def test_versions_before_a_checkpoint_are_read_if_no_commit_changed_the_table(path: Path) -> None:
    history = History(path, feed=True, partitioned=False)
    for number in range(4):
        history.append(rows((number, "a", 1.0)))
    clean_up(history, 2)
    feed = DeltaFeed(path).open()
    assert feed.oldest() == 1
    assert changes(feed, 1)["id"].to_pylist() == [1, 2, 3]
    assert {part.commit.columns for task in feed.tasks(1, 4, 10) for part in task} != {()}


def test_a_version_that_removes_files_with_mapped_columns_is_refused(path: Path) -> None:
    history = History(path, feed=False, partitioned=False)
    history.append(rows((1, "a", 1.0)))
    history.overwrite(rows((2, "a", 1.0)))
    actions = [json.loads(line) for line in log_file(path, 0).read_text().splitlines()]
    plain = next(action for action in actions if "metaData" in action)
    edit(path, 0, metaData=lambda found: found["configuration"].update({"delta.columnMapping.mode": "name"}))
    with log_file(path, 2).open("a") as file:
        file.write("\n" + json.dumps(plain))
    with refused("COLUMN_MAPPING", "version 2 "):
        DeltaFeed(path, "id").open().tasks(1, 2, 10)


def test_versions_that_needed_an_unknown_feature_are_refused_after_it_was_dropped(path: Path) -> None:
    history = History(path, feed=True, partitioned=False)
    for number in range(3):
        history.append(rows((number, "a", 1.0)))
    actions = [json.loads(line) for line in log_file(path, 0).read_text().splitlines()]
    plain = next(action for action in actions if "protocol" in action)
    edit(path, 0, protocol=lambda found: found.update(minReaderVersion=3, readerFeatures=["magic"]))
    with log_file(path, 2).open("a") as file:
        file.write("\n" + json.dumps(plain))
    feed = DeltaFeed(path).open()
    feed.describe()
    with refused("READER_FEATURE", "version 1 .*magic") as raised:
        feed.tasks(0, 3, 10)
    assert raised.value.parameters["version"] == 1
    assert changes(feed, 1)["id"].to_pylist() == [1, 2]


# What happens to the table as a whole.


@pytest.mark.parametrize("feed_on", [True, False], ids=["feed", "files"])
def test_a_table_that_is_restored(path: Path, feed_on: bool) -> None:
    history = History(path, feed=feed_on, partitioned=True)
    history.append(rows((1, "a", 1.0), (2, "b", 2.0)))
    history.update(rows((1, "a", 1.0)))
    history.delete_all(rows())
    history.table.restore(1)
    history.append(rows((3, "c", 3.0)))
    history.table.restore(2)
    feed = DeltaFeed(path, "id").open()
    check_replay(path, passed(feed, changes(feed), updates=True))


def test_a_replaced_table_is_read_by_a_new_query_and_refused_by_a_running_one(path: Path) -> None:
    history = History(path, feed=True, partitioned=False)
    history.append(rows((1, "a", 1.0)))
    running = DeltaFeed(path, "id").open()
    before = running.describe()
    DeltaTable.create(path, SCHEMA, mode="overwrite", configuration=FEED)
    history.append(rows((7, "a", 1.0)))
    with refused("TABLE_REPLACED", "version 2 .*new checkpoint"):
        running.tasks(1, 3, 10)
    feed = DeltaFeed(path, "id").open()
    assert feed.describe().identity != before.identity
    check_replay(path, changes(feed))


def test_a_stream_of_a_table_that_is_dropped_and_recreated_is_refused(
    spark: SparkSession, path: Path, tmp_path: Path
) -> None:
    History(path, feed=True, partitioned=False).append(rows((1, "a", 1.0)))
    sink = Sink(tmp_path)
    assert sink.run(penstock.changes.read_stream(spark, DeltaFeed(path)))
    shutil.rmtree(path)
    again = History(path, feed=True, partitioned=False)
    for number in range(3):
        again.append(rows((number, "a", 1.0)))
    with pytest.raises(Exception, match="CHECKPOINT_MISMATCH"):
        sink.run(penstock.changes.read_stream(spark, DeltaFeed(path)))


def test_a_stream_of_a_table_that_was_restored_from_a_backup_is_refused(
    spark: SparkSession, path: Path, tmp_path: Path
) -> None:
    history = History(path, feed=True, partitioned=False)
    history.append(rows((1, "a", 1.0)))
    shutil.copytree(path, tmp_path / "backup")
    history.append(rows((2, "a", 1.0)))
    history.append(rows((3, "a", 1.0)))
    sink = Sink(tmp_path)
    assert len(sink.run(penstock.changes.read_stream(spark, DeltaFeed(path)))) == 3
    shutil.rmtree(path)
    (tmp_path / "backup").rename(path)
    with pytest.raises(Exception, match=r"DATA_LOST.HISTORY_CHANGED.*new checkpoint"):
        sink.run(penstock.changes.read_stream(spark, DeltaFeed(path)))
    feed = DeltaFeed(path).open()
    feed.logged(3)
    with pytest.raises(DataLostError, match=r"version 3 .* at version 1 now"):
        feed.newest(3)


def test_columns_changed_before_the_log_was_cleaned_up(path: Path) -> None:
    history = History(path, feed=True, partitioned=False)
    history.append(rows((1, "a", 1.0)))
    add_column(path)
    history.table.create_checkpoint()
    write_deltalake(path, rows((6, "x", 1.0, "more"), schema=WIDER), mode="append")
    for version in range(3):
        log_file(path, version).unlink()
    feed = DeltaFeed(path, "id").open()
    assert data(changes(feed, 2)) == [{"id": 6, "p": "x", "v": 1.0, "extra": "more"}]
    with pytest.raises(DataLostError, match="versions 3 to 3 are left"):
        feed.tasks(0, 3, 10)
    with pytest.raises(FeedUnavailableError, match="starting_version=3"):
        feed.prepare()


def test_a_stream_of_a_restored_table_is_refused_even_at_the_same_version(
    spark: SparkSession, path: Path, tmp_path: Path
) -> None:
    history = History(path, feed=True, partitioned=False)
    history.append(rows((1, "a", 1.0)))
    shutil.copytree(path, tmp_path / "backup")
    history.append(rows((2, "a", 1.0)))
    sink = Sink(tmp_path)
    assert len(sink.run(penstock.changes.read_stream(spark, DeltaFeed(path)))) == 2
    shutil.rmtree(path)
    (tmp_path / "backup").rename(path)
    for number in range(3, 5):
        history.append(rows((number, "a", 1.0)))
    with pytest.raises(Exception, match=r"DATA_LOST.HISTORY_CHANGED.*no longer the commit"):
        sink.run(penstock.changes.read_stream(spark, DeltaFeed(path)))
