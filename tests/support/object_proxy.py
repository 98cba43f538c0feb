"""Proxy for an S3 or Glue server that answers some requests with faults."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit

from typing_extensions import override

Fault = Callable[["Exchange"], None]
_HOP = {"connection", "transfer-encoding", "content-length", "keep-alive"}


class Exchange:
    """Request that a fault may forward, and answer in its own way."""

    def __init__(self, handler: BaseHTTPRequestHandler, upstream: str) -> None:
        self._handler = handler
        self._upstream = urlsplit(upstream)
        self._body = handler.rfile.read(int(handler.headers.get("Content-Length") or 0))
        self.method = handler.command
        self.operation = handler.headers.get("X-Amz-Target", self.method).rpartition(".")[2]
        """The operation of a service such as Glue, or the HTTP method for S3."""

    def forward(self) -> tuple[int, list[tuple[str, str]], bytes]:
        """Forward the request to the server, and return its reply."""
        connection = HTTPConnection(self._upstream.hostname or "", self._upstream.port)
        # The signature includes the host name that the client uses.
        connection.request(self.method, self._handler.path, self._body, dict(self._handler.headers))
        answer = connection.getresponse()
        body = answer.read()
        # The reply to HEAD must keep the length that the body would have.
        left_out = _HOP - {"content-length"} if self.method == "HEAD" else _HOP
        headers = [(name, value) for name, value in answer.getheaders() if name.lower() not in left_out]
        connection.close()
        return answer.status, headers, body

    def answer(
        self, status: int, headers: list[tuple[str, str]], body: bytes, length: int | None = None
    ) -> None:
        """Answer the client. If a length is given, announce it instead of the body's."""
        self._handler.send_response(status)
        for name, value in headers:
            self._handler.send_header(name, value)
        if self.method != "HEAD":
            self._handler.send_header("Content-Length", str(len(body) if length is None else length))
        self._handler.end_headers()
        if self.method != "HEAD":
            self._handler.wfile.write(body)
        if length is not None:
            self.hang_up()

    def hang_up(self) -> None:
        """Close the connection."""
        self._handler.close_connection = True


def unavailable(exchange: Exchange) -> None:
    """Answer 503 without forwarding the request."""
    exchange.answer(503, [], b"<Error><Code>SlowDown</Code></Error>")


def lost_reply(exchange: Exchange) -> None:
    """Execute the request, and answer that it failed."""
    exchange.forward()
    exchange.answer(500, [], b"<Error><Code>InternalError</Code></Error>")


def no_reply(exchange: Exchange) -> None:
    """Execute the request, and close the connection."""
    exchange.forward()
    exchange.hang_up()


def truncated(exchange: Exchange) -> None:
    """Close the connection in the middle of the body."""
    status, headers, body = exchange.forward()
    exchange.answer(status, headers, body[: len(body) // 2], len(body))


def shortened(exchange: Exchange) -> None:
    """Answer with half of the body as if it were complete."""
    status, headers, body = exchange.forward()
    exchange.answer(status, headers, body[: len(body) // 2])


def garbled(exchange: Exchange) -> None:
    """Answer with a changed byte in the body."""
    status, headers, body = exchange.forward()
    exchange.answer(status, headers, bytes([body[0] ^ 1, *body[1:]]) if body else body)


class ObjectProxy:
    """Running proxy."""

    def __init__(self, endpoint: str, upstream: str) -> None:
        self.endpoint = endpoint
        self.upstream = upstream
        self._faults: list[tuple[str, Fault]] = []
        self._lock = threading.Lock()
        self.requests: list[str] = []
        """The operations of all requests."""

    def fail(self, operation: str, *faults: Fault) -> None:
        """Answer the next requests for an operation with faults, in order."""
        with self._lock:
            self._faults += [(operation, fault) for fault in faults]

    @property
    def pending(self) -> int:
        """The number of faults that have not been used."""
        return len(self._faults)

    def handle(self, exchange: Exchange) -> None:
        with self._lock:
            asked = exchange.operation
            self.requests.append(asked)
            index = next((i for i, (operation, _) in enumerate(self._faults) if operation == asked), None)
            fault = None if index is None else self._faults.pop(index)[1]
        if fault is None:
            exchange.answer(*exchange.forward())
        else:
            fault(exchange)


@contextmanager
def object_proxy(upstream: str) -> Iterator[ObjectProxy]:
    """Run a proxy in front of a server."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def _handle(self) -> None:
            proxy.handle(Exchange(self, proxy.upstream))

        do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = _handle  # noqa: N815 - the names of http.server

        @override
        def log_message(self, format: str, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        proxy = ObjectProxy(f"http://127.0.0.1:{server.server_address[1]}", upstream)
        thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
        thread.start()
        try:
            yield proxy
        finally:
            server.shutdown()
            thread.join()
