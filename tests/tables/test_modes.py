"""Append adds, update upserts, complete replaces; each exactly once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql import DataFrame, SparkSession

import penstock
from penstock.errors import InvalidOptionError, OutputModeRefusedError, SchemaMismatchError, TableRefusedError
from penstock.testing import replay_last_batch
from tests.support.spark_queues import one_store
from tests.support.sql_tables import NOW, Feed, query, rows, sql_name, totals

SCHEMA = pa.schema([("id", pa.int64()), ("k", pa.string()), ("v", pa.int64())])


@pytest.fixture
def feed(spark: SparkSession, store_url: str, tmp_path: Path) -> Feed:
    return Feed(spark, store_url, tmp_path, SCHEMA)


def row(number: int, k: str = "a", v: int = 1) -> dict[str, Any]:
    return {"id": number, "k": k, "v": v}


def test_append_creates_the_table_and_adds_rows_once(feed: Feed) -> None:
    sink = feed.table("plain")
    feed.add(row(1), row(2, "b")).run(sink)
    replay_last_batch(feed.folder / "ck")
    feed.run(sink)
    feed.add(row(3)).run(sink)
    assert rows(feed.url, "plain") == [(1, "a", 1), (2, "b", 1), (3, "a", 1)]
    assert feed.store.consumer("c").lag("in").rows == 0


def test_update_replaces_rows_with_the_same_key(feed: Feed) -> None:
    sink = feed.table("totals", "k")
    feed.add(row(1, "a", 5), row(2, "b", 7)).run(sink, totals, mode="update")
    feed.add(row(3, "a", 1)).run(sink, totals, mode="update")
    replay_last_batch(feed.folder / "ck")
    feed.run(sink, totals, mode="update")
    assert rows(feed.url, "totals") == [("a", 6, 2), ("b", 7, 1)]
    assert feed.store.info().staged_segments == 0


def test_complete_replaces_all_rows(feed: Feed) -> None:
    sink = feed.table("top")

    def many(frame: DataFrame) -> DataFrame:
        return totals(frame).where("total < 10")

    feed.add(row(1, "a", 5), row(2, "b", 7)).run(sink, many, mode="complete")
    assert rows(feed.url, "top") == [("a", 5, 1), ("b", 7, 1)]
    feed.add(row(3, "a", 9)).run(sink, many, mode="complete")
    replay_last_batch(feed.folder / "ck")
    feed.run(sink, many, mode="complete")
    assert rows(feed.url, "top") == [("b", 7, 1)]


def test_a_running_query_updates_its_table_and_stops_with_its_consumer_caught_up(feed: Feed) -> None:
    query = feed.pipeline(feed.table("totals", "k"), totals, mode="update").start(
        checkpoint=feed.folder / "ck"
    )
    for number in range(3):
        feed.add(row(number, "a", 10**number))
        query.processAllAvailable()
        assert rows(feed.url, "totals", "total") == [(int("1" * (number + 1)),)]
    assert query.stop()
    assert feed.store.consumer("c").seek("in", to="latest") == {0: 3}


def test_no_staged_rows_are_left_behind(feed: Feed) -> None:
    for number, mode in enumerate(("append", "update", "complete")):
        keys = ["k"] if mode == "update" else []
        transform = None if mode == "append" else totals
        feed.store.consumer("c").seek("in", to="earliest")
        feed.add(row(number)).run(feed.table(f"t{number}", *keys), transform, mode=mode, checkpoint=mode)
    if feed.url.startswith("postgres"):
        left = "select relname from pg_class where relname like 'staged\\_rows%' and relkind = 'r'"
        assert query(feed.url, left) == []
    assert feed.store.info().staged_segments == 0


def test_different_rows_with_the_same_key_are_refused_and_equal_ones_count_once(feed: Feed) -> None:
    sink = feed.table("latest", "k")

    def keep(frame: DataFrame) -> DataFrame:
        return frame.select("k", "v")

    feed.add(row(1, "a", 5), row(2, "a", 5), row(3, "b", 1)).run(sink, keep, mode="update")
    assert rows(feed.url, "latest") == [("a", 5), ("b", 1)]
    feed.add(row(4, "a", 6), row(5, "a", 7))
    with pytest.raises(TableRefusedError, match=r"several rows with the key 'k' = 'a'") as caught:
        feed.run(sink, keep, mode="update")
    assert caught.value.condition == "TABLE_REFUSED.DUPLICATE_KEYS"
    assert rows(feed.url, "latest") == [("a", 5), ("b", 1)]
    assert feed.store.consumer("c").lag("in").rows == 2


def test_append_with_keys_refuses_an_existing_key(feed: Feed) -> None:
    sink = feed.table("once", "id")
    feed.add(row(1)).run(sink)
    feed.add(row(1))
    with pytest.raises(TableRefusedError, match="use output mode update") as caught:
        feed.run(sink)
    assert caught.value.condition == "TABLE_REFUSED.KEY_EXISTS"
    assert rows(feed.url, "once") == [(1, "a", 1)]


def test_a_null_key_is_refused(feed: Feed) -> None:
    feed.add({"id": 1, "k": None, "v": 2})
    with pytest.raises(TableRefusedError, match="coalesce") as caught:
        feed.run(feed.table("totals", "k"), totals, mode="update")
    assert caught.value.condition == "TABLE_REFUSED.NULL_KEY"


def test_only_complete_mode_changes_the_columns(feed: Feed) -> None:
    def other(frame: DataFrame) -> DataFrame:
        return frame.groupBy("k").agg({"v": "max"}).toDF("k", "highest")

    feed.add(row(1, "a", 5)).run(feed.table("t", "k"), totals, mode="update")
    feed.store.consumer("c").seek("in", to="earliest")
    with pytest.raises(SchemaMismatchError, match=r"TABLE_DIFFERS\].*no column 'highest'") as caught:
        feed.run(feed.table("t", "k"), other, mode="update", checkpoint="other")
    assert "only output mode complete" in caught.value.message
    feed.run(feed.table("t", "k"), other, mode="complete", checkpoint="other")
    assert rows(feed.url, "t", "k, highest") == [("a", 5)]


@pytest.mark.parametrize("store_url", ["postgresql"], indirect=True)
def test_a_table_that_a_view_depends_on_keeps_its_columns(feed: Feed) -> None:
    def other(frame: DataFrame) -> DataFrame:
        return totals(frame).withColumnRenamed("n", "many")

    feed.add(row(1, "a", 5)).run(feed.table("t"), totals, mode="complete")
    view = sql_name(feed.url, "seen")
    query(feed.url, f"create view {view} as select n from {sql_name(feed.url, 't')}")
    feed.store.consumer("c").seek("in", to="earliest")
    with pytest.raises(TableRefusedError, match="views depend") as caught:
        feed.run(feed.table("t"), other, mode="complete", checkpoint="other")
    assert caught.value.condition == "TABLE_REFUSED.DEPENDED_ON"
    assert query(feed.url, f"select * from {view}") == [(1,)]
    query(feed.url, f"drop view {view}")
    feed.run(feed.table("t"), other, mode="complete", checkpoint="other")
    assert rows(feed.url, "t", "k, total, many") == [("a", 5, 1)]


def test_a_table_created_by_the_user_is_used_as_it_is(feed: Feed) -> None:
    name = sql_name(feed.url, "mine")
    query(feed.url, f"create table {name} (note text default 'new', v bigint, k text unique, id bigint)")
    feed.add(row(1, "a", 5), row(2, "b", 6)).run(feed.table("mine", "k"), mode="update")
    assert rows(feed.url, "mine", "id, k, v, note") == [(1, "a", 5, "new"), (2, "b", 6, "new")]


def test_an_incompatible_table_is_refused_with_every_difference(feed: Feed) -> None:
    query(feed.url, f"create table {sql_name(feed.url, 'mine')} (k real, id bigint, need text not null)")
    with pytest.raises(SchemaMismatchError) as caught:
        feed.run(feed.table("mine", "id"), mode="update")
    refusal = caught.value.message
    assert all(part in refusal for part in ("'k' is", "no column 'v'", "'need'", 'no unique index on ("id")'))


def test_two_queries_maintain_one_table(feed: Feed) -> None:
    sink = feed.table("shared", "id")
    feed.add(row(1)).run(sink, mode="update")
    feed.store.consumer("c").seek("in", to="earliest")
    feed.add(row(2)).run(sink, mode="update", checkpoint="second")
    assert rows(feed.url, "shared", "id") == [(1,), (2,)]


def test_at_least_once_records_micro_batches_and_leaves_the_consumer_to_the_source(feed: Feed) -> None:
    feed.add(row(1), row(2)).run(feed.table("plain"), guarantee="at_least_once")
    assert rows(feed.url, "plain", "id") == [(1,), (2,)]
    assert feed.store.info().commits > 0
    assert feed.store.consumer("c").registration("in").app_id is None
    assert feed.store.consumer("c").lag("in").rows == 0


@one_store
def test_a_session_window_in_update_mode_is_refused_with_a_remedy(feed: Feed) -> None:
    from pyspark.sql import functions as F  # noqa: N812 - its usual name

    def sessions(frame: DataFrame) -> DataFrame:
        timed = frame.withColumn("at", F.timestamp_seconds("v")).withWatermark("at", "1 minute")
        counted = timed.groupBy(F.session_window("at", "5 minutes").alias("w"), "k").count()
        return counted.selectExpr("w.start", "k", "count")

    pipeline = feed.pipeline(feed.table("s", "k", "start"), sessions, mode="update")
    with pytest.raises(OutputModeRefusedError, match="PENSTOCK_SESSION_WINDOW_IN_UPDATE"):
        pipeline.start(checkpoint=feed.folder / "refused")
    with pytest.raises(TableRefusedError, match="append with a watermark") as caught:
        pipeline.start(checkpoint=feed.folder / "refused", check=False)
    assert caught.value.condition == "TABLE_REFUSED.SESSION_WINDOW"
    feed.add(row(1, "a", 0), row(2, "a", 60), row(3, "a", 10_000)).run(
        feed.table("s", "k", "start"), sessions
    )
    assert rows(feed.url, "s", "k, count") == [("a", 2)]


@one_store
def test_wrong_arguments_are_refused_before_the_query_starts(feed: Feed) -> None:
    with pytest.raises(InvalidOptionError, match=r"OPTION.MISSING\].*name the keys"):
        feed.pipeline(feed.table("t"), mode="update")
    with pytest.raises(InvalidOptionError, match=r"OPTION.VALUE\].*Did you mean 'complete'"):
        feed.pipeline(feed.table("t"), mode="compleet")
    with pytest.raises(penstock.errors.InvalidInputError, match=r"INPUT.UNKNOWN_COLUMN\].*Did you mean 'id'"):
        feed.run(feed.table("t", "idd"))
    assert "geheim" not in repr(penstock.TableSink("t", url="postgresql://u:geheim@h/d"))
    with pytest.raises(InvalidOptionError, match=r"OPTION.MISSING\].*no store is named"):
        feed.pipeline(penstock.TableSink("t")).start(checkpoint=feed.folder / "ck", trigger=NOW)
