"""HTTP server of the monitor page; everything is read-only.

The number of connections is limited, and idle ones are closed. A browser sends its request immediately, so a
connection without one after some seconds does not belong to a viewer. When there are too many connections,
the oldest one without a request is closed in favour of the new one.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from operator import itemgetter
from pathlib import Path
from typing import Any

import h11
import uvicorn
from fastapi import FastAPI
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.staticfiles import StaticFiles
from starlette.types import Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from penstock.errors import InvalidInputError, InvalidOptionError
from penstock.ui.access import Access, ForkSafeLock, is_loopback
from penstock.ui.metrics import exposition
from penstock.ui.snapshots import Collector, SnapshotStream

if sys.platform == "linux":
    import fcntl
    import termios

MAX_CONNECTIONS = 200
"""The maximum number of connections: more than viewers, because each viewer also loads the page's files."""
MAX_CONNECTIONS_PER_ADDRESS = 80
"""The maximum number of connections from another machine: fewer than viewers, so that one machine cannot use
all of them."""
REQUEST_SECONDS = 5.0
"""The time limit for a request to arrive, from the start of the connection or from the last response."""
WRITE_SECONDS = 30.0
"""The time limit for a viewer to read sent data, and the longest time without progress."""
SEND_BUFFER_BYTES = 65_536
"""The size of a connection's send buffer in the system. By default it grows to megabytes, enough for minutes
of unread snapshots."""
WRITE_BUFFER_BYTES = 16_384
"""The number of bytes that may wait for space in the send buffer before an event stream pauses."""
_PROGRESS_CHECKS = 10


class CountingTransport:
    """A transport that counts the bytes written to it."""

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self.written = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def write(self, data: bytes) -> None:
        self.written += len(data)
        self._transport.write(data)

    def acknowledged(self) -> int | None:
        """Return how many bytes have reached the other side; None if the system does not report it."""
        unacknowledged_bytes = unacknowledged(self._transport.get_extra_info("socket"))
        return (
            None
            if unacknowledged_bytes is None
            else self.written - self._transport.get_write_buffer_size() - unacknowledged_bytes
        )


def unacknowledged(connection: socket.socket) -> int | None:
    """Return how many bytes in the send buffer the other side has not acknowledged; None if not on Linux."""
    if sys.platform != "linux":
        return None
    try:
        return int.from_bytes(fcntl.ioctl(connection.fileno(), termios.TIOCOUTQ, bytes(4)), sys.byteorder)
    except (OSError, ValueError):
        # The connection is closed.
        return None


class BoundedProtocol(H11Protocol):
    """HTTP with time limits."""

    _peer: str | None = None
    """The address of the other machine; None for this machine, where a proxy may have many viewers."""
    _request_timer: asyncio.TimerHandle | None = None
    _write_timer: asyncio.TimerHandle | None = None
    _progress_timer: asyncio.TimerHandle | None = None
    _counting: CountingTransport
    _acknowledged = 0
    _progress_at = 0.0
    """When bytes were last acknowledged, or there were no unacknowledged bytes."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # always a transport
        self._peer = remote_address(transport)
        bounded = [
            connection_protocol
            for connection_protocol in self.connections
            if isinstance(connection_protocol, BoundedProtocol)
        ]
        from_address = [
            connection_protocol for connection_protocol in bounded if connection_protocol._peer == self._peer
        ]
        if self._peer is not None and len(from_address) >= MAX_CONNECTIONS_PER_ADDRESS:
            _close_oldest_idle(from_address, transport)
        elif len(self.connections) >= MAX_CONNECTIONS:
            _close_oldest_idle(bounded, transport)
        with suppress(OSError):
            # The other side may already have closed it.
            connection = transport.get_extra_info("socket")
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
        transport.set_write_buffer_limits(high=WRITE_BUFFER_BYTES)
        self._counting = CountingTransport(transport)
        super().connection_made(self._counting)  # type: ignore[arg-type]  # passes everything on
        self._wait_for_request()
        self._progress_at = self.loop.time()
        self._check_progress()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.cycle is not None and not self.cycle.response_complete:
            self._request_timer = _cancel(self._request_timer)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if not self.transport.is_closing() and (self.cycle is None or self.cycle.response_complete):
            self._wait_for_request()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._write_timer = self.loop.call_later(WRITE_SECONDS, self._abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._write_timer = _cancel(self._write_timer)

    def connection_lost(self, exc: Exception | None) -> None:
        self._request_timer, self._write_timer = _cancel(self._request_timer), _cancel(self._write_timer)
        self._progress_timer = _cancel(self._progress_timer)
        super().connection_lost(exc)

    def _check_progress(self) -> None:
        """Close the connection if it has not acknowledged any of the missing bytes for too long.

        Small amounts of data fit into the send buffer, so writing does not pause even if nothing is read.
        """
        acknowledged = self._counting.acknowledged()
        if acknowledged is None or acknowledged == self._counting.written:
            self._progress_at = self.loop.time()
        elif acknowledged > self._acknowledged:
            self._acknowledged, self._progress_at = acknowledged, self.loop.time()
        elif self.loop.time() - self._progress_at >= WRITE_SECONDS:
            self._abort()
            return
        self._progress_timer = self.loop.call_later(WRITE_SECONDS / _PROGRESS_CHECKS, self._check_progress)

    def _wait_for_request(self) -> None:
        _cancel(self._request_timer)
        self._request_timer = self.loop.call_later(REQUEST_SECONDS, self._abort)

    def _abort(self) -> None:
        self._request_timer = _cancel(self._request_timer)
        self.transport.abort()


def _close_oldest_idle(connections: Sequence[BoundedProtocol], transport: asyncio.Transport) -> None:
    """Close the oldest connection without a request, or the new connection if all have a request."""
    idle = [(timer.when(), connection) for connection in connections if (timer := connection._request_timer)]
    if idle:
        min(idle, key=itemgetter(0))[1]._abort()
    else:
        transport.abort()


def remote_address(transport: asyncio.Transport) -> str | None:
    """Return the address of another machine that has connected; None for this machine."""
    peer = transport.get_extra_info("peername")
    host = str(peer[0]) if peer else ""
    return None if not host or is_loopback(host) else host


def _cancel(timer: asyncio.TimerHandle | None) -> asyncio.TimerHandle | None:
    if timer is not None:
        timer.cancel()
    return None


PAGE = Path(__file__).parent / "page"
_NO_PAGE_TEXT = "This installation of Penstock does not include the page; /api/snapshot and /metrics work.\n"
MIN_TOKEN_CHARACTERS = 16
_SHUTDOWN_SECONDS = 3


def make_app(stream: SnapshotStream, access: Access, page: Path = PAGE) -> FastAPI:
    app = FastAPI(title="Penstock", docs_url=None, redoc_url=None, openapi_url=None)
    app.add_middleware(ForkSafeLock, access=access)

    @app.api_route("/api/snapshot", methods=["GET", "HEAD"])
    async def snapshot() -> Response:
        return Response((await stream.newest()).text, media_type="application/json")

    @app.get("/api/events")
    async def events() -> Response:
        # Count viewers here: many requests may arrive before the first response is sent.
        return _Events(stream) if stream.admit() else PlainTextResponse("There are too many viewers.\n", 503)

    @app.api_route("/metrics", methods=["GET", "HEAD"])
    async def metrics() -> Response:
        text = exposition((await stream.newest()).snapshot)
        return Response(text, headers={"content-type": CONTENT_TYPE_LATEST})

    if (page / "index.html").is_file():
        app.mount("/", _Page(directory=page, html=True))
    else:
        app.add_api_route("/", lambda: PlainTextResponse(_NO_PAGE_TEXT), methods=["GET"])
    return app


class _Events(StreamingResponse):
    """The event stream of an admitted viewer."""

    def __init__(self, stream: SnapshotStream) -> None:
        super().__init__(stream.events(), media_type="text/event-stream", headers={"X-Accel-Buffering": "no"})
        self._stream = stream

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._stream.leave()


class _Page(StaticFiles):
    """Static files that browsers revalidate, except those whose names change with their contents."""

    def file_response(self, *args: object, **kwargs: object) -> Response:
        response = super().file_response(*args, **kwargs)  # type: ignore[arg-type]  # passed on
        is_immutable = Path(str(args[0])).parent.name == "assets"
        response.headers["Cache-Control"] = (
            "private, max-age=31536000, immutable" if is_immutable else "no-cache"
        )
        return response


@contextmanager
def open_server(
    url: str,
    *,
    checkpoints: Sequence[str] = (),
    host: str = "127.0.0.1",
    port: int = 8080,
    token: str | None = None,
    every: float = 1.0,
) -> Iterator[Server]:
    """Open a server that already listens; it answers as soon as it serves."""
    access = _access(host, token)
    collector = Collector(url, checkpoints, every=every)
    try:
        with _listen(host, port) as listening:
            yield Server(SnapshotStream(collector, every), access, listening)
    finally:
        collector.close()


def _is_own_failure(record: logging.LogRecord) -> bool:
    """Return whether a log record is about a failure of the server, not about a client without valid HTTP."""
    error = record.exc_info[1] if record.exc_info else None
    # A response to such a client fails as well.
    closing = ("state=ERROR", "state=MUST_CLOSE")
    is_failed_response = isinstance(error, h11.LocalProtocolError) and any(
        each in str(error) for each in closing
    )
    return not (is_failed_response or isinstance(error, h11.RemoteProtocolError))


class Server(uvicorn.Server):
    """A server that ends its event streams when it shuts down, instead of waiting for them."""

    def __init__(self, stream: SnapshotStream, access: Access, listening: socket.socket) -> None:
        logging.getLogger("uvicorn.error").addFilter(_is_own_failure)
        super().__init__(
            uvicorn.Config(
                make_app(stream, access),
                http=BoundedProtocol,
                ws="none",
                log_config=None,
                # Any client that can connect can send invalid requests, as often as it likes.
                log_level="error",
                access_log=False,
                server_header=False,
                # Any client that can connect could claim any address in a header.
                proxy_headers=False,
                timeout_graceful_shutdown=_SHUTDOWN_SECONDS,
                lifespan="off",
            )
        )
        self.stream = stream
        self._listening = listening
        self.address = _address(access.host, listening.getsockname()[1])
        """The page's URL."""

    def serve_until_ended(self) -> None:
        """Serve until the process receives a signal, or ``should_exit`` is set."""
        self.run(sockets=[self._listening])

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self.stream.close()
        await super().shutdown(sockets)


def _access(host: str, token: str | None) -> Access:
    if token is None and not is_loopback(host):
        raise InvalidOptionError(
            f"other machines can reach the page at {host!r}, so it needs a token. Set "
            "PENSTOCK_UI_TOKEN, or --token",
            condition="INVALID_OPTION.MISSING",
            option="token",
        )
    if token is not None and len(token) < MIN_TOKEN_CHARACTERS:
        raise InvalidOptionError(
            f"a token needs at least {MIN_TOKEN_CHARACTERS} characters, such as those of `openssl rand -hex "
            "16`",
            condition="INVALID_OPTION.VALUE",
            option="token",
        )
    return Access(host, token)


def _listen(host: str, port: int) -> socket.socket:
    try:
        family = socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host.strip("[]"), port), family=family)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise InvalidInputError(
                f"port {port} of {host} is taken: choose another one with --port, or 0 for any free one",
                condition="PORT_TAKEN",
                port=port,
            ) from error
        if error.errno == errno.EACCES:
            raise InvalidInputError(
                f"this user may not listen on port {port}: choose one from 1024 on with --port",
                condition="PORT_REFUSED",
                port=port,
            ) from error
        raise InvalidInputError(
            f"{host!r} is not an address of this machine ({error.strerror or error}): set --host to one, "
            "such as 127.0.0.1 or 0.0.0.0",
            condition="NO_SUCH_ADDRESS",
            host=host,
        ) from error


def _address(host: str, port: int) -> str:
    name = host.strip("[]")
    return f"http://[{name}]:{port}/" if ":" in name else f"http://{name}:{port}/"
