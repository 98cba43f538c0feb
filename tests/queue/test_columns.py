"""Adding columns: a queue has older and newer rows, and old readers and writers keep working."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings

import penstock
from penstock.errors import (
    InvalidInputError,
    QueueNotFoundError,
    SchemaMismatchError,
    StoreError,
    UnsupportedTypeError,
)
from penstock.store import staging
from penstock.store.log import compact
from penstock.store.log.partition_log import COMPACTION_FAN_IN
from penstock.store.log.segmenting import to_segments
from penstock.store.staging import Attempt
from penstock.store.statements import qualify
from tests.support.arrow_strategies import tables
from tests.support.queues import SCHEMA, await_maintenance, without_disk_sync
from tests.support.raw_sql import run_sql

NOTE = pa.field("note", pa.string())
MORE = pa.field("more", pa.list_(pa.int64()))


def three_ages(store: penstock.Store) -> penstock.Queue:
    """Append an old row, one with an additional column, one with two additional columns, and another old
    row.
    """
    queue, old = store.create_queue("q", SCHEMA), store.queue("q")
    queue.append([{"n": 1, "s": "a"}])
    queue.add_columns(NOTE)
    queue.append([{"n": 2, "note": "b"}])
    queue.add_columns([MORE])
    queue.append([{"n": 3, "note": "c", "more": [3]}])
    old.append([{"n": 4}])
    return queue


ROWS = [
    {"n": 1, "s": "a", "note": None, "more": None},
    {"n": 2, "s": None, "note": "b", "more": None},
    {"n": 3, "s": None, "note": "c", "more": [3]},
    {"n": 4, "s": None, "note": None, "more": None},
]


def picked(*names: str) -> list[dict[str, Any]]:
    return [{name: row[name] for name in names} for row in ROWS]


def test_older_rows_have_nulls_in_new_columns(store: penstock.Store) -> None:
    queue = three_ages(store)
    found = queue.read(0, 0)
    assert found.to_pylist() == ROWS
    assert found.schema.equals(
        pa.schema([*SCHEMA, NOTE, pa.field("more", pa.list_(pa.field("element", pa.int64())))])
    )
    found.validate(full=True)
    assert queue.read(0, 1, 3).to_pylist() == ROWS[1:3]
    assert store.queue("q").schema.names == queue.info().schema.names == ["n", "s", "note", "more"]


@pytest.mark.parametrize(
    "names",
    [
        ["more"],
        ["note", "n"],
        ["n"],
        ["n", "s"],
        ["n", "s", "note"],
        ["more", "note", "s", "n"],
        ["note", "more"],
    ],
)
def test_a_selection_of_columns_can_be_read_from_old_and_new_rows(
    store: penstock.Store, names: list[str]
) -> None:
    queue = three_ages(store)
    assert queue.read(0, 0, columns=names).to_pylist() == picked(*names)
    queue.compact()
    assert queue.read(0, 0, columns=names).to_pylist() == picked(*names)


def test_a_queue_opened_earlier_keeps_its_columns(store: penstock.Store) -> None:
    queue, reader = store.create_queue("q", SCHEMA), store.queue("q")
    queue.add_columns([NOTE, MORE])
    queue.append([{"n": 1, "s": "a", "note": "b", "more": [1]}])
    assert reader.read(0, 0).to_pylist() == [{"n": 1, "s": "a"}]
    assert reader.read(0, 0, columns=["s"]).to_pylist() == [{"s": "a"}]
    reader.append([{"n": 2}])
    assert reader.append(pa.table({"n": [3], "s": ["c"]}, schema=SCHEMA)).rows == 1
    assert reader.schema.equals(SCHEMA)
    assert queue.read(0, 1).to_pylist() == [
        {"n": 2, "s": None, "note": None, "more": None},
        {"n": 3, "s": "c", "note": None, "more": None},
    ]
    reader.refresh()
    assert reader.read(0, 0, 1).to_pylist() == [{"n": 1, "s": "a", "note": "b", "more": [1]}]


def _once(rows: list[dict[str, Any]]) -> Any:
    return (row for row in rows)


def _arrow(rows: list[dict[str, Any]]) -> Any:
    return pa.RecordBatchReader.from_batches(
        pa.schema([("n", pa.int64()), NOTE]),
        pa.table({"n": [row["n"] for row in rows], "note": ["x"] * len(rows)}).to_batches(),
    )


@pytest.mark.parametrize("give", [list, _once, _arrow])
def test_a_queue_opened_earlier_loads_a_new_column_when_it_is_named(store: penstock.Store, give: Any) -> None:
    queue, late = store.create_queue("q", SCHEMA), store.queue("q")
    late_reader, producer = store.queue("q"), store.producer("q", "s")
    queue.add_columns(NOTE)
    late.append(give([{"n": 1, "note": "x"}, {"n": 2, "note": "x"}]))
    producer.append(give([{"n": 3, "note": "x"}]), sequence=1)
    assert late_reader.read(0, 0, columns=["note", "n"]).to_pylist() == [
        {"note": "x", "n": n} for n in (1, 2, 3)
    ]
    with pytest.raises(SchemaMismatchError, match=r"SCHEMA_MISMATCH.UNKNOWN_COLUMN\].*nope"):
        late.append(give([{"n": 1, "nope": 2}]) if give is list else [{"nope": 2}])
    with pytest.raises(SchemaMismatchError, match=r"SCHEMA_MISMATCH.UNKNOWN_COLUMN\].*nope"):
        late_reader.read(0, 0, columns=["nope"])


def test_a_consumer_pulls_all_columns(store: penstock.Store) -> None:
    queue = three_ages(store)
    store.create_consumer("c")
    pull = queue.register("c").pull("q", 0)
    assert pull.table.to_pylist() == ROWS


def test_adding_columns_again_adds_only_the_missing_ones(store: penstock.Store) -> None:
    queue = store.create_queue("q", SCHEMA)
    for _ in range(3):
        assert queue.add_columns([NOTE]).names == ["n", "s", "note"]
    assert queue.add_columns([NOTE, ("s", pa.large_string()), MORE]).names == ["n", "s", "note", "more"]


def test_columns_are_accepted_as_a_schema_as_fields_or_as_a_struct_type(store: penstock.Store) -> None:
    from pyspark.sql.types import DecimalType, IntegerType, MapType, StringType, StructType

    queue = store.create_queue("q", SCHEMA)
    queue.add_columns(pa.schema([("a", pa.large_string())]))
    queue.add_columns([("b", pa.int32()), pa.field("c", pa.date64())])
    kinds = {"d": StructType().add("x", IntegerType()), "e": MapType(StringType(), DecimalType(10, 2))}
    queue.add_columns(StructType().add("d", kinds["d"]).add("e", kinds["e"]))
    assert [str(field.type) for field in queue.schema][2:5] == ["string", "int32", "date32[day]"]
    row = {"n": 1, "s": "s", "a": "a", "b": 2, "c": None, "d": {"x": 1}, "e": [("k", None)]}
    queue.append([row])
    assert queue.read(0, 0).to_pylist() == [row]


@pytest.mark.parametrize(
    ("columns", "reason"),
    [
        (
            pa.field("x", pa.int64(), nullable=False),
            "'x' is NOT NULL, but existing rows have no value in it: add it as nullable",
        ),
        (
            pa.field("s", pa.int64()),
            (
                "COLUMN_TYPE] column 's' of queue 'q' is string, not int64: "
                "add a column with another name; columns cannot be renamed"
            ),
        ),
        (pa.field("id", pa.int64()), "NOT_NULL] column 'id' of queue 'q' is NOT NULL"),
        (
            pa.field("S", pa.string()),
            "DUPLICATE_COLUMN] queue 'q' has a column 's', which is the same name to Spark as 'S'",
        ),
        (
            pa.field("place", pa.struct([("x", pa.int32()), ("y", pa.int32())])),
            "fields cannot be added inside a column, because existing rows",
        ),
        (
            pa.field("place.y", pa.int32()),
            (
                "COLUMN_TYPE] 'place.y' would be a field inside the struct 'place' of queue 'q': "
                "fields cannot be added inside a column"
            ),
        ),
        (
            pa.field("_Row_Index", pa.int64()),
            "RESERVED_COLUMN] column '_Row_Index' has a name that is reserved for readers of the queue",
        ),
        (pa.field("__penstock_kind", pa.int8()), "has a name that is reserved"),
        ([("a", pa.int64()), ("A", pa.int64())], "which are the same name to Spark"),
        (pa.field("", pa.int64()), "empty name"),
        ([], "INVALID_SCHEMA] the schema has no columns"),
    ],
)  # fmt: skip
def test_invalid_columns_are_refused_with_a_hint(store: penstock.Store, columns: Any, reason: str) -> None:
    fields = [
        pa.field("id", pa.int64(), nullable=False),
        ("s", pa.string()),
        ("place", pa.struct([("x", pa.int32())])),
    ]
    queue = store.create_queue("q", pa.schema(fields))
    with pytest.raises(SchemaMismatchError) as caught:
        queue.add_columns(columns)
    assert reason in str(caught.value)
    assert store.queue("q").schema.names == ["id", "s", "place"]


def test_nothing_is_added_when_one_of_several_is_refused(store: penstock.Store) -> None:
    queue = store.create_queue("q", SCHEMA)
    with pytest.raises(SchemaMismatchError):
        queue.add_columns([NOTE, ("n", pa.string())])
    with pytest.raises(UnsupportedTypeError):
        queue.add_columns([NOTE, ("u", pa.uint64())])
    for other in (7, "note string", [7], None):
        with pytest.raises(InvalidInputError):
            queue.add_columns(other)
    assert store.queue("q").schema.equals(SCHEMA)


def test_a_dropped_or_recreated_queue_gets_no_columns(store: penstock.Store) -> None:
    queue = store.create_queue("q", SCHEMA)
    store.drop_queue("q")
    with pytest.raises(QueueNotFoundError):
        queue.add_columns(NOTE)
    store.create_queue("q", SCHEMA)
    with pytest.raises(QueueNotFoundError, match="was dropped"):
        queue.add_columns(NOTE)
    assert store.queue("q").schema.equals(SCHEMA)


def test_added_columns_do_not_change_the_partition_of_a_key(store: penstock.Store) -> None:
    queue, old = store.create_queue("q", SCHEMA, partitions=3, key=["n"]), store.queue("q")
    queue.append([{"n": n} for n in range(30)])
    queue.add_columns(NOTE)
    queue.append([{"n": n, "note": "x"} for n in range(30)])
    old.append([{"n": n} for n in range(30)])
    queue.add_partitions(2)
    queue.append([{"n": n, "note": "y"} for n in range(30)])
    homes: dict[int, set[int]] = {}
    for partition in range(queue.partitions):
        for n in queue.read(partition, 0)["n"].to_pylist():
            homes.setdefault(n, set()).add(partition)
    assert len(homes) == 30
    assert all(len(partitions) == 1 for partitions in homes.values())


# Compaction.


def test_compacted_rows_keep_every_column(store: penstock.Store) -> None:
    queue = three_ages(store)
    assert queue.compact() == 3
    assert queue.read(0, 0).to_pylist() == ROWS
    store.queue("q").append([{"n": 5}])
    queue.add_columns([("last", pa.bool_())])
    assert queue.compact() == 1
    assert queue.read(0, 0).to_pylist() == [
        {**row, "last": None} for row in [*ROWS, {"n": 5, "s": None, "note": None, "more": None}]
    ]


def test_compacting_only_rows_without_a_column_does_not_add_the_column(store: penstock.Store) -> None:
    queue = store.create_queue("q", SCHEMA)
    for n in range(5):
        queue.append([{"n": n}])
    queue.add_columns(NOTE)
    queue.compact()
    assert _columns(store) == [["n", "s"]]
    queue.append([{"n": 5, "note": "x"}])
    queue.compact()
    assert _columns(store) == [["n", "s", "note"]]


def _columns(store: penstock.Store) -> list[list[str]]:
    """Return the columns with which each payload was written."""
    text = qualify(
        "select columns_id from penstock.segment order by payload_id",
        store.database.dialect,
        store.database.url.schema,
    )
    columns = store.queue("q").record.columns
    return [columns.of(row[0]).names for row in run_sql(store.database, text)]


def test_maintenance_with_an_older_schema_drops_no_columns(store: penstock.Store) -> None:
    """The maintenance thread belongs to a program that opened the queue earlier."""
    queue, old = store.create_queue("q", SCHEMA), store.queue("q")
    queue.add_columns(NOTE)
    for n in range(COMPACTION_FAN_IN // 2):
        queue.append([{"n": n, "note": f"note {n}"}])
        old.append([{"n": n}])
    await_maintenance(store)
    assert queue.info().partitions[0].segments < COMPACTION_FAN_IN
    assert queue.read(0, 0).column("note").to_pylist() == [
        note for n in range(COMPACTION_FAN_IN // 2) for note in (f"note {n}", None)
    ]


def test_compaction_keeps_columns_added_since_the_queue_was_opened(store: penstock.Store) -> None:
    queue = store.create_queue("q", SCHEMA)
    before = queue.record
    queue.append([{"n": 1}])
    queue.add_columns(NOTE)
    queue.append([{"n": 2, "note": "x"}])
    assert compact.compact_all(store.database, before, [0]) == 1
    assert queue.read(0, 0, columns="note").column(0).to_pylist() == [None, "x"]


def test_a_damaged_segment_with_fewer_columns_is_a_store_error(store: penstock.Store) -> None:
    queue = three_ages(store)
    value = {"sqlite": "x'00'", "postgres": r"'\x00'"}[store.database.dialect]
    run_sql(store.database, f"update penstock.payload set data = {value}")
    with pytest.raises(StoreError, match="cannot be read"):
        queue.read(0, 0)


# Staging.


def test_rows_staged_before_columns_are_added_can_be_committed_after(store: penstock.Store) -> None:
    queue = store.create_queue("q", SCHEMA)
    old = queue.record
    staged = pa.table({"n": [1], "s": ["a"]}, schema=SCHEMA)
    store.database.run(
        lambda tx: staging.stage(tx, old, Attempt("app", 0, 0, "one"), to_segments(staged, 0), 0)
    )
    queue.add_columns(NOTE)
    wide = pa.table({"n": [2], "s": ["b"], "note": ["c"]}, schema=queue.schema)
    segments = to_segments(wide, 0, columns_id=queue.record.columns.id)
    store.database.run(lambda tx: staging.stage(tx, queue.record, Attempt("app", 0, 1, "two"), segments, 0))
    store.database.run(lambda tx: staging.promote(tx, old, "app", 0, {"one": 1, "two": 1}))
    expected = [{"n": 1, "s": "a", "note": None}, {"n": 2, "s": "b", "note": "c"}]
    assert queue.read(0, 0).to_pylist() == expected
    queue.compact()
    assert queue.read(0, 0).to_pylist() == expected


# Concurrency.


def test_columns_can_be_added_while_an_append_is_running(store: penstock.Store) -> None:
    """In PostgreSQL this does not wait. SQLite has one writer at a time anyway."""
    queue = store.create_queue("q", SCHEMA)
    if store.database.dialect == "postgres":
        with store.database.transaction() as tx:
            from penstock.store.log import partition_log

            partition_log.append(
                tx, queue.record, to_segments(pa.table({"n": [1], "s": ["a"]}, schema=SCHEMA), 0)
            )
            assert store.queue("q").add_columns(NOTE).names == ["n", "s", "note"]
    else:
        queue.append([{"n": 1, "s": "a"}])
        queue.add_columns(NOTE)
    assert store.queue("q").read(0, 0).to_pylist() == [{"n": 1, "s": "a", "note": None}]


def test_columns_added_concurrently_are_all_kept(store: penstock.Store) -> None:
    store.create_queue("q", SCHEMA)
    names = [f"c{n}" for n in range(8)]
    failures: list[BaseException] = []

    def add(name: str) -> None:
        try:
            queue = store.queue("q")
            queue.add_columns([(name, pa.int64()), ("common", pa.string())])
            queue.append([{"n": 1, name: 7, "common": name}])
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=add, args=(name,)) for name in names]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    queue = store.queue("q")
    assert sorted(queue.schema.names[2:]) == sorted([*names, "common"])
    rows = queue.read(0, 0).to_pylist()
    assert sorted(row["common"] for row in rows) == names
    assert all([name for name in names if row[name] == 7] == [row["common"]] for row in rows)


# Columns of any type.


@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(first=tables(), second=tables())
def test_columns_of_any_type_can_be_added_and_read(
    quick: penstock.Store,
    first: tuple[pa.Schema, list[dict[str, Any]]],
    second: tuple[pa.Schema, list[dict[str, Any]]],
) -> None:
    """Columns after those that a reader knows do not affect it, whatever their types. Missing columns are
    null.
    """
    schema, before = first[0], pa.Table.from_pylist(first[1], schema=first[0])
    queue = quick.create_queue(f"q{len(quick.queues())}", schema)
    old = quick.queue(queue.name)
    queue.append(before)
    wide = queue.add_columns([pa.field(f"later {n}", field.type) for n, field in enumerate(second[0])])
    later = pa.Table.from_pylist(second[1], schema=second[0])
    if all(field.nullable for field in schema):
        queue.append(
            pa.table([pa.nulls(len(later), field.type) for field in schema] + later.columns, schema=wide)
        )
    found, narrow = queue.read(0, 0), old.read(0, 0)
    found.validate(full=True)
    narrow.validate(full=True)
    assert narrow.equals(found.select(schema.names))
    assert narrow.slice(0, len(before)).equals(before)
    missing = found.slice(0, len(before)).columns[len(schema) :]
    assert all(column.null_count == len(before) for column in missing)
    queue.compact()
    assert queue.read(0, 0).equals(found)


@pytest.fixture
def quick(tmp_path: Path) -> Iterator[penstock.Store]:
    with penstock.connect(without_disk_sync(f"sqlite:///{tmp_path}/quick.db")) as store:
        yield store
