"""TLS proxy in front of the tests' PostgreSQL server, which is built without TLS."""

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
    """Self-signed certificate, which is its own authority."""

    file: Path
    key: Path


def certificate(folder: Path, name: str) -> Certificate:
    """Create a certificate for a host name."""
    created = Certificate(folder / f"{name}.crt", folder / f"{name}.key")
    subprocess.run(
        [
            "openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes",
            "-days", "2", "-keyout", str(created.key), "-out", str(created.file),
            "-subj", f"/CN={name}", "-addext", f"subjectAltName=DNS:{name}",
        ],
        check=True, capture_output=True,
    )  # fmt: skip
    return created


@contextmanager
def tls_proxy(host: str, port: int, server_certificate: Certificate) -> Iterator[int]:
    """Run a proxy that serves the server with TLS only, and yield its port on 127.0.0.1."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(server_certificate.file, server_certificate.key)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=_accept, args=[listener, context, (host, port)], daemon=True).start()
        yield listener.getsockname()[1]
        listener.shutdown(socket.SHUT_RDWR)


def _accept(listener: socket.socket, context: ssl.SSLContext, server: tuple[str, int]) -> None:
    with suppress(OSError):
        while True:
            connection, _ = listener.accept()
            threading.Thread(target=_serve, args=[connection, context, server], daemon=True).start()


def _serve(connection: socket.socket, context: ssl.SSLContext, server: tuple[str, int]) -> None:
    with suppress(OSError), connection:
        if connection.recv(len(_SSL_REQUEST)) != _SSL_REQUEST:
            return
        connection.sendall(b"S")
        with (
            context.wrap_socket(connection, server_side=True) as client,
            socket.create_connection(server) as backend,
        ):
            # One thread serves both directions, because a TLS socket must not be shared between threads.
            client.setblocking(False)
            backend.setblocking(False)
            _forward(client, backend)


def _forward(client: ssl.SSLSocket, backend: socket.socket) -> None:
    # Unlike `select`, a selector supports descriptors above 1023, which a run of all tests has.
    selector = selectors.DefaultSelector()
    selector.register(client, selectors.EVENT_READ)
    selector.register(backend, selectors.EVENT_READ)
    while True:
        if not client.pending():
            selector.select()
        for source, target in ((client, backend), (backend, client)):
            try:
                data = source.recv(1 << 16)
            except (BlockingIOError, ssl.SSLWantReadError):
                continue
            if not data:
                return
            target.setblocking(True)
            target.sendall(data)
            target.setblocking(False)
