"""What the tests of change feeds share: servers that the feeds read from."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture(scope="session")
def logical_pg_url() -> Iterator[str]:
    """A PostgreSQL database of our own with wal_level=logical, where slots can be made and dropped."""
    from tests.support.postgres import start_postgres

    server = start_postgres()
    yield server.url
    server.stop()
