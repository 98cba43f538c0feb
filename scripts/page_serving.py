"""Serves the built page with given snapshots instead of those of a store."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Event, Thread
from typing import Any

BUILT = Path(__file__).resolve().parents[1] / "src/penstock/ui/page"
KINDS = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript",
    ".css": "text/css",
    ".svg": "image/svg+xml",
}


class _PageHandler(BaseHTTPRequestHandler):
    """Handler for the files of the page, and a stream of snapshots."""

    def __init__(
        self, take_snapshot: Callable[[], dict[str, Any]], interval: float, stopped: Event, *args: Any
    ) -> None:
        self._take_snapshot, self._interval, self._stopped = take_snapshot, interval, stopped
        super().__init__(*args)

    def do_GET(self) -> None:
        if self.path == "/api/events":
            self._answer("text/event-stream", b"")
            self._stream()
            return
        path = BUILT / ("index.html" if self.path == "/" else self.path.lstrip("/"))
        self._answer(KINDS[path.suffix], path.read_bytes())

    def _stream(self) -> None:
        try:
            while True:
                self.wfile.write(f"event: snapshot\ndata: {json.dumps(self._take_snapshot())}\n\n".encode())
                self.wfile.flush()
                if self._stopped.wait(self._interval):
                    return
        except OSError:
            pass  # the client has disconnected

    def _answer(self, kind: str, body: bytes) -> None:
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass


@contextmanager
def serving(take_snapshot: Callable[[], dict[str, Any]], interval: float = 1.0) -> Iterator[str]:
    """Serve the page, and yield its address.

    Parameters
    ----------
    take_snapshot
        Returns a snapshot.
    interval
        Seconds between two snapshots.
    """
    stopped = Event()
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(_PageHandler, take_snapshot, interval, stopped))
    server.daemon_threads = True
    Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/"
    stopped.set()
    server.shutdown()
    server.server_close()
