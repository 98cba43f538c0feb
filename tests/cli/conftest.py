"""The command line, run in this process."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.commands import Penstock, run_penstock


@pytest.fixture
def penstock(store_url: str, monkeypatch: pytest.MonkeyPatch) -> Penstock:
    """Commands on a new store, once for each kind of database."""
    monkeypatch.setenv("PENSTOCK_URL", store_url)
    run_penstock("store", "init")
    return run_penstock


@pytest.fixture
def penstock_sqlite(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> Penstock:
    """Commands on a new SQLite store, where the database does not matter."""
    monkeypatch.setenv("PENSTOCK_URL", f"sqlite:///{tmp_path}/penstock.db")
    run_penstock("store", "init")
    return run_penstock
