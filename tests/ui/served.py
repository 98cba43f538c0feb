"""A running server of the page, and the events that it sends."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from typing import Any

import httpx

from penstock.ui.server import Server

TOKEN = "öffne-dich & 100%"


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


Serve = Callable[..., Served]
"""`serve(token=, every=)` of the fixture."""


def events(lines: Iterator[str]) -> Iterator[dict[str, Any]]:
    """The snapshots of an event stream."""
    name = None
    for line in lines:
        if line.startswith("event: "):
            name = line.removeprefix("event: ")
        elif line.startswith("data: "):
            assert name == "snapshot"
            yield json.loads(line.removeprefix("data: "))
