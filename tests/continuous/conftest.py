"""Fixture that copies a queue on each kind of store."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.continuous.queue_copy import Copy


@pytest.fixture
def copy(store_url: str, tmp_path: Path) -> Iterator[Copy]:
    copy = Copy(store_url, tmp_path)
    yield copy
    copy.close()
