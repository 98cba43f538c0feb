"""Streaming queries into Iceberg tables: types, names, changed columns, and what is refused by name."""

from __future__ import annotations

from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from pyiceberg.manifest import DataFile, DataFileContent, FileFormat
from pyiceberg.typedef import Record
from pyiceberg.utils.config import Config
from pyspark.sql import DataFrame

import penstock
from penstock.errors import (
    CheckpointMismatchError,
    CheckpointRewoundError,
    ContinuousRefusedError,
    InvalidInputError,
    InvalidNameError,
    InvalidOptionError,
    InvalidUrlError,
    SchemaMismatchError,
    StoreUnavailableError,
    TableRefusedError,
    UnsupportedTypeError,
)
from penstock.testing import replay_last_batch
from tests.support.spark_queues import one_store
from tests.support.sql_tables import totals
from tests.tables.iceberg.tables import IcebergTables


def row(number: int, k: str | None = "a", v: int = 1) -> dict[str, Any]:
    return {"id": number, "k": k, "v": v}


@one_store
def test_every_type_of_iceberg_is_written_unchanged(tables: IcebergTables) -> None:
    def many(frame: DataFrame) -> DataFrame:
        return frame.selectExpr(
            "id",
            "true as b",
            "cast(1 as tinyint) as i8",
            "cast(2 as smallint) as i16",
            "cast(1.5 as float) as f",
            "cast('nan' as double) as d",
            "cast(1.25 as decimal(38, 10)) as dec",
            "binary('x') as bin",
            "date'2026-01-31' as day",
            "timestamp'2026-01-31 12:00:00.123456Z' as at",
            "timestamp_ntz'2026-01-31 12:00:00' as local",
            "map('a', array(named_struct('x', 1, 'y z.', cast(3 as smallint)), null)) as nested",
            "array(array(1, null), null) as lists",
            "cast(null as struct<a: string>) as nothing",
            "'q' as `a b.c`",
        )

    tables.feed.add(row(1)).run(tables.sink("types"), many)
    tables.feed.add(row(2)).run(tables.sink("types"), many)
    # Not by pyiceberg, which loses fields deep inside columns whose name is another one in the file.
    files = [file.file_path.removeprefix("file://") for file in tables.files("types")]
    found = [row for file in files for row in pq.read_table(file).to_pylist()]
    assert len(found) == 2
    (first,) = [each for each in found if each.pop("id") == 1]
    assert repr(first.pop("d")) == "nan"
    assert first == {
        "b": True,
        "i8": 1,
        "i16": 2,
        "f": 1.5,
        "dec": Decimal("1.2500000000"),
        "bin": b"x",
        "day": datetime(2026, 1, 31, tzinfo=UTC).date(),
        "at": datetime(2026, 1, 31, 12, 0, 0, 123456, tzinfo=UTC),
        "local": datetime(2026, 1, 31, 12),  # noqa: DTZ001 - it has none
        "nested": [("a", [{"x": 1, "y_x20z_x2E": 3}, None])],
        "lists": [[1, None], None],
        "nothing": None,
        "a_x20b_x2Ec": "q",
    }
    with pytest.raises(UnsupportedTypeError, match="'gap' is interval day") as caught:
        tables.feed.run(
            tables.sink("no"), lambda frame: frame.selectExpr("id", "interval '1' day as gap", "null as none")
        )
    assert "'none' is void" in caught.value.message


@one_store
def test_other_programs_read_the_files_of_the_table(tables: IcebergTables) -> None:
    duckdb = pytest.importorskip("duckdb")
    feed, sink = tables.feed, tables.sink("totals", "k")
    feed.add(row(1, "a", 5), row(2, "b", 7)).run(sink, totals, mode="update")
    feed.add(row(3, "a", 5), row(4, "c", 7)).run(sink, totals, mode="update")
    files = [file.file_path.removeprefix("file://") for file in tables.files("totals")]
    found = duckdb.sql(f"select k, total, n from read_parquet({files!r})").fetchall()
    assert sorted(found) == [("a", 10, 2), ("b", 7, 1), ("c", 7, 1)]


@one_store
def test_names_may_be_any_text(tables: IcebergTables) -> None:
    names = ["a.b", 'say "k"', "Upper Case", "Größe ☃", "back`tick"]

    def odd(frame: DataFrame) -> DataFrame:
        return frame.select(*(frame["k"].alias(name) for name in names), frame["v"].alias("v.w"))

    sink = penstock.TableSink('"my ""lake"".shop".inner."odd ☃ name.s"', names, tables.url)
    tables.feed.add(row(1, "a", 5), row(2, "b", 6)).run(sink, odd, mode="update")
    tables.feed.add(row(3, "a", 7)).run(sink, odd, mode="update")
    found = tables.catalog.load_table(('my "lake".shop', "inner", "odd ☃ name.s")).scan().to_arrow()
    assert sorted(tuple(each.values()) for each in found.to_pylist()) == [
        ("a",) * 5 + (7,),
        ("b",) * 5 + (6,),
    ]


@one_store
def test_a_catalog_of_the_configuration_is_named_before_the_table(
    tables: IcebergTables, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in tables.properties.items():
        monkeypatch.setenv(f"PYICEBERG_CATALOG__LAKE__{name.upper()}", value)
    # pyiceberg reads it when it is imported.
    monkeypatch.setattr("pyiceberg.catalog._ENV_CONFIG", Config())
    sink = penstock.TableSink("iceberg:lake.shop.configured")
    tables.feed.add(row(1)).run(sink)
    assert tables.rows("configured") == [(1, "a", 1)]


@one_store
def test_new_columns_are_refused_added_or_left_out(tables: IcebergTables) -> None:
    def more(frame: DataFrame) -> DataFrame:
        return frame.selectExpr("id", "k", "v", "v * 2 as `w.x`", "named_struct('a', id, 'l', array(k)) as s")

    feed = tables.feed
    feed.add(row(1)).run(tables.sink("t"))
    feed.add(row(2))
    with pytest.raises(SchemaMismatchError, match=r"TABLE_DIFFERS\].*no column 'w.x'"):
        feed.run(tables.sink("t"), more)
    feed.run(tables.sink("t", schema_changes="ignore"), more)
    assert tables.rows("t") == [(1, "a", 1), (2, "a", 1)]
    feed.add(row(3)).run(tables.sink("t", schema_changes="evolve"), more)
    assert tables.rows("t")[:1] == [(1, "a", 1, None, None)]
    assert tables.rows("t")[2:] == [(3, "a", 1, 2, {"a": 3, "l": ["a"]})]
    feed.add(row(4)).run(tables.sink("t"))
    assert len(tables.rows("t")) == 4
    with pytest.raises(SchemaMismatchError, match="'v' is long in the table and string in the rows"):
        feed.run(
            tables.sink("t", schema_changes="evolve"),
            lambda frame: frame.selectExpr("id", "k", "string(v) as v"),
        )


@one_store
def test_only_complete_mode_changes_the_columns(tables: IcebergTables) -> None:
    def other(frame: DataFrame) -> DataFrame:
        return frame.groupBy("k").agg({"v": "max"}).toDF("k", "highest")

    feed = tables.feed
    feed.add(row(1, "a", 5)).run(tables.sink("t", "k"), totals, mode="update")
    with pytest.raises(SchemaMismatchError, match=r"TABLE_DIFFERS\].*no column 'highest'") as caught:
        feed.run(tables.sink("t", "k"), other, mode="update", checkpoint="other")
    assert "only output mode complete" in caught.value.message
    feed.store.consumer("c").seek("in", to="earliest")
    feed.run(tables.sink("t", "k"), other, mode="complete", checkpoint="other")
    assert tables.rows("t") == [("a", 5)]
    assert tables.table("t").schema().column_names == ["k", "highest"]


@one_store
@pytest.mark.parametrize("few", [True, False], ids=["few rows", "many rows"])
def test_two_rows_with_the_same_key_in_a_micro_batch_are_refused(
    tables: IcebergTables, monkeypatch: pytest.MonkeyPatch, few: bool
) -> None:
    if not few:
        monkeypatch.setattr("penstock.tables.iceberg.keys._DRIVER_ROWS", 0)
    feed, sink = tables.feed, tables.sink("latest", "k", "v")
    feed.add(row(1, "a", 5), row(2, "b", 5)).run(sink, mode="update")
    feed.add(row(3, "c", 6), row(4, "a", 6), row(5, "a", 6), row(6, "a", 5))
    with pytest.raises(TableRefusedError, match="several rows with the key 'k' = 'a', 'v' = 6") as caught:
        feed.run(sink, mode="update")
    assert caught.value.condition == "TABLE_REFUSED.DUPLICATE_KEYS"
    assert tables.rows("latest") == [(1, "a", 5), (2, "b", 5)]
    assert [name for name in tables.orphans("latest") if name.endswith(".parquet")] == []
    assert feed.store.consumer("c").lag("in").rows == 4


@one_store
def test_a_file_that_tasks_cannot_rewrite_is_named(tables: IcebergTables) -> None:
    feed, sink = tables.feed, tables.sink("totals", "k")
    feed.add(row(1)).run(sink, totals, mode="update")
    table = tables.table("totals")
    file = DataFile.from_args(
        content=DataFileContent.DATA,
        file_path=f"{table.location()}/data/file.orc",
        file_format=FileFormat.ORC,
        partition=Record(),
        record_count=1,
        file_size_in_bytes=1,
    )
    with table.transaction() as transaction, transaction.update_snapshot().fast_append() as producer:
        producer.append_data_file(file)
    feed.add(row(2))
    with pytest.raises(TableRefusedError, match="only Parquet files can be rewritten") as caught:
        feed.run(sink, totals, mode="update")
    assert caught.value.condition == "TABLE_REFUSED.FILE_FORMAT"


@one_store
def test_a_null_key_is_refused(tables: IcebergTables) -> None:
    tables.feed.add(row(1, None))
    with pytest.raises(TableRefusedError, match="coalesce") as caught:
        tables.feed.run(tables.sink("totals", "k"), totals, mode="update")
    assert caught.value.condition == "TABLE_REFUSED.NULL_KEY"


@one_store
def test_at_least_once_records_no_micro_batch(tables: IcebergTables) -> None:
    feed = tables.feed
    feed.add(row(1), row(2)).run(tables.sink("plain"), guarantee="at_least_once")
    replay_last_batch(feed.folder / "ck")
    feed.run(tables.sink("plain"), guarantee="at_least_once")
    assert [each[0] for each in tables.rows("plain")] == [1, 1, 2, 2]
    assert tables.orphans("plain") == []


@one_store
def test_two_queries_maintain_one_table(tables: IcebergTables) -> None:
    feed, sink = tables.feed, tables.sink("shared", "id")
    feed.add(row(1)).run(sink, mode="update")
    feed.store.consumer("c").seek("in", to="earliest")
    feed.add(row(2)).run(sink, mode="update", checkpoint="second")
    assert [each[0] for each in tables.rows("shared")] == [1, 2]


@one_store
def test_a_new_checkpoint_under_the_same_app_id_is_refused(tables: IcebergTables) -> None:
    feed, sink = tables.feed, tables.sink("plain", app_id="mine")
    feed.add(row(1)).run(sink)
    feed.store.consumer("c").seek("in", to="earliest")
    with pytest.raises(CheckpointMismatchError, match="with other input"):
        feed.run(sink, checkpoint="new")


@one_store
def test_a_checkpoint_older_than_the_table_is_refused(tables: IcebergTables) -> None:
    feed, sink = tables.feed, tables.sink("plain", app_id="mine")
    feed.add(row(1)).run(sink)
    feed.add(row(2)).run(sink)
    feed.store.consumer("c").seek("in", to="earliest")
    with pytest.raises(CheckpointRewoundError, match="at micro-batch 1 in the Iceberg table"):
        feed.run(sink, checkpoint="new")
    assert [each[0] for each in tables.rows("plain")] == [1, 2]


@one_store
def test_a_task_that_fails_leaves_no_file(tables: IcebergTables) -> None:
    feed = tables.feed
    feed.add(*(row(number) for number in range(50)))
    with pytest.raises(Exception, match="USER_RAISED"):
        feed.run(
            tables.sink("t"), lambda frame: frame.selectExpr("id", "if(id = 49, raise_error('no'), k) as k")
        )
    assert [name for name in tables.stored("t") if name.endswith(".parquet")] == []


@one_store
def test_wrong_arguments_are_refused_with_a_remedy(tables: IcebergTables, tmp_path: Path) -> None:
    feed = tables.feed
    with pytest.raises(InvalidOptionError, match=r"OPTION.CONFLICT\].*use output mode update"):
        feed.run(tables.sink("t", "k"))
    with pytest.raises(InvalidInputError, match=r"INPUT.UNKNOWN_COLUMN\].*Did you mean 'id'"):
        feed.run(tables.sink("t", "idd"), mode="update")
    with pytest.raises(InvalidInputError, match=r"INPUT.COLUMN_TYPE\].*exact comparison"):
        feed.run(tables.sink("t", "f"), lambda frame: frame.selectExpr("double(v) as f", "id"), mode="update")
    with pytest.raises(InvalidOptionError, match=r"OPTION.CONFLICT\].*exactly_once"):
        feed.run(tables.sink("t"), guarantee="idempotent")
    with pytest.raises(ContinuousRefusedError, match="is an Iceberg table"):
        feed.pipeline(tables.sink("t")).start(
            checkpoint=tmp_path / "ck2", trigger=penstock.Trigger.continuous("1 second")
        )
    for name in ("iceberg:t", "iceberg:lake.t", "iceberg:", "iceberg:lake..t", 'iceberg:lake."a.t'):
        with pytest.raises(InvalidNameError, match=r"iceberg:catalog\.namespace\.table"):
            feed.run(penstock.TableSink(name))
    with pytest.raises(InvalidNameError, match=r"write namespace\.table"):
        feed.run(penstock.TableSink("t", url=tables.url))
    with pytest.raises(InvalidNameError, match="so does the URL"):
        feed.run(penstock.TableSink("iceberg:lake.shop.t", url=tables.url))
    with pytest.raises(InvalidUrlError, match=r"UNKNOWN_PARAMETER\].*property\.KEY=VALUE"):
        feed.run(penstock.TableSink("a.t", url="iceberg:lake?key=geheim"))
    assert not tables.catalog.list_namespaces()


@one_store
def test_credentials_are_in_no_message(tables: IcebergTables) -> None:
    url = "iceberg:lake?property.type=rest&property.uri=http://127.0.0.1:9/x&property.token=geheimeswort"
    sink = penstock.TableSink("shop.t", url=url)
    assert "geheimeswort" not in repr(sink)
    with pytest.raises(StoreUnavailableError) as caught:
        tables.feed.run(sink)
    assert caught.value.condition == "STORE_UNAVAILABLE.ICEBERG"
    assert "geheimeswort" not in str(caught.value)


@one_store
def test_a_check_before_the_start_reads_no_table(tables: IcebergTables) -> None:
    tables.feed.add(row(1))
    sink = tables.sink("t", "k")
    frame = tables.feed.spark.createDataFrame([(1, "a")], "id int, k string")
    assert sink.refusal(frame, "update") is None
    assert isinstance(sink.refusal(frame, "append"), InvalidOptionError)
