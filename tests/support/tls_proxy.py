"""TLS in front of the tests' PostgreSQL server, which is built without it."""

from __future__ import annotations

import selectors
import socket
import ssl
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

_SSL_REQUEST = b"\0\0\0\x08\x04\xd2\x16\x2f"


@dataclass(frozen=True)
class Certificate:
    """A certificate that signs itself, so that it is its own authority."""

    file: Path
    key: Path


def certificate(folder: Path, name: str) -> Certificate:
    """Make one for a host's name."""
    made = Certificate(folder / f"{name}.crt", folder / f"{name}.key")
    subprocess.run(
        [
            "openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes",
            "-days", "2", "-keyout", str(made.key), "-out", str(made.file),
            "-subj", f"/CN={name}", "-addext", f"subjectAltName=DNS:{name}",
        ],
        check=True, capture_output=True,
    )  # fmt: skip
    return made


@contextmanager
def tls_in_front_of(host: str, port: int, shown: Certificate) -> Iterator[int]:
    """The port of 127.0.0.1 where the server is to be had by TLS alone."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(shown.file, shown.key)
    with socket.create_server(("127.0.0.1", 0)) as listening:
        threading.Thread(target=_accept, args=[listening, context, (host, port)], daemon=True).start()
        yield listening.getsockname()[1]
        listening.shutdown(socket.SHUT_RDWR)


def _accept(listening: socket.socket, context: ssl.SSLContext, server: tuple[str, int]) -> None:
    with suppress(OSError):
        while True:
            incoming, _ = listening.accept()
            threading.Thread(target=_serve, args=[incoming, context, server], daemon=True).start()


def _serve(incoming: socket.socket, context: ssl.SSLContext, server: tuple[str, int]) -> None:
    with suppress(OSError), incoming:
        if incoming.recv(len(_SSL_REQUEST)) != _SSL_REQUEST:
            return
        incoming.sendall(b"S")
        with (
            context.wrap_socket(incoming, server_side=True) as client,
            socket.create_connection(server) as behind,
        ):
            # The two directions take turns in one thread: a TLS socket is not for two.
            client.setblocking(False)
            behind.setblocking(False)
            _forward(client, behind)


def _forward(client: ssl.SSLSocket, behind: socket.socket) -> None:
    # Not select: it knows no descriptor above 1023, and a run of all tests has more open.
    waiting = selectors.DefaultSelector()
    waiting.register(client, selectors.EVENT_READ)
    waiting.register(behind, selectors.EVENT_READ)
    while True:
        if not client.pending():
            waiting.select()
        for source, target in ((client, behind), (behind, client)):
            try:
                data = source.recv(1 << 16)
            except (BlockingIOError, ssl.SSLWantReadError):
                continue
            if not data:
                return
            target.setblocking(True)
            target.sendall(data)
            target.setblocking(False)
