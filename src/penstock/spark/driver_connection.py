"""A connection for messages between a task and its driver: authenticated, and encrypted if Spark's traffic
is.

Both sides prove that they know the driver's secret. Encrypted connections use TLS 1.3, and the task accepts
only the certificate of its driver, which it gets together with the secret.
"""

from __future__ import annotations

import hmac
import secrets
import select
import socket
import ssl
import struct
import threading
from contextlib import suppress
from multiprocessing import AuthenticationError

_LENGTH = struct.Struct("!i")
_MAX_BYTES = 0x7FFFFFFF
_RECORD_HEADER_BYTES = 5
"""The header of a TLS record: type, version, and the length of the rest in two bytes (RFC 8446, 5.1)."""
_RECORD_TYPES = range(20, 25)


class Connection:
    """Messages over a socket, each after its length. One thread may receive while others send."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._tls: _Tls | None = None
        self._send_lock = threading.Lock()

    def encrypt(self, context: ssl.SSLContext, *, server: bool) -> None:
        """Encrypt from now on; raise an ``ssl.SSLError`` if the peer does not, or is not trusted."""
        tls = _Tls(context, server=server)
        try:
            while not tls.continue_handshake():
                self._socket.sendall(tls.take_outgoing())
                tls.add_received(self._read_record())
        except ssl.SSLError:
            # Send the alert, which tells the peer the reason.
            with suppress(OSError):
                self._socket.sendall(tls.take_outgoing())
            raise
        self._socket.sendall(tls.take_outgoing())
        self._tls = tls

    def fileno(self) -> int:
        """Return the file descriptor for ``select``; it is readable when a message has arrived."""
        return self._socket.fileno()

    def set_timeout(self, seconds: float | None) -> None:
        """Make operations that wait for the peer fail with a TimeoutError after ``seconds``."""
        self._socket.settimeout(seconds)

    def poll(self, timeout: float = 0.0) -> bool:
        """Wait up to ``timeout`` seconds; return whether a message has arrived or the peer has gone."""
        if self._socket.fileno() < 0:
            raise OSError("the connection is closed")
        poller = select.poll()
        poller.register(self._socket, select.POLLIN)
        return bool(poller.poll(timeout * 1000))

    def send_bytes(self, message: bytes) -> None:
        if len(message) > _MAX_BYTES:
            raise OSError(f"a message of {len(message)} bytes is too long")
        framed = _LENGTH.pack(len(message)) + message
        with self._send_lock:
            self._socket.sendall(framed if self._tls is None else self._tls.encrypt(framed))

    def recv_bytes(self, max_bytes: int = _MAX_BYTES) -> bytes:
        """Return the next message; raise an OSError if it is longer than ``max_bytes`` bytes."""
        (length,) = _LENGTH.unpack(self._receive(_LENGTH.size))
        if not 0 <= length <= max_bytes:
            raise OSError(f"a message of {length} bytes has arrived, but only {max_bytes} are allowed")
        return self._receive(length)

    def shut_down(self) -> None:
        """Wake the thread that receives; closing the socket would not wake it."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._socket.close()

    def __enter__(self) -> Connection:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _receive(self, count: int) -> bytes:
        if self._tls is None:
            return self._read_exactly(count)
        while (data := self._tls.decrypt(count)) is None:
            self._tls.add_received(self._read_record())
        return data

    def _read_record(self) -> bytes:
        """Read the next TLS record, and nothing after it.

        So all bytes that have arrived are either in the socket, where ``select`` sees them, or processed.
        """
        header = self._read_exactly(_RECORD_HEADER_BYTES)
        if header[0] not in _RECORD_TYPES:
            raise ssl.SSLError("the peer does not encrypt")
        return header + self._read_exactly(int.from_bytes(header[3:]))

    def _read_exactly(self, count: int) -> bytes:
        data = bytearray()
        while len(data) < count:
            piece = self._socket.recv(count - len(data))
            if not piece:
                raise EOFError("the peer has hung up")
            data += piece
        return bytes(data)


class _Tls:
    """TLS without a socket.

    With an ``ssl.SSLSocket``, a thread could not send while another one waits for a message.
    """

    def __init__(self, context: ssl.SSLContext, *, server: bool) -> None:
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._object = context.wrap_bio(self._incoming, self._outgoing, server_side=server)
        self._lock = threading.Lock()
        self._decrypted = bytearray()

    def continue_handshake(self) -> bool:
        """Take the next step of the handshake; return whether the handshake is complete."""
        try:
            self._object.do_handshake()
        except ssl.SSLWantReadError:
            return False
        return True

    def take_outgoing(self) -> bytes:
        return self._outgoing.read()

    def add_received(self, record: bytes) -> None:
        with self._lock:
            self._incoming.write(record)

    def encrypt(self, data: bytes) -> bytes:
        with self._lock:
            self._object.write(data)
            return self._outgoing.read()

    def decrypt(self, count: int) -> bytes | None:
        """Return the next ``count`` bytes; None if fewer have arrived."""
        with self._lock, suppress(ssl.SSLWantReadError):
            while len(self._decrypted) < count:
                piece = self._object.read(count - len(self._decrypted))
                if not piece:
                    raise EOFError("the peer has hung up")
                self._decrypted += piece
        if len(self._decrypted) < count:
            return None
        data = bytes(self._decrypted[:count])
        del self._decrypted[:count]
        return data


TASK, DRIVER = b"penstock task", b"penstock driver"
"""The sides of a connection. They are part of a proof, so that one side cannot reuse the other's proof."""
_CHALLENGE_BYTES = 32
_ACCEPTED, _REFUSED = b"accepted", b"refused"


def require_proof(connection: Connection, secret: bytes, side: bytes) -> None:
    """Make the peer prove that it is on one side and knows the secret, which is not sent (HMAC-SHA-256).

    The handshake of ``multiprocessing`` uses MD5 before Python 3.12, and does not distinguish the sides.
    """
    challenge = secrets.token_bytes(_CHALLENGE_BYTES)
    connection.send_bytes(challenge)
    accepted = hmac.compare_digest(connection.recv_bytes(256), _proof(secret, side, challenge))
    connection.send_bytes(_ACCEPTED if accepted else _REFUSED)
    if not accepted:
        raise AuthenticationError("the peer does not know the secret")


def prove(connection: Connection, secret: bytes, side: bytes) -> None:
    challenge = connection.recv_bytes(256)
    if len(challenge) != _CHALLENGE_BYTES:
        raise AuthenticationError("the peer speaks another protocol")
    connection.send_bytes(_proof(secret, side, challenge))
    if connection.recv_bytes(256) != _ACCEPTED:
        raise AuthenticationError("the peer has another secret")


def _proof(secret: bytes, side: bytes, challenge: bytes) -> bytes:
    return hmac.digest(secret, side + challenge, "sha256")


def disable_nagle(connection: socket.socket) -> None:
    """Send small messages immediately.

    Otherwise a message may wait 40 ms until the peer has acknowledged the previous one (Nagle's algorithm and
    delayed acknowledgements, RFC 896 and RFC 1122).
    """
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
