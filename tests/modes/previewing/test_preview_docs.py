"""The examples of docs/modes-preview.md run as written, and give the output shown."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

DOCS = Path(__file__).resolve().parents[3] / "docs"
_BLOCK = re.compile(r"^```(\w+)\n(.*?)^```", re.MULTILINE | re.DOTALL)


def blocks(language: str) -> list[str]:
    found = _BLOCK.findall((DOCS / "modes-preview.md").read_text())
    return [body for name, body in found if name == language]


def test_the_examples_give_the_output_in_the_docs(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"spark": spark}
    first, data, joined, _ = blocks("python")
    exec(first, names)
    assert capsys.readouterr().out == blocks("text")[0]
    exec(data, names)
    assert Path("modes-preview.svg").read_text() == (DOCS / "modes-preview.svg").read_text()
    exec(joined, names)
    expected = re.findall(r"print\(.*\)  # (.*)", joined)
    assert capsys.readouterr().out.splitlines()[-1:] == expected


@pytest.mark.soak
def test_the_commands_of_the_docs_run(tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text(blocks("python")[-1])
    text = f'set -euo pipefail; penstock() {{ {sys.executable} -m penstock "$@"; }}; {blocks("sh")[0]}'
    done = subprocess.run(
        ["bash", "-c", text],
        cwd=tmp_path,
        env={**os.environ, "PYSPARK_PYTHON": sys.executable},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "arrivals.svg").exists()
    assert "append: allowed" in done.stdout
    assert '"trigger": "continuous"' in done.stdout
