"""Every Python worker pays for `import penstock`."""

from __future__ import annotations

import subprocess
import sys

import pytest

HEAVY = [
    *("deltalake", "numpy", "pandas", "psycopg", "psycopg_pool", "py4j", "pyarrow", "pyiceberg", "pyspark"),
    *("rich", "sqlite3", "typer"),
]
# Of work, not of waiting, so that a busy machine changes little; it takes a tenth of this.
MOST_SECONDS = 0.2


@pytest.mark.parametrize("module", ["penstock", "penstock.errors"])
def test_importing_loads_no_heavy_packages(module: str) -> None:
    program = f"import {module}, sys; print(*sorted(set({HEAVY}) & set(sys.modules)))"
    shown = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert shown.returncode == 0, shown.stderr
    assert shown.stdout.split() == []


def test_importing_is_fast_and_loads_no_third_party_packages() -> None:
    program = (
        "import sys, time; before, began = set(sys.modules), time.process_time(); import penstock; "
        "took = time.process_time() - began; "
        "print(took, "
        "*{name.partition('.')[0] for name in set(sys.modules) - before} - sys.stdlib_module_names)"
    )
    shown = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    took, *packages = shown.stdout.split()
    assert packages == ["penstock"]
    assert float(took) < MOST_SECONDS
