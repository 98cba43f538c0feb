"""A bucket, behind a proxy that can answer wrongly."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.object_proxy import ObjectProxy, object_proxy
from tests.support.object_store import object_store, settings


@pytest.fixture(scope="module")
def server() -> Iterator[ObjectProxy]:
    with object_store() as running, object_proxy(running.endpoint) as proxy:
        running.bucket("rows")
        yield proxy


@pytest.fixture
def bucket(server: ObjectProxy, monkeypatch: pytest.MonkeyPatch) -> ObjectProxy:
    """The server of the bucket ``rows``, for which the environment has credentials."""
    for name, value in settings(server.endpoint).items():
        monkeypatch.setenv(name, value)
    return server
