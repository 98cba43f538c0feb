"""HTTP server of the monitor page; everything is read-only."""

from __future__ import annotations

import errno
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import uvicorn
from fastapi import FastAPI
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.staticfiles import StaticFiles

from penstock.errors import InvalidInputError, InvalidOptionError, PenstockError
from penstock.ui.access import Access, Guard, is_loopback
from penstock.ui.collector import Collector
from penstock.ui.connections import BoundedProtocol
from penstock.ui.metrics import exposition
from penstock.ui.snapshot_stream import SnapshotStream

PAGE = Path(__file__).parent / "page"
_NO_PAGE = "This installation of Penstock does not include the page; /api/snapshot and /metrics work.\n"
SHORTEST_TOKEN = 8
_SHUTDOWN_SECONDS = 3


def make_app(stream: SnapshotStream, access: Access, page: Path = PAGE) -> FastAPI:
    """Return the web application.

    Parameters
    ----------
    page
        The folder with index.html.
    """
    app = FastAPI(title="Penstock", docs_url=None, redoc_url=None, openapi_url=None)
    app.add_middleware(Guard, access=access)

    @app.get("/api/snapshot")
    async def snapshot() -> Response:
        return Response((await stream.newest()).text, media_type="application/json")

    @app.get("/api/events")
    async def events() -> Response:
        if stream.full:
            return PlainTextResponse("There are too many viewers.\n", 503)
        return StreamingResponse(
            stream.events(), media_type="text/event-stream", headers={"X-Accel-Buffering": "no"}
        )

    @app.get("/metrics")
    async def metrics() -> Response:
        text = exposition((await stream.newest()).snapshot)
        return Response(text, headers={"content-type": CONTENT_TYPE_LATEST})

    if (page / "index.html").is_file():
        app.mount("/", _Page(directory=page, html=True))
    else:
        app.add_api_route("/", lambda: PlainTextResponse(_NO_PAGE), methods=["GET"])
    return app


class _Page(StaticFiles):
    """Static files that browsers revalidate, except those whose names change with their contents."""

    def file_response(self, *args: object, **more: object) -> Response:
        response = super().file_response(*args, **more)  # type: ignore[arg-type]  # passed on
        path = str(args[0])
        forever = "/assets/" in path.replace("\\", "/")
        response.headers["Cache-Control"] = "private, max-age=31536000, immutable" if forever else "no-cache"
        return response


def serve(
    url: str,
    *,
    checkpoints: Sequence[str] = (),
    host: str = "127.0.0.1",
    port: int = 8080,
    token: str | None = None,
    every: float = 1.0,
    ready: Callable[[str], None] = lambda address: None,
) -> None:
    """Serve the page until the process is asked to end.

    Parameters
    ----------
    url
        The store, which must exist.
    checkpoints
        Checkpoints to show as well.
    host, port
        The address to listen on; port 0 takes a free one.
    token
        The secret that viewers need; required where other machines can reach the server.
    every
        Seconds between two snapshots.
    ready
        Called with the page's address once it can be opened.

    Raises
    ------
    InvalidOptionError
        When a token is missing, or too short.
    InvalidInputError
        When the address is taken, or not one of this machine's.
    InvalidUrlError, StoreNotFoundError, StoreUnavailableError, StoreTooNewError, MissingDependencyError
    """
    with prepared(url, checkpoints=checkpoints, host=host, port=port, token=token, every=every) as server:
        ready(server.address)
        server.serve_until_ended()


@contextmanager
def prepared(
    url: str,
    *,
    checkpoints: Sequence[str] = (),
    host: str = "127.0.0.1",
    port: int = 8080,
    token: str | None = None,
    every: float = 1.0,
) -> Iterator[Server]:
    """Return a server that already listens; it answers once it serves. Parameters and errors are those of
    `serve`.
    """
    access = _access(host, token)
    collector = Collector(url, checkpoints, every=every)
    try:
        with _bound(host, port) as listening:
            yield Server(SnapshotStream(collector, every), access, listening)
    finally:
        collector.close()


class Server(uvicorn.Server):
    """A server that ends its event streams when it shuts down, instead of waiting for them."""

    def __init__(self, stream: SnapshotStream, access: Access, listening: socket.socket) -> None:
        super().__init__(
            uvicorn.Config(
                make_app(stream, access),
                http=BoundedProtocol,
                ws="none",
                log_config=None,
                access_log=False,
                server_header=False,
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
        """End the event streams, then the rest."""
        self.stream.close()
        await super().shutdown(sockets)


def _access(host: str, token: str | None) -> Access:
    if token is None and not is_loopback(host):
        raise InvalidOptionError(
            f"other machines can reach the page at {host!r}, so it needs a token: set "
            "PENSTOCK_UI_TOKEN, or --token",
            option="token",
        )
    if token is not None and len(token) < SHORTEST_TOKEN:
        raise InvalidOptionError(
            f"a token needs at least {SHORTEST_TOKEN} characters, such as those of `openssl rand -hex 16`",
            option="token",
        )
    return Access(host, token)


def _bound(host: str, port: int) -> socket.socket:
    try:
        family = socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host.strip("[]"), port), family=family)
    except OSError as error:
        raise _refused(host, port, error) from error


def _refused(host: str, port: int, error: OSError) -> PenstockError:
    if error.errno == errno.EADDRINUSE:
        return InvalidInputError(
            f"port {port} of {host} is taken: choose another one with --port, or 0 for any free one",
            condition="PORT_TAKEN",
            port=port,
        )
    if error.errno == errno.EACCES:
        return InvalidInputError(
            f"this user may not listen on port {port}: choose one from 1024 on with --port",
            condition="PORT_REFUSED",
            port=port,
        )
    return InvalidInputError(
        f"{host!r} is not an address of this machine ({error.strerror or error}): set --host to one, "
        "such as 127.0.0.1 or 0.0.0.0",
        condition="NO_SUCH_ADDRESS",
        host=host,
    )


def _address(host: str, port: int) -> str:
    name = host.strip("[]")
    return f"http://[{name}]:{port}/" if ":" in name else f"http://{name}:{port}/"
