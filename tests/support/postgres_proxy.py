"""TCP proxy between a client and PostgreSQL that can lose the reply to a commit."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from urllib.parse import urlsplit


@dataclass
class Proxy:
    """Proxy that forwards bytes in both directions until it is made to fail."""

    url: str
    target: tuple[str, int]
    """Host and port of the server."""
    fail_on: bytes = b""
    """The proxy fails on a client's message that contains these bytes."""
    deliver: bool = True
    """Whether the server still receives that message."""
    skip: int = 0
    """The number of such messages that are forwarded first."""
    failures: int = 0
    """How many more times the proxy fails."""
    _open: list[socket.socket] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def lead_to(self, url: str) -> None:
        """Forward new connections to another server, and close the open ones."""
        parts = urlsplit(url)
        self.target = parts.hostname or "127.0.0.1", parts.port or 5432
        for connection in self._open:
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def lose(self, message: bytes, *, deliver: bool, times: int = 1, skip: int = 0) -> None:
        with self._lock:
            self.fail_on, self.deliver, self.skip, self.failures = message, deliver, skip, times

    def losing_each_commit(self) -> Iterator[int]:
        """Lose the reply to one commit in each round of the caller: the first one, then the second, etc.

        Yield the number of commits before it, and stop after a round with fewer commits.
        """
        number = 0
        while not self.failures:
            self.lose(b"COMMIT\0", deliver=True, skip=number)
            yield number
            number += 1
        self.failures = 0

    def is_to_fail(self, data: bytes) -> bool:
        """Return whether the proxy fails on these bytes of a client."""
        with self._lock:
            if not self.failures or self.fail_on not in data:
                return False
            if self.skip:
                self.skip -= 1
                return False
            self.failures -= 1
            return True


@contextmanager
def proxied(url: str) -> Iterator[Proxy]:
    """Run a proxy in front of the server of a PostgreSQL URL."""
    parts = urlsplit(url)
    target = (parts.hostname or "127.0.0.1", parts.port or 5432)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        credentials = parts.netloc.rpartition("@")[0]
        netloc = f"{credentials}@127.0.0.1:{listener.getsockname()[1]}"
        proxy = Proxy(parts._replace(netloc=netloc).geturl(), target)
        threading.Thread(target=_accept, args=(listener, proxy), daemon=True).start()
        yield proxy
    for connection in proxy._open:
        connection.close()


def _accept(listener: socket.socket, proxy: Proxy) -> None:
    while True:
        try:
            client, _ = listener.accept()
        except OSError:
            return
        try:
            server = socket.create_connection(proxy.target)
        except OSError:
            client.close()
            continue
        proxy._open += [client, server]
        threading.Thread(target=_forward, args=(client, server, proxy, True), daemon=True).start()
        threading.Thread(target=_forward, args=(server, client, proxy, False), daemon=True).start()


def _forward(source: socket.socket, sink: socket.socket, proxy: Proxy, upstream: bool) -> None:
    try:
        while data := source.recv(1 << 16):
            if upstream and proxy.is_to_fail(data):
                source.shutdown(socket.SHUT_RDWR)
                if proxy.deliver:
                    sink.sendall(data)
                    while sink.recv(1 << 16):
                        break
                sink.shutdown(socket.SHUT_RDWR)
                return
            sink.sendall(data)
    except OSError:
        pass
    finally:
        for connection in (source, sink):
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
