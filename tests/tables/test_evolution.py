"""What a table does when the rows of a query have columns that it lacks, or wider ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql import DataFrame, SparkSession

import penstock
from penstock.errors import (
    ContinuousRefusedError,
    InvalidOptionError,
    SchemaMismatchError,
    TableRefusedError,
)
from penstock.testing import replay_last_batch, temporary_store_url
from tests.support.spark_queues import one_store
from tests.support.sql_tables import Feed, iceberg_url, named, query, rows, sql_name

SCHEMA = pa.schema([("id", pa.int64()), ("v", pa.int32()), ("w", pa.string())])
CHANGES = pa.schema([*SCHEMA, ("_change_type", pa.string()), ("_commit_version", pa.int64())])


@pytest.fixture
def feed(spark: SparkSession, tmp_path: Path) -> Any:
    """A queue of its own, wherever the table is."""
    with temporary_store_url(None) as store:
        yield Feed(spark, store, tmp_path, SCHEMA)


@pytest.fixture
def changes(spark: SparkSession, tmp_path: Path) -> Any:
    with temporary_store_url(None) as store:
        yield Feed(spark, store, tmp_path, CHANGES)


def narrow(frame: DataFrame) -> DataFrame:
    return frame.drop("w")


def wide(frame: DataFrame) -> DataFrame:
    """Rows with a name that has to be quoted, in the middle."""
    return frame.selectExpr("id", "w as `a.\"b' c`", "v")


def sink(url: str, policy: str, *keys: str, **more: object) -> penstock.TableSink:
    return penstock.TableSink(named(url, "t"), keys, url, schema_changes=policy, **more)


def row(number: int, **more: object) -> dict[str, Any]:
    return {"id": number, "v": number, "w": f"w{number}", **more}


def test_columns_are_added_for_new_rows(feed: Feed, url: str) -> None:
    feed.add(row(1)).run(sink(url, "refuse"), narrow)
    feed.add(row(2)).run(sink(url, "evolve"), wide)
    replay_last_batch(feed.folder / "ck")
    feed.run(sink(url, "evolve"), wide)
    assert rows(url, "t") == [(1, 1, None), (2, 2, "w2")]
    # What is there stays, and other writers may keep the columns that they know.
    feed.add(row(3)).run(sink(url, "evolve"), narrow)
    assert rows(url, "t") == [(1, 1, None), (2, 2, "w2"), (3, 3, None)]


def test_new_columns_are_left_out(feed: Feed, url: str) -> None:
    feed.add(row(1)).run(sink(url, "ignore"), narrow)
    feed.add(row(2)).run(sink(url, "ignore"), wide)
    assert rows(url, "t") == [(1, 1), (2, 2)]


def test_without_a_policy_new_columns_are_refused(feed: Feed, url: str) -> None:
    feed.add(row(1)).run(sink(url, "refuse"), narrow)
    with pytest.raises(SchemaMismatchError, match="no column"):
        feed.add(row(2)).run(penstock.TableSink(named(url, "t"), (), url), wide)
    assert rows(url, "t") == [(1, 1)]


@pytest.mark.parametrize("url", ["delta", "iceberg"], indirect=True)
def test_rows_that_are_refused_add_no_columns(feed: Feed, url: str) -> None:
    feed.add(row(1)).run(sink(url, "refuse"), narrow)
    with pytest.raises(InvalidOptionError, match="has no unique keys"):
        feed.add(row(2)).run(sink(url, "evolve", "id"))
    feed.run(sink(url, "ignore"))
    assert rows(url, "t") == [(1, 1), (2, 2)]


@pytest.mark.few(5)
@pytest.mark.parametrize("scd_type", [1, 2])
@pytest.mark.parametrize("policy", ["evolve", "ignore"])
def test_changes_get_new_columns_or_leave_them_out(
    changes: Feed, url: str, policy: str, scd_type: int
) -> None:
    def change(number: int, version: int, kind: str = "insert") -> dict[str, Any]:
        return row(number, _change_type=kind, _commit_version=version)

    target = sink(url, policy, "id", apply_changes=True, scd_type=scd_type)
    changes.add(change(1, 1), change(2, 1)).run(target, narrow)
    changes.add(change(2, 2, "delete"), change(1, 3, "update_postimage"), change(3, 3)).run(target)
    names = "id, v, w" if policy == "evolve" else "id, v"
    width = len(names.split(", "))
    now = [(1, 1, "w1"), (3, 3, "w3")]
    if scd_type == 1:
        assert rows(url, "t", names) == [each[:width] for each in now]
        return
    before = [(1, 1, None), (2, 2, None)]
    versions = [
        (*each[:width], until) for each, until in zip([*now, *before], (None, None, 3, 2), strict=True)
    ]
    assert rows(url, "t", f"{names}, _valid_to") == sorted(versions, key=repr)


def test_types_are_widened_in_postgresql(spark: SparkSession, feed: Feed, pg_url: str) -> None:
    with temporary_store_url(pg_url) as url:
        feed.add(row(1)).run(sink(url, "evolve", "id"), mode="update")

        def wider(frame: DataFrame) -> DataFrame:
            return frame.selectExpr("id", "v + 5000000000L as v", "w")

        def wrong(frame: DataFrame) -> DataFrame:
            return frame.selectExpr("id", "w as v", "w")

        with pytest.raises(SchemaMismatchError, match="is integer, and the rows need bigint"):
            feed.add(row(2)).run(sink(url, "ignore", "id"), wider, mode="update")
        feed.run(sink(url, "evolve", "id"), wider, mode="update")
        assert rows(url, "t", "id, v") == [(1, 1), (2, 5000000002)]
        with pytest.raises(SchemaMismatchError, match="is bigint, and the rows need text"):
            feed.add(row(3)).run(sink(url, "evolve", "id"), wrong, mode="update")


@pytest.mark.parametrize("mode", ["append", "update"])
def test_types_are_promoted_in_iceberg(feed: Feed, tmp_path: Path, mode: str) -> None:
    url, keys = iceberg_url(tmp_path), ["id"] if mode == "update" else []

    def wider(frame: DataFrame) -> DataFrame:
        return frame.selectExpr("id", "v + 5000000000L as v", "w")

    feed.add(row(1), row(2)).run(sink(url, "evolve", *keys), mode=mode)
    with pytest.raises(SchemaMismatchError, match="'v' is int in the table and long in the rows"):
        feed.add(row(2), row(3)).run(sink(url, "ignore", *keys), wider, mode=mode)
    feed.run(sink(url, "evolve", *keys), wider, mode=mode)
    replay_last_batch(feed.folder / "ck")
    feed.run(sink(url, "evolve", *keys), wider, mode=mode)
    old = [(1, 1)] if keys else [(1, 1), (2, 2)]
    assert rows(url, "t", "id, v") == [*old, (2, 5000000002), (3, 5000000003)]
    # A program that is not up to date goes on.
    feed.add(row(5)).run(sink(url, "refuse", *keys), mode=mode)
    assert rows(url, "t", "id, v")[-1] == (5, 5)
    with pytest.raises(SchemaMismatchError, match="'v' is long in the table and string in the rows"):
        feed.add(row(4)).run(
            sink(url, "evolve", *keys), lambda frame: frame.selectExpr("id", "w as v", "w"), mode=mode
        )


@pytest.mark.parametrize("scd_type", [1, 2])
def test_values_of_changes_are_promoted_in_iceberg_and_keys_are_not(
    changes: Feed, tmp_path: Path, scd_type: int
) -> None:
    url = iceberg_url(tmp_path)
    target = sink(url, "evolve", "id", apply_changes=True, scd_type=scd_type)

    def change(number: int, version: int, kind: str = "insert") -> dict[str, Any]:
        return row(number, _change_type=kind, _commit_version=version)

    def narrower(frame: DataFrame) -> DataFrame:
        return frame.withColumn("id", frame.id.cast("int"))

    def wider(frame: DataFrame) -> DataFrame:
        return narrower(frame).withColumn("v", frame.v + 5_000_000_000)

    changes.add(change(1, 1), change(2, 1)).run(target, narrower)
    changes.add(change(1, 2, "update_postimage"), change(3, 2)).run(target, wider)
    now = [(1, 5000000001), (2, 2), (3, 5000000003)]
    found = rows(url, "t", "id, v") if scd_type == 1 else rows(url, "t", "id, v, _valid_to")
    if scd_type == 1:
        assert found == now
    else:
        assert found == sorted([*((*each, None) for each in now), (1, 1, 2)], key=repr)
    changes.add(change(3, 3, "update_postimage"), change(4, 3)).run(target, narrower)
    assert {(3, 3), (4, 4)} <= set(rows(url, "t", "id, v"))
    with pytest.raises(SchemaMismatchError, match="'id' is int in the table and long in the rows"):
        changes.add(change(5, 4)).run(target, lambda frame: frame.withColumn("v", frame.v.cast("long")))


@pytest.mark.parametrize("applied", [False, True])
def test_keys_with_more_digits_after_the_point_are_refused_in_sqlite(
    spark: SparkSession, tmp_path: Path, applied: bool
) -> None:
    """Equal keys would be other text there."""
    more = CHANGES if applied else SCHEMA
    schema = pa.schema([("id", pa.decimal128(6, 2)), *list(more)[1:]])
    with temporary_store_url(None) as url:
        feed = Feed(spark, url, tmp_path, schema)
        target = sink(url, "evolve", "id", apply_changes=applied)
        mode = "append" if applied else "update"

        def change(version: int, kind: str) -> dict[str, Any]:
            events = {"_change_type": kind, "_commit_version": version} if applied else {}
            return row(1, **events) | {"v": version}

        feed.add(change(1, "insert")).run(target, mode=mode)
        feed.queue.widen_columns([("id", pa.decimal128(12, 4))])
        feed.add(change(2, "update_postimage"))
        with pytest.raises(
            SchemaMismatchError, match="have 2 digits after the point, and those of the rows 4"
        ):
            feed.run(target, mode=mode)
        feed.run(target, lambda frame: frame.withColumn("id", frame.id.cast("decimal(10, 2)")), mode=mode)
        assert [(str(key), v) for key, v in rows(url, "t", "id, v")] == [("1.00", 2)]


def test_a_view_on_the_column_is_named(feed: Feed, pg_url: str) -> None:
    with temporary_store_url(pg_url) as url:
        feed.add(row(1)).run(sink(url, "refuse"))
        query(url, f"create view {sql_name(url, 'seen')} as select v from {sql_name(url, 't')}")
        with pytest.raises(TableRefusedError, match="a view or a policy uses it") as found:
            feed.add(row(2)).run(
                sink(url, "evolve"), lambda frame: frame.selectExpr("id", "v + 1L as v", "w")
            )
        assert found.value.condition == "TABLE_REFUSED.DEPENDED_ON"


def test_a_key_is_never_added(feed: Feed, url: str) -> None:
    feed.add(row(1)).run(sink(url, "refuse"), narrow)
    with pytest.raises(SchemaMismatchError):
        feed.add(row(2)).run(sink(url, "evolve", "w"), mode="update")
    assert rows(url, "t") == [(1, 1)]


def test_a_difference_of_case_is_no_new_column_in_sqlite(feed: Feed) -> None:
    with temporary_store_url(None) as url:
        feed.add(row(1)).run(sink(url, "refuse"))
        for policy in ("evolve", "ignore"):
            feed.add(row(2)).run(sink(url, policy), lambda frame: frame.selectExpr("id", "v as V", "w"))
        assert rows(url, "t") == [(1, 1, "w1"), (2, 2, "w2"), (2, 2, "w2")]


@one_store
def test_a_continuous_query_evolves_its_table(spark: SparkSession, store_url: str, tmp_path: Path) -> None:
    feed = Feed(spark, store_url, tmp_path, SCHEMA)
    feed.add(row(1)).run(sink(store_url, "refuse"), narrow)
    with pytest.raises(ContinuousRefusedError, match="does not leave out columns"):
        continuous(feed, sink(store_url, "ignore"))
    running = continuous(feed, sink(store_url, "evolve"))
    feed.add(row(2))
    running.processAllAvailable()
    running.stop()
    assert rows(store_url, "t") == [(1, 1, None), (2, 2, "w2")]


def continuous(feed: Feed, target: penstock.TableSink) -> penstock.Query:
    pipeline = feed.pipeline(target)
    return pipeline.start(checkpoint=feed.folder / "ck", trigger=penstock.Trigger.continuous("100 ms"))


def test_another_policy_is_refused() -> None:
    with pytest.raises(InvalidOptionError, match=r"refuse or evolve or ignore.*Did you mean 'evolve'"):
        penstock.TableSink("t", schema_changes="evolv")
