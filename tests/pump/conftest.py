"""What the tests of pumps share: a server to read from, and the tables that its queues make."""

from __future__ import annotations

import pytest

from tests.support.postgres_source import Source
from tests.support.pumped import TABLES, fill


@pytest.fixture
def shop(source: Source) -> Source:
    """Two published tables with rows."""
    for name, columns in TABLES.items():
        source.table(columns, name)
    fill(source, 1, 500)
    return source


@pytest.fixture(autouse=True)
def _decoding_server(decoding_server: None) -> None:
    """Also for tests that start servers of their own."""
