"""The page's address space; everything in it is read."""

from __future__ import annotations

from pathlib import Path

from fastapi import FastAPI
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.staticfiles import StaticFiles

from penstock.ui.access import Access, Guard
from penstock.ui.feed import Feed
from penstock.ui.metrics import exposition

PAGE = Path(__file__).parent / "page"
_NO_PAGE = "This installation of Penstock has no page in it; /api/snapshot and /metrics are there.\n"


def make_app(feed: Feed, access: Access, page: Path = PAGE) -> FastAPI:
    """The application.

    Parameters
    ----------
    page
        The folder with index.html.
    """
    app = FastAPI(title="Penstock", docs_url=None, redoc_url=None, openapi_url=None)
    app.add_middleware(Guard, access=access)

    @app.get("/api/snapshot")
    async def snapshot() -> Response:
        return Response((await feed.newest()).text, media_type="application/json")

    @app.get("/api/events")
    async def events() -> Response:
        if feed.full:
            return PlainTextResponse("There are too many viewers.\n", 503)
        return StreamingResponse(
            feed.events(), media_type="text/event-stream", headers={"X-Accel-Buffering": "no"}
        )

    @app.get("/metrics")
    async def metrics() -> Response:
        text = exposition((await feed.newest()).snapshot)
        return Response(text, headers={"content-type": CONTENT_TYPE_LATEST})

    if (page / "index.html").is_file():
        app.mount("/", _Page(directory=page, html=True))
    else:
        app.add_api_route("/", lambda: PlainTextResponse(_NO_PAGE), methods=["GET"])
    return app


class _Page(StaticFiles):
    """Files that a browser asks for again, but for those whose names change with what is in them."""

    def file_response(self, *args: object, **more: object) -> Response:
        response = super().file_response(*args, **more)  # type: ignore[arg-type]  # passed on
        path = str(args[0])
        forever = "/assets/" in path.replace("\\", "/")
        response.headers["Cache-Control"] = "private, max-age=31536000, immutable" if forever else "no-cache"
        return response
