"""The examples of docs/taking.md run as written, and give the output shown."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql import SparkSession

import penstock

PAGE = Path(__file__).resolve().parents[2] / "docs/taking.md"
_BLOCK = re.compile(r"^```(\w+)\n(.*?)^```", re.MULTILINE | re.DOTALL)
_SHOWN = re.compile(r"^(?P<expression>.*?)\s+# (?P<value>.*)$", re.MULTILINE)


def blocks(language: str) -> list[str]:
    return [body for name, body in _BLOCK.findall(PAGE.read_text()) if name == language]


def test_the_examples_give_the_output_on_the_page(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    # There is one session for all tests.
    monkeypatch.setattr(penstock, "session", lambda **_: spark)
    names: dict[str, Any] = {}
    for block in (each.replace("shop.db", f"{tmp_path}/shop.db") for each in blocks("python")):
        exec(block, names)
        for shown in _SHOWN.finditer(block):
            assert eval(shown["expression"], names) == ast.literal_eval(shown["value"]), shown[0]
    assert capsys.readouterr().out == blocks("text")[0]
    flights = penstock.QueueFeed.create(
        "flights", pa.schema([("id", pa.int64())]), penstock.ChangeContract("id"), store="sqlite:///shop.db"
    )
    rows = [{"id": number, "_change_type": "insert"} for number in range(5)]
    flights.append_commit(1, datetime(2026, 1, 1, tzinfo=UTC), rows)
    monkeypatch.setenv("PENSTOCK_URL", "sqlite:///shop.db")
    shell = f'penstock() {{ {sys.executable} -m penstock "$@"; }}; {blocks("sh")[0]}'
    command = ["bash", "-euo", "pipefail", "-c", shell]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert [line.split()[0] for line in done.stdout.splitlines()].count("+") == 2
