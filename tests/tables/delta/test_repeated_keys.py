"""Repeated keys of large micro-batches, which no single process holds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql import DataFrame, SparkSession

from penstock.errors import TableRefusedError
from tests.support.spark_queues import one_store
from tests.support.sql_tables import Feed
from tests.tables.delta.tables import DeltaTables

SCHEMA = pa.schema([("id", pa.int64()), ("k", pa.string()), ("v", pa.int64())])


@pytest.fixture
def tables(
    spark: SparkSession, store_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> DeltaTables:
    """Each micro-batch is large."""
    monkeypatch.setattr("penstock.tables.delta.repeated_keys._FEW_ROWS", 0)
    return DeltaTables(Feed(spark, store_url, tmp_path, SCHEMA), tmp_path / "tables")


def row(number: int, k: str = "a") -> dict[str, Any]:
    return {"id": number, "k": k, "v": 1}


def spread(frame: DataFrame) -> DataFrame:
    return frame.repartition(3, "v", "id")


@one_store
@pytest.mark.parametrize("mode", ["update", "complete"])
def test_they_are_refused_and_leave_nothing(tables: DeltaTables, mode: str) -> None:
    feed, sink = tables.feed, tables.sink("t", "k", "v")
    if mode == "complete":
        feed.add(row(1, "a"), row(2, "b"), row(3, "a"))

        def shown(frame: DataFrame) -> DataFrame:
            return frame.groupBy("id", "k", "v").count().drop("count")
    else:
        feed.add(row(1, "a"), row(2, "b")).run(sink, spread, mode=mode)
        assert [each[0] for each in tables.rows("t")] == [1, 2]
        feed.add(row(3, "c"), row(4, "d"), row(5, "c"))
        shown = spread
    before = sorted(path.name for path in (tables.folder / "t").glob("*.parquet"))
    with pytest.raises(TableRefusedError, match=r"several rows with the key 'k' = '[ac]', 'v' = 1") as caught:
        feed.run(sink, shown, mode=mode)
    assert caught.value.condition == "TABLE_REFUSED.DUPLICATE_KEYS"
    assert sorted(path.name for path in (tables.folder / "t").glob("*.parquet")) == before
