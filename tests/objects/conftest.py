"""A bucket, behind a proxy that can answer wrongly."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.object_proxy import ObjectProxy, object_proxy
from tests.support.object_store import KEY, SECRET, object_store


@pytest.fixture(scope="module")
def server() -> Iterator[ObjectProxy]:
    with object_store() as running, object_proxy(running.endpoint) as proxy:
        running.bucket("rows")
        yield proxy


@pytest.fixture
def bucket(server: ObjectProxy, monkeypatch: pytest.MonkeyPatch) -> ObjectProxy:
    """The server of the bucket ``rows``, for which the environment has credentials."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", KEY)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    monkeypatch.setenv("AWS_ENDPOINT_URL", server.endpoint)
    monkeypatch.setenv("AWS_ALLOW_HTTP", "true")
    return server
