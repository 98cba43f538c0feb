"""The example of docs/feeds.md for a Delta table prints what the page shows."""

from __future__ import annotations

from pathlib import Path

import pytest
from pyspark.sql import SparkSession

import penstock
from tests.support.pages import DOCS, blocks


def test_the_delta_example_prints_what_the_page_shows(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(penstock, "session", lambda **_: spark)
    found = list(blocks(DOCS / "feeds.md"))
    (place,) = [number for number, block in enumerate(found) if "for mode in" in block.body]
    exec(found[place].body.replace('"orders"', f'"{tmp_path}/orders"'), {})
    assert capsys.readouterr().out.strip() == found[place + 1].body.strip()
