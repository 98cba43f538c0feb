"""The examples of docs/queues.md run as written, in order."""

from __future__ import annotations

import contextlib
import io
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

import penstock
from tests.support.pages import DOCS, blocks


def test_the_examples_do_what_they_say(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    penstock.register(spark)
    monkeypatch.setattr(penstock, "session", lambda **_: spark)
    names: dict[str, Any] = {}
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        for block in blocks(DOCS / "queues.md"):
            assert block.language == "python"
            # Spark's own folder is another one.
            body = block.body.replace("sqlite:///shop.db", f"sqlite:///{tmp_path}/shop.db")
            body = body.replace("checkpoints/", f"{tmp_path}/checkpoints/")
            exec(body, names)
    lines = printed.getvalue().splitlines()
    assert sorted(lines[:2]) in (["0", "2"], ["1", "1"])
    assert lines[2:5] == ["0", "1", "2"]
    assert [line.split("|")[1:3] for line in lines if line.startswith("|")][1:] == [
        ["     ada", "  12.5"],
        ["     bob", "  99.0"],
        ["     cyd", "   7.0"],
        ["     dee", "   3.5"],
        ["     eve", "   1.0"],
        ["     fay", "   2.0"],
        ["     gil", " 479.0"],
    ]
    assert names["store"].queue("totals").info().rows == 7
    assert names["store"].queue("copy").info().rows == names["orders"].info().rows
