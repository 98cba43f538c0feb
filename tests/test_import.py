"""`import penstock` is what every Python worker pays for."""

from __future__ import annotations

import subprocess
import sys

import pytest

HEAVY = ["numpy", "pandas", "psycopg", "psycopg_pool", "py4j", "pyspark", "rich", "sqlite3", "typer"]


@pytest.mark.parametrize("module", ["penstock", "penstock.errors"])
def test_importing_loads_nothing_heavy(module: str) -> None:
    program = f"import {module}, sys; print(*sorted(set({HEAVY}) & set(sys.modules)))"
    shown = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert shown.returncode == 0, shown.stderr
    assert shown.stdout.split() == []
