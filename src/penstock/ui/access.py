"""Access to the monitor page: its token, the host name of a request, and security headers for browsers."""

from __future__ import annotations

import hmac
import ipaddress
import re
import secrets
import time
from collections import deque
from collections.abc import Callable
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
    "This page needs its token: open it once as /?token=… with the token that the server was started "
    "with, or send it as Authorization: Bearer …\n"
)
_OTHER_SITE = "Pages of another site may not request this page.\n"
_WRONG_HOST = "This server is only for this machine: open the page as localhost or 127.0.0.1.\n"


_TOO_MANY_WRONG_TOKENS = "Too many wrong tokens have come from your address: try again in a minute.\n"
MAX_WRONG_TOKENS = 20
"""The number of wrong tokens that an address may send in a minute."""
_WRONG_TOKEN_SECONDS = 60.0
_MAX_ADDRESSES = 1000


class WrongTokenCounter:
    """Counter of the wrong tokens of the last minute, by the address that sent them."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self.by_address: dict[str, deque[float]] = {}

    def has_too_many(self, address: str) -> bool:
        times = self.by_address.get(address)
        return (
            times is not None
            and len(times) == MAX_WRONG_TOKENS
            and self._clock() - times[0] < _WRONG_TOKEN_SECONDS
        )

    def add(self, address: str) -> None:
        # The newest address is last, and the oldest one is removed first.
        times = self.by_address.pop(address, None) or deque(maxlen=MAX_WRONG_TOKENS)
        times.append(self._clock())
        self.by_address[address] = times
        if len(self.by_address) > _MAX_ADDRESSES:
            del self.by_address[next(iter(self.by_address))]


@dataclass(frozen=True)
class Access:
    host: str
    token: str | None = field(default=None, repr=False)
    # The cookie cannot be guessed whatever the token is, so only wrong tokens are counted.
    secret: bytes = field(default_factory=lambda: secrets.token_bytes(32), repr=False)
    wrong_tokens: WrongTokenCounter = field(default_factory=WrongTokenCounter, repr=False)

    def refusal(self, request: Request) -> Response | None:
        """Return the response to a request that is refused or signs in; None if the request is permitted."""
        if _is_of_another_site(request):
            return PlainTextResponse(_OTHER_SITE, 403)
        if self.token is None:
            # Another site's host name may resolve to this machine (DNS rebinding). With a token, that site
            # would need to know it, and browsers send the cookie only to the name that set it. So a proxy may
            # use its own name.
            is_local = _is_loopback_host(request.headers.get("host", ""))
            return None if is_local else PlainTextResponse(_WRONG_HOST, 421)
        if self._has_cookie(request):
            return None
        address = _network_of(request)
        bearer = _bearer_of(request)
        is_page_request = request.url.path == "/" and request.method == "GET"
        token = (
            bearer if bearer is not None else request.query_params.get("token") if is_page_request else None
        )
        if token is None:
            return PlainTextResponse(_NO_TOKEN, 401, {"WWW-Authenticate": "Bearer"})
        # The right token is always accepted, so that wrong tokens cannot lock out users who know it.
        if not self._matches(token):
            if self.wrong_tokens.has_too_many(address):
                return PlainTextResponse(_TOO_MANY_WRONG_TOKENS, 429, {"Retry-After": "60"})
            self.wrong_tokens.add(address)
            return PlainTextResponse(_NO_TOKEN, 401, {"WWW-Authenticate": "Bearer"})
        if bearer is not None:
            return None
        response = RedirectResponse("/", 303)
        encrypted = request.url.scheme == "https" or _is_encrypted_by_proxy(request)
        response.set_cookie(
            COOKIE, self._cookie(), httponly=True, samesite="strict", secure=encrypted, path="/"
        )
        return response

    def _has_cookie(self, request: Request) -> bool:
        return secrets.compare_digest(request.cookies.get(COOKIE, "").encode(), self._cookie().encode())

    def _matches(self, token: str) -> bool:
        return secrets.compare_digest(token.encode(), (self.token or "").encode())

    def _cookie(self) -> str:
        """Return a hash of the token, not the token itself, since cookies go to every port of a host."""
        return hmac.digest(self.secret, (self.token or "").encode(), "sha256").hex()


def _bearer_of(request: Request) -> str | None:
    scheme, _, token = request.headers.get("authorization", "").partition(" ")
    # Headers are decoded as Latin-1, but programs write them in UTF-8.
    decoded = token.strip().encode("latin-1").decode(errors="replace")
    return decoded if scheme.lower() == "bearer" else None


def _host_of(request: Request) -> str:
    return request.client.host if request.client else ""


def _is_encrypted_by_proxy(request: Request) -> bool:
    """Return whether a proxy on this machine reports that the browser's connection is encrypted."""
    return is_loopback(_host_of(request)) and request.headers.get("x-forwarded-proto", "") == "https"


def _network_of(request: Request) -> str:
    """Return the address of a client; for IPv6 its network, since each client has many addresses."""
    host = _host_of(request)
    return ":".join(ipaddress.IPv6Address(host).exploded.split(":")[:4]) if _is_v6(host) else host


def _is_v6(host: str) -> bool:
    try:
        address = ipaddress.IPv6Address(host)
    except ValueError:
        return False
    return address.ipv4_mapped is None


class ForkSafeLock:
    """Middleware that lets permitted requests pass, and adds security headers to every response."""

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

        refusal = self._access.refusal(Request(scope))
        await (self._app if refusal is None else refusal)(scope, receive, guarded)


def _is_of_another_site(request: Request) -> bool:
    """Return whether a browser reports that a page of another site makes this request.

    Such a page cannot read the response, but could exhaust the viewers' connections. Following a link is
    permitted.
    """
    site = request.headers.get("sec-fetch-site")
    if site in ("same-origin", "none"):
        return False
    if site is not None:
        link = request.headers.get("sec-fetch-mode") == "navigate" and request.url.path == "/"
        return not (link and request.headers.get("sec-fetch-dest") == "document")
    # Older browsers, and pages loaded without TLS from another machine, only send Origin, and not to the
    # page's own server.
    origin = request.headers.get("origin")
    return origin is not None and origin.partition("://")[2] != request.headers.get("host", "")


def is_loopback(host: str) -> bool:
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


# A host name, an IPv4 address or an IPv6 address in brackets, and a port; nothing else may follow.
_HOST = re.compile(r"(?:\[(?P<v6>[0-9a-f:.]+)\]|(?P<name>[a-z0-9.-]+))(?::[0-9]{1,5})?", re.IGNORECASE)


def _is_loopback_host(header: str) -> bool:
    host = _HOST.fullmatch(header)
    if host is None:
        return False
    # Only IPv6 addresses have brackets, so [localhost] is not a name.
    return is_loopback(host["v6"] or host["name"]) and (host["v6"] is None or ":" in host["v6"])
