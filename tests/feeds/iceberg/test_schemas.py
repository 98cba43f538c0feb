"""Iceberg tables whose columns, partitions or history change: their rows are delivered exactly, or
refused by name.
"""

from __future__ import annotations

import pickle
import warnings
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pyiceberg.table import Table
from pyiceberg.table.snapshots import Snapshot
from pyiceberg.transforms import IdentityTransform
from pyiceberg.types import IntegerType, LongType, StringType
from pyspark.sql import SparkSession

import penstock
from penstock.errors import FeedUnavailableError, InvalidChangelogSchemaError
from tests.feeds.iceberg.lake import (
    SCHEMA,
    Lake,
    changes,
    compact,
    delete_positions,
    found,
    live_files,
    replayed,
    rows,
    states,
)
from tests.feeds.running import RunningQuery
from tests.support.change_frames import Sink


@pytest.fixture
def table(lake: Lake) -> Table:
    """One version of two rows."""
    made = lake.table()
    made.append(rows((1, "a", 1), (2, "b", 2)))
    return made


# Whatever a table goes through.


def _evolve(table: Table, what: str, number: int) -> None:
    names = {field.field_id: field.name for field in table.schema().fields}
    with table.update_schema() as update:
        if what == "add":
            update.add_column(f"c{number}", IntegerType())
        elif what == "rename" and 2 in names:
            update.rename_column(names[2], f"d{number}")
        elif what == "drop" and 2 in names and all(each.source_id != 2 for each in table.spec().fields):
            update.delete_column(names[2])
        elif what == "widen":
            update.update_column(names[3], LongType())
    if what == "partition":
        with table.update_spec() as spec:
            if table.spec().fields:
                spec.remove_field(table.spec().fields[0].name)
            else:
                spec.add_field(names[3], IdentityTransform())


def _change(table: Table, what: str, number: int) -> None:
    key, count = table.schema().find_column_name(1), table.schema().find_column_name(3)
    if what == "append":
        arrow = table.schema().as_arrow()
        values = [
            [
                f"{number}" if pa.types.is_large_string(kind) or pa.types.is_string(kind) else place % 2
                for place in range(3)
            ]
            for kind in arrow.types
        ]
        values[arrow.names.index(str(key))] = [3 * number + place for place in range(3)]
        table.append(
            pa.table(
                [pa.array(column, kind) for column, kind in zip(values, arrow.types, strict=True)],
                schema=arrow,
            )
        )
    elif what == "delete":
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # that nothing was deleted
            table.delete(f"{count} = {number % 2}")
    elif what == "positions" and table.current_snapshot() is not None:
        delete_positions(table, [(file, number % file.record_count) for file in live_files(table)[:2]])
    elif what == "compact" and not table.spec().fields and table.scan().to_arrow().num_rows:
        compact(table)
    elif what == "rollback" and len(table.snapshots()) > 1:
        parent = table.current_snapshot().parent_snapshot_id  # type: ignore[union-attr] - there are several
        if parent is not None:
            table.manage_snapshots().rollback_to_snapshot(parent).commit()


def _held(table: Table) -> dict[int, Counter[object]]:
    """What the table holds at each snapshot, in the columns that it has now."""
    now, found, snapshot = table.schema().fields, {}, table.current_snapshot()
    while snapshot is not None:
        schema = next(each for each in table.metadata.schemas if each.schema_id == snapshot.schema_id)
        names = {field.field_id: field.name for field in schema.fields}
        rows = table.scan(snapshot_id=snapshot.snapshot_id).to_arrow().to_pylist()
        found[snapshot.sequence_number or 0] = Counter(
            tuple(row.get(names.get(field.field_id, "")) for field in now) for row in rows
        )
        parent = snapshot.parent_snapshot_id
        snapshot = table.snapshot_by_id(parent) if parent is not None else None
    return found


EVOLUTIONS = ["add", "rename", "drop", "widen", "partition"]
CHANGES = ["append", "append", "delete", "positions", "compact", "rollback"]


@settings(
    max_examples=8,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(steps=st.lists(st.sampled_from([*EVOLUTIONS, *CHANGES]), min_size=4, max_size=10))
def test_the_changes_of_an_evolving_table_turn_each_snapshot_into_the_next(
    tmp_path_factory: pytest.TempPathFactory, steps: list[str]
) -> None:
    lake = Lake(tmp_path_factory.mktemp("lake"))
    table = lake.table()
    for number, step in enumerate(["append", *steps]):
        (_evolve if step in EVOLUTIONS else _change)(table, step, number)
    feed = lake.feed(row_id=table.schema().find_column_name(1)).open()
    held = _held(table)
    for version, state in replayed(changes(feed, 0, feed.newest(0)), Counter()):
        assert state == held[version], version


@settings(
    max_examples=8,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(steps=st.lists(st.sampled_from([*EVOLUTIONS, *CHANGES, "read", "read"]), min_size=5, max_size=14))
def test_a_running_query_of_an_evolving_table_keeps_an_exact_copy(
    tmp_path_factory: pytest.TempPathFactory, steps: list[str]
) -> None:
    lake = Lake(tmp_path_factory.mktemp("lake"))
    table = lake.table()
    _change(table, "append", 0)

    def by_id(names: Sequence[str]) -> list[Hashable]:
        now = lake.catalog.load_table("shop.orders").schema()
        return [now.find_field(name).field_id for name in names]

    def at(version: int) -> tuple[Snapshot, dict[str, Hashable]]:
        snapshot = next(each for each in table.snapshots() if each.sequence_number == version)
        schema = next(each for each in table.metadata.schemas if each.schema_id == snapshot.schema_id)
        return snapshot, {field.name: field.field_id for field in schema.fields}

    def read() -> None:
        for version in query.read():
            assert set(at(version)[1].values()) == set(query.columns)
        snapshot, ids = at(query.position)
        held = table.scan(snapshot_id=snapshot.snapshot_id).to_arrow().to_pylist()
        query.check(ids.values(), ({ids[name]: value for name, value in row.items()} for row in held))

    query = RunningQuery(
        lambda: lake.feed(row_id=table.schema().find_column_name(1)).open(), by_id, 1, position=0
    )
    for number, step in enumerate([*steps, "read"], 1):
        if step in EVOLUTIONS:
            _evolve(table, step, number)
        elif step != "read" and step != "rollback":
            _change(table, step, number)
        elif step == "read":
            read()


def append(table: Table, **columns: object) -> None:
    arrow = table.schema().as_arrow()
    table.append(pa.table({name: [columns[name]] for name in arrow.names}, schema=arrow))


def add_column(table: Table) -> None:
    with table.update_schema() as update:
        update.add_column("note", StringType())
    append(table, id=3, data="c", n=3, note="new")


def drop_column(table: Table) -> None:
    with table.update_schema() as update:
        update.delete_column("data")
    append(table, id=3, n=3)


def exchange_column(table: Table) -> None:
    with table.update_schema() as update:
        update.delete_column("data")
    with table.update_schema() as update:
        update.add_column("data", StringType())
    append(table, id=3, n=3, data="another")


def widen_column(table: Table) -> None:
    with table.update_schema() as update:
        update.update_column("n", LongType())
    append(table, id=3, data="c", n=2**40)


@pytest.mark.parametrize(
    ("change", "message", "now"),
    [
        (add_column, "'note' was added", (3, "c", 3, "new")),
        (drop_column, "'data' was dropped", (3, 3)),
        (exchange_column, "'data' was dropped, 'data' was added", (3, 3, "another")),
        (widen_column, "'n' is long now, not int", (3, "c", 2**40)),
    ],
)
def test_a_running_query_stops_before_a_version_with_other_columns(
    lake: Lake, table: Table, change: Callable[[Table], None], message: str, now: tuple[object, ...]
) -> None:
    feed = lake.feed(row_id="id").open()
    planned = feed.describe().planned_schema
    change(table)
    assert feed.newest(1) == 2
    (first, second) = pickle.loads(pickle.dumps([feed.tasks(0, 1, 10), feed.tasks(1, 2, 10)]))
    assert sum(batch.num_rows for task in first for batch in feed.read(task, planned)) == 2
    with pytest.raises(FeedUnavailableError, match=message) as raised:
        [list(feed.read(task, planned)) for task in second]
    assert raised.value.condition == "FEED_UNAVAILABLE.SCHEMA_CHANGED"
    # The same feed, described again, is that of a query that is started again.
    assert found(feed, 1, 2) == Counter([(*now, "insert", 2)])


def test_a_version_that_does_not_say_its_schema_is_compared_with_the_tables_columns(
    lake: Lake, table: Table
) -> None:
    """``schema-id`` of a snapshot is optional."""

    def forget(metadata: dict[str, Any]) -> None:
        for snapshot in metadata["snapshots"]:
            del snapshot["schema-id"]

    feed = lake.feed(row_id="id").open()
    planned = feed.describe().planned_schema
    append(table, id=3, data="c", n=3)
    lake.edit("orders", forget)
    assert feed.newest(1) == 2
    (task,) = feed.tasks(0, 2, 10)
    assert sum(batch.num_rows for batch in feed.read(task, planned)) == 3
    table.refresh()
    add_column(table)
    lake.edit("orders", lambda metadata: metadata["snapshots"][-1].pop("schema-id"))
    assert feed.newest(2) == 3
    (task,) = feed.tasks(2, 3, 10)
    with pytest.raises(FeedUnavailableError, match="'note' was added") as raised:
        list(feed.read(task, planned))
    assert raised.value.condition == "FEED_UNAVAILABLE.SCHEMA_CHANGED"
    assert found(feed, 2, 3) == Counter([(3, "c", 3, "new", "insert", 3)])


def test_rows_of_earlier_versions_have_the_initial_default_of_an_added_column(lake: Lake) -> None:
    schema = pa.schema([("id", pa.int64()), ("s", pa.struct([("a", pa.int32())]))])
    table = lake.table(schema=schema)
    table.append(pa.Table.from_pylist([{"id": 1, "s": {"a": 1}}, {"id": 2, "s": None}], schema=schema))
    with table.update_schema() as update:
        update.add_column("note", StringType())
        update.add_column("n", IntegerType())
        update.add_column(("s", "b"), LongType())

    def set_defaults(metadata: dict[str, Any]) -> None:
        metadata["format-version"], metadata["next-row-id"] = 3, 2
        columns = {field["name"]: field for field in metadata["schemas"][-1]["fields"]}
        columns["note"].update({"initial-default": "none", "write-default": "later"})
        columns["s"]["type"]["fields"][-1].update({"initial-default": 7})

    lake.edit("orders", set_defaults)
    found = changes(lake.feed(row_id="id").open(), 0, 1).to_pylist()
    assert [(row["id"], row["s"], row["note"], row["n"]) for row in found] == [
        (1, {"a": 1, "b": 7}, "none", None),
        (2, None, "none", None),
    ]


def test_a_read_of_selected_columns_is_affected_by_those_alone(lake: Lake, table: Table) -> None:
    feed = lake.feed(row_id="id").open()
    planned = feed.describe().planned_schema
    chosen = planned.remove(planned.get_field_index("data"))
    add_column(table)
    feed.newest(1)
    (task,) = feed.tasks(1, 2, 10)
    assert [row["id"] for batch in feed.read(task, chosen) for row in batch.to_pylist()] == [3]


def test_names_comments_and_column_order_do_not_affect_a_running_query(lake: Lake) -> None:
    schema = pa.schema([("id", pa.int64()), ("s", pa.struct([pa.field("a", pa.int32(), nullable=False)]))])
    table = lake.table(schema=schema)
    table.append(pa.Table.from_pylist([{"id": 1, "s": {"a": 1}}], schema=schema))
    feed = lake.feed(row_id="id").open()
    planned = feed.describe().planned_schema
    with table.update_schema() as update:
        update.update_column("s", doc="a struct")
        update.update_column(("s", "a"), doc="a number", required=False)
        update.move_first("s")
        update.rename_column("id", "key")
    append(table, key=2, s={"a": 2})
    assert feed.newest(1) == 2
    (task,) = feed.tasks(1, 2, 10)
    (row,) = [row for batch in feed.read(task, planned) for row in batch.to_pylist()]
    assert (row["id"], row["s"]) == (2, {"a": 2})


def test_a_column_that_reuses_a_name_has_none_of_the_old_values(lake: Lake, table: Table) -> None:
    with table.update_schema() as update:
        update.rename_column("data", "text")
    with table.update_schema() as update:
        update.add_column("data", StringType())
    append(table, id=3, text="c", n=3, data="new")
    assert found(lake.feed(row_id="id").open(), 0, 2) == Counter(
        [(1, "a", 1, None, "insert", 1), (2, "b", 2, None, "insert", 1), (3, "c", 3, "new", "insert", 2)]
    )


def test_nested_fields_are_matched_by_id(lake: Lake) -> None:
    schema = pa.schema(
        [
            ("s", pa.struct([("a", pa.int32()), ("b", pa.string())])),
            ("l", pa.list_(pa.struct([("x", pa.int32())]))),
            ("m", pa.map_(pa.string(), pa.int32())),
        ]
    )
    table = lake.table(schema=schema)
    value = {"s": {"a": 1, "b": "x"}, "l": [{"x": 1}], "m": [("k", 1)]}
    table.append(pa.Table.from_pylist([value], schema=schema))
    with table.update_schema() as update:
        update.update_column(("s", "a"), LongType())
        update.rename_column(("s", "b"), "c")
    with table.update_schema() as update:
        update.add_column(("s", "b"), IntegerType())
        update.add_column(("l", "element", "y"), StringType())
        update.update_column(("m", "value"), LongType())
    (row,) = changes(lake.feed().open(), 0, 1).to_pylist()
    assert {name: row[name] for name in schema.names} == {
        "s": {"a": 1, "c": "x", "b": None},
        "l": [{"x": 1, "y": None}],
        "m": [("k", 1)],
    }


def test_partitions_that_evolve_with_columns_and_deletes(lake: Lake, table: Table) -> None:
    with table.update_spec() as spec:
        spec.add_field("data", IdentityTransform())
    table.append(rows((3, "c", 3), (4, "c", 4)))
    delete_positions(table, [(file, 0) for file in live_files(table)])
    with table.update_spec() as spec:
        spec.remove_field("data")
        spec.add_field("n", IdentityTransform())
    table.append(rows((5, "e", 5)))
    with table.update_schema() as update:
        update.update_column("n", LongType())
        update.rename_column("data", "text")
    table.delete("id = 5")
    append(table, id=6, text="f", n=2**40)
    delete_positions(table, [(file, 0) for file in live_files(table) if file.record_count == 1])
    feed = lake.feed(row_id="id").open()
    held = states(table)
    for version, state in replayed(changes(feed, 0, feed.newest(0)), Counter()):
        assert state == held[version], version


def test_a_renamed_row_id_is_refused(lake: Lake, table: Table) -> None:
    with table.update_schema() as update:
        update.rename_column("id", "key")
    with pytest.raises(InvalidChangelogSchemaError, match="no column 'id'") as raised:
        lake.feed(row_id="id").open().describe()
    assert raised.value.condition == "INVALID_CHANGELOG_SCHEMA.MISSING_COLUMN"


def test_a_stream_stops_at_an_added_column_and_has_its_values_after_a_restart(
    spark: SparkSession, lake: Lake, table: Table, tmp_path: Path
) -> None:
    sink = Sink(tmp_path)
    feed = lake.feed(row_id="id")
    frame = penstock.changes.read_stream(spark, feed)
    assert len(sink.run(frame)) == 2
    add_column(table)
    sink.batches.clear()
    with pytest.raises(Exception, match=r"(?s)SCHEMA_CHANGED.*'note' was added"):
        sink.run(frame)
    assert sink.batches == {}
    assert [row[:4] for row in sink.run(penstock.changes.read_stream(spark, feed)).elements()] == [
        (3, "c", 3, "new")
    ]


def test_a_stream_of_a_restored_catalog_is_refused_even_when_it_has_as_many_snapshots(
    spark: SparkSession, lake: Lake, table: Table, tmp_path: Path
) -> None:
    backup = table.metadata_location
    table.append(rows((3, "c", 3)))
    sink = Sink(tmp_path)
    assert len(sink.run(penstock.changes.read_stream(spark, lake.feed(row_id="id")))) == 3
    lake.catalog.drop_table("shop.orders")
    restored = lake.catalog.register_table("shop.orders", backup)
    restored.append(rows((4, "another", 4)))
    restored.append(rows((5, "e", 5)))
    with pytest.raises(Exception, match=r"DATA_LOST.HISTORY_CHANGED.*no longer the commit"):
        sink.run(penstock.changes.read_stream(spark, lake.feed(row_id="id")))


def test_a_recreated_table_of_the_same_name_is_another_feed(lake: Lake, table: Table) -> None:
    feed = lake.feed(row_id="id").open()
    identity = feed.describe().identity
    lake.catalog.drop_table("shop.orders")
    lake.table().append(rows((9, "z", 9), schema=SCHEMA))
    assert feed.describe().identity != identity
    assert found(feed, 0, 1) == Counter([(9, "z", 9, "insert", 1)])
