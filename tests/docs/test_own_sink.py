"""The program of docs/how-to/own-sink.md prints what the page says."""

from __future__ import annotations

from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from tests.support.pages import DOCS, blocks


def test_the_program_prints_what_the_page_says(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    program, output = blocks(DOCS / "how-to/own-sink.md")
    # Spark's workers have another working directory than this test.
    text = program.body.replace("sqlite:///shop.db", f"sqlite:///{tmp_path}/shop.db")
    exec(compile(text, "own_sink.py", "exec", dont_inherit=True), {"__name__": "__main__"})
    assert capsys.readouterr().out == output.body
