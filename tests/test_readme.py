"""The README's program runs as it is written there."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.sparks import short_lived

README = Path(__file__).resolve().parents[1] / "README.md"
_BLOCK = re.compile(r"^```(\w+)\n(.*?)^```", re.MULTILINE | re.DOTALL)


def blocks(language: str) -> list[str]:
    return [body for found, body in _BLOCK.findall(README.read_text()) if found == language]


def test_the_readme_names_the_two_commands() -> None:
    assert {"make demo", "make test"} <= {
        line.split("  ")[0].strip() for line in "\n".join(blocks("sh")).splitlines()
    }


@pytest.mark.timeout(300)
def test_the_program_prints_what_the_readme_shows_and_runs_again_as_it_says(tmp_path: Path) -> None:
    program = "\n".join(blocks("python"))
    printed = _run([sys.executable, "-c", program], tmp_path)
    assert printed.strip().endswith(blocks("text")[0].strip())
    again = re.sub(r'store\.create_queue\(("\w+"), .*\)', r"store.queue(\1)", program)
    again = re.sub(r"^store\.create_consumer.*\n", "", again, flags=re.MULTILINE)
    assert "create_" not in again
    # It appends the same two rows once more, and the query reads them alone.
    assert _run([sys.executable, "-c", again], tmp_path).count("'amount': 99.0") == 2


def test_the_readme_can_be_read_in_three_minutes() -> None:
    assert len(README.read_text().split()) < 800


def _run(command: list[str], folder: Path) -> str:
    scripts = str(Path(sys.executable).parent)
    environment = os.environ | {
        "PATH": os.pathsep.join([scripts, os.environ["PATH"]]),
        "PYSPARK_PYTHON": sys.executable,
        "SPARK_LOCAL_IP": "127.0.0.1",
        "SPARK_SUBMIT_OPTS": short_lived(),
    }
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout
