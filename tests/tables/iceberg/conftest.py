"""A queue, and a catalog of Iceberg tables that queries fill from it."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest
from pyspark.sql import SparkSession

from tests.support.sql_tables import Feed
from tests.tables.iceberg.tables import IcebergTables

SCHEMA = pa.schema([("id", pa.int64()), ("k", pa.string()), ("v", pa.int64())])


@pytest.fixture
def feed(spark: SparkSession, store_url: str, tmp_path: Path) -> Feed:
    return Feed(spark, store_url, tmp_path, SCHEMA)


@pytest.fixture
def tables(feed: Feed, tmp_path: Path) -> IcebergTables:
    return IcebergTables(feed, tmp_path / "tables of ours")
