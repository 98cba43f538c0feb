"""The examples of docs/feeds/delta.md for a Delta table print and write what the page says."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from deltalake import DeltaTable
from pyspark.sql import SparkSession

import penstock
from tests.support.pages import DOCS, blocks


def test_the_delta_examples_print_and_write_what_the_page_says(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(penstock, "session", lambda **_: spark)
    found = list(blocks(DOCS / "feeds/delta.md"))
    (place,) = [number for number, block in enumerate(found) if "for mode in" in block.body]
    names: dict[str, object] = {}
    exec(found[place].body.replace('"orders"', f'"{tmp_path}/orders"'), names)
    assert capsys.readouterr().out.strip() == found[place + 1].body.strip()
    stream = found[place + 2].body.replace("delta:///data", f"delta://{tmp_path}")
    exec(stream.replace('"checkpoints', f'"{tmp_path}/checkpoints'), names)
    written = DeltaTable(tmp_path / "order_changes").to_pyarrow_table()
    # Version 0 has three inserts; the others are printed on the page.
    assert Counter(written["_commit_version"].to_pylist()) == {0: 3, 1: 2, 2: 3}
    assert Counter(written["_change_type"].to_pylist())["update_postimage"] == 2
