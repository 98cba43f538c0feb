"""What the tests of reconciliations share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.postgres_source import Source
from tests.support.reconciled import KINDS, CopiedTable, copied_table


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def orders(source: Source, kind: str, tmp_path: Path) -> Iterator[CopiedTable]:
    """A table of 1,000 rows, and an equal copy."""
    table = source.table("id int PRIMARY KEY, item text, price numeric(10, 2)", "orders")
    source.run(f"INSERT INTO {table} SELECT n, 'item ' || n % 7, n / 4.0 FROM generate_series(1, 1000) AS n")
    with copied_table(source, table, kind, tmp_path) as made:
        yield made
