"""Thousands of damaged segments, rows of a store and checkpoints: readers, the page and the command line end
with an answer or a named error, and within bounded memory.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

CHECKPOINTS = Path(__file__).parent / "golden/0.1.0/sqlite/checkpoints"
MOST_MIB = 256
"""A small segment may unpack to 64 MiB."""


def mutate(kind: str, folder: Path, first: int, count: int) -> None:
    if kind == "checkpoints":
        shutil.copytree(CHECKPOINTS, folder, dirs_exist_ok=True)
    # A process of its own: a crash of a library would end the tests.
    found = subprocess.run(
        [sys.executable, "-m", "tests.support.mutations", kind, str(folder), str(first), str(count)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (found.returncode, found.stdout[:5000]) == (0, found.stdout), found.stderr[-2000:]
    made, harm, peak = map(int, re.findall(r"\d+", found.stdout.splitlines()[-1]))
    assert (made, harm) == (count, 0)
    assert peak < MOST_MIB


@pytest.mark.parametrize(
    ("kind", "count"), [("segments", 100), ("sqlite", 10), ("postgresql", 4), ("checkpoints", 6)]
)
def test_damaged_data_harms_no_reader(kind: str, count: int, tmp_path: Path) -> None:
    mutate(kind, tmp_path, 0, count)


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("kind", ["segments", "sqlite", "postgresql", "checkpoints"])
def test_ten_thousand_times_damaged_data_harms_no_reader(kind: str, tmp_path: Path) -> None:
    mutate(kind, tmp_path, 1_000_000, 10_000)
