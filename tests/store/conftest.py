"""Fixtures of the store's tests."""

from __future__ import annotations

import uuid
from collections.abc import Iterator

import pytest

import penstock


@pytest.fixture
def pg_store(pg_url: str) -> Iterator[penstock.Store]:
    from tests.support.postgres import drop_schema, with_schema

    schema = f"t_{uuid.uuid4().hex}"
    with penstock.connect(with_schema(pg_url, schema)) as store:
        yield store
    drop_schema(pg_url, schema)
