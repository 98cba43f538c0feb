"""The files, values and errors of a Delta feed."""

from __future__ import annotations

import pickle
import sys
from collections import Counter
from datetime import UTC, date, datetime
from decimal import Decimal
from pathlib import Path

import pyarrow as pa
import pytest
from deltalake import DeltaTable, WriterProperties, write_deltalake

from penstock.errors import InvalidChangelogSchemaError, InvalidUrlError, MissingDependencyError
from penstock.feeds.contract import CHANGE_TYPE, COMMIT_TIMESTAMP, COMMIT_VERSION
from penstock.feeds.delta import DeltaFeed
from penstock.feeds.urls import parse
from tests.feeds.delta.tables import FEED, SCHEMA, History, check_replay, edit, log_file, refused, rows
from tests.support.feed_reading import changes


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "table"


def test_the_url_gives_the_same_feed_and_secrets_are_not_shown(path: Path) -> None:
    options = {"AWS_SECRET_ACCESS_KEY": "s3cr3t/+&=?", "region": "eu"}
    for feed in (
        DeltaFeed("s3://bucket/ta ble?é", ["id", "a.b"], options),
        DeltaFeed(path, "id"),
        DeltaFeed("relative/table"),
    ):
        assert parse(feed.url) == feed
        assert pickle.loads(pickle.dumps(feed)) == feed
        assert "s3cr3t" not in repr(feed) + feed.name
    assert DeltaFeed("s3://user:pass@host/t?sig=abc").name == "s3://user@host/t"
    assert Path(DeltaFeed("relative/table").path).is_absolute()
    with pytest.raises(InvalidUrlError, match=r"UNKNOWN_PARAMETER\].*Did you mean 'row_id'"):
        parse(f"delta:{path}?rowid=id")


def test_a_table_in_an_object_store_is_read_through_its_url(path: Path) -> None:
    History(path, feed=True, partitioned=True).append(rows((1, "b/ c=%25", 1.0), (2, None, 2.0)))
    feed = DeltaFeed(path.as_uri(), "id").open()
    assert feed.describe().identity == DeltaFeed(path, "id").open().describe().identity
    check_replay(path, changes(feed))


def test_the_description_depends_on_the_change_data_feed(path: Path, tmp_path: Path) -> None:
    History(path, feed=True, partitioned=False)
    with_feed = DeltaFeed(path).open().describe()
    assert with_feed.contract is None
    assert with_feed.identity == f"delta:{DeltaTable(path).metadata().id}"
    assert with_feed.schema.names == [*SCHEMA.names, CHANGE_TYPE, COMMIT_VERSION, COMMIT_TIMESTAMP]
    named = DeltaFeed(path, "id").open().describe().contract
    assert (named.row_id, named.whole_commits, named.intermediate_changes) == (("id",), True, True)
    History(tmp_path / "other", feed=False, partitioned=False)
    with pytest.raises(
        InvalidChangelogSchemaError, match=r"delta:PATH\?row_id=COLUMN.*DeltaFeed\(path, row_id="
    ) as raised:
        DeltaFeed(tmp_path / "other").open().describe()
    assert raised.value.condition == "INVALID_CHANGELOG_SCHEMA.MISSING_ROW_ID"


def test_a_path_without_a_table_is_refused(path: Path, tmp_path: Path) -> None:
    for where in (path, tmp_path):
        with refused("NOT_A_TABLE", "not a Delta table"):
            DeltaFeed(where, "id").open().describe()


def test_a_storage_that_denies_access_is_named_without_its_secrets() -> None:
    options = {
        "AWS_ACCESS_KEY_ID": "hiddenid",
        "AWS_SECRET_ACCESS_KEY": "hiddenkey",
        "AWS_ENDPOINT_URL": "http://127.0.0.1:9/hiddenplace",
        "aws_region": "us-east-1",
        "aws_allow_http": "true",
        "max_retries": "0",
    }
    for given_options in (options, {**options, "aws_allow_http": "hiddenvalue"}):
        with refused("STORAGE", "credentials") as raised:
            DeltaFeed("s3://bucket/table", "id", given_options).open().describe()
        assert "hidden" not in str(raised.value)
    with refused("STORAGE", "Unknown scheme"):
        DeltaFeed("nowhere://bucket/table", "id").open().describe()


def test_the_error_for_a_missing_library_says_what_to_install(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    History(path, feed=True, partitioned=False)
    for name in ("deltalake", "deltalake.fs"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(MissingDependencyError, match=r"pip install 'penstock-spark\[delta\]"):
        DeltaFeed(path).open().describe()


def test_older_files_may_lack_columns_and_have_narrower_types(path: Path) -> None:
    old = pa.schema([("id", pa.int32()), ("s", pa.struct([("a", pa.int16())])), ("f", pa.float32())])
    write_deltalake(path, rows((1, {"a": 5}, 0.5), (2, None, None), schema=old), configuration=FEED)
    new = pa.schema(
        [
            ("id", pa.int64()),
            ("s", pa.struct([("a", pa.int32()), ("b", pa.string())])),
            ("f", pa.float64()),
            ("t", pa.timestamp("us", tz="UTC")),
        ]
    )
    write_deltalake(path, rows(schema=new), mode="overwrite", schema_mode="overwrite")
    moment = datetime(2026, 1, 1, 12, tzinfo=UTC)
    write_deltalake(path, rows((3, {"a": 7, "b": "x"}, 1.5, moment), schema=new), mode="append")
    feed = DeltaFeed(path).open()
    assert feed.describe().schema.field("s").type.field("b").type == pa.string()
    found = changes(feed).drop_columns([CHANGE_TYPE, COMMIT_VERSION, COMMIT_TIMESTAMP]).to_pylist()
    first = [
        {"id": 1, "s": {"a": 5, "b": None}, "f": 0.5, "t": None},
        {"id": 2, "s": None, "f": None, "t": None},
    ]
    assert found == [*first, *first, {"id": 3, "s": {"a": 7, "b": "x"}, "f": 1.5, "t": moment}]


def test_files_of_another_schema_are_refused_by_name(path: Path) -> None:
    for first, second in ((pa.string(), pa.int64()), (pa.float64(), pa.float32()), (pa.int64(), pa.string())):
        table = path / f"{first}-{second}"
        write_deltalake(table, pa.table({"id": pa.array([None], first)}), configuration=FEED)
        write_deltalake(
            table, pa.table({"id": pa.array([None], second)}), mode="overwrite", schema_mode="overwrite"
        )
        with refused("SCHEMA_CHANGED", "version 0 .*'id'"):
            changes(DeltaFeed(table).open())


def test_partition_values_keep_their_types(path: Path) -> None:
    moment = datetime(2026, 1, 31, 12, 0, 0, 5, tzinfo=UTC)
    schema = pa.schema(
        [
            ("id", pa.int64()),
            ("i", pa.int16()),
            ("d", pa.date32()),
            ("t", pa.timestamp("us", tz="UTC")),
            ("n", pa.timestamp("us")),
            ("b", pa.bool_()),
            ("m", pa.decimal128(9, 3)),
            ("x", pa.float64()),
        ]
    )
    data = rows(
        (1, -5, date(2026, 1, 31), moment, moment.replace(tzinfo=None), True, Decimal("1.250"), 1.5),
        (2, *[None] * 7),
        schema=schema,
    )
    write_deltalake(path, data, partition_by=schema.names[1:], configuration=FEED)
    found = changes(DeltaFeed(path).open()).select(schema.names).sort_by("id")
    assert found.cast(schema).to_pylist() == data.to_pylist()
    edit(path, 0, add=lambda add: add["partitionValues"].update(i="five"))
    with refused("PARTITION_VALUE", "'five'"):
        changes(DeltaFeed(path).open())


def test_some_of_the_columns_in_any_order(path: Path) -> None:
    History(path, feed=True, partitioned=True).append(rows((1, "a", 1.5), (2, "b", 2.5)))
    feed = DeltaFeed(path).open()
    full = feed.describe().schema
    for names in ([COMMIT_VERSION, "p"], ["v", CHANGE_TYPE, "id"], ["p"], [COMMIT_TIMESTAMP]):
        schema = pa.schema([full.field(name) for name in names])
        found = pa.Table.from_batches(
            [batch for task in feed.tasks(-1, 9, 10) for batch in feed.read(task, schema)], schema
        )
        assert Counter(map(str, found.to_pylist())) == Counter(
            map(str, changes(feed).select(names).to_pylist())
        )


def test_a_column_with_a_name_reserved_for_change_rows_is_refused(path: Path) -> None:
    write_deltalake(path, pa.table({"id": [1], "_Commit_Version": [1]}))
    with pytest.raises(InvalidChangelogSchemaError, match="rename"):
        DeltaFeed(path, "id").open().describe()


def test_deletion_vectors_are_refused_where_they_matter(path: Path) -> None:
    history = History(path, feed=False, partitioned=False)
    history.append(rows((1, "a", 1.0), (2, "a", 1.0)))
    history.append(rows((3, "a", 1.0)))
    edit(path, 1, add=lambda add: add.update(deletionVector={"storageType": "u", "cardinality": 1}))
    feed = DeltaFeed(path, "id").open()
    with refused("DELETION_VECTORS", "version 1"):
        feed.tasks(-1, 2, 10)
    assert changes(feed, 1).num_rows == 1


def test_a_table_that_may_have_deletion_vectors_is_read_until_it_has_one(path: Path) -> None:
    """deltalake then also says that it may have variants, and those are refused where a column has some."""
    history = History(path, feed=False, partitioned=False)
    history.append(rows((1, "a", 1.0)))
    DeltaTable(path).alter.set_table_properties({"delta.enableDeletionVectors": "true"})
    enabled = DeltaTable(path).version()
    assert "variantType" in DeltaTable(path).protocol().reader_features
    write_deltalake(path, rows((2, "a", 1.0)), mode="append")
    assert changes(DeltaFeed(path, "id").open())["id"].to_pylist() == [1, 2]
    edit(
        path,
        enabled,
        metaData=lambda data: data.update(schemaString=data["schemaString"].replace("double", "variant")),
    )
    with refused("READER_FEATURE", "features variantType"):
        DeltaFeed(path, "id").open().describe()


def test_a_version_that_records_its_changes_may_have_deletion_vectors(path: Path) -> None:
    history = History(path, feed=True, partitioned=False)
    history.append(rows((1, "a", 1.0), (2, "a", 1.0)))
    history.delete(rows((1, "a", 1.0)))
    vector = {"storageType": "u", "cardinality": 1}
    edit(path, 2, add=lambda add: add.update(deletionVector=vector))
    assert log_file(path, 2).read_text().count("deletionVector") == 1
    found = changes(DeltaFeed(path, "id").open())
    assert [(row["id"], row["_change_type"], row["_commit_version"]) for row in found.to_pylist()] == [
        (1, "insert", 1),
        (2, "insert", 1),
        (1, "delete", 2),
    ]


def test_unknown_features_are_refused(path: Path) -> None:
    history = History(path, feed=True, partitioned=False)
    history.append(rows((1, "a", 1.0)))
    edit(path, 1, add=lambda add: add.update(path="s3://elsewhere/part.parquet?sig=abc"))
    with refused("FILES_ELSEWHERE", "version 1"):
        DeltaFeed(path).open().tasks(-1, 2, 10)
    mapped = {"delta.columnMapping.mode": "name"}
    edit(path, 0, metaData=lambda data: data["configuration"].update(mapped))
    with refused("COLUMN_MAPPING", "by name"):
        DeltaFeed(path).open().describe()
    edit(
        path,
        0,
        protocol=lambda found: found.update(minReaderVersion=3, readerFeatures=["timestampNtz", "magic"]),
    )
    with refused("READER_FEATURE", "features magic"):
        DeltaFeed(path).open().describe()
    edit(path, 0, protocol=lambda found: found.update(minReaderVersion=4, readerFeatures=[]))
    with refused("READER_FEATURE", "reader version 4"):
        DeltaFeed(path).open().describe()


def test_a_corrupt_log_and_a_corrupt_file_are_named(path: Path) -> None:
    history = History(path, feed=True, partitioned=False)
    history.append(rows((1, "a", 1.0)))
    feed = DeltaFeed(path).open()
    (task,) = feed.tasks(-1, 1, 10)
    (path / task[0].file.path).write_bytes(b"no Parquet at all")
    with refused("UNREADABLE_FILE", "part-"):
        list(feed.read(task, feed.describe().schema))
    for text in ("{}\nnot JSON", "[" * 100_000, "[]"):
        log_file(path, 1).write_text(text)
        with refused("BROKEN_LOG", "00001.json"):
            DeltaFeed(path).open().tasks(-1, 1, 10)
    log_file(path, 1).write_text("{}")
    log_file(path, 0).unlink()
    for text in ("[" * 100_000, "[]", '{"metaData": {"id": "x"}}', '{"protocol": 5}'):
        (path / "_delta_log" / f"{1:020}.checkpoint.{'0' * 8}.json").write_text(text)
        with refused("BROKEN_LOG", "is not a valid checkpoint"):
            DeltaFeed(path).open().describe()


def test_large_files_are_read_in_parts_and_small_ones_together(path: Path) -> None:
    count = 50_000
    big = pa.table({"id": range(count), "text": [f"{number:050}" for number in range(count)]})
    write_deltalake(
        path, big, configuration=FEED, writer_properties=WriterProperties(max_row_group_size=10_000)
    )
    for number in range(30):
        write_deltalake(path, big.slice(number, 1), mode="append")
    feed = DeltaFeed(path).open()
    schema = feed.describe().schema
    tasks = feed.tasks(-1, 100, 10_000)
    parts = [list(feed.read(task, schema)) for task in tasks]
    sizes = [sum(batch.num_rows for batch in part) for part in parts]
    assert len(tasks) == 6
    assert sizes == [10_000] * 5 + [30]
    assert sorted(pa.Table.from_batches([b for part in parts for b in part])["id"].to_pylist()) == sorted(
        [*range(count), *range(30)]
    )
    assert [commit.rows for commit in feed.commits(-1, 2)] == [count, 1, 1]


def test_wide_rows_are_read_in_small_batches(path: Path) -> None:
    write_deltalake(
        path,
        pa.table({"id": range(40), "blob": [f"{n % 10}" * 2**20 for n in range(40)]}),
        configuration=FEED,
    )
    feed = DeltaFeed(path).open()
    (task,) = feed.tasks(-1, 1, 10**6)
    sizes = [batch.nbytes for batch in feed.read(task, feed.describe().schema)]
    assert len(sizes) > 2
