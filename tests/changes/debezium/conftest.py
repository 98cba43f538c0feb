"""Fixture with a store for dead letters."""

from __future__ import annotations

from pathlib import Path

import pytest

import penstock
from penstock.feeds.contract import DEAD_LETTERS


@pytest.fixture
def url(tmp_path: Path) -> str:
    """A store with a queue of dead letters."""
    url = f"sqlite:///{tmp_path}/penstock.db"
    with penstock.connect(url, create=True) as store:
        store.create_queue("dead", DEAD_LETTERS)
    return url
