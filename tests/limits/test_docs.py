"""The examples in docs/limits.md run as written, in order."""

from __future__ import annotations

import contextlib
import io
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql import SparkSession

import penstock
from tests.support.spark_queues import one_store

DOCS = Path(__file__).resolve().parents[2] / "docs/limits.md"
BLOCKS = re.findall(r"```python\n(.*?)```", DOCS.read_text(), re.DOTALL)
SCHEMA = pa.schema([("id", pa.int64()), ("customer", pa.string())])


@one_store
def test_the_examples_do_what_they_say(
    spark: SparkSession, store_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    store = penstock.connect(store_url, create=True)
    orders = store.create_queue("orders", SCHEMA, partitions=2, key=["customer"])
    orders.append([{"id": number, "customer": "abc"[number % 3]} for number in range(30)])
    for name in ("sample", "firsts"):
        store.create_queue(name, SCHEMA)
        store.create_consumer(name).register("orders")
    names: dict[str, Any] = {"penstock": penstock, "spark": spark, "url": store_url}
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        for block in BLOCKS:
            exec(block, names)
    wanted = [line.rpartition("# ")[2] for block in BLOCKS for line in block.splitlines() if "print(" in line]
    assert printed.getvalue().splitlines()[: len(wanted)] == wanted
    assert names["query"].exception() is None
    assert len(set(store.queue("sample").read(0, 0)["id"].to_pylist())) == 15
    firsts = store.queue("firsts").read(0, 0)["customer"].to_pylist()
    assert Counter(firsts) == {"a": 2, "b": 2, "c": 2}
