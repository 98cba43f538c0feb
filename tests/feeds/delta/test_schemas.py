"""Delta tables whose columns or partitions change: their rows are delivered exactly, or
refused by name.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable, write_deltalake
from pyspark.sql import SparkSession

import penstock
from penstock.errors import InvalidChangelogSchemaError
from penstock.feeds.contract import CHANGE_TYPE
from penstock.feeds.delta import DeltaFeed
from tests.feeds.delta.tables import (
    FEED,
    SCHEMA,
    History,
    add_column,
    change_type,
    check_replay,
    data,
    drop_column,
    edit,
    log_file,
    overwrite,
    read_as,
    refused,
    rename_column,
    rows,
)
from tests.support.change_frames import Sink
from tests.support.feed_reading import changes, passed


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "table"


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
