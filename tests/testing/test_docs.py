"""The examples in docs/testing.md run as written."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql import DataFrame, SparkSession

from penstock.errors import StoreError
from penstock.testing import Crash, MemoryStream, crash_at, run
from tests.support.sparks import short_lived

pytest_plugins = ["pytester"]
DOCS = Path(__file__).resolve().parents[2] / "docs/testing.md"
TEST, CRASH, STORE, PLUGIN = re.findall(r"```python\n(.*?)```", DOCS.read_text(), re.DOTALL)


def test_the_example_tests_pass_with_only_the_plugin_installed(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a user's project: saved as they are, in a separate process, and in a time zone far from UTC."""
    monkeypatch.setenv("TZ", "America/New_York")
    monkeypatch.setenv("SPARK_SUBMIT_OPTS", short_lived())
    monkeypatch.delenv("PENSTOCK_TEST_PG_URL", raising=False)
    pytester.makepyfile(test_visits=TEST, test_orders=PLUGIN)
    pytester.runpytest_subprocess("-p", "no:cacheprovider").assert_outcomes(passed=2)


def test_the_example_of_a_store_creates_one() -> None:
    names: dict[str, Any] = {"schema": pa.schema([("id", pa.int64())])}
    exec(STORE, names)
    with pytest.raises(StoreError):
        names["store"].queues()


def test_the_example_of_a_crash_shows_repeated_rows(spark: SparkSession, tmp_path: Path) -> None:
    table: list[int] = []

    def write(batch: DataFrame, number: int) -> None:
        table.extend(row.id for row in batch.collect())

    with MemoryStream(spark, "id long") as stream:
        stream.add_data([{"id": 1}])
        names = {"run": run, "crash_at": crash_at, "pytest": pytest, "Crash": Crash}
        exec(CRASH, names | {"frame": stream.to_df(), "folder": tmp_path, "write": write})
    assert table == [1, 1]
