"""A queue whose large appends are in objects. Tests of other queues have their own fixtures."""

from __future__ import annotations

from pathlib import Path

import pytest

import penstock
from tests.support.object_queues import SCHEMA


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "rows"


@pytest.fixture
def queue(store: penstock.Store, folder: Path) -> penstock.Queue:
    return store.create_queue("q", SCHEMA, partitions=2, payloads=folder)
