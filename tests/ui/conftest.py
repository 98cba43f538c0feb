"""A store with something in it, and the page's server in a thread."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest

import penstock
from penstock.ui.server import open_server
from penstock.ui.snapshots import Collector
from tests.ui.served import Serve, Served


class Clock:
    """Seconds that pass when a test says so."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def collector(store: penstock.Store, store_url: str, clock: Clock) -> Iterator[Collector]:
    found = Collector(store_url, clock=clock)
    yield found
    found.close()


@pytest.fixture
def serve(store: penstock.Store, store_url: str) -> Iterator[Serve]:
    """`serve(token=, every=)`: the page of the store."""
    with ExitStack() as stack:
        running: list[Served] = []

        def start(**more: Any) -> Served:
            server = stack.enter_context(open_server(store_url, port=0, **{"every": 0.2, **more}))
            running.append(Served(server))
            return running[-1]

        yield start
        for each in running:
            each.end()
