"""Who may look: a token, the host that a browser names, and what browsers are told to do and not to do."""

from __future__ import annotations

import hashlib
import ipaddress
import secrets
from dataclasses import dataclass, field

from starlette.datastructures import MutableHeaders
from starlette.requests import Request
from starlette.responses import PlainTextResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

COOKIE = "penstock_ui"
_HEADERS = {
    "Content-Security-Policy": (
        "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; object-src 'none'"
    ),
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}
_NO_TOKEN = (
    "This page needs its token: open it once as /?token=… with the token that the server was started with, or send it as "
    "Authorization: Bearer …\n"
)
_ELSEWHERE = "This is the page of a store, and another site's page has asked for it.\n"
_WRONG_HOST = "This server is for this machine alone, and was asked for under another name: open it as localhost or 127.0.0.1.\n"


@dataclass(frozen=True)
class Access:
    """What is asked of a request.

    Parameters
    ----------
    host
        The address that the server is bound to.
    token
        What a viewer has to know; None where everybody on the machine may look.
    """

    host: str
    token: str | None = field(default=None, repr=False)

    def answer(self, request: Request) -> Response | None:
        """What a request gets in place of what it asks for; None when it may have that."""
        if _is_of_another_site(request):
            return PlainTextResponse(_ELSEWHERE, 403)
        if self.token is None:
            # A web page whose name leads to this machine could ask for all of it. Where there is a token it would have to know that,
            # and browsers send the cookie to no other name; so a proxy may ask under its own.
            named = _names_loopback(request.headers.get("host", ""))
            return None if named else PlainTextResponse(_WRONG_HOST, 421)
        if self._knows(request):
            return None
        given = request.query_params.get("token")
        if request.url.path == "/" and request.method == "GET" and given is not None and self._is(given):
            response = RedirectResponse("/", 303)
            # As a proxy on this machine says, where there is one.
            encrypted = request.url.scheme == "https"
            response.set_cookie(
                COOKIE, self._pass(), httponly=True, samesite="strict", secure=encrypted, path="/"
            )
            return response
        return PlainTextResponse(_NO_TOKEN, 401, {"WWW-Authenticate": "Bearer"})

    def _knows(self, request: Request) -> bool:
        kind, _, given = request.headers.get("authorization", "").partition(" ")
        # Headers are read as Latin-1, and programs write them in UTF-8.
        if kind.lower() == "bearer" and self._is(given.strip().encode("latin-1").decode(errors="replace")):
            return True
        return secrets.compare_digest(request.cookies.get(COOKIE, "").encode(), self._pass().encode())

    def _is(self, given: str) -> bool:
        return secrets.compare_digest(given.encode(), (self.token or "").encode())

    def _pass(self) -> str:
        """What a browser keeps: cookies go to every port of a host, so it is not the token itself."""
        return hashlib.sha256(f"penstock ui {self.token}".encode()).hexdigest()


class Guard:
    """Lets requests through that may pass, and adds the headers of safety to every response."""

    def __init__(self, app: ASGIApp, access: Access) -> None:
        self._app, self._access = app, access

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            if scope["type"] == "lifespan":
                await self._app(scope, receive, send)
            return

        async def guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in _HEADERS.items():
                    headers[name] = value
                headers.setdefault("Cache-Control", "no-store")
            await send(message)

        answer = self._access.answer(Request(scope))
        await (self._app if answer is None else answer)(scope, receive, guarded)


def _is_of_another_site(request: Request) -> bool:
    """Whether a browser says that a page of another site makes this request.

    It could not read the answer, and yet hold the places of viewers. A link to the page is for its viewer to follow.
    """
    site = request.headers.get("sec-fetch-site")
    if site in ("same-origin", "none"):
        return False
    if site is not None:
        link = request.headers.get("sec-fetch-mode") == "navigate" and request.url.path == "/"
        return not (link and request.headers.get("sec-fetch-dest") == "document")
    # Older browsers, and pages that came without TLS from another machine, say no more than this, and no page says it to its own server.
    origin = request.headers.get("origin")
    return origin is not None and origin.partition("://")[2] != request.headers.get("host", "")


def is_loopback(host: str) -> bool:
    """Whether an address is this machine's own."""
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def _names_loopback(header: str) -> bool:
    if header.startswith("["):
        return is_loopback(header.partition("]")[0] + "]")
    return is_loopback(header.partition(":")[0])
