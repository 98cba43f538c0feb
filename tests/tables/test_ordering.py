"""Commits that change a row more than once: the last change of a commit counts, in its own order."""

from __future__ import annotations

import random
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql import DataFrame, SparkSession

import penstock
from penstock.errors import InvalidInputError, InvalidOptionError
from tests.support.sql_tables import NOW, named, rows

SCHEMA = pa.schema([("id", pa.int64()), ("v", pa.int64()), ("step", pa.int64())])
CONTRACT = penstock.ChangeContract("id", whole_commits=True, intermediate_changes=True, sequence="step")
START = datetime(2026, 1, 1, tzinfo=UTC)


@pytest.fixture
def feed(tmp_path: Path) -> penstock.QueueFeed:
    store = f"sqlite:///{tmp_path}/feed.db"
    penstock.connect(store, create=True).close()
    return penstock.QueueFeed.create("changes", SCHEMA, CONTRACT, store=store)


def commit(
    feed: penstock.QueueFeed, version: int, *changes: tuple[str, int, int], seconds: int | None = None
) -> None:
    rows = [
        {"_change_type": kind, "id": key, "v": v, "step": step} for step, (kind, key, v) in enumerate(changes)
    ]
    feed.append_commit(version, START + timedelta(seconds=version if seconds is None else seconds), rows)


def run(spark: SparkSession, feed: penstock.QueueFeed, url: str, folder: Path, **more: Any) -> None:
    sink = penstock.TableSink(named(url, "t"), ["id"], url, apply_changes=True, **more)
    pipeline = penstock.stream(spark, penstock.changes.read_stream(spark, feed)).write(sink)
    pipeline.start(checkpoint=folder / "ck", trigger=NOW).awaitTermination()


@pytest.mark.few(3)
@pytest.mark.parametrize("scd_type", [1, 2])
def test_the_table_equals_all_changes_applied_in_order(
    spark: SparkSession, feed: penstock.QueueFeed, url: str, tmp_path: Path, scd_type: int
) -> None:
    chance, there, versions = random.Random(3), dict[int, int](), dict[int, int]()
    for version in range(1, 41):
        changes = []
        touched = set()
        for v in range(chance.randint(1, 6)):
            key, value = chance.randrange(4), version * 10 + v
            kind = "insert" if key not in there else chance.choice(["delete", "update_postimage"])
            changes.append((kind, key, value))
            there[key] = value
            if kind == "delete":
                del there[key]
            touched.add(key)
        for key in touched & there.keys():
            versions[key] = versions.get(key, 0) + 1
        commit(feed, version, *changes)
        if version in (5, 6, 20):
            run(spark, feed, url, tmp_path, scd_type=scd_type)
    run(spark, feed, url, tmp_path, scd_type=scd_type)
    if scd_type == 1:
        assert rows(url, "t", "id, v") == sorted(there.items())
        return
    current = [(key, v) for key, v, end in rows(url, "t", "id, v, coalesce(_valid_to, -1)") if end == -1]
    assert current == sorted(there.items())
    assert len(rows(url, "t", "id, v")) == sum(versions.values())


def test_commits_with_the_same_time_are_ordered_by_version(
    spark: SparkSession, feed: penstock.QueueFeed, url: str, tmp_path: Path
) -> None:
    commit(feed, 1, ("insert", 1, 1), ("insert", 2, 1), ("update_postimage", 1, 2), seconds=9)
    commit(feed, 2, ("update_postimage", 1, 3), ("delete", 2, 1), seconds=9)
    run(spark, feed, url, tmp_path, sequence_by="_commit_timestamp")
    assert rows(url, "t", "id, v") == [(1, 3)]


@pytest.mark.parametrize("url", ["sqlite", "delta", "iceberg"], indirect=True)
def test_a_sequence_that_restarts_in_each_commit_is_refused_as_overall_order(
    spark: SparkSession, feed: penstock.QueueFeed, url: str, tmp_path: Path
) -> None:
    with pytest.raises(InvalidOptionError, match=r"LOSES_CHANGES\].*leave sequence_by out"):
        run(spark, feed, url, tmp_path, sequence_by="step")


@pytest.mark.parametrize("url", ["sqlite", "delta", "iceberg"], indirect=True)
def test_the_column_that_orders_changes_cannot_be_left_out(
    spark: SparkSession, feed: penstock.QueueFeed, url: str
) -> None:
    def refusal(df: DataFrame) -> Exception | None:
        return penstock.TableSink(named(url, "t"), ["id"], url, apply_changes=True).refusal(df, "append")

    changes = penstock.changes.read_stream(spark, feed)
    found = refusal(changes.drop("step"))
    assert isinstance(found, InvalidInputError)
    assert found.condition == "INVALID_INPUT.CHANGE_COLUMN_MISSING"
    assert "'step', is not among the rows" in found.message
    assert refusal(changes.withColumnRenamed("step", "n")) is None
    net = penstock.changes.read_stream(spark, feed, deduplication_mode="netChanges", net_window="commit")
    assert refusal(net.drop("step")) is None
