"""A store with something in it, and the page's server in a thread."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import httpx
import pytest

import penstock
from penstock.ui.server import Server, prepared
from penstock.ui.snapshots import Collector


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


class Served:
    """A running server."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self.url = server.address
        self.thread = threading.Thread(target=server.serve_until_ended, daemon=True)
        self.thread.start()

    def get(self, path: str, **more: Any) -> httpx.Response:
        # To load the certificates of public authorities takes longer than the request.
        return httpx.get(self.url.rstrip("/") + path, timeout=30, verify=False, **more)

    def end(self) -> None:
        self.server.should_exit = True
        self.thread.join(20)
        assert not self.thread.is_alive()


@pytest.fixture
def serve(store: penstock.Store, store_url: str) -> Iterator[Callable[..., Served]]:
    """`serve(token=, every=)`: the page of the store."""
    with ExitStack() as stack:
        running: list[Served] = []

        def start(**more: Any) -> Served:
            server = stack.enter_context(prepared(store_url, port=0, **{"every": 0.2, **more}))
            running.append(Served(server))
            return running[-1]

        yield start
        for each in running:
            each.end()
