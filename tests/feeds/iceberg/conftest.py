"""A lake with a table in it."""

from __future__ import annotations

from pathlib import Path

import pytest
from pyiceberg.table import Table

from tests.feeds.iceberg.lake import Lake, rows


@pytest.fixture
def lake(tmp_path: Path) -> Lake:
    return Lake(tmp_path / "lake")


@pytest.fixture
def orders(lake: Lake) -> Table:
    """Three versions: an append, another one, and a delete that rewrites a file."""
    table = lake.table()
    table.append(rows((1, "a", 1), (2, "b", 2)))
    table.append(rows((3, "c", 3)))
    table.delete("id = 2")
    return table
