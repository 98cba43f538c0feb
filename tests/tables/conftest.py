"""Places for tables of every kind."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.testing import temporary_store_url


@pytest.fixture(params=["sqlite", "postgresql", "delta"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """Where a sink puts its tables: a store of each kind, or a folder of Delta tables."""
    if request.param == "delta":
        yield f"delta://{tmp_path}/lake"
        return
    with temporary_store_url(
        request.getfixturevalue("pg_url") if request.param == "postgresql" else None
    ) as found:
        yield found
