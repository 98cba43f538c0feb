"""Connections to the monitor page's server: limited in number, and closed when they send or take nothing.

A browser sends its request at once, so a connection without one after some seconds is not a viewer's. When
there are too many connections, the oldest one without a request is closed in favour of the new one.
"""

from __future__ import annotations

import asyncio

from uvicorn.protocols.http.h11_impl import H11Protocol

MOST_CONNECTIONS = 200
"""More than the most viewers, since each also loads the page and its parts."""
REQUEST_SECONDS = 5.0
"""The time for a request to arrive, from the start of the connection or from the last response."""
WRITE_SECONDS = 30.0
"""The time for a viewer to read what was sent."""


class BoundedProtocol(H11Protocol):
    """HTTP with time limits."""

    _request_timer: asyncio.TimerHandle | None = None
    _write_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # always a transport
        if len(self.connections) >= MOST_CONNECTIONS:
            idle = [
                each for each in self.connections if isinstance(each, BoundedProtocol) and each._request_timer
            ]
            if idle:
                min(idle, key=_deadline)._abort()
            else:
                transport.abort()
        super().connection_made(transport)
        self._wait_for_request()

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
        super().connection_lost(exc)

    def _wait_for_request(self) -> None:
        _cancel(self._request_timer)
        self._request_timer = self.loop.call_later(REQUEST_SECONDS, self._abort)

    def _abort(self) -> None:
        self._request_timer = _cancel(self._request_timer)
        self.transport.abort()


def _deadline(connection: BoundedProtocol) -> float:
    return 0.0 if connection._request_timer is None else connection._request_timer.when()


def _cancel(timer: asyncio.TimerHandle | None) -> asyncio.TimerHandle | None:
    if timer is not None:
        timer.cancel()
    return None
