"""Connections to the page's server: only so many, and none for somebody who says nothing or takes nothing.

A browser sends its request at once, so whoever has not after some seconds is no viewer. When there are too many connections the oldest of
those without a request is closed, and the new one gets its turn.
"""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

MOST_CONNECTIONS = 200
"""More than there may be viewers: each asks for the page and its parts too."""
REQUEST_SECONDS = 5.0
"""Within which a request has to be there, from the connection's beginning or from the response before."""
TAKING_SECONDS = 30.0
"""For how long a viewer may leave what was sent where it is."""


class BoundedProtocol(H11Protocol):
    """HTTP with limits of time."""

    _asked_by: asyncio.TimerHandle | None = None
    _taken_by: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        """Somebody has connected."""
        if len(self.connections) >= MOST_CONNECTIONS:
            silent = [
                each for each in self.connections if isinstance(each, BoundedProtocol) and each._asked_by
            ]
            if not silent:
                transport.abort()
            else:
                min(silent, key=_deadline)._hang_up()
        super().connection_made(transport)
        self._wait_for_request()

    def data_received(self, data: bytes) -> None:
        """A part of a request has come."""
        super().data_received(data)
        if self.cycle is not None and not self.cycle.response_complete:
            self._asked_by = _stopped(self._asked_by)

    def on_response_complete(self) -> None:
        """A request is done with; another one may follow."""
        super().on_response_complete()
        if not self.transport.is_closing() and (self.cycle is None or self.cycle.response_complete):
            self._wait_for_request()

    def pause_writing(self) -> None:
        """The viewer is slower than the server."""
        super().pause_writing()
        self._taken_by = self.loop.call_later(TAKING_SECONDS, self._hang_up)

    def resume_writing(self) -> None:
        """The viewer has taken what there was."""
        super().resume_writing()
        self._taken_by = _stopped(self._taken_by)

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection is gone."""
        self._asked_by, self._taken_by = _stopped(self._asked_by), _stopped(self._taken_by)
        super().connection_lost(exc)

    def _wait_for_request(self) -> None:
        _stopped(self._asked_by)
        self._asked_by = self.loop.call_later(REQUEST_SECONDS, self._hang_up)

    def _hang_up(self) -> None:
        self._asked_by = _stopped(self._asked_by)
        self.transport.abort()


def _deadline(connection: BoundedProtocol) -> float:
    return 0.0 if connection._asked_by is None else connection._asked_by.when()


def _stopped(timer: asyncio.TimerHandle | None) -> asyncio.TimerHandle | None:
    """No timer, in the place of one that runs."""
    if timer is not None:
        timer.cancel()
    return None
