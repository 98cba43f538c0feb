"""Change rows applied to Delta tables that others make, replace or clean up."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from deltalake import DeltaTable, write_deltalake
from pyspark.sql import SparkSession

import penstock
from tests.support.spark_queues import one_store
from tests.support.sql_tables import Feed
from tests.tables.change_tables import SCHEMA, change
from tests.tables.delta.tables import DeltaTables

pytestmark = one_store


@pytest.fixture
def feed(spark: SparkSession, store_url: str, tmp_path: Path) -> Feed:
    return Feed(spark, store_url, tmp_path, SCHEMA)


@pytest.fixture
def tables(feed: Feed, tmp_path: Path) -> DeltaTables:
    return DeltaTables(feed, tmp_path / "tables of ours")


def people(tables: DeltaTables, scd_type: int = 1, *keys: str, **more: Any) -> penstock.TableSink:
    return tables.sink("people", *(keys or ("id",)), apply_changes=True, scd_type=scd_type, **more)


def applied(tables: DeltaTables) -> list[Path]:
    return list(tables.folder.glob("people/_penstock/applied-*"))


def test_a_replaced_table_starts_over_and_a_vacuumed_one_continues(tables: DeltaTables) -> None:
    feed = tables.feed
    feed.add(change(1, "ada", "insert", 5)).run(people(tables))
    made = tables.table("people")
    made.vacuum(retention_hours=0, enforce_retention_duration=False, dry_run=False)
    feed.add(change(1, "old", "insert", 4)).run(people(tables))
    assert tables.rows("people") == [(1, "ada")]
    DeltaTable.create(made.table_uri, made.schema(), mode="overwrite")
    feed.add(change(1, "bob", "insert", 4)).run(people(tables))
    assert tables.rows("people") == [(1, "bob")]
    assert len(applied(tables)) == 2


def test_a_table_created_by_the_user_keeps_its_other_columns(tables: DeltaTables) -> None:
    made = pa.table({"note": ["mine", "stays"], "name": ["old", "z"], "ID": pa.array([1, 7], pa.int64())})
    (tables.folder / "people").mkdir(parents=True)
    write_deltalake(str(tables.folder / "people"), made, partition_by=["ID"])
    tables.feed.add(change(1, "ada", "update_postimage", 5), change(2, "bob", "insert", 5)).run(
        people(tables)
    )
    assert tables.rows("people") == [("mine", "ada", 1), ("stays", "z", 7), (None, "bob", 2)]
