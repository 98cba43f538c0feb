"""Fixtures for the tests of the store."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import penstock
from penstock.testing import temporary_store


@pytest.fixture
def pg_store(pg_url: str) -> Iterator[penstock.Store]:
    with temporary_store(pg_url) as store:
        yield store
