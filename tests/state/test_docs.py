"""The examples of docs/state.md run as written, and give the output shown."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from tests.support.commands import run_penstock

DOCS = Path(__file__).resolve().parents[2] / "docs/state.md"
_BLOCK = re.compile(r"^```(\w+)\n(.*?)^```", re.MULTILINE | re.DOTALL)
_CHANGING = re.compile(r"[0-9a-f]{8}-[0-9a-f-]{27}|20(?!26-01)\d\d-\d\d-\d\d \d\d:\d\d:\d\d(?:\.\d+)?")
CHECKPOINT = "checkpoints/totals"
ORDERS = """\
{"at": "2026-01-01T12:05:00Z", "shop": "a"}
{"at": "2026-01-01T12:20:00Z", "shop": "b"}
{"at": "2026-01-01T12:40:00Z", "shop": "b"}
"""


def blocks(language: str) -> list[str]:
    return [body for name, body in _BLOCK.findall(DOCS.read_text()) if name == language]


def settled(text: str) -> list[str]:
    """Words of lines, without what differs from run to run: ids, times and sizes of files."""
    lines = [" ".join(_CHANGING.sub("SOME", line).split()) for line in text.rstrip().splitlines()]
    return [re.sub(r"(?<=hdfs 2 )[\d,]+|[\d,]+(?= bytes)", "SOME", line) for line in lines]


def test_the_examples_and_commands_give_the_output_in_the_docs(
    spark: SparkSession, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "orders").mkdir()
    (tmp_path / "orders/0.json").write_text(ORDERS)

    def there(text: str) -> str:
        # Spark's own folder is another one.
        return text.replace('"orders"', f'"{tmp_path}/orders"').replace(CHECKPOINT, f"{tmp_path}/ck")

    names: dict[str, Any] = {"spark": spark}
    for program, expected in zip(blocks("python"), blocks("text"), strict=True):
        exec(there(program), names)
        assert settled(capsys.readouterr().out) == settled(there(expected))
    for line in blocks("sh")[0].splitlines():
        words = shlex.split(there(line).partition("|")[0])
        assert words.pop(0) == "penstock"
        run_penstock(*words)
