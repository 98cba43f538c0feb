"""Delta tables as sinks: each mode equals a fold in plain Python, and each micro-batch is written once."""

from __future__ import annotations

import time
from datetime import UTC, datetime
from decimal import Decimal
from itertools import chain
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from deltalake import DeltaTable, Schema, write_deltalake
from pyspark.sql import DataFrame, SparkSession

import penstock
from penstock.errors import (
    CheckpointMismatchError,
    CheckpointRewoundError,
    InvalidInputError,
    InvalidNameError,
    InvalidOptionError,
    InvalidUrlError,
    SchemaMismatchError,
    TableRefusedError,
    UnsupportedTypeError,
)
from penstock.testing import replay_last_batch
from tests.support.spark_queues import one_store
from tests.support.sql_tables import Feed, totals
from tests.tables.delta.tables import DeltaTables

SCHEMA = pa.schema([("id", pa.int64()), ("k", pa.string()), ("v", pa.int64())])


@pytest.fixture
def feed(spark: SparkSession, store_url: str, tmp_path: Path) -> Feed:
    return Feed(spark, store_url, tmp_path, SCHEMA)


@pytest.fixture
def tables(feed: Feed, tmp_path: Path) -> DeltaTables:
    return DeltaTables(feed, tmp_path / "tables of ours")


def row(number: int, k: str | None = "a", v: int = 1) -> dict[str, Any]:
    return {"id": number, "k": k, "v": v}


def folded(given: list[dict[str, Any]]) -> list[tuple[Any, ...]]:
    groups: dict[str, list[int]] = {}
    for each in given:
        groups.setdefault(each["k"], []).append(each["v"])
    return sorted((k, sum(values), len(values)) for k, values in groups.items())


def test_append_creates_the_table_and_adds_rows_once(tables: DeltaTables) -> None:
    feed, sink = tables.feed, tables.sink("plain")
    feed.add(row(1), row(2, "b")).run(sink)
    version = tables.table("plain").version()
    replay_last_batch(feed.folder / "ck")
    feed.run(sink)
    assert tables.table("plain").version() == version
    feed.add(row(3)).run(sink)
    assert tables.rows("plain") == [(1, "a", 1), (2, "b", 1), (3, "a", 1)]
    assert tables.staged("plain") == []
    assert feed.store.consumer("c").lag("in").rows == 0


def test_update_replaces_rows_with_the_same_key(tables: DeltaTables) -> None:
    feed, sink = tables.feed, tables.sink("totals", "K")
    given = [[row(1, "a", 5), row(2, "b", 7)], [row(3, "a", 1), row(4, "c", 2)], [row(5, "b", 3)]]
    for number, part in enumerate(given):
        feed.add(*part).run(sink, totals, mode="update")
        assert tables.rows("totals") == folded([*chain(*given[: number + 1])])
    replay_last_batch(feed.folder / "ck")
    feed.run(sink, totals, mode="update")
    assert tables.rows("totals") == folded([*chain(*given)])
    assert feed.add(row(6, "a", 1)).run(sink, totals, mode="update").exception() is None
    assert tables.rows("totals")[0] == ("a", 7, 3)
    assert feed.store.consumer("c").lag("in").rows == 0


@one_store
def test_complete_replaces_all_rows_in_one_version_and_readers_keep_the_old_one(
    tables: DeltaTables,
) -> None:
    feed, sink = tables.feed, tables.sink("top", "k")

    def few(frame: DataFrame) -> DataFrame:
        return totals(frame).where("total < 10")

    feed.add(row(1, "a", 5), row(2, "b", 7)).run(sink, few, mode="complete")
    before = tables.table("top")
    feed.add(row(3, "a", 9)).run(sink, few, mode="complete")
    replay_last_batch(feed.folder / "ck")
    feed.run(sink, few, mode="complete")
    assert tables.rows("top") == [("b", 7, 1)]
    assert tables.table("top").version() == before.version() + 1
    assert sorted(row["k"] for row in before.to_pyarrow_table().to_pylist()) == ["a", "b"]
    feed.add(row(4, "b", 9)).run(sink, few, mode="complete")
    assert tables.rows("top") == []


@one_store
def test_only_complete_mode_changes_the_columns(tables: DeltaTables) -> None:
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
    assert tables.table("t").to_pyarrow_table().column_names == ["k", "highest"]


@one_store
def test_a_table_created_by_the_user_keeps_its_other_columns(tables: DeltaTables) -> None:
    feed = tables.feed
    made = pa.table({"note": ["mine"], "v": [1], "K": ["a"], "id": [7]})
    (tables.folder / "made").mkdir(parents=True)
    write_deltalake(str(tables.folder / "made"), made, partition_by=["K"])
    feed.add(row(1, "a", 5), row(2, "b", 6)).run(tables.sink("made", "k"), mode="update")
    assert tables.rows("made") == [("mine", 5, "a", 1), (None, 6, "b", 2)]
    feed.add(row(3, "c", 1)).run(tables.sink("made"), checkpoint="appending")
    assert tables.rows("made")[-1] == (None, 6, "b", 2)
    assert (None, 1, "c", 3) in tables.rows("made")


@one_store
def test_every_type_of_delta_is_written_unchanged(tables: DeltaTables) -> None:
    def many(frame: DataFrame) -> DataFrame:
        return frame.selectExpr(
            "id",
            "true as b",
            "cast(1 as tinyint) as i8",
            "cast(1.5 as float) as f",
            "cast(1.25 as decimal(38, 10)) as d",
            "binary('x') as bin",
            "date'2026-01-31' as day",
            "timestamp'2026-01-31 12:00:00.123456Z' as at",
            "timestamp_ntz'2026-01-31 12:00:00' as local",
            "map('a', array(named_struct('x', 1))) as nested",
            "'q' as `a b.c`",
        )

    tables.feed.add(row(1)).run(tables.sink("types"), many)
    tables.feed.add(row(2)).run(tables.sink("types"), many)
    found = tables.table("types").to_pyarrow_table().to_pylist()
    assert len(found) == 2
    (first,) = [each for each in found if each.pop("id") == 1]
    assert first == {
        "b": True,
        "i8": 1,
        "f": 1.5,
        "d": Decimal("1.2500000000"),
        "bin": b"x",
        "day": datetime(2026, 1, 31, tzinfo=UTC).date(),
        "at": datetime(2026, 1, 31, 12, 0, 0, 123456, tzinfo=UTC),
        "local": datetime(2026, 1, 31, 12),  # noqa: DTZ001 - it has none
        "nested": [("a", [{"x": 1}])],
        "a b.c": "q",
    }
    with pytest.raises(UnsupportedTypeError, match="'gap' is interval day") as caught:
        tables.feed.run(
            tables.sink("no"), lambda frame: frame.selectExpr("id", "interval '1' day as gap", "null as none")
        )
    assert "'none' is void" in caught.value.message


@one_store
def test_merges_work_with_keys_and_columns_of_any_name(tables: DeltaTables) -> None:
    names = ["a.b", 'say "k"', "Upper Case", "Größe ☃"]

    def odd(frame: DataFrame) -> DataFrame:
        return frame.select(*(frame["k"].alias(name) for name in names), frame["v"].alias("v.w"))

    sink = tables.sink("odd names", *names)
    tables.feed.add(row(1, "a", 5), row(2, "b", 6)).run(sink, odd, mode="update")
    tables.feed.add(row(3, "a", 7)).run(sink, odd, mode="update")
    assert tables.rows("odd names") == [("a",) * 4 + (7,), ("b",) * 4 + (6,)]


def test_two_rows_with_the_same_key_in_a_micro_batch_are_refused(tables: DeltaTables) -> None:
    feed, sink = tables.feed, tables.sink("latest", "k")
    feed.add(row(1, "a", 5), row(2, "b", 5)).run(sink, mode="update")
    feed.add(row(3, "c", 6), row(4, "a", 6), row(5, "a", 7))
    with pytest.raises(TableRefusedError, match="several rows with the key 'k' = 'a'") as caught:
        feed.run(sink, mode="update")
    assert caught.value.condition == "TABLE_REFUSED.DUPLICATE_KEYS"
    assert tables.rows("latest") == [(1, "a", 5), (2, "b", 5)]
    assert tables.staged("latest") == []
    assert feed.store.consumer("c").lag("in").rows == 3


@one_store
def test_a_start_deletes_what_dead_queries_have_staged_a_day_ago(tables: DeltaTables) -> None:
    feed, sink = tables.feed, tables.sink("plain")
    feed.add(row(1)).run(sink)
    old, new = int(time.time()) - 90_000, int(time.time())
    running = {f"running-5-{old}-a.parquet", f"running-5-{new}-b.parquet"}
    staged = feed.folder / "tables of ours/plain/_penstock"
    staged.mkdir()
    for name in {*running, f"dead-3-{old}-c.parquet"}:
        (staged / name).touch()
    feed.add(row(2)).run(sink)
    assert set(tables.staged("plain")) == running


@one_store
def test_a_null_key_is_refused(tables: DeltaTables) -> None:
    tables.feed.add(row(1, None))
    with pytest.raises(TableRefusedError, match="coalesce") as caught:
        tables.feed.run(tables.sink("totals", "k"), totals, mode="update")
    assert caught.value.condition == "TABLE_REFUSED.NULL_KEY"


@one_store
@pytest.mark.parametrize("mode", ["append", "update"])
def test_a_text_that_deltalake_takes_for_null_is_refused_in_a_partition_column(
    tables: DeltaTables, mode: str
) -> None:
    DeltaTable.create(str(tables.folder / "parts"), Schema.from_arrow(SCHEMA), partition_by=["k"])
    sink = tables.sink("parts", *(["id"] if mode == "update" else []))
    tables.feed.add(row(1), row(2, None)).run(sink, mode=mode)
    tables.feed.add(row(3, "__HIVE_DEFAULT_PARTITION__"))
    with pytest.raises(TableRefusedError, match="use another text") as caught:
        tables.feed.run(sink, mode=mode)
    assert caught.value.condition == "TABLE_REFUSED.PARTITION_VALUE"
    assert tables.rows("parts") == [(1, "a", 1), (2, None, 1)]


def test_at_least_once_records_no_transaction(tables: DeltaTables) -> None:
    feed = tables.feed
    feed.add(row(1), row(2)).run(tables.sink("plain"), guarantee="at_least_once")
    replay_last_batch(feed.folder / "ck")
    feed.run(tables.sink("plain"), guarantee="at_least_once")
    assert [each[0] for each in tables.rows("plain")] == [1, 1, 2, 2]
    assert tables.staged("plain") == []


@one_store
def test_two_queries_maintain_one_table(tables: DeltaTables) -> None:
    feed, sink = tables.feed, tables.sink("shared", "id")
    feed.add(row(1)).run(sink, mode="update")
    feed.store.consumer("c").seek("in", to="earliest")
    feed.add(row(2)).run(sink, mode="update", checkpoint="second")
    assert [each[0] for each in tables.rows("shared")] == [1, 2]


@one_store
def test_a_new_checkpoint_under_the_same_app_id_is_refused(tables: DeltaTables) -> None:
    feed, sink = tables.feed, tables.sink("plain", app_id="mine")
    feed.add(row(1)).run(sink)
    feed.store.consumer("c").seek("in", to="earliest")
    with pytest.raises(CheckpointMismatchError, match="with other input"):
        feed.run(sink, checkpoint="new")


@one_store
def test_a_checkpoint_older_than_the_table_is_refused(tables: DeltaTables) -> None:
    feed, sink = tables.feed, tables.sink("plain", app_id="mine")
    feed.add(row(1)).run(sink)
    feed.add(row(2)).run(sink)
    feed.store.consumer("c").seek("in", to="earliest")
    with pytest.raises(CheckpointRewoundError, match="at micro-batch 1 in the Delta table"):
        feed.run(sink, checkpoint="new")
    assert [each[0] for each in tables.rows("plain")] == [1, 2]


@one_store
def test_wrong_arguments_are_refused_with_a_remedy(tables: DeltaTables) -> None:
    feed = tables.feed
    with pytest.raises(InvalidOptionError, match=r"OPTION.CONFLICT\].*use output mode update"):
        feed.run(tables.sink("t", "k"))
    with pytest.raises(InvalidInputError, match=r"INPUT.UNKNOWN_COLUMN\].*Did you mean 'id'"):
        feed.run(tables.sink("t", "idd"), mode="update")
    with pytest.raises(InvalidInputError, match=r"COLUMN_NAME\].*backtick"):
        feed.run(
            tables.sink("t", "k"), lambda frame: frame.select("k", frame["v"].alias("a`b")), mode="update"
        )
    with pytest.raises(InvalidNameError, match="without a slash"):
        feed.run(tables.sink("../t"))
    with pytest.raises(InvalidUrlError, match=r"URL.VALUE\].*must be an absolute path"):
        feed.run(penstock.TableSink("t", url="delta:tables"))
    with pytest.raises(InvalidUrlError, match=r"INVALID_URL.*delta:///folder"):
        penstock.TableSink("t", url="/data/tables")
    with pytest.raises(InvalidUrlError, match=r"UNKNOWN_PARAMETER\].*storage\.KEY=VALUE"):
        feed.run(penstock.TableSink("t", url="delta:///tables?key=geheim"))
    assert "geheim" not in repr(penstock.TableSink("t", url="delta:s3://b/t?storage.secret=geheim"))
    with pytest.raises(InvalidOptionError, match=r"OPTION.CONFLICT\].*exactly_once"):
        feed.run(tables.sink("t"), guarantee="idempotent")


@one_store
def test_many_small_files_of_a_micro_batch_become_few(tables: DeltaTables) -> None:
    feed, sink = tables.feed, tables.sink("many", "k")
    feed.add(*(row(number, f"k{number}") for number in range(40)))
    feed.run(sink, lambda frame: totals(frame.repartition(12, "k")), mode="complete")
    feed.add(row(40, "k3"))
    feed.run(sink, lambda frame: totals(frame).repartition(12, "k"), mode="complete")
    assert len(tables.rows("many")) == 40
    assert len(tables.table("many").file_uris()) <= 2
    assert len(list((tables.folder / "many").glob("part-*.parquet"))) <= 4
