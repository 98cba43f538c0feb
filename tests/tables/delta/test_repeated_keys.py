"""Repeated keys of large micro-batches, which no single process holds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyspark.sql import DataFrame, SparkSession

from penstock.errors import TableRefusedError
from penstock.tables.delta.repeated_keys import find_repeated_hashes, partition_hashes
from tests.support.spark_queues import one_store
from tests.support.sql_tables import Feed
from tests.tables.delta.tables import DeltaTables

SCHEMA = pa.schema([("id", pa.int64()), ("k", pa.string()), ("v", pa.int64())])


@pytest.fixture
def tables(
    spark: SparkSession, store_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> DeltaTables:
    """Each micro-batch is large."""
    monkeypatch.setattr("penstock.tables.delta.repeated_keys._DRIVER_ROWS", 0)
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


HASHES = st.one_of(st.integers(0, 20), st.integers(0, 2**64 - 1), st.integers(2**64 - 3, 2**64 - 1))


@given(chunks=st.lists(st.lists(HASHES, min_size=1), max_size=4), bits=st.integers(1, 12))
def test_parts_of_hashes_have_the_repeated_ones(chunks: list[list[int]], bits: int) -> None:
    """Equal hashes are in one part, and a task may get several parts, also as slices of batches."""
    batches = [partition_hashes(pa.array(chunk, pa.uint64()), bits) for chunk in chunks]
    found = []
    for part in {number for batch in batches for number in batch["part"].to_pylist()}:
        rows = [row for batch in batches for row in rows_of(batch, part)]
        assert all(value >> (64 - bits) == part for row in rows for value in values(row))
        found += [hash for batch in find_repeated_hashes(rows) for hash in batch["hash"].to_pylist()]
    together = [hash for batch in find_repeated_hashes(batches) for hash in batch["hash"].to_pylist()]
    flat = [hash for chunk in chunks for hash in chunk]
    expected = sorted({hash for hash in flat if flat.count(hash) > 1})
    assert sorted(hash % 2**64 for hash in found) == sorted(hash % 2**64 for hash in together) == expected


def rows_of(batch: pa.RecordBatch, part: int) -> list[pa.RecordBatch]:
    numbers = batch["part"].to_pylist()
    return [batch.slice(numbers.index(part), 1)] if part in numbers else []


def values(row: pa.RecordBatch) -> list[int]:
    (joined,) = row["hashes"].to_pylist()
    return [int(value) for value in np.frombuffer(joined, np.uint64)]
