"""Places for tables of every kind."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.testing import temporary_store_url
from tests.support.sql_tables import iceberg_url


@pytest.fixture(params=["sqlite", "postgresql", "delta", "iceberg"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """Where a sink puts its tables: a store of each kind, a folder of Delta tables, or a catalog of
    Iceberg tables.
    """
    if request.param == "delta":
        yield f"delta://{tmp_path}/lake"
        return
    if request.param == "iceberg":
        yield iceberg_url(tmp_path)
        return
    with temporary_store_url(
        request.getfixturevalue("pg_url") if request.param == "postgresql" else None
    ) as found:
        yield found
