"""The examples in docs/evolution.md run without changes."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path

import pytest

from penstock.cli import main

DOCS = Path(__file__).resolve().parents[2] / "docs/evolution.md"


def test_the_examples_produce_the_documented_results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PENSTOCK_URL", "sqlite:///shop.db")
    program = "".join(re.findall(r"```python\n(.*?)```", DOCS.read_text(), re.DOTALL))
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(program, {})
    wanted = [line.rpartition("# ")[2] for line in program.splitlines() if line.startswith("print(")]
    assert printed.getvalue().splitlines() == wanted
    for words, ddl in re.findall(r"^penstock (.*?) '(.*)'$", DOCS.read_text(), re.MULTILINE):
        assert main([*words.split(), ddl]) == 0
