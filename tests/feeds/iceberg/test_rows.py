"""The changes of Iceberg tables turn each snapshot into the next."""

from __future__ import annotations

import math
import pickle
import struct
import subprocess
import sys
from collections import Counter
from decimal import Decimal
from itertools import pairwise
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyiceberg.manifest import DataFileContent, FileFormat
from pyiceberg.table import Table
from pyiceberg.transforms import IdentityTransform
from pyiceberg.types import DecimalType, DoubleType, LongType, StringType

from penstock.changes.passes.passes import Passes
from penstock.changes.passes.rows import ChangeRows, Layout
from penstock.errors import DataLostError, FeedUnavailableError, InvalidChangelogSchemaError, InvalidUrlError
from penstock.feeds.iceberg import IcebergFeed, scan
from penstock.feeds.protocol import OpenFeed
from penstock.feeds.urls import parse
from tests.feeds.iceberg.examples import SLOW
from tests.feeds.iceberg.lake import (
    Lake,
    changes,
    commit_deletes,
    compact,
    counted,
    delete_file,
    delete_positions,
    found,
    live_files,
    new_files,
    remove_as_before,
    replayed,
    rows,
    states,
)

LAYOUT = Layout(3, 4, 5, row_id=((0,),), data=((0,), (1,), (2,)))


# What the rows are.


def _random_commit(data: st.DataObject, table: Table, ids: list[int]) -> None:
    def drawn(keys: list[int]) -> pa.Table:
        texts = st.sampled_from(["p", "q", None])
        return rows(*((key, data.draw(texts), data.draw(st.integers(0, 2))) for key in keys))

    held = sorted(table.scan().to_arrow()["id"].to_pylist()) if table.current_snapshot() else []
    some = data.draw(st.lists(st.sampled_from(held), unique=True, max_size=3)) if held else []
    new = [max([0, *ids]) + 1 + place for place in range(data.draw(st.integers(1, 4)))]
    what = data.draw(st.sampled_from(["append", "delete", "overwrite", "upsert", "positions", "compact"]))
    if what == "append" or not some:
        table.append(drawn(new))
    elif what == "delete":
        table.delete(f"id in ({', '.join(map(str, some))})" if data.draw(st.booleans()) else "n = 1")
    elif what == "overwrite":
        table.overwrite(drawn([*some, *new]), f"id in ({', '.join(map(str, some))})")
    elif what == "upsert":
        table.upsert(drawn([*some, *new]), join_cols=["id"])
    elif what == "compact" and not table.spec().fields:
        compact(table)
    else:
        places = [(file, place) for file in live_files(table) for place in range(file.record_count)]
        chosen = data.draw(st.lists(st.sampled_from(places), min_size=1, max_size=4))
        delete_positions(table, chosen, bounds=data.draw(st.booleans()))
    ids += new


@SLOW
@given(data=st.data())
def test_the_changes_of_any_history_turn_each_snapshot_into_the_next(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    lake = Lake(tmp_path_factory.mktemp("lake"))
    table = lake.table()
    if data.draw(st.booleans()):
        with table.update_spec() as spec:
            spec.add_field("n", IdentityTransform())
    ids: list[int] = []
    for _ in range(data.draw(st.integers(2, 6))):
        _random_commit(data, table, ids)
    feed = lake.feed(row_id="id").open()
    held = states(table)
    newest = feed.newest(0)
    assert newest == max(held)

    bounds = [
        0,
        *sorted(data.draw(st.lists(st.integers(0, newest), max_size=3))),
        newest,
    ]
    parts = [
        changes(feed, after, upto, data.draw(st.sampled_from([1, 3, 1000])))
        for after, upto in pairwise(bounds)
    ]
    everything = pa.concat_tables(parts)
    assert counted(everything) == counted(changes(feed, 0, newest))
    for version, state in replayed(everything, Counter()):
        assert state == held[version], version

    kept = Passes(carryovers=True).run(ChangeRows(everything.combine_chunks(), LAYOUT)).table
    net: dict[int, tuple[Counter[object], Counter[object]]] = {}
    for row in counted(kept.drop_columns("_commit_timestamp")).elements():
        gone, come = net.setdefault(row[-1], (Counter(), Counter()))
        (gone if row[-2] == "delete" else come)[row[:-2]] += 1
    before: Counter[object] = Counter()
    for version, after in held.items():
        assert net.get(version, (Counter(), Counter())) == (before - after, after - before)
        before = after


def test_a_position_deleted_twice_gives_one_delete_and_a_restored_one_an_insert(
    lake: Lake, orders: Table
) -> None:
    lake.table("t").append(rows(*((key, str(key), key) for key in range(6))))
    table = lake.catalog.load_table("shop.t")
    (file,) = live_files(table)
    first = delete_file(table, [(file, 1), (file, 2)])
    commit_deletes(table, first)
    second = delete_file(table, [(file, 2), (file, 3)])
    commit_deletes(table, second)
    commit_deletes(table, delete_file(table, [(file, 2)]), dropped=[first.file_path, second.file_path])
    table.delete("id >= 0")
    feed = lake.feed("t").open()
    shown = Counter((row[0], row[-2]) for row in found(feed, 1, 2).elements())
    assert shown == Counter([(1, "delete"), (2, "delete")])
    assert found(feed, 2, 3) == Counter([(3, "3", 3, "delete", 3)])
    assert found(feed, 3, 4) == Counter([(1, "1", 1, "insert", 4), (3, "3", 3, "insert", 4)])
    assert sorted(row[0] for row in found(feed, 4, 5).elements()) == [0, 1, 3, 4, 5]


def test_positions_deleted_in_the_partition_of_nan(lake: Lake) -> None:
    table = lake.table("t", pa.schema([("id", pa.int64()), ("x", pa.float64())]))
    with table.update_spec() as spec:
        spec.add_field("x", IdentityTransform())
    (file,) = new_files(table, rows((1, 0.0), (2, 0.0), schema=table.schema().as_arrow()))
    file.partition[0] = math.nan
    with table.transaction() as transaction, transaction.update_snapshot().fast_append() as append:
        append.append_data_file(file)
    commit_deletes(table, delete_file(table, [(file, 0)], bounds=False))
    feed = lake.feed("t").open()
    assert found(feed, 1, 2) == Counter([(1, 0.0, "delete", 2)])


def test_rows_added_and_deleted_by_the_same_snapshot_give_no_changes(lake: Lake) -> None:
    table = lake.table()
    (file,) = new_files(table, rows((1, "a", 1), (2, "b", 2)))
    commit_deletes(table, delete_file(table, [(file, 0)]), added=[file])
    assert found(lake.feed().open(), 0, 1) == Counter([(2, "b", 2, "insert", 1)])


def test_a_file_removed_under_another_snapshots_id_is_removed_once(lake: Lake) -> None:
    table = lake.table()
    table.append(rows((1, "a", 1)))
    table.append(rows((2, "b", 2)))
    second, first = live_files(table)
    remove_as_before(table, second)
    table.append(rows((3, "c", 3)))
    remove_as_before(table, first, gone_before=[second])
    feed = lake.feed(row_id="id").open()
    for version, state in replayed(changes(feed, 0, 5), Counter()):
        assert state == states(table)[version]
    assert [row[-1] for row in found(feed, 0, 5).elements() if row[-2] == "delete"] == [3, 5]


def test_a_compaction_gives_no_changes(lake: Lake, orders: Table) -> None:
    compact(orders)
    orders.append(rows((9, "z", 9)))
    feed = lake.feed().open()
    newest = feed.newest(0)
    assert found(feed, 3, newest) == Counter([(9, "z", 9, "insert", newest)])
    assert [commit.version for commit in feed.commits(0, newest)] == [1, 2, 3, newest]


def test_commits_have_the_time_and_estimated_row_count_of_their_snapshot(lake: Lake, orders: Table) -> None:
    feed = lake.feed().open()
    commits = list(feed.commits(0, 3))
    assert [(commit.version, commit.rows) for commit in commits] == [(1, 2), (2, 1), (3, 3)]
    assert [commit.timestamp for commit in commits] == [
        snapshot.timestamp_ms * 1000 for snapshot in orders.metadata.snapshots
    ]
    times = changes(feed, 0, 1)["_commit_timestamp"].cast(pa.int64()).unique().to_pylist()
    assert times == [commits[0].timestamp]


def test_a_large_file_is_read_in_parts_that_contain_every_row_once(
    lake: Lake, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scan, "BATCH_ROWS", 64)
    table = lake.table(**{"write.parquet.row-group-limit": "100"})
    table.append(rows(*((key, str(key), key) for key in range(1000))))
    (file,) = live_files(table)
    delete_positions(table, [(file, place) for place in (0, 99, 100, 555, 999)])
    feed = lake.feed().open()
    tasks = feed.tasks(0, 1, 250)
    assert len(tasks) == 4
    assert len(feed.tasks(0, 2, 250)) > 4
    whole = found(feed, 0, 2)
    assert found(feed, 0, 2, 250) == found(feed, 0, 2, 7) == whole
    assert sorted(row[0] for row in whole.elements() if row[-2] == "delete") == [0, 99, 100, 555, 999]
    sizes = [sum(batch.num_rows for batch in feed.read(task, feed.describe().schema)) for task in tasks]
    assert sizes == [200, 300, 200, 300]


def test_selected_columns_are_read_in_any_order_or_no_data_columns_at_all(lake: Lake, orders: Table) -> None:
    feed = lake.feed().open()
    full = feed.describe().schema
    for names in (["_change_type", "n"], ["_commit_version"], ["data", "id"]):
        schema = pa.schema([full.field(name) for name in names])
        batches = [batch for task in feed.tasks(0, 2, 10) for batch in feed.read(task, schema)]
        assert all(batch.schema == schema for batch in batches)
        assert sum(batch.num_rows for batch in batches) == 3


# Columns.


def test_columns_are_matched_by_id_through_renames_wider_types_and_additions(lake: Lake) -> None:
    table = lake.table()
    table.append(rows((1, "a", 1)))
    with table.update_schema() as update:
        update.rename_column("data", "text")
        update.update_column("n", LongType())
        update.add_column("note", StringType())
    table.append(
        pa.table({"id": [2], "text": ["b"], "n": [2**40], "note": ["new"]}, schema=table.schema().as_arrow())
    )
    feed = lake.feed().open()
    assert feed.describe().schema.names[:4] == ["id", "text", "n", "note"]
    assert feed.describe().schema.field("n").type == pa.int64()
    assert found(feed, 0, 2) == Counter([(1, "a", 1, None, "insert", 1), (2, "b", 2**40, "new", "insert", 2)])


def test_types_that_iceberg_widens_are_widened_exactly(lake: Lake) -> None:
    wide = Decimal("1234567890.25")
    schema = pa.schema([("id", pa.int64()), ("f", pa.float32()), ("d", pa.decimal128(9, 2))])
    table = lake.table(schema=schema)
    table.append(rows((1, 0.1, Decimal("1234567.25")), (2, None, None), schema=schema))
    with table.update_schema() as update:
        update.update_column("f", DoubleType())
        update.update_column("d", DecimalType(12, 2))
    table.append(
        pa.table({"id": [3], "f": [0.1], "d": [wide]}, schema=table.schema().as_arrow()),
    )
    feed = lake.feed(row_id="id").open()
    assert feed.describe().schema.types[:3] == [pa.int64(), pa.float64(), pa.decimal128(12, 2)]
    as_float = struct.unpack("f", struct.pack("f", 0.1))[0]
    assert found(feed, 0, 2) == Counter(
        [
            (1, as_float, Decimal("1234567.25"), "insert", 1),
            (2, None, None, "insert", 1),
            (3, 0.1, wide, "insert", 2),
        ]
    )
    # What is removed has the older type in its file.
    table.delete("id = 1")
    assert (1, as_float, Decimal("1234567.25"), "delete", 3) in found(lake.feed(row_id="id").open(), 2, 3)


def test_a_running_query_keeps_its_columns_and_the_next_one_has_the_new_ones(
    lake: Lake, orders: Table
) -> None:
    running = lake.feed().open()
    schema = running.describe().planned_schema
    with orders.update_schema() as update:
        update.rename_column("data", "text")
    orders.append(rows((7, "g", 7)).rename_columns(["id", "text", "n"]))
    (task,) = running.tasks(3, running.newest(3), 10)
    (batch,) = running.read(pickle.loads(pickle.dumps(task)), schema)
    assert batch["data"].to_pylist() == ["g"]
    assert "text" in lake.feed().open().describe().schema.names
    (later,) = lake.feed().open().tasks(3, 4, 10)
    with pytest.raises(FeedUnavailableError, match="dropped or renamed") as error:
        list(running.read(later, schema))
    assert error.value.condition == "FEED_UNAVAILABLE.SCHEMA_CHANGED"


def test_a_partition_value_replaces_a_column_missing_from_the_file(lake: Lake, tmp_path: Path) -> None:
    table = lake.table(
        schema=pa.schema([("id", pa.int64()), ("day", pa.string())]),
        **{
            "schema.name-mapping.default": '[{"field-id": 1, "names": ["id"]}, '
            '{"field-id": 2, "names": ["day"]}]'
        },
    )
    with table.update_spec() as spec:
        spec.add_field("day", IdentityTransform())
    table.append(
        pa.table({"id": pa.array([1], pa.int64()), "day": ["mon"]}, schema=table.schema().as_arrow())
    )
    (file,) = live_files(table)
    # As a table that came from Hive has it.
    pq.write_table(pa.table({"id": pa.array([1], pa.int64())}), file.file_path.removeprefix("file://"))
    assert found(lake.feed().open(), 0, 1) == Counter([(1, "mon", "insert", 1)])


def test_nested_columns_are_read_unchanged(lake: Lake) -> None:
    schema = pa.schema(
        [
            ("id", pa.int64()),
            ("item", pa.struct([("name", pa.string()), ("tags", pa.list_(pa.string()))])),
            ("more", pa.map_(pa.string(), pa.int64())),
        ]
    )
    table = lake.table(schema=schema)
    value = {"id": 1, "item": {"name": "x", "tags": ["p", "q"]}, "more": [("k", 1)]}
    table.append(pa.Table.from_pylist([value], schema=schema))
    feed = lake.feed().open()
    (row,) = changes(feed, 0, 1).to_pylist()
    assert {name: row[name] for name in schema.names} == value
    assert feed.describe().contract.row_id == ("id", "item")  # type: ignore[union-attr] - it has one


def test_a_null_list_or_map_of_structs_is_not_an_empty_one(lake: Lake, tmp_path: Path) -> None:
    part = pa.struct([("a", pa.int64())])
    schema = pa.schema(
        [
            pa.field("id", pa.int64(), nullable=False),
            ("parts", pa.list_(part)),
            ("named", pa.map_(pa.string(), part)),
            ("deep", pa.struct([("parts", pa.list_(part))])),
        ]
    )
    values = [
        {"id": 1, "parts": None, "named": None, "deep": None},
        {"id": 2, "parts": [], "named": [], "deep": {"parts": None}},
        {"id": 3, "parts": [None, {"a": None}], "named": [("k", None)], "deep": {"parts": []}},
        {"id": 4, "parts": [{"a": 1}], "named": [("k", {"a": 1})], "deep": {"parts": [{"a": 1}]}},
    ]
    # Not by pyiceberg, which writes them as empty ones too.
    pq.write_table(pa.Table.from_pylist(values, schema), tmp_path / "rows.parquet")
    lake.table("nested", schema).add_files([f"file://{tmp_path}/rows.parquet"])
    feed = lake.feed("nested", row_id="id").open()
    read = changes(feed, 0, 1).select(schema.names).to_pylist()
    assert sorted(read, key=lambda row: int(row["id"])) == values


# What identifies rows.


def test_the_row_id_defaults_to_the_identifier_fields_and_then_to_all_columns(
    lake: Lake, orders: Table
) -> None:
    def row_id(**options: object) -> Any:
        contract = lake.feed(**options).open().describe().contract
        assert contract is not None
        assert contract.carryover_rows
        assert contract.whole_commits
        assert contract.nullable_row_id == (len(contract.row_id) == 3), "only a table without a key"
        return contract.row_id

    assert row_id() == ("id", "data", "n")
    with orders.update_schema() as update:
        update.set_identifier_fields("id")
    assert row_id() == ("id",)
    assert row_id(row_id=["id", "n"]) == ("id", "n")
    assert row_id(row_id=["n", "id", "data"]) == ("n", "id", "data")
    with pytest.raises(InvalidChangelogSchemaError, match="'data'"):
        lake.feed(row_id="dta").open().describe()


def test_a_column_with_a_name_reserved_by_the_feed_is_refused(lake: Lake) -> None:
    lake.table(schema=pa.schema([("id", pa.int64()), ("_commit_version", pa.int64())]))
    with pytest.raises(InvalidChangelogSchemaError, match="rename the column"):
        lake.feed().open().describe()


# What cannot be read, and what was said wrongly.


@pytest.mark.parametrize(
    ("condition", "options"),
    [
        ("EQUALITY_DELETES", {"content": DataFileContent.EQUALITY_DELETES}),
        ("FILE_FORMAT", {"file_format": FileFormat.AVRO}),
    ],
)
def test_deletes_that_cannot_be_read_are_refused_by_name(
    lake: Lake, orders: Table, condition: str, options: dict[str, object]
) -> None:
    commit_deletes(orders, delete_file(orders, [(live_files(orders)[0], 0)], **options))
    feed = lake.feed().open()
    with pytest.raises(FeedUnavailableError) as error:
        feed.tasks(3, 4, 10)
    assert error.value.condition == f"FEED_UNAVAILABLE.{condition}"
    assert found(feed, 0, 3)


def test_a_table_of_format_1_and_versions_before_its_upgrade_are_refused_with_a_remedy(
    lake: Lake,
) -> None:
    table = lake.table(**{"format-version": "1"})
    table.append(rows((1, "a", 1)))
    with pytest.raises(FeedUnavailableError, match="upgrade_table_version") as error:
        lake.feed().open().describe()
    assert error.value.condition == "FEED_UNAVAILABLE.FORMAT_VERSION"
    with table.transaction() as transaction:
        transaction.upgrade_table_version(2)
    table.append(rows((2, "b", 2)))
    feed = lake.feed().open()
    assert feed.oldest() == 0
    assert found(feed, 0, 1) == Counter([(2, "b", 2, "insert", 1)])
    with pytest.raises(DataLostError, match="format 1"):
        feed.tasks(-1, 1, 10)


def test_missing_tables_and_catalogs_are_reported_without_secrets(tmp_path: Path, lake: Lake) -> None:
    def condition(feed: OpenFeed) -> str:
        with pytest.raises(FeedUnavailableError) as error:
            feed.describe()
        for text in (str(error.value), repr(feed), repr(error.value.parameters)):
            assert "hunter22" not in text
        assert error.value.__cause__ is None
        return error.value.condition.removeprefix("FEED_UNAVAILABLE.")

    assert condition(lake.feed("nothing").open()) == "TABLE_NOT_FOUND"
    assert condition(IcebergFeed("nowhere.orders", properties=lake.properties).open()) == "TABLE_NOT_FOUND"
    assert condition(IcebergFeed("shop.orders", "unheard_of").open()) == "CATALOG"
    secret = {**lake.properties, "uri": "postgresql+psycopg://me:hunter22@127.0.0.1:1/none"}
    assert condition(IcebergFeed("shop.orders", properties=secret).open()) == "CATALOG"
    wrong = {**lake.properties, "uri": f"sqlite:///{tmp_path}/none/hunter22.db", "token": "hunter22"}
    assert condition(IcebergFeed("shop.orders", properties=wrong).open()) == "CATALOG"
    empty = {**lake.properties, "uri": f"sqlite:///{tmp_path}/empty.db"}
    assert condition(IcebergFeed("shop.orders", properties=empty).open()) == "CATALOG"


def test_a_feed_survives_a_round_trip_through_its_url_and_pickle(lake: Lake) -> None:
    feed = lake.feed(row_id=["id", "n"])
    other = IcebergFeed("a.b", "prod", {"uri": "http://x/?a=b&c", "s3.secret-access-key": "hunter22"})
    for each in (feed, other):
        assert parse(each.url) == each
        assert pickle.loads(pickle.dumps(each)) == each
    assert "hunter22" not in repr(other)
    with pytest.raises(InvalidUrlError, match="catalog"):
        parse("iceberg:a.b?catalogue=prod")


def test_without_pyiceberg_the_extra_is_named() -> None:
    program = (
        "import sys; sys.modules['pyiceberg'] = None\n"
        "from penstock.feeds.iceberg import IcebergFeed\n"
        "feed = IcebergFeed('a.b')\n"
        "try: feed.open()\n"
        "except ImportError as error: print(error)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert "pip install 'penstock-spark[iceberg]'" in done.stdout


def test_a_table_with_only_map_columns_has_no_row_id(lake: Lake) -> None:
    lake.table("maps", pa.schema([("m", pa.map_(pa.string(), pa.int64()))]))
    with pytest.raises(FeedUnavailableError, match="add a column") as error:
        lake.feed("maps").open().describe()
    assert error.value.condition == "FEED_UNAVAILABLE.NO_ROW_ID"
