"""Connections that have not shown the secret yet: only so many, and each for a second only.

Anybody who reaches the driver's port can connect and say nothing. Tasks must not wait for such a stranger, so handshakes run side by
side. When there are too many, the oldest is closed: an honest one takes milliseconds, so the oldest is a stranger's.
"""

from __future__ import annotations

import socket
import threading
import time
from contextlib import suppress
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge

SECONDS = 1.0
"""For how long a handshake may take."""
MOST = 128
"""Handshakes at a time."""


class Handshakes:
    """The handshakes that are under way at one socket."""

    def __init__(self, secret: bytes) -> None:
        self._secret = secret
        self._lock = threading.Lock()
        self._open: dict[Connection, float] = {}
        """When each has to be done, the oldest first."""

    def begin(self, connection: Connection) -> bool:
        """Let a connection shake hands within a second; False when the oldest one had to be closed for it."""
        with self._lock:
            full = len(self._open) >= MOST
            if full:
                self._shut(next(iter(self._open)))
            self._open[connection] = time.monotonic() + SECONDS
        return not full

    def shake(self, connection: Connection) -> None:
        """Wait until both ends have shown that they know the secret.

        Raises
        ------
        OSError, EOFError, AuthenticationError
            When the other end does not know it, takes too long, or has gone away.
        """
        try:
            deliver_challenge(connection, self._secret)
            answer_challenge(connection, self._secret)
        finally:
            with self._lock:
                in_time = self._open.pop(connection, None) is not None
        if not in_time:
            raise TimeoutError(f"not done within {SECONDS:.0f} s, or {MOST} others have come since")

    def expire(self) -> float | None:
        """Close what takes too long; the seconds until the next one does, None when there is none."""
        with self._lock:
            now = time.monotonic()
            for connection, deadline in list(self._open.items()):
                if deadline > now:
                    return deadline - now
                self._shut(connection)
        return None

    def end(self) -> None:
        """Close all of them."""
        with self._lock:
            for connection in list(self._open):
                self._shut(connection)

    def _shut(self, connection: Connection) -> None:
        del self._open[connection]
        shut(connection)


def shut(connection: Connection) -> None:
    """Wake the thread that reads from a connection, which a mere close would not."""
    with suppress(OSError), socket.socket(fileno=socket.dup(connection.fileno())) as twin:
        twin.shutdown(socket.SHUT_RDWR)
