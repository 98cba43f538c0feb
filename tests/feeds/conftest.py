"""What the tests of change feeds share: servers that the feeds read from."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.object_store import KEY, SECRET, ObjectStore, object_store


@pytest.fixture(scope="module")
def s3() -> Iterator[ObjectStore]:
    """An object store with the bucket "lake"."""
    with object_store() as found:
        found.bucket("lake")
        yield found


@pytest.fixture
def storage(s3: ObjectStore) -> dict[str, str]:
    """What deltalake has to know to read from it."""
    return {
        "AWS_ENDPOINT_URL": s3.endpoint,
        "AWS_ACCESS_KEY_ID": KEY,
        "AWS_SECRET_ACCESS_KEY": SECRET,
        "AWS_REGION": "us-east-1",
        "AWS_ALLOW_HTTP": "true",
    }
