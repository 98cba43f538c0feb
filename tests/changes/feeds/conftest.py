"""What the tests of change feeds share: servers that the feeds read from."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.changes.feeds.postgres import Source, source_at


@pytest.fixture(scope="session")
def logical_pg_url() -> Iterator[str]:
    """A PostgreSQL database of our own with wal_level=logical, where slots can be made and dropped."""
    from tests.support.postgres import start_postgres

    server = start_postgres()
    yield server.url
    server.stop()


@pytest.fixture
def source(logical_pg_url: str) -> Iterator[Source]:
    """A schema of that database, with a publication of its tables."""
    with source_at(logical_pg_url) as made:
        yield made
