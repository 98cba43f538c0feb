"""The examples in docs/testing.md run as they stand there."""

from __future__ import annotations

import re
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - its usual name

from penstock.errors import StoreError
from penstock.testing import Crash, MemoryStream, crash_at, run

DOCS = Path(__file__).resolve().parents[2] / "docs/testing.md"
TEST, CRASH, STORE, PLUGIN = re.findall(r"```python\n(.*?)```", DOCS.read_text(), re.DOTALL)


def test_the_example_of_a_test_passes(spark: SparkSession) -> None:
    names: dict[str, Any] = {"F": F, "timedelta": timedelta, "noon": datetime(2026, 1, 1, 12, tzinfo=UTC)}
    exec(TEST, names)
    names["test_a_window_comes_when_the_watermark_has_passed_it"](spark)


def test_the_example_of_a_store_makes_one() -> None:
    names: dict[str, Any] = {"schema": pa.schema([("id", pa.int64())])}
    exec(STORE, names)
    with pytest.raises(StoreError):
        names["store"].queues()


def test_the_example_with_a_fixture_passes(penstock_stream: Callable[[str], MemoryStream]) -> None:
    names: dict[str, Any] = {}
    exec(PLUGIN, names)
    names["test_large_orders"](penstock_stream)


def test_the_example_of_a_crash_shows_rows_that_come_twice(spark: SparkSession, tmp_path: Path) -> None:
    table: list[int] = []

    def write(batch: DataFrame, number: int) -> None:
        table.extend(row.id for row in batch.collect())

    with MemoryStream(spark, "id long") as stream:
        stream.add_data([{"id": 1}])
        names = {"run": run, "crash_at": crash_at, "pytest": pytest, "Crash": Crash}
        exec(CRASH, names | {"frame": stream.to_df(), "folder": tmp_path, "write": write})
    assert table == [1, 1]
