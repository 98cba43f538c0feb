"""Exports from a PostgreSQL store that commits, and whose reply is lost."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest

import penstock
from penstock.testing import temporary_store_url
from tests.export.conftest import SCHEMA, append
from tests.export.lakes import DeltaLake
from tests.support.postgres_proxy import Proxy, proxied
from tests.support.waiting import wait_until


@pytest.fixture
def server(pg_url: str) -> Iterator[Proxy]:
    with proxied(pg_url) as proxy:
        yield proxy


@pytest.fixture
def store_url(server: Proxy) -> Iterator[str]:
    with temporary_store_url(server.url) as url:
        yield url


@pytest.fixture
def lake(tmp_path: Path) -> DeltaLake:
    return DeltaLake(tmp_path)


@pytest.fixture
def store(store_url: str) -> Iterator[penstock.Store]:
    with penstock.connect(store_url, create=True) as opened:
        yield opened


def test_a_run_exports_each_row_once_whichever_reply_is_lost(
    server: Proxy, store: penstock.Store, store_url: str, lake: DeltaLake
) -> None:
    queue = store.create_queue("orders", SCHEMA, partitions=2)
    append(queue, 1, 2)
    for number in server.losing_each_commit():
        table = f"orders{number}"
        export = penstock.QueueExport("orders", store_url, lake.url, table=table)
        assert export.run().rows == 2
        assert lake.numbers(table) == [1, 2]


def test_following_goes_on_whichever_reply_is_lost(
    server: Proxy, store: penstock.Store, store_url: str, lake: DeltaLake, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As if the store did not answer for as long as transactions are tried again.
    monkeypatch.setattr("penstock.store.database.RETRY_SECONDS", 0.0)
    monkeypatch.setattr("penstock.export.waiting._FIRST_PAUSE", 0.01)
    queue = store.create_queue("orders", SCHEMA, partitions=2)
    append(queue, 1, 2)
    for number in server.losing_each_commit():
        table = f"orders{number}"
        export = penstock.QueueExport("orders", store_url, lake.url, table=table)
        thread = threading.Thread(target=export.follow, kwargs={"every": timedelta(0)})
        thread.start()
        try:
            wait_until(lambda export=export: export.status().rows == 2)  # type: ignore[misc]
        finally:
            export.stop()
            thread.join(30)
        assert lake.numbers(table) == [1, 2]
