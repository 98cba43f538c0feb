"""The examples in docs/logging.md run as they are written there, and print what the page shows."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from tests.logs.records import PAGE
from tests.support.waiting import wait_until

_BLOCK = re.compile(r"^```(\w+)\n(.*?)^```", re.MULTILINE | re.DOTALL)
_TIME = re.compile(r'"at": "[^"]*"')


def blocks(language: str) -> list[str]:
    return [body for name, body in _BLOCK.findall(PAGE.read_text()) if name == language]


@pytest.fixture
def loggers() -> Iterator[None]:
    """Restore the loggers after the test."""
    names = ["penstock", *(f"penstock.{room}" for room in ("queue", "commit", "progress"))]
    before = [
        (each, each.level, each.propagate, list(each.handlers)) for each in map(logging.getLogger, names)
    ]
    yield
    for each, level, propagate, handlers in before:
        each.setLevel(level)
        each.propagate, each.handlers[:] = propagate, handlers


@pytest.mark.usefixtures("loggers")
def test_the_examples_print_what_the_page_shows(
    spark: SparkSession,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"spark": spark}
    for block in blocks("python"):
        exec(block.replace("shop.db", f"{tmp_path}/shop.db"), names)
    shown = capsys.readouterr().out
    assert _TIME.sub("", shown) == _TIME.sub("", blocks("text")[0])
    assert _TIME.search(shown) is not None

    def actions() -> list[str]:
        return [record.action for record in caplog.records if record.name == "penstock.progress"]  # type: ignore[attr-defined] # by extra

    wait_until(lambda: "terminated" in actions())
    assert actions() == ["started", "progress", "terminated"]
